"""Small launches of every variant, for a memory or race checker:

    compute-sanitizer --tool memcheck  python tests/sanitize.py [words of a slug, such as bf16 d128]
    compute-sanitizer --tool racecheck python tests/sanitize.py bf16
    compute-sanitizer --tool synccheck python tests/sanitize.py bf16
    compute-sanitizer --tool memcheck  python tests/sanitize.py bwd

`python tests/sanitize.py` alone compiles what is missing, checks the results, and so prepares the runs above.
"""

import os
import sys
from pathlib import Path

# Every tensor gets an allocation of its own, so an access beyond its end is one the checker sees.
os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

import torch

from flashattn_hopper import jit, planner, reference, runner
from flashattn_hopper.arguments import TORCH_DTYPES
from flashattn_hopper.kernels.sm90 import specs as sm90
from flashattn_hopper.spec.mask import Band
from flashattn_hopper.spec.problem import BWD, FWD, AttentionProblem, Shape

sys.path.insert(0, str(Path(__file__).parent))
import cases
from oracle import check_forward, check_grads


def run(variant, seqlens, trend):
    """One launch. `trend` makes scores rise to the left by so many standard deviations, for a second attempt."""
    spec, traits, tile, arch = variant
    window = (tile.tile_n + 70, 9) if traits.mask == "window" else None
    mask = cases.mask_arguments(traits.mask, window)
    band = Band(*window) if window else Band(None, 0 if mask else None)
    shape = Shape(2, *seqlens, 2, 1)
    generator = torch.Generator().manual_seed(0)
    make = lambda seqlen, heads, headdim: torch.randn(2, seqlen, heads, headdim, generator=generator)
    q, k = make(seqlens[0], 2, traits.headdim), make(seqlens[1], 1, traits.headdim)
    v, dout = make(seqlens[1], 1, traits.headdim_v), make(seqlens[0], 2, traits.headdim_v)
    k[..., 0] -= trend * torch.arange(seqlens[1]).view(1, -1, 1)
    q[..., 0] = q[..., 0].abs() + 1
    q, k, v, dout = (x.to("cuda", TORCH_DTYPES[traits.dtype]) for x in (q, k, v, dout))
    problem = AttentionProblem(traits, shape, band, traits.headdim**-0.5)
    plan, fn = planner.Plan(spec, traits, tile), jit.compiled(spec, traits, tile, arch)
    LAUNCHES[spec.phase](fn, plan, problem, q, k, v, dout, mask, cases.variant_id(variant))


def forward(fn, plan, problem, q, k, v, dout, mask, label):
    out, lse = runner.bind(fn, plan, problem, q, k, v)(q, k, v)
    torch.cuda.synchronize()
    check_forward(out, lse, q, k, v, label=label, **mask)


def backward(fn, plan, problem, q, k, v, dout, mask, label):
    """With a gradient into lse; out and lse are the reference's, so that only one kernel of ours runs."""
    out, lse = reference.forward(q, k, v, problem.band, problem.softmax_scale)
    dlse = torch.randn_like(lse)
    grads = runner.bind_backward(fn, plan, problem, dout, q, k, v, (True,) * 3)(dout, dlse, q, k, v, out, lse)
    torch.cuda.synchronize()
    check_grads(grads, q, k, v, dout, dlse, label=label, **mask)


LAUNCHES = {FWD: forward, BWD: backward}


def main(words):
    variants = [*cases.variants(sm90.FORWARD), *cases.other_variants(sm90.FORWARD), *cases.variants(sm90.BACKWARD)]
    chosen = [v for v in variants if set(words) <= set(v[1].slug.split("."))]
    if not chosen:
        raise SystemExit(f"no variant has all of {', '.join(words)} in its slug")
    jit.warmup(chosen)
    launches = 0
    for variant in chosen:
        tile = variant[2]
        for seqlens in ((tile.tile_m + 1, 2 * tile.tile_n + 5), (1, 1), (2 * tile.tile_m, tile.tile_n)):
            for trend in (0, 50) if variant[0].phase == FWD else (0,):
                run(variant, seqlens, trend)
                launches += 1
    print(f"sanitize: {len(chosen)} variants, {launches} launches, all right")


if __name__ == "__main__":
    main(sys.argv[1:])
