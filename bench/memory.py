"""How memory grows with the sequence: peak extra memory of one forward and backward, beside a dense softmax's.

`python bench/run.py memory` measures; exact attention without the S x S matrix is linear in S, and a matrix of
probabilities in the operands' dtype is what it does without.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping

import peers
import suites
from tasks import DTYPES, BackwardTask

from flashattn_hopper.spec.problem import BWD

SEQLENS = tuple(2**n for n in range(11, 18))  # 2048 to 131072
QUICK_SEQLENS = (2048, 16384, 131072)
HEADS, HEADDIM = 2, 128


def cells(quick: bool = False) -> list[suites.Cell]:
    """One sequence, causal; as it is by default, and for results that repeat bit by bit."""
    return [
        suites.Cell(1, seqlen, HEADS, HEADS, HEADDIM, HEADDIM, suites.CAUSAL, phase=BWD, deterministic=deterministic)
        for deterministic in (False, True)
        for seqlen in (QUICK_SEQLENS if quick else SEQLENS)
    ]


def operand_bytes(cell: suites.Cell) -> int:
    """q, k, v, out and the four gradients of them."""
    rows = cell.batch * cell.seqlen
    per_row = 2 * (cell.num_heads_q + cell.num_heads_kv) * (cell.headdim + cell.headdim_v)
    return rows * per_row * DTYPES[cell.dtype].itemsize


def dense_bytes(cell: suites.Cell) -> int:
    """One S x S matrix of each head, in the operands' dtype."""
    return cell.batch * cell.num_heads_q * cell.seqlen**2 * DTYPES[cell.dtype].itemsize


def row(cell: suites.Cell, contestant: peers.Contestant, device: str, describe: Callable) -> dict:
    """`extra_bytes` of one call after a first one, or `failed`; and what it is compared with."""
    found = {"operand_bytes": operand_bytes(cell), "dense_bytes": dense_bytes(cell)}
    gc.collect()  # what is freed in the middle of a measurement would be subtracted from it
    try:
        task = BackwardTask(cell, device)
        with task.session(contestant):
            for name, grad in zip(("dq", "dk", "dv"), task.bind(contestant)()):
                if not grad.isfinite().all():
                    raise ValueError(f"{name} is not finite everywhere")
            found["extra_bytes"] = task.extra_bytes(contestant)
        return found | describe(cell, device)
    except Exception as error:
        return found | {"failed": peers.first_line(error)}


def line(row: Mapping) -> str:
    mib = lambda name: f"{row[name] / 2**20:.1f}"
    extra = row.get("failed") or f"{mib('extra_bytes')} MiB"
    rest = f"operands {mib('operand_bytes')} MiB, dense softmax {mib('dense_bytes')} MiB"
    return f"{row['slug']:<36} s{row['seqlen']:<7} extra {extra}; {rest}; {row.get('kernel', '')}"
