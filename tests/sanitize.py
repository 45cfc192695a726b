"""Small launches of every variant, for a memory or race checker:

    compute-sanitizer --tool memcheck  python tests/sanitize.py [words of a slug, such as bf16 d128]
    compute-sanitizer --tool racecheck python tests/sanitize.py bf16
    compute-sanitizer --tool synccheck python tests/sanitize.py bf16
    compute-sanitizer --tool memcheck  python tests/sanitize.py bwd
    compute-sanitizer --tool racecheck python tests/sanitize.py fp8 d128
    compute-sanitizer --tool memcheck  python tests/sanitize.py quantize

`python tests/sanitize.py` alone compiles what is missing, checks the results, and so prepares the runs above.
"""

import os
import sys
from pathlib import Path

# Every tensor gets an allocation of its own, so an access beyond its end is one the checker sees.
os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

import torch

from flashattn_hopper import jit, planner, quantize_fp8, reference, reference_fp8, runner, runner_fp8
from flashattn_hopper.arguments import TORCH_DTYPES
from flashattn_hopper.kernels.sm90 import specs as sm90
from flashattn_hopper.quantize import decode, restore_lse
from flashattn_hopper.spec.mask import Band
from flashattn_hopper.spec.problem import BWD, FWD, QUANTIZE, AttentionProblem, QuantizeTraits, Shape

sys.path.insert(0, str(Path(__file__).parent))
import cases
from oracle import check_forward, check_grads


def run(variant, seqlens, trend):
    """One launch. `trend` makes scores rise to the left by so many standard deviations, for a second attempt."""
    spec, traits, tile, arch = variant
    if spec.phase == QUANTIZE:
        return quantized(traits, seqlens, trend)
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
    half = "fp16" if traits.dtype == "fp8" and traits.fp16_out else "bf16"
    q, k, v, dout = (x.to("cuda", TORCH_DTYPES.get(traits.dtype, TORCH_DTYPES[half])) for x in (q, k, v, dout))
    problem = AttentionProblem(traits, shape, band, traits.headdim**-0.5)
    plan, fn = planner.Plan(spec, traits, tile), jit.compiled(spec, traits, tile, arch)
    if traits.dtype == "fp8":
        return forward_fp8(plan, problem, q, k, v, cases.variant_id(variant))
    LAUNCHES[spec.phase](fn, plan, problem, q, k, v, dout, mask, cases.variant_id(variant))


def forward(fn, plan, problem, q, k, v, dout, mask, label):
    out, lse = runner.bind(fn, plan, problem, q, k, v)(q, k, v)
    torch.cuda.synchronize()
    check_forward(out, lse, q, k, v, label=label, **mask)


def forward_fp8(plan, problem, q, k, v, label):
    """Codes are PyTorch's, so that only one kernel of ours runs; lse is written twice, as after the quantizer."""
    codes = quantize_fp8(q, k, v, qk_dtype="int8" if problem.traits.int8_qk else "fp8")
    operands = runner_fp8.from_scaled(*codes)._replace(logit_offset=codes[0].logit_offset)
    out, _, lse = runner_fp8.bind(plan, problem, q.dtype, q.device)(operands)
    torch.cuda.synchronize()
    wanted, core = reference_fp8.forward(*codes, problem.band, problem.softmax_scale)
    wanted_lse = restore_lse(core, codes[0], problem.softmax_scale)
    near = (out.float() - wanted.float()).norm() <= 0.01 * wanted.float().norm()
    if not near or not torch.allclose(lse, wanted_lse, rtol=1e-5, atol=0.01):
        raise AssertionError(f"{label}: not what the emulation gives")


def quantized(traits, seqlens, trend):
    """What codes stand for, against the tensors turned alike: within the rounding of a code."""
    generator = torch.Generator().manual_seed(0)
    sizes = (seqlens[0], 4, traits.headdim), (seqlens[1], 2, traits.headdim), (seqlens[1], 2, traits.headdim_v)
    make = lambda size: torch.randn(2, *size, generator=generator).to("cuda", TORCH_DTYPES[traits.dtype])
    q, k, v = map(make, sizes)
    recipe = {"hadamard": traits.hadamard, "smooth_k": traits.smooth_k}
    found = runner_fp8.to_scaled(
        runner_fp8.quantize(q, k, v, int8_qk=traits.int8_qk, **recipe), q.dtype, traits.hadamard
    )
    torch.cuda.synchronize()
    wanted = quantize_fp8(q, k, v, qk_dtype="int8" if traits.int8_qk else "fp8", **recipe)
    for ours, theirs in zip(found, wanted):
        # Scales may differ in their last bit, and a few codes with them.
        if not (decode(ours) - decode(theirs)).norm() <= 1e-2 * decode(theirs).norm():
            raise AssertionError(f"{traits.slug}: not what quantize_fp8 gives")


def backward(fn, plan, problem, q, k, v, dout, mask, label):
    """With a gradient into lse; out and lse are the reference's, so that only one kernel of ours runs."""
    out, lse = reference.forward(q, k, v, problem.band, problem.softmax_scale)
    dlse = torch.randn_like(lse)
    grads = runner.bind_backward(fn, plan, problem, dout, q, k, v, (True,) * 3)(dout, dlse, q, k, v, out, lse)
    torch.cuda.synchronize()
    check_grads(grads, q, k, v, dout, dlse, label=label, **mask)


LAUNCHES = {FWD: forward, BWD: backward}
QUANTIZERS = [
    (sm90.QUANTIZER, QuantizeTraits("bf16", *dims, int8_qk=int8), None, sm90.QUANTIZER.arch)
    for dims in (*sm90.FORWARD_FP8.headdims, (64, 256), (16, 16))
    for int8 in (False, True)
]


def main(words):
    variants = [*cases.variants(sm90.FORWARD), *cases.other_variants(sm90.FORWARD), *cases.variants(sm90.BACKWARD)]
    variants += [*cases.variants(sm90.FORWARD_FP8), *QUANTIZERS]
    chosen = [v for v in variants if set(words) <= set(v[1].slug.split("."))]
    if not chosen:
        raise SystemExit(f"no variant has all of {', '.join(words)} in its slug")
    jit.warmup(chosen)
    launches = 0
    for variant in chosen:
        m, n = (128, 128) if variant[2] is None else (variant[2].tile_m, variant[2].tile_n)
        for seqlens in ((m + 1, 2 * n + 5), (1, 1), (2 * m, n)):
            for trend in (0, 50) if variant[0].phase == FWD else (0,):
                run(variant, seqlens, trend)
                launches += 1
    print(f"sanitize: {len(chosen)} variants, {launches} launches, all right")


if __name__ == "__main__":
    main(sys.argv[1:])
