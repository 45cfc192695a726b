"""Everything a launch passes, in one NamedTuple. The field order is the call's order."""

from __future__ import annotations

from typing import Any, NamedTuple


class FwdOperands(NamedTuple):
    """Operands of a forward kernel: tensors as the caller holds them, then run-time scalars. None: not in this variant."""

    q: Any  # (B, Sq, Hq, D)
    k: Any  # (B, Sk, Hk, D)
    v: Any  # (B, Sk, Hk, Dv)
    o: Any  # (B, Sq, Hq, Dv)
    lse: Any  # (B, Hq, Sq) float32, natural log
    softmax_scale: Any  # Float32, > 0
    window_left: Any = None  # Int32, keys; only for mask="window"
    window_right: Any = None
    num_ctas: Any = None  # Int32, resident thread blocks; only for schedule="dynamic"
    tickets: Any = None  # (2,) int32, zero; the kernel leaves it zero; only for schedule="dynamic"
