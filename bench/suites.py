"""What is measured: suites of cells. Needs the vocabulary of the package only, neither torch nor a GPU.

A suite is a row of `SUITES`, a cell is one shape. Tokens and hidden size stay fixed over a sweep, so a longer
sequence means a smaller batch and a wider head means fewer heads: every cell asks for the same projections around it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flashattn_hopper.spec.mask import Band, Seqlens
from flashattn_hopper.spec.problem import BWD, FWD, AttentionProblem, Shape, Traits

TOKENS = 16384
HIDDEN = 2048
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
LONG_SEQLENS = (2048, 4096, 8192, 16384)
SM80_SEQLENS = (1024, 4096, 16384)
QUICK_SEQLENS = (512, 1024, 4096, 16384)
FULL, CAUSAL = Band(), Band(right=0)


def window(keys: int) -> Band:
    """Causal window in which a query sees itself and the `keys - 1` keys before it."""
    return Band(left=keys - 1, right=0)


@dataclass(frozen=True)
class Cell:
    """One shape of one suite; queries and keys are equally many."""

    batch: int
    seqlen: int
    num_heads_q: int
    num_heads_kv: int
    headdim: int
    headdim_v: int
    band: Band = FULL
    dtype: str = "bf16"
    phase: str = FWD
    deterministic: bool = False
    source: str = ""  # of FP8: "from_bf16" where the call quantizes BF16 tensors; otherwise it takes codes

    @property
    def traits(self) -> Traits:
        gqa = self.num_heads_q != self.num_heads_kv
        return Traits(self.phase, self.dtype, self.headdim, self.headdim_v, self.band.kind, gqa, self.deterministic)

    @property
    def shape(self) -> Shape:
        return Shape(self.batch, self.seqlen, self.seqlen, self.num_heads_q, self.num_heads_kv)

    @property
    def softmax_scale(self) -> float:
        return self.headdim**-0.5

    @property
    def problem(self) -> AttentionProblem:
        return AttentionProblem(self.traits, self.shape, self.band, self.softmax_scale)

    @property
    def slug(self) -> str:
        """That of the traits, and the source where there is one."""
        return ".".join([self.traits.slug, self.source] if self.source else [self.traits.slug])

    @property
    def task(self) -> str:
        """What is timed: a key of `tasks.TASKS`."""
        return self.source or ("codes" if self.dtype == "fp8" else self.phase)

    @property
    def key(self) -> str:
        """Names the cell within its suite: slug and shape. `--only` looks for its substring here."""
        heads = f"{self.num_heads_q}:{self.num_heads_kv}"
        return f"{self.slug} b{self.batch} s{self.seqlen} h{heads}"

    @property
    def causal(self) -> bool:
        return self.band.kind == "causal"

    @property
    def window_size(self) -> tuple[int | None, int | None]:
        """(left, right) in keys for a call that has `causal` beside it; (None, None) where there is no window."""
        return (self.band.left, self.band.right) if self.band.kind == "window" else (None, None)

    @property
    def pairs(self) -> float:
        """(query, key) pairs of one head that count as work.

        Half of all pairs for causal, the convention of the field (the exact number has half a diagonal more);
        the visible ones, exactly, for a window.
        """
        if self.band.kind == "window":
            return visible_pairs(self.band, Seqlens(self.seqlen, self.seqlen))
        return self.seqlen**2 / (2 if self.causal else 1)

    @property
    def flops(self) -> float:
        """Floating-point operations of the phase's matrix products; for the backward pass 2.5 times the forward's."""
        along_d, along_dv = PRODUCTS[self.phase]
        depth = along_d * self.headdim + along_dv * self.headdim_v
        return 2.0 * self.batch * self.num_heads_q * self.pairs * depth


# How many matrix products a phase has whose inner or outer dimension is headdim, and how many with headdim_v.
# Forward: S; O. Backward: S again, dQ, dK; dP, dV. A kernel that computes one of them twice is not paid for it.
PRODUCTS = {FWD: (1, 1), BWD: (3, 2)}


def visible_pairs(band: Band, seqlens: Seqlens) -> int:
    """How many (query, key) pairs `band` lets through."""
    shift = seqlens.k - seqlens.q
    total = 0
    for i in range(seqlens.q):
        low = 0 if band.left is None else max(0, i + shift - band.left)
        high = seqlens.k - 1 if band.right is None else min(seqlens.k - 1, i + shift + band.right)
        total += max(0, high - low + 1)
    return total


def sweep(headdims, bands=(FULL, CAUSAL), seqlens=SEQLENS, **cell) -> Iterator[Cell]:
    """Fixed tokens, fixed hidden size: headdim x mask x seqlen."""
    for headdim in headdims:
        for band in bands:
            for seqlen in seqlens:
                heads = HIDDEN // headdim
                yield Cell(TOKENS // seqlen, seqlen, heads, heads, headdim, headdim, band, **cell)


def fixed(num_heads_q, num_heads_kv, headdim, headdim_v=None, bands=(FULL, CAUSAL), seqlen=4096, **cell):
    """One shape with a head count of its own, per mask."""
    for band in bands:
        yield Cell(TOKENS // seqlen, seqlen, num_heads_q, num_heads_kv, headdim, headdim_v or headdim, band, **cell)


@dataclass(frozen=True)
class Suite:
    """Cells of one phase. `--quick` keeps those at `QUICK_SEQLENS`; `backend` is the one of ours that is asked for."""

    name: str
    phase: str
    cells: tuple[Cell, ...]
    backend: str = ""  # by default the one that a user gets

    def __post_init__(self):
        keys = [cell.key for cell in self.cells]
        if len(set(keys)) != len(keys):
            raise ValueError(f"suite {self.name}: two cells share a key")
        if any(cell.phase != self.phase for cell in self.cells):
            raise ValueError(f"suite {self.name}: a cell of another phase")

    def select(self, quick: bool = False, only: str = "", skip: str = "") -> tuple[Cell, ...]:
        """Cells to run: all, the quick ones, those whose key contains `only` and not `skip` (if there is one)."""
        kept = (c for c in self.cells if not quick or c.seqlen in QUICK_SEQLENS)
        return tuple(c for c in kept if only in c.key and not (skip and skip in c.key))


SUITES = {
    suite.name: suite
    for suite in (
        Suite(
            "forward",
            FWD,
            (
                *sweep((64, 128, 256)),
                *fixed(32, 8, 128),
                *fixed(20, 20, 96),
                *fixed(10, 10, 192),
                *fixed(16, 16, 192, 128),
                *fixed(16, 16, 128, bands=(window(1024),), seqlen=16384),
                *fixed(16, 16, 128, dtype="fp16"),
            ),
        ),
        Suite(
            "fp8",
            FWD,
            (
                *sweep((64, 128, 256), seqlens=LONG_SEQLENS, dtype="fp8"),
                *sweep((64, 128, 256), seqlens=LONG_SEQLENS, dtype="fp8", source="from_bf16"),
            ),
        ),
        Suite(
            "backward",
            BWD,
            (
                *sweep((64, 128, 256), phase=BWD),
                *fixed(32, 8, 128, phase=BWD),
                *fixed(20, 20, 96, phase=BWD),
                *fixed(10, 10, 192, phase=BWD),
                *fixed(16, 16, 192, 128, phase=BWD),
                *fixed(16, 16, 128, bands=(window(1024),), seqlen=16384, phase=BWD),
                *sweep((64, 128, 256), seqlens=(1024, 4096), phase=BWD, deterministic=True),
            ),
        ),
        # The kernels for older GPUs, on this one.
        Suite("sm80_forward", FWD, tuple(sweep((64, 128, 256), seqlens=SM80_SEQLENS)), "sm80"),
        Suite("sm80_backward", BWD, tuple(sweep((64, 128, 256), seqlens=SM80_SEQLENS, phase=BWD)), "sm80"),
    )
}
