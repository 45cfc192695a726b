"""How far FP8 attention is from float64: output, lse and gradients, by input set and recipe. Needs no GPU.

    python bench/fp8_accuracy.py [--device cpu | cuda] [--out DIR] [--revision TEXT]

Writes bench/results/<cpu or gpu>/fp8_accuracy.json, which docs/numerics.md's table is made from. A CPU computes the
emulation, a GPU runs quantizer, forward and backward kernels. Inputs are drawn on the CPU and rounded to bf16 first,
and float64 attention sees the same rounded inputs. bench/fp8_checks.py holds the recipe to its bounds.
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
from flashattn_hopper import jit, ops_fp8, planner, quantize, reference, reference_fp8, runner_fp8
from flashattn_hopper.kernels.sm90.specs import QUANTIZER
from flashattn_hopper.spec.mask import Band
from flashattn_hopper.spec.problem import BWD, FWD, QuantizeTraits, Shape, Traits

SEQLEN, HEADDIM, SEEDS = 1024, 128, (0, 1, 2)
MASKS = {"full": Band(), "causal": Band(right=0)}
BF16 = torch.bfloat16
BACKEND = "sm90"  # on a GPU


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
# The second one is the default; what a step of the recipe is worth shows in e4m3.
FLOAT8 = {"qk_dtype": "fp8"}
RECIPES = {
    "fp8": FLOAT8,
    "fp8, int8 q and k": {"qk_dtype": "int8"},
    "fp8, no smoothing": {**FLOAT8, "smooth_k": False},
    "fp8, no rotation": {**FLOAT8, "hadamard": False},
    "fp8, neither": {**FLOAT8, "hadamard": False, "smooth_k": False},
    "bf16": None,
}


class Results(NamedTuple):
    out: torch.Tensor
    lse: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


def attend(recipe: dict | None, q, k, v, dout, band: Band) -> Results:
    """Forward and backward; None is attention in the operands' dtype."""
    scale = q.shape[-1] ** -0.5
    if q.is_cuda and q.dtype != torch.float64:
        return by_kernels(recipe, q, k, v, dout, band, scale)
    if recipe is None:
        out, lse = reference.forward(q, k, v, band, scale)
        return Results(out, lse, *reference.backward(dout, None, q, k, v, out, lse, band, scale))
    codes = flashattn_hopper.quantize_fp8(q, k, v, **recipe)
    out, lse = reference_fp8.forward(*codes, band, scale)
    grads = reference_fp8.backward(dout, None, *codes, out, lse, band, scale)
    return Results(out, quantize.restore_lse(lse, codes[0], scale), *grads)


def by_kernels(recipe: dict | None, q, k, v, dout, band: Band, scale: float) -> Results:
    if recipe is None:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        keywords = {"causal": band.right == 0, "softmax_scale": scale, "return_lse": True, "backend": BACKEND}
        out, lse = flashattn_hopper.hopper_attention(*leaves, **keywords)
        return Results(out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout))
    problem, scaled, out, core, lse = forward_by_kernels(recipe, q, k, v, band, scale)
    planned = runner_fp8.gradient_problem(problem, BACKEND, planner.capability_of(q.device))
    every = (True, True, True)
    return Results(out, lse, *runner_fp8.backward(planned, BACKEND, dout, None, *scaled, out, core, every))


def forward_by_kernels(recipe: dict, q, k, v, band: Band, scale: float):
    """(problem, codes, out, lse of the scores that codes give, lse)."""
    codes = runner_fp8.quantize(q, k, v, **quantizer_options(recipe))
    scaled = runner_fp8.to_scaled(codes, q.dtype, recipe.get("hadamard", True))
    problem = ops_fp8.problem_fp8(*scaled, (scale, band.left, band.right, False, BACKEND), q.dtype)
    attended = runner_fp8.bind(runner_fp8.plan(problem, BACKEND, q.device), problem, q.dtype, q.device)
    return problem, scaled, *attended(codes)


def attend_forward(recipe: dict, q, k, v, band: Band):
    """(out, lse) of a recipe."""
    scale = q.shape[-1] ** -0.5
    if q.is_cuda:
        _, _, out, _, lse = forward_by_kernels(recipe, q, k, v, band, scale)
        return out, lse
    codes = flashattn_hopper.quantize_fp8(q, k, v, **recipe)
    out, lse = reference_fp8.forward(*codes, band, scale)
    return out, quantize.restore_lse(lse, codes[0], scale)


def quantizer_options(recipe: dict) -> dict:
    """`recipe` is for quantize_fp8."""
    return {name: on for name, on in recipe.items() if name != "qk_dtype"} | {"int8_qk": recipe["qk_dtype"] == "int8"}


def compile_kernels(headdims: Sequence[int], recipes: Sequence[dict | None], half: str = "bf16", backward=True):
    """What the two masks take, side by side, in place of one after the other where each is called first."""
    capability, found = planner.capability_of(torch.device("cuda")), []
    for headdim in headdims:
        for recipe in recipes:
            if recipe is not None:
                traits = QuantizeTraits(half, headdim, headdim, **quantizer_options(recipe))
                found.append((QUANTIZER, traits, None, QUANTIZER.arch))
            for mask in MASKS:
                words = {} if recipe is None else {"int8_qk": recipe["qk_dtype"] == "int8", "fp16_out": half == "fp16"}
                wanted = [Traits(FWD, "fp8" if words else half, headdim, headdim, mask, **words)]
                wanted += [Traits(BWD, half, headdim, headdim, mask)] if backward else []
                for traits in wanted:
                    plan = planner.plan(traits, capability, BACKEND, Shape(1, SEQLEN, SEQLEN, 1, 1))
                    found.append((plan.spec, plan.traits, plan.tile, plan.spec.arch))
    jit.warmup(dict.fromkeys(found))


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


def rows(device: str = "cpu"):
    for name in SETS:
        for mask, band in MASKS.items():
            found: dict[str, list[dict]] = {recipe: [] for recipe in RECIPES}
            for seed in SEEDS:
                q, k, v = inputs(name, seed)
                dout = torch.randn(v.shape, generator=torch.Generator().manual_seed(5 + seed)).to(BF16)
                q, k, v, dout = (x.to(device) for x in (q, k, v, dout))
                exact = attend(None, *(x.double() for x in (q, k, v, dout)), band)
                for recipe, options in RECIPES.items():
                    found[recipe].append(errors(attend(options, q, k, v, dout, band), exact))
            for recipe, runs in found.items():
                # Means, and the worst seed: a few rows make the error of heavy tails.
                measured = {key: sum(run[key] for run in runs) / len(runs) for key in runs[0]}
                measured |= {f"{key}_worst": max(run[key] for run in runs) for key in ("out", "lse_rms")}
                rounded = {key: float(f"{x:.3g}") for key, x in measured.items()}
                yield {"set": name, "mask": mask, "recipe": recipe} | rounded


SHOWN = ("set", "mask", "recipe", "out", "out_worst", "out_cos", "lse_rms", "dq", "dk", "dv")


def line(row: dict) -> str:
    return "  ".join(f"{row[name]!s:<{18 if name == 'recipe' else 9}}" for name in SHOWN).rstrip()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", default=record.RESULTS)
    parser.add_argument("--revision")
    args = parser.parse_args(argv)
    if args.device == "cuda":
        compile_kernels((HEADDIM,), list(RECIPES.values()))
    else:
        torch.set_num_threads(1)  # one order of summation, however many cores there are
    head = record.environment(args.device, args.revision) | {"suite": "fp8_accuracy"}
    settings = {"batch": 1, "seqlen": SEQLEN, "heads": 1, "headdim": HEADDIM, "seeds": list(SEEDS)}
    results = head | {"settings": settings, "rows": []}
    folder = results["gpu"]["name"] if args.device == "cuda" else "cpu"
    path = record.path_for(args.out, folder, "fp8_accuracy")
    print(line(dict(zip(SHOWN, SHOWN))))
    for row in rows(args.device):
        results["rows"].append(row)
        print(line(row), flush=True)
    print(record.save(results, path))
    return 0


if __name__ == "__main__":
    sys.exit(main())
