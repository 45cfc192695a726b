"""Random problems on a GPU, each held against float64.

    python tests/fuzz.py [how many] [first seed]     # prints failing seeds and one line of summary

A seed decides everything about its problem: `python tests/fuzz.py 1 SEED` runs one again.
"""

from __future__ import annotations

import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from flashattn_hopper import hopper_attention, jit
from flashattn_hopper.arguments import TORCH_DTYPES
from flashattn_hopper.kernels.sm90 import specs as sm90

if __package__:
    from . import cases, oracle
else:  # started as a script
    sys.path.insert(0, str(Path(__file__).parent))
    import cases
    import oracle


COMMON = (0, 1, 64, 128, 256, 512)  # lengths


@dataclass(frozen=True)
class Problem:
    seed: int
    dtype: str
    batch: int
    seqlens: tuple[int, int]
    heads: tuple[int, int]
    headdims: tuple[int, int]
    mask: dict
    softmax_scale: float | None
    spread: float  # of q
    trend: float  # added along the keys, in standard deviations of a score
    layouts: tuple[str, str, str]


class Outcome(NamedTuple):
    """`failures`: seed -> what was wrong. `worst`: the largest error, in errors of plain PyTorch."""

    shapes: int
    failures: dict[int, str]
    worst: float

    def __str__(self):
        return f"fuzz: {self.shapes} shapes, {len(self.failures)} failed, worst {self.worst:.1f} times plain PyTorch"


def problem_of(seed: int) -> Problem:
    rng = random.Random(seed)
    edge = lambda: rng.choice((0, None, rng.randint(0, 20), rng.randint(0, 300), 2**33))
    dim = lambda: rng.choice((64, 128, 128, 256, 8 * rng.randint(1, 32)))
    length = lambda: rng.choice((rng.randint(1, 600), rng.randint(1, 600), rng.randint(1, 40), rng.choice(COMMON)))
    dtype = rng.choice(sorted(sm90.FORWARD.dtypes))
    wide = dtype == "bf16"  # scores that float16 cannot hold would leave plain PyTorch without a finite result
    headdim, kv_heads = dim(), rng.randint(1, 4)
    window = (edge(), edge())
    masks = {}, {"causal": True}, {"window_size": window}, {"window_size": (window[0], 0), "causal": True}
    return Problem(
        seed,
        dtype,
        rng.choice((1, 1, 2, 3)),
        (length(), length()),
        (kv_heads * rng.choice((1, 1, 2, 3, 7)), kv_heads),
        (headdim, headdim if rng.random() < 0.7 else dim()),
        rng.choice(masks),
        rng.choice((None, None, 10 ** rng.uniform(-4, 0.5))),
        rng.choice((1, 1, 4, 30 if wide else 2)),
        rng.choice((0, 0, 0, 50, -50, 1000 if wide else 20)),
        tuple(rng.choice(list(cases.LAYOUTS)) if rng.random() < 0.4 else "contiguous" for _ in "qkv"),
    )


def tensors(problem: Problem, device):
    generator = torch.Generator(device).manual_seed(problem.seed)
    make = lambda seqlen, heads, headdim: torch.randn(
        problem.batch, seqlen, heads, headdim, generator=generator, device=device
    )
    seqlen_q, seqlen_k = problem.seqlens
    q = make(seqlen_q, problem.heads[0], problem.headdims[0]) * problem.spread
    k, v = (make(seqlen_k, problem.heads[1], headdim) for headdim in problem.headdims)
    # A trend along the keys, seen through one channel: the maximum then moves from tile to tile.
    k[..., 0] += problem.trend * torch.linspace(-1, 1, seqlen_k, device=device).view(1, -1, 1)
    typed = (x.to(TORCH_DTYPES[problem.dtype]) for x in (q, k, v))
    return [cases.LAYOUTS[name](x) for name, x in zip(problem.layouts, typed)]


def run_one(problem: Problem, device=None, backend=None) -> float:
    """Largest error over plain PyTorch's (both with half the rounding floor). AssertionError beyond the budget."""
    q, k, v = tensors(problem, device or cases.DEVICE)
    scale = {"softmax_scale": problem.softmax_scale}
    out, lse = hopper_attention(q, k, v, return_lse=True, backend=backend or cases.BACKEND, **scale, **problem.mask)
    exact, usual = (f(q, k, v, **scale, **problem.mask) for f in (oracle.attention, oracle.plain))
    worst = 0.0
    for what, actual in (("out", out), ("lse", lse)):
        ref, plain, terms = getattr(exact, what), getattr(usual, what), exact.terms[what]
        oracle.assert_close_to_oracle(actual, ref, plain, q.dtype, what, terms=terms)
        allowed = oracle.budget(oracle.error(plain, ref), ref, q.dtype, what, terms)
        if allowed:
            worst = max(worst, oracle.error(actual, ref) / (allowed / oracle.FACTOR))
    return worst


def fuzz(count: int, first_seed: int = 0, device=None, backend=None, say=print) -> Outcome:
    """Run seeds from `first_seed` on; every failure is one line of `say`."""
    failures, worst = {}, 0.0
    for seed in range(first_seed, first_seed + count):
        problem = problem_of(seed)
        try:
            worst = max(worst, run_one(problem, device, backend))
        except (AssertionError, NotImplementedError, ValueError, TypeError) as error:
            failures[seed] = f"{type(error).__name__}: {error}"
            say(f"seed {seed} failed: {problem}\n  {failures[seed]}")
    return Outcome(count, failures, worst)


def main(count=2000, first_seed=0):
    count, first_seed = int(count), int(first_seed)
    jit.warmup(cases.variants(sm90.FORWARD))
    start = time.perf_counter()
    outcome = fuzz(count, first_seed)
    print(outcome, f"({time.perf_counter() - start:.0f} s)")
    return 1 if outcome.failures else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
