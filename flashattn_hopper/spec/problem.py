"""What is asked of a kernel: traits change the compiled code, shape and scalars do not."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .mask import Band, Seqlens

FWD, BWD, QUANTIZE = "fwd", "bwd", "quantize"
PHASES = (FWD, BWD)
DTYPES = ("fp16", "bf16", "fp8", "fp32", "fp64")
HALF, FP8 = frozenset({"fp16", "bf16"}), frozenset({"fp8"})
MASKS = ("full", "causal", "window")
FP8_FEATURES = ("int8_qk", "fp16_out", "fp32_out")
FEATURES = ("gqa", "deterministic", *FP8_FEATURES)  # boolean fields of Traits


@dataclass(frozen=True)
class Traits:
    """The half of a problem that is compiled in.

    `mask` is a compile-time class: a causal edge is static, the edges of a window are run-time integers.
    Of dtype "fp8" only: `int8_qk`, codes of q and k are int8; `fp16_out` or `fp32_out`, out is not BF16.
    """

    phase: str
    dtype: str
    headdim: int
    headdim_v: int
    mask: str = "full"
    gqa: bool = False
    deterministic: bool = False
    int8_qk: bool = False
    fp16_out: bool = False
    fp32_out: bool = False

    def __post_init__(self):
        for name, allowed in (("phase", PHASES), ("dtype", DTYPES), ("mask", MASKS)):
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"{name}={value!r}: allowed are {', '.join(allowed)}")
        for word in FP8_FEATURES:
            if getattr(self, word) and self.dtype != "fp8":
                raise ValueError(f"{word}: only with dtype='fp8', got {self.dtype!r}")

    @property
    def features(self) -> frozenset[str]:
        """Words that a kernel must declare to accept these traits."""
        return frozenset(word for word in FEATURES if getattr(self, word))

    @property
    def slug(self) -> str:
        """The one name of a variant: cache key, test id, bench row, log line. `fwd.bf16.d128.causal.gqa`."""
        dims = f"d{self.headdim}" if self.headdim == self.headdim_v else f"d{self.headdim}x{self.headdim_v}"
        return ".".join([self.phase, self.dtype, dims, self.mask, *sorted(self.features)])

    @classmethod
    def parse(cls, slug: str) -> Traits:
        """The traits that a slug names. Raises ValueError for any other text."""
        try:
            phase, dtype, dims, mask, *features = slug.split(".")
            headdim, _, headdim_v = dims.removeprefix("d").partition("x")
            traits = cls(phase, dtype, int(headdim), int(headdim_v or headdim), mask, **dict.fromkeys(features, True))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{slug!r} is not a traits slug: {error}") from None
        if traits.slug != slug:
            raise ValueError(f"{slug!r} is not a traits slug; {traits.slug!r} is")
        return traits


# On an H200 int8 scores cost the FP8 forward 2 to 13 % of its speed at headdim 64 and 128, and nothing at 256
# (bench/results/nvidia-h200/fp8.json); 96 and 192 were not timed.
E4M3_UP_TO = 192


def int8_by_default(headdim: int) -> bool:
    """Whether precision="fp8" takes int8 codes of q and k, the more accurate ones: where they are not slower."""
    return headdim > E4M3_UP_TO


@dataclass(frozen=True)
class QuantizeTraits:
    """What is compiled into the quantizer: the dtype of its inputs, exact head dimensions, and the recipe."""

    dtype: str
    headdim: int
    headdim_v: int
    hadamard: bool = True
    smooth_k: bool = True
    int8_qk: bool = False

    def __post_init__(self):
        if self.dtype not in HALF:
            raise ValueError(f"dtype={self.dtype!r}: allowed are {', '.join(sorted(HALF))}")
        for name in ("headdim", "headdim_v"):
            width = getattr(self, name)
            if width % 16 or not 16 <= width <= 256:
                raise ValueError(f"{name}={width}: allowed are multiples of 16 up to 256")

    @property
    def slug(self) -> str:
        dims = f"d{self.headdim}" if self.headdim == self.headdim_v else f"d{self.headdim}x{self.headdim_v}"
        words = [word for word in ("hadamard", "int8_qk", "smooth_k") if getattr(self, word)]
        return ".".join(["quantize", self.dtype, dims, *words])


@dataclass(frozen=True)
class Shape:
    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads_q: int
    num_heads_kv: int

    @property
    def seqlens(self) -> Seqlens:
        return Seqlens(self.seqlen_q, self.seqlen_k)

    @property
    def empty(self) -> bool:
        """No output element is computed from a key: nothing to launch."""
        return not (self.batch and self.seqlen_q and self.seqlen_k and self.num_heads_q)


@dataclass(frozen=True)
class AttentionProblem:
    """One validated call, without its tensors."""

    traits: Traits
    shape: Shape
    band: Band
    softmax_scale: float

    def for_phase(self, phase: str) -> AttentionProblem:
        return replace(self, traits=replace(self.traits, phase=phase))
