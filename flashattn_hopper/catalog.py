"""The ordered tuple of all kernels: the one capability table. The first row that does not refuse is chosen."""

from .kernels.sm80 import specs as sm80
from .kernels.sm90 import specs as sm90
from .spec.kernel import KernelSpec
from .spec.problem import BWD, FP8_FEATURES, FWD

_ANY = frozenset({"fp16", "bf16", "fp32", "fp64"})
_FEATURES = frozenset({"gqa", "deterministic"})
_FP8_FEATURES = _FEATURES.union(FP8_FEATURES)

CATALOG: tuple[KernelSpec, ...] = (
    sm90.FORWARD,
    sm80.FORWARD,
    sm90.FORWARD_FP8,
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
        name="reference.forward_fp8",
        phase=FWD,
        dtypes=frozenset({"fp8"}),
        features=_FP8_FEATURES,
        serves=frozenset({"cpu"}),
        entry="flashattn_hopper.reference_fp8:forward",
        note="PyTorch emulation of FP8 products",
    ),
    sm90.BACKWARD,
    sm80.BACKWARD,
    KernelSpec(
        name="reference.backward",
        phase=BWD,
        dtypes=_ANY,
        features=_FEATURES,
        # CUDA tensors take the tiled recomputation in PyTorch where no backward kernel does; explain() says so.
        serves=frozenset({"cpu", "cuda"}),
        entry="flashattn_hopper.reference:backward",
        note="tiled PyTorch recomputation",
    ),
    KernelSpec(
        name="reference.backward_fp8",
        phase=BWD,
        dtypes=frozenset({"fp8"}),
        features=_FP8_FEATURES,
        serves=frozenset({"cpu", "cuda"}),  # as above
        entry="flashattn_hopper.reference_fp8:backward",
        note="float32 recomputation in PyTorch on the dequantized codes",
    ),
)
