"""The ordered tuple of all kernels: the one capability table. The first row that does not refuse is chosen."""

from .kernels.sm90 import specs as sm90
from .spec.kernel import KernelSpec
from .spec.problem import BWD, FWD

_ANY = frozenset({"fp16", "bf16", "fp32", "fp64"})
_FEATURES = frozenset({"gqa", "deterministic"})

CATALOG: tuple[KernelSpec, ...] = (
    sm90.FORWARD,
    KernelSpec(
        name="reference.forward",
        phase=FWD,
        dtypes=_ANY,
        features=_FEATURES,
        serves=frozenset({"cpu"}),
        entry="flashattn_hopper.reference:forward",
        note="tiled PyTorch",
    ),
    KernelSpec(
        name="reference.backward",
        phase=BWD,
        dtypes=_ANY,
        features=_FEATURES,
        # Until a backward kernel lands, CUDA tensors take the tiled recomputation in PyTorch too; explain() says so.
        serves=frozenset({"cpu", "cuda"}),
        entry="flashattn_hopper.reference:backward",
        note="tiled PyTorch recomputation",
    ),
)
