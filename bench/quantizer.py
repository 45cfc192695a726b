"""The FP8 quantizer alone: bytes a second, beside a copy of as many bytes by torch.

`python bench/run.py quantizer` measures. Bytes are those that the kernel moves: q read once, k and v twice, for the
mean and the scale must be known before the first code, and codes written. The copy moves as many. `least_share` is the
share of the copy if k and v counted once too, as in a quantizer that finds all of the second reading in L2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import fp8
import peers
import suites
import tasks
import timing
import torch

SEQLENS = (1024, 4096, 16384)
QUICK_SEQLENS = (4096,)
HEADDIMS = (64, 96, 128, 192, 256)
WRONG = 0.04  # relative error of dequantized codes above which a quantizer is not timed; rounding of v makes .026


def cells(quick: bool = False) -> list[suites.Cell]:
    """Heads as many as the hidden size holds, and grouped heads at headdim 128, where q is most of the work."""
    lengths = QUICK_SEQLENS if quick else SEQLENS
    return [
        *suites.sweep(HEADDIMS, (suites.FULL,), lengths, dtype="fp8"),
        *suites.fixed(32, 8, 128, bands=(suites.FULL,), dtype="fp8"),
    ]


def moved_bytes(cell: suites.Cell, readings: int = 2) -> int:
    """q once, k and v as often as `readings` says, and codes; scales and sums are less than a hundredth of it."""
    rows, half = cell.batch * cell.seqlen, tasks.DTYPES[cell.dtype].itemsize
    queries = rows * cell.num_heads_q * cell.headdim
    others = rows * cell.num_heads_kv * (cell.headdim + cell.headdim_v)
    return queries * (half + 1) + others * (readings * half + 1)


def judge(ops: tasks.Operands, codes) -> dict[str, float]:
    """Relative error (Frobenius norm) of what the codes stand for, the largest of q, k and v."""
    from flashattn_hopper import dequantize, runner_fp8

    scaled = runner_fp8.to_scaled(codes, ops.q.dtype)
    errors = []
    for x, code in zip(ops, scaled):
        exact = x.float()
        errors.append(((dequantize(code).float() - exact).norm() / exact.norm()).item())
    return {"rel_error": tasks.rounded(tasks.worst_of(errors))}


def rows(cell: suites.Cell, clock, device: str, quantize: Callable) -> list[dict]:
    """One row for the quantizer and one for the copy."""
    slug = fp8.quantizer(cell)[1].slug
    where = {"slug": slug, "batch": cell.batch, "seqlen": cell.seqlen}
    where |= {"heads": cell.num_heads_q, "kv_heads": cell.num_heads_kv, "window": None}
    count = moved_bytes(cell)
    try:
        ops = tasks.operands(cell, device)
        known = judge(ops, quantize(*ops))
        if not known["rel_error"] <= WRONG:
            raise ValueError(f"wrong result: relative error {known['rel_error']:.1e} of the dequantized codes")
        source = torch.empty(count // 2, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        calls = {"ours": lambda: quantize(*ops), "copy": lambda: target.copy_(source)}
        timings = timing.interleave(calls, clock)
        found = []
        for name, taken in timings.items():
            if isinstance(taken, Exception):
                raise taken
            rate = count / taken.ms / 1e6
            speed = {"ms": round(taken.ms, 5), "p20": round(taken.percentile(20), 5), "gb_s": tasks.rounded(rate)}
            found.append({"contestant": name} | where | speed | (known if name == "ours" else {}))
    except Exception as error:
        return [{"contestant": "ours"} | where | {"failed": peers.first_line(error)}]
    share = found[1]["ms"] / found[0]["ms"]
    found[0] |= {"share": round(share, 3), "least_share": round(share * moved_bytes(cell, 1) / count, 3)}
    return found


def line(found: list[Mapping]) -> str:
    row = found[0]
    text = f"{row['slug']:<36} b{row['batch']:<3} s{row['seqlen']:<6} h{row['heads']}:{row['kv_heads']:<3}"
    if row.get("failed"):
        return f"{text} failed: {row['failed']}"
    rates = f"{row['gb_s']:.0f} GB/s, copy {found[1]['gb_s']:.0f}, share {row['share']:.2f} ({row['least_share']:.2f})"
    return f"{text} {rates}, err {row['rel_error']:.1e}"
