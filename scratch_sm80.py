"""python scratch_sm80.py TREE [compile]: alternatives of sm80.backward on this GPU beside FA2 (torch SDPA flash)."""

import math
import os
import statistics
import sys
import time

TREE = os.path.abspath(sys.argv[1])
sys.path.insert(0, TREE)
os.environ["PYTHONPATH"] = TREE
os.environ["PYTHONSAFEPATH"] = "1"

import torch

from flashattn_hopper import jit, planner, runner
from flashattn_hopper.kernels.sm80 import specs as sm80
from flashattn_hopper.spec.arch import SM90
from flashattn_hopper.spec.mask import Band
from flashattn_hopper.spec.problem import BWD, AttentionProblem, Shape, Traits
from flashattn_hopper.spec.tile import Sm80BwdTile, Sm80SumTile

SPEC = sm80.BACKWARD.on((9, 0))
ALTERNATIVES = {
    64: {
        "base": Sm80BwdTile(64),
        "A 4w m64 late": Sm80SumTile(64, 128, num_warps=4, step=32, vector=True),
        "B 8w m128 /2 stag": Sm80SumTile(128, 128, split=2, vector=True, staggered=True),
        "C 4w m64": Sm80SumTile(64, 128, num_warps=4, step=32, vector=True, late=False),
        "D 4w m32 late": Sm80SumTile(32, 128, num_warps=4, vector=True),
    },
    128: {
        "base": Sm80BwdTile(32),
        "A /2 late": Sm80SumTile(64, 128, split=2, vector=True),
        "B /2 stag": Sm80SumTile(64, 128, split=2, vector=True, staggered=True),
        "C /2": Sm80SumTile(64, 128, split=2, vector=True, late=False),
        "D /1 late": Sm80SumTile(64, 128, vector=True),
    },
    256: {
        "A /4 late": Sm80SumTile(64, 64, split=4, vector=True),
        "B /4 stag": Sm80SumTile(64, 64, split=4, vector=True, staggered=True),
        "C /4": Sm80SumTile(64, 64, split=4, vector=True, late=False),
    },
}
BANDS = {"full": Band(), "causal": Band(None, 0)}


def traits_of(headdim, mask):
    return Traits(BWD, "bf16", headdim, headdim, mask)


def kernel(headdim, mask, tile, q, k, v, do, needs=(True, True, True)):
    """A backward of these operands by this tile."""
    traits = traits_of(headdim, mask)
    fn = jit.compiled(SPEC, traits, tile, SM90)
    b, s, h, _ = q.shape
    problem = AttentionProblem(traits, Shape(b, s, k.shape[1], h, k.shape[2]), BANDS[mask], headdim**-0.5)
    return runner.bind_backward(fn, planner.Plan(SPEC, traits, tile), problem, do, q, k, v, needs)


def exact(q, k, v, do, mask):
    """(out, lse, dq, dk, dv) in float64, (B, S, H, D)."""
    group = q.shape[2] // k.shape[2]
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    Q, K, V = leaves[0], *(x.repeat_interleave(group, 2) for x in leaves[1:])
    s = torch.einsum("bqhd,bkhd->bhqk", Q, K) * q.shape[3] ** -0.5
    if mask == "causal":
        hidden = torch.ones(q.shape[1], k.shape[1], device=q.device, dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        s = s.masked_fill(~hidden, -math.inf)
    out = torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1), V)
    return out.detach(), s.logsumexp(-1).detach(), *torch.autograd.grad(out, leaves, do.double())


def check(headdim, mask, tile):
    worst = []
    for b, sq, sk, h, hk in ((2, 333, 400, 4, 2), (1, 1100, 1100, 2, 2)):
        make = lambda s, heads: torch.randn(b, s, heads, headdim, device="cuda", dtype=torch.bfloat16)
        q, k, v, do = make(sq, h), make(sk, hk), make(sk, hk), make(sq, h)
        out, lse, *expected = exact(q, k, v, do, mask)
        got = kernel(headdim, mask, tile, q, k, v, do)(do, None, q, k, v, out.bfloat16(), lse.float())
        worst += [((a.double() - e).norm() / e.norm()).item() for a, e in zip(got, expected)]
    return max(worst) if not any(map(math.isnan, worst)) else math.nan


BIG = None


def timed(call, reps=9):
    global BIG
    if BIG is None:
        BIG = torch.empty(5 * 2**29, dtype=torch.uint8, device="cuda")
    for _ in range(3):
        call()
    pairs = []
    for _ in range(reps):
        BIG.zero_()
        a, b = torch.cuda.Event(True), torch.cuda.Event(True)
        a.record()
        call()
        b.record()
        pairs.append((a, b))
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairs)


def flash(q, k, v, do, causal):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    leaves = [x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=causal)
    grad = do.transpose(1, 2)
    return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)


def main():
    start = time.time()
    variants = [
        (SPEC, traits_of(d, mask), tile, SM90)
        for d, tiles in ALTERNATIVES.items()
        for mask in BANDS
        for tile in tiles.values()
    ]
    print(jit.warmup(variants), f"{time.time() - start:.0f} s", flush=True)
    if "compile" in sys.argv:
        return
    torch.manual_seed(0)
    errors = {}
    for d, tiles in ALTERNATIVES.items():
        for mask in BANDS:
            for name, tile in tiles.items():
                try:
                    errors[d, mask, name] = check(d, mask, tile)
                except Exception as error:
                    errors[d, mask, name] = math.nan
                    print(d, mask, name, repr(error)[:300], flush=True)
                torch.cuda.synchronize()
            print(d, mask, {n: f"{e:.2e}" for (dd, m, n), e in errors.items() if (dd, m) == (d, mask)}, flush=True)
    print(f"checked {time.time() - start:.0f} s", flush=True)
    for d, tiles in ALTERNATIVES.items():
        for mask in BANDS:
            for s in (1024, 4096):
                b, h = 16384 // s, 2048 // d
                q, k, v, do = (torch.randn(b, s, h, d, device="cuda", dtype=torch.bfloat16) for _ in range(4))
                flops = 10.0 * b * h * s * s * d / (2 if mask == "causal" else 1)
                out = torch.empty_like(q)
                lse = torch.full((b, h, s), math.log(s), device="cuda")
                calls = {"FA2": flash(q, k, v, do, mask == "causal")}
                for name, tile in tiles.items():
                    if errors[d, mask, name] < 0.02:
                        run = kernel(d, mask, tile, q, k, v, do)
                        calls[name] = lambda run=run: run(do, None, q, k, v, out, lse)
                ms = {name: min(timed(call, 5), timed(call, 5)) for name, call in calls.items()}
                line = "  ".join(f"{n}: {flops / t / 1e9:.0f} ({ms['FA2'] / t:.2f})" for n, t in ms.items())
                print(f"hd{d} {mask} S={s}: {line}   [{time.time() - start:.0f} s]", flush=True)
                del calls


if __name__ == "__main__":
    main()
