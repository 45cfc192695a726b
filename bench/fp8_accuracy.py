"""How far FP8 attention is from float64: output, lse and gradients, by input set and recipe. Needs no GPU.

    python bench/fp8_accuracy.py [--out DIR] [--revision TEXT]

Writes bench/results/cpu/fp8_accuracy.json, which docs/numerics.md's table is made from. Everything is computed by the
emulation on a CPU. Inputs are rounded to bf16 first, and float64 attention sees the same rounded inputs.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import record
import torch

import flashattn_hopper
from flashattn_hopper import quantize, reference, reference_fp8
from flashattn_hopper.spec.mask import Band

SEQLEN, HEADDIM, SEEDS = 1024, 128, (0, 1, 2)
MASKS = {"full": Band(), "causal": Band(right=0)}
BF16 = torch.bfloat16


# ------------------------------------------------------------------------------------------------------------ inputs
def normal(shape, draw):
    return [draw(*shape) for _ in "qkv"]


def outlier(shape, draw):
    """One element in a thousand is ten times as large: the distribution of the FlashAttention-3 paper."""
    spikes = lambda: 10 * draw(*shape) * (draw(*shape).abs() > 3.2905)  # P(|x| > 3.2905) = 1e-3
    return [draw(*shape) + spikes() for _ in "qkv"]


def student(shape, draw):
    """Student's t with 3 degrees of freedom: heavy tails, logits beyond 100."""
    return [draw(*shape) / (sum(draw(*shape) ** 2 for _ in range(3)) / 3).sqrt() for _ in "qkv"]


def llm(shape, draw):
    """Rotary embedding, a mean in k's slow channels, unequal channels, a sink at the first token with a tiny value."""
    batch, _, heads, headdim = shape
    channel = lambda: draw(batch, 1, heads, headdim)
    slow = torch.zeros(headdim)
    slow[headdim // 2 - 10 : headdim // 2] = slow[-10:] = 1.0
    scales = torch.exp(0.4 * channel())
    mean_k = 0.4 * channel() + 5.0 * channel() * slow
    mean_q = 0.4 * channel() + channel() * slow
    q, k = rope(draw(*shape) * scales + mean_q), rope(draw(*shape) * scales + mean_k)
    mean = q.mean(1, keepdim=True)
    lift = 10.0 * math.sqrt(headdim) / mean.square().sum(-1, keepdim=True)
    k[:, :1] = k.mean(1, keepdim=True) + lift * mean
    v = draw(*shape) * torch.exp(0.5 * channel()) + 0.3 * channel()
    v[:, :1] *= 0.05
    return [q, k, v]


def rope(x, base=10000.0):
    seqlen, headdim = x.shape[1], x.shape[3]
    angles = torch.arange(seqlen)[:, None, None] * base ** (-torch.arange(0, headdim, 2) / headdim)
    cos, sin = angles.cos(), angles.sin()
    low, high = x.chunk(2, -1)
    return torch.cat((low * cos - high * sin, low * sin + high * cos), -1)


SETS: dict[str, Callable] = {f.__name__: f for f in (normal, outlier, llm, student)}


def inputs(name: str, seed: int, seqlen=SEQLEN, headdim=HEADDIM, batch=1, heads=1, dtype=BF16):
    """q, k, v (B, S, H, D) of a set, rounded to `dtype`."""
    generator = torch.Generator().manual_seed(1000 + seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator)
    return [x.to(dtype) for x in SETS[name]((batch, seqlen, heads, headdim), draw)]


# ----------------------------------------------------------------------------------------------------------- recipes
RECIPES = {
    "fp8": {},
    "fp8, int8 q and k": {"qk_dtype": "int8"},
    "fp8, no smoothing": {"smooth_k": False},
    "fp8, no rotation": {"hadamard": False},
    "fp8, neither": {"hadamard": False, "smooth_k": False},
    "bf16": None,
}


class Results(NamedTuple):
    out: torch.Tensor
    lse: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


def attend(recipe: dict | None, q, k, v, dout, band: Band) -> Results:
    """Forward and backward; None is the 16-bit reference."""
    scale = q.shape[-1] ** -0.5
    if recipe is None:
        out, lse = reference.forward(q, k, v, band, scale)
        return Results(out, lse, *reference.backward(dout, None, q, k, v, out, lse, band, scale))
    codes = flashattn_hopper.quantize_fp8(q, k, v, **recipe)
    out, lse = reference_fp8.forward(*codes, band, scale)
    grads = reference_fp8.backward(dout, None, *codes, out, lse, band, scale)
    return Results(out, quantize.restore_lse(lse, codes[0], scale), *grads)


def errors(actual: Results, exact: Results) -> dict[str, float]:
    """Relative errors in the Frobenius norm, `out_cos` the cosine, `lse_rms` in nats."""
    found = {}
    for name, a, b in zip(Results._fields, actual, exact):
        a, b = a.double(), b.double()
        if name == "lse":
            found["lse_rms"] = (a - b).square().mean().sqrt().item()
        else:
            found[name] = ((a - b).norm() / b.norm()).item()
    a, b = actual.out.double(), exact.out.double()
    return found | {"out_cos": ((a * b).sum() / (a.norm() * b.norm())).item()}


def rows():
    for name in SETS:
        for mask, band in MASKS.items():
            found: dict[str, list[dict]] = {recipe: [] for recipe in RECIPES}
            for seed in SEEDS:
                q, k, v = inputs(name, seed)
                dout = torch.randn(v.shape, generator=torch.Generator().manual_seed(5 + seed)).to(BF16)
                exact = attend(None, *(x.double() for x in (q, k, v, dout)), band)
                for recipe, options in RECIPES.items():
                    found[recipe].append(errors(attend(options, q, k, v, dout, band), exact))
            for recipe, runs in found.items():
                # Means, and the worst seed: a few rows make the error of heavy tails.
                measured = {key: sum(run[key] for run in runs) / len(runs) for key in runs[0]}
                measured |= {f"{key}_worst": max(run[key] for run in runs) for key in ("out", "lse_rms")}
                rounded = {key: float(f"{x:.3g}") for key, x in measured.items()}
                yield {"set": name, "mask": mask, "recipe": recipe} | rounded


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default=record.RESULTS)
    parser.add_argument("--revision")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # one order of summation, however many cores there are
    head = record.environment("cpu", args.revision) | {"suite": "fp8_accuracy"}
    settings = {"batch": 1, "seqlen": SEQLEN, "heads": 1, "headdim": HEADDIM, "seeds": list(SEEDS)}
    results = head | {"settings": settings, "rows": list(rows())}
    print(record.save(results, record.path_for(args.out, "cpu", "fp8_accuracy")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
