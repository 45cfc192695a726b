"""Everything a launch passes, in one NamedTuple. The field order is the call's order."""

from __future__ import annotations

from typing import Any, NamedTuple


class FwdOperands(NamedTuple):
    """Operands of a forward kernel: tensors as the caller holds them, then run-time scalars. None: not in this variant.

    What the runner allocates itself is contiguous and comes as an address: a tensor costs host time with every call.
    """

    q: Any  # (B, Sq, Hq, D)
    k: Any  # (B, Sk, Hk, D)
    v: Any  # (B, Sk, Hk, Dv)
    o: Any  # Int64, address of (B, Sq, Hq, Dv), 16-byte aligned
    lse: Any  # Int64, address of (B, Hq, Sq) float32, natural log; 0 where nobody wants it
    softmax_scale: Any  # Float32, > 0
    window_left: Any = None  # Int32, keys; only for mask="window"
    window_right: Any = None
    num_ctas: Any = None  # Int32, resident thread blocks; only for schedule="dynamic"
    tickets: Any = None  # Int64, address of (2,) int32, zero; the kernel leaves it zero; only for schedule="dynamic"


class ScaledOperands(NamedTuple):
    """Operands of an FP8 forward: those of FwdOperands, with codes as QuantizeOperands has them, then their scales.

    `lse` is that of the scores that the codes give.
    """

    q: Any  # (B, Sq, Hq, D)
    k: Any  # (B, Sk, Hk, D)
    v: Any  # (B, Hk, Dv, 128 * tiles)
    o: Any
    lse: Any
    softmax_scale: Any
    window_left: Any
    window_right: Any
    num_ctas: Any
    tickets: Any
    q_descale: Any  # Int64, address of (B, Hq, Sq) float32
    k_descale: Any  # Int64, address of (B, Hk, tiles) float32
    v_descale: Any  # Int64, address of (B, Hk) float32
    logit_offset: Any  # Int64, address of (B, Hq, Sq) float32, what the scores lack before scaling; 0: nothing
    restored_lse: Any  # Int64, address of (B, Hq, Sq) float32, lse with that share; 0 where nobody wants it


class BwdOperands(NamedTuple):
    """Operands of a backward kernel; addresses are Int64, of contiguous memory."""

    q: Any  # (B, Sq, Hq, D)
    k: Any  # (B, Sk, Hk, D)
    v: Any  # (B, Sk, Hk, Dv)
    do: Any  # (B, Sq, Hq, Dv)
    o: Any  # address of (B, Sq, Hq, Dv), as the forward left it
    lse: Any  # address of (B, Hq, Sq) float32, natural log
    dlse: Any  # the same; 0 where no gradient arrives at lse
    dq: Any  # address of (B, Sq, Hq, D)
    dk: Any  # address of (B, Sk, Hk, D)
    dv: Any  # address of (B, Sk, Hk, Dv)
    workspace: Any  # address; rows of Sq padded to 128: float32 dQ (rows, headdim), lse (rows), delta (rows); a ticket
    softmax_scale: Any  # Float32, > 0
    window_left: Any = None  # Int32, keys; only for mask="window"
    window_right: Any = None
    num_ctas: Any = None  # Int32, resident thread blocks; only for kv_stages=2


class QuantizeOperands(NamedTuple):
    """Operands of the FP8 quantizer; addresses are Int64, of contiguous memory, 16-byte aligned.

    `tiles` is ceil(Sk / 128). Inside every 16 keys of `v8`, key 8j + 2t + i lies at 4t + 2j + i (i, j in {0, 1}).
    """

    q: Any  # (B, Sq, Hq, D)
    k: Any  # (B, Sk, Hk, D)
    v: Any  # (B, Sk, Hk, Dv)
    q8: Any  # address of (B, Sq, Hq, D) codes
    k8: Any  # address of (B, Sk, Hk, D) codes
    v8: Any  # address of (B, Hk, Dv, 128 * tiles) codes: V transposed and permuted; zeros from Sk on
    q_descale: Any  # address of (B, Hq, Sq) float32
    k_descale: Any  # address of (B, Hk, tiles) float32
    v_descale: Any  # address of (B, Hk) float32
    k_mean: Any  # address of (B, Hk, D) float32; None without smooth_k
    logit_offset: Any  # address of (B, Hq, Sq) float32: q . mean(k); None without smooth_k
    workspace: Any  # address of float32: for each head and chunk of keys a peak of V; from a multiple of 4, D sums of K
    counters: Any  # address of (B, Hk) int32, zero; the kernel leaves them zero
