"""Random problems on a GPU, each held against float64.

    python tests/fuzz.py [--backward] [how many] [first seed]     # prints failing seeds and one line of summary

A seed decides everything about its problem: `python tests/fuzz.py 1 SEED` runs one again. `--backward` has problems of
its own, and compares gradients.
"""

from __future__ import annotations

import random
import sys
import time
from dataclasses import dataclass, replace
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
SHARES = range(0, 2000, 250)  # first seeds of what tests run at a time
WIDENED = ("one number", "sequence", "heads")  # where dout is expanded; its other layouts are those of cases.LAYOUTS


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
    arrives: tuple[str | None, bool] = (None, False)  # layout of dout, or no dout; whether there is a dlse


class Outcome(NamedTuple):
    """`failures`: seed -> what was wrong. `worst`: the largest error, in errors of plain PyTorch."""

    shapes: int
    failures: dict[int, str]
    worst: float

    def __str__(self):
        return f"fuzz: {self.shapes} shapes, {len(self.failures)} failed, worst {self.worst:.1f} times plain PyTorch"


def problem_of(seed: int, backward: bool = False) -> Problem:
    rng = random.Random(seed)
    spec = sm90.BACKWARD if backward else sm90.FORWARD
    top = max(spec.headdims)[0]
    # Logits of the backward stay where one unit of float32 is worth less than one of the operands: P = exp(S - lse).
    largest_scale = -0.5 if backward else 0.5
    edge = lambda: rng.choice((0, None, rng.randint(0, 20), rng.randint(0, 300), 2**33))
    dim = lambda: rng.choice((64, 128, 128, top, 8 * rng.randint(1, top // 8)))
    length = lambda: rng.choice((rng.randint(1, 600), rng.randint(1, 600), rng.randint(1, 40), rng.choice(COMMON)))
    dtype = rng.choice(sorted(spec.dtypes))
    wide = dtype == "bf16"  # scores that float16 cannot hold would leave plain PyTorch without a finite result
    headdim, kv_heads = dim(), rng.randint(1, 4)
    window = (edge(), edge())
    masks = {}, {"causal": True}, {"window_size": window}, {"window_size": (window[0], 0), "causal": True}
    problem = Problem(
        seed,
        dtype,
        rng.choice((1, 1, 2, 3)),
        (length(), length()),
        (kv_heads * rng.choice((1, 1, 2, 3, 7)), kv_heads),
        (headdim, headdim if rng.random() < 0.7 else dim()),
        rng.choice(masks),
        rng.choice((None, None, 10 ** rng.uniform(-4, largest_scale))),
        rng.choice((1, 1, 4, 30 if wide else 2)),
        rng.choice((0, 0, 0, 50, -50, 1000 if wide else 20)),
        tuple(rng.choice(list(cases.LAYOUTS)) if rng.random() < 0.4 else "contiguous" for _ in "qkv"),
    )
    if not backward:
        return problem
    arrives = rng.choice((("dout", False), ("dout", False), ("dout", True), (None, True)))
    layout = rng.choice((*cases.LAYOUTS, *WIDENED)) if rng.random() < 0.5 else "contiguous"
    return replace(problem, arrives=(arrives[0] and layout, arrives[1]))


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


def incoming(problem: Problem, q, v):
    """dout and dlse, either of them None."""
    layout, has_dlse = problem.arrives
    generator = torch.Generator(q.device).manual_seed(problem.seed + 1)
    normal = lambda *shape: torch.randn(*shape, generator=generator, device=q.device)
    dout = normal(*q.shape[:3], v.shape[3]).to(q.dtype)
    dlse = normal(q.shape[0], q.shape[2], q.shape[1])
    if layout in WIDENED and dout.numel():
        one = {"one number": dout[:1, :1, :1, :1], "sequence": dout[:, :1], "heads": dout[:, :, :1]}[layout]
        dout = one.expand_as(dout)
    elif layout in cases.LAYOUTS:
        dout = cases.LAYOUTS[layout](dout)
    return (None if layout is None else dout), (dlse if has_dlse else None)


def run_one(problem: Problem, device=None, backend=None) -> float:
    """Largest error over plain PyTorch's (both with half the rounding floor). AssertionError beyond the budget."""
    q, k, v = tensors(problem, device or cases.DEVICE)
    arguments = {"softmax_scale": problem.softmax_scale, **problem.mask}
    flows = incoming(problem, q, v) if problem.arrives != (None, False) else (None, None)
    backward = any(x is not None for x in flows)
    leaves = [x.detach().requires_grad_(backward) for x in (q, k, v)]
    out, lse = hopper_attention(*leaves, return_lse=True, backend=backend or cases.BACKEND, **arguments)
    if backward:
        ends, arrived = zip(*((x, g) for x, g in zip((out, lse), flows) if g is not None))
        results = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(ends, leaves, arrived)))
        arguments |= {"dout": flows[0], "dlse": flows[1]}
    else:
        results = {"out": out, "lse": lse}
    exact, usual = (f(q, k, v, **arguments) for f in (oracle.attention, oracle.plain))
    worst = 0.0
    for what, actual in results.items():
        ref, plain, terms = getattr(exact, what), getattr(usual, what), exact.terms[what]
        oracle.assert_close_to_oracle(actual, ref, plain, q.dtype, what, terms=terms)
        allowed = oracle.budget(oracle.error(plain, ref), ref, q.dtype, what, terms)
        if allowed:
            worst = max(worst, oracle.error(actual, ref) / (allowed / oracle.FACTOR))
    return worst


def fuzz(count: int, first_seed: int = 0, device=None, backend=None, say=print, backward=False) -> Outcome:
    """Run seeds from `first_seed` on; every failure is one line of `say`."""
    failures, worst = {}, 0.0
    for seed in range(first_seed, first_seed + count):
        problem = problem_of(seed, backward)
        try:
            worst = max(worst, run_one(problem, device, backend))
        except (AssertionError, NotImplementedError, ValueError, TypeError) as error:
            failures[seed] = f"{type(error).__name__}: {error}"
            say(f"seed {seed} failed: {problem}\n  {failures[seed]}")
    return Outcome(count, failures, worst)


def check(first_seed: int, **options) -> None:
    """One of the `SHARES` of a kernel's random problems, none of which may fail."""
    lines = []
    outcome = fuzz(SHARES.step, first_seed, say=lines.append, **options)
    assert not outcome.failures, "\n".join([str(outcome), *lines])
    print(outcome)


def main(*words):
    backward = "--backward" in words
    numbers = [int(word) for word in words if word != "--backward"]
    count, first_seed = (*numbers, *(2000, 0)[len(numbers) :])
    specs = (sm90.FORWARD, sm90.BACKWARD)[: 1 + backward]
    jit.warmup([variant for spec in specs for variant in cases.variants(spec)])
    start = time.perf_counter()
    outcome = fuzz(count, first_seed, backward=backward)
    print(outcome, f"({time.perf_counter() - start:.0f} s)")
    return 1 if outcome.failures else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
