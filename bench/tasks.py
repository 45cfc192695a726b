"""What is timed of a cell, and when its result is right: one task for each phase of attention.

A task draws the operands of one cell. For each contestant it gives the call to time (`bind`), compares a result with
float64 (`judge`), and says how much memory one call takes beside what goes in and comes out (`extra_bytes`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import suites
import torch

from flashattn_hopper.spec.problem import BWD, FWD

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp8": torch.bfloat16}  # of tensors
# Relative error (Frobenius norm, against float64) above which a result counts as wrong and is not timed. Output and
# probabilities rounded once each to the dtype give about one unit in the last place; ten of those is a defect. With
# 8-bit operands everyone's error is .03 to .08.
WRONG = {"bf16": 2e-2, "fp16": 4e-3, "fp32": 1e-4, "fp8": 0.15}
# Gradients are compared whole, so a few wrong rows would drown in thousands of right ones: any `BLOCK` consecutive rows
# may be off by `BLOCK_SLACK` times as much and no more. One row of 64 that is missing is an error of 1/8.
BLOCK, BLOCK_SLACK = 64, 3.0


class Operands(NamedTuple):
    q: torch.Tensor  # (B, S, Hq, D)
    k: torch.Tensor  # (B, S, Hk, D)
    v: torch.Tensor  # (B, S, Hk, Dv)


def draw(cell: suites.Cell, device: str, heads: int, dim: int) -> torch.Tensor:
    return torch.randn(cell.batch, cell.seqlen, heads, dim, device=device, dtype=DTYPES[cell.dtype])


def operands(cell: suites.Cell, device: str) -> Operands:
    heads, kv_heads = cell.num_heads_q, cell.num_heads_kv
    dims = (heads, cell.headdim), (kv_heads, cell.headdim), (kv_heads, cell.headdim_v)
    return Operands(*(draw(cell, device, *pair) for pair in dims))


def arguments(cell: suites.Cell) -> tuple:
    """Causal, window and scale, in a contestant's order."""
    return cell.causal, cell.window_size, cell.softmax_scale


def must_have(name: str, tensor: torch.Tensor, shape: Sequence[int]) -> None:
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name} of shape {tuple(tensor.shape)}, expected {tuple(shape)}")


def rounded(value: float) -> float:
    return float(f"{value:.3g}")


# ----------------------------------------------------------------------------------------------------------- forward
def forward_error(cell: suites.Cell, ops: Operands, out: torch.Tensor, heads: int = 4, rows: int = 16):
    """(largest absolute, relative Frobenius) error of a sample of rows against float64.

    The sample has the first and the last query and random ones between, in `heads` random (batch, head) pairs.
    """
    must_have("output", out, (cell.batch, cell.seqlen, cell.num_heads_q, cell.headdim_v))
    device, seqlens = out.device, cell.shape.seqlens
    i = torch.randint(cell.seqlen, (rows,), device=device)
    i[0], i[-1] = 0, cell.seqlen - 1
    visible = cell.band.keep(i[:, None], torch.arange(cell.seqlen, device=device), seqlens)
    worst, off, norm = 0.0, 0.0, 0.0
    for pair in torch.randint(cell.batch * cell.num_heads_q, (heads,)).tolist():
        batch, head = divmod(pair, cell.num_heads_q)
        kv_head = head // (cell.num_heads_q // cell.num_heads_kv)
        q, k, v = ops.q[batch, i, head], ops.k[batch, :, kv_head], ops.v[batch, :, kv_head]
        scores = q.double() @ k.double().T * cell.softmax_scale
        reference = scores.masked_fill(~visible, -math.inf).softmax(-1) @ v.double()
        difference = out[batch, i, head].double() - reference
        largest = difference.abs().max().item()
        # Trap: max(0.0, nan) is 0.0 in Python; a NaN must stay one.
        worst = largest if math.isnan(largest) else max(worst, largest)
        off += difference.square().sum().item()
        norm += reference.square().sum().item()
        if math.isnan(off):
            break
    return worst, math.sqrt(off / norm) if norm else math.sqrt(off)


class ForwardTask:
    """One forward pass, no graph."""

    def __init__(self, cell: suites.Cell, device: str):
        self.cell, self.ops = cell, operands(cell, device)

    def session(self, contestant):
        return contestant.session()

    def bind(self, contestant) -> Callable:
        def call():
            with torch.no_grad():
                return contestant.call(*self.ops, *arguments(self.cell))

        return call

    def judge(self, contestant, out) -> tuple[dict, str | None]:
        """(errors, None) or (errors, what is wrong)."""
        worst, relative = forward_error(self.cell, self.ops, out)
        return {"max_error": rounded(worst), "rel_error": rounded(relative)}, verdict(self.cell, relative)

    def extra_bytes(self, contestant) -> int | None:
        return None  # nothing but lse


def verdict(cell: suites.Cell, relative: float, slack: float = 1.0, what: str = "relative error") -> str | None:
    """None where the error is below the limit; a NaN is not."""
    right = relative <= slack * WRONG[cell.dtype]
    return None if right else f"wrong result: {what} {relative:.1e} against float64"


# ---------------------------------------------------------------------------------------------------------- backward
class Gradients(NamedTuple):
    """Of one kv head of one sequence, or of a whole call."""

    dq: torch.Tensor  # (S, G, D), G query heads of the kv head; or (B, S, Hq, D)
    dk: torch.Tensor  # (S, D); or (B, S, Hk, D)
    dv: torch.Tensor  # (S, Dv); or (B, S, Hk, Dv)


def exact_gradients(cell: suites.Cell, ops: Operands, dout: torch.Tensor, batch: int, kv_head: int, rows: int = 1024):
    """float64 gradients of one kv head of one sequence, all its query heads included.

    Queries come in chunks of `rows`: memory grows with rows x S and not with S x S.
    """
    group, seqlens = cell.num_heads_q // cell.num_heads_kv, cell.shape.seqlens
    k, v = (x[batch, :, kv_head].double() for x in (ops.k, ops.v))
    found = Gradients(k.new_empty(cell.seqlen, group, cell.headdim), torch.zeros_like(k), torch.zeros_like(v))
    keys = torch.arange(cell.seqlen, device=k.device)
    for member in range(group):
        head = kv_head * group + member
        for begin in range(0, cell.seqlen, rows):
            part = slice(begin, begin + rows)
            q, do = (x[batch, part, head].double() for x in (ops.q, dout))
            visible = cell.band.keep(keys[part, None], keys, seqlens)
            p = (q @ k.T * cell.softmax_scale).masked_fill_(~visible, -math.inf).softmax(-1)
            found.dv.add_(p.T @ do)
            dp = do @ v.T
            ds = dp.sub_((dp * p).sum(-1, keepdim=True)).mul_(p).mul_(cell.softmax_scale)
            found.dq[part, member] = ds @ k
            found.dk.add_(ds.T @ q)
    return found


def gradient_errors(cell: suites.Cell, grads: Gradients, exact: dict[tuple[int, int], Gradients]) -> dict[str, float]:
    """Relative errors (Frobenius norm) over the (batch, kv head) pairs of `exact`: one for each gradient.

    `max_error` is the largest absolute one, `block_error` the relative one of the worst `BLOCK` rows of a head.
    """
    group = cell.num_heads_q // cell.num_heads_kv
    off, norm, blocks, largest = dict.fromkeys(Gradients._fields, 0.0), dict.fromkeys(Gradients._fields, 0.0), [], []
    for (batch, kv_head), expected in exact.items():
        mine = Gradients(
            grads.dq[batch, :, kv_head * group : (kv_head + 1) * group],
            grads.dk[batch, :, kv_head],
            grads.dv[batch, :, kv_head],
        )
        for name, a, b in zip(Gradients._fields, mine, expected):
            a, b = (x.reshape(cell.seqlen, -1, x.shape[-1]).double() for x in (a, b))
            error = by_block(a - b)
            whole = by_block(b)
            off[name] += error.sum().item()
            norm[name] += whole.sum().item()
            # A block of gradients far below the others (exactly 0 for the first causal query) has no relative error.
            blocks.append((error / whole.clamp_min(1e-4 * whole.mean())).max().sqrt().item())
            largest.append((a - b).abs().max().item())
    errors = {name: math.sqrt(off[name] / norm[name]) if norm[name] else math.sqrt(off[name]) for name in off}
    return errors | {"block_error": worst_of(blocks), "max_error": worst_of(largest)}


def by_block(x: torch.Tensor) -> torch.Tensor:
    """Sums of squares of `BLOCK` consecutive rows: (S, G, D) -> (blocks, G). The last block may be short."""
    squares = x.square().sum(-1)
    ragged = -len(squares) % BLOCK
    return torch.nn.functional.pad(squares, (0, 0, 0, ragged)).unflatten(0, (-1, BLOCK)).sum(1)


def worst_of(values) -> float:
    """The largest; NaN where one is, which Python's max may drop."""
    values = list(values)
    return math.nan if any(map(math.isnan, values)) else max(values)


class BackwardTask:
    """The gradients alone: the forward has run, its graph is kept, and every call walks it again."""

    SAMPLE = 4  # (batch, kv head) pairs that are compared with float64

    def __init__(self, cell: suites.Cell, device: str):
        self.cell, self.ops = cell, operands(cell, device)
        self.dout = draw(cell, device, cell.num_heads_q, cell.headdim_v)
        pairs = [divmod(n, cell.num_heads_kv) for n in torch.randperm(cell.batch * cell.num_heads_kv).tolist()]
        last = (cell.batch - 1, cell.num_heads_kv - 1)
        self.pairs = [last, *(pair for pair in pairs if pair != last)][: self.SAMPLE]

    @functools.cached_property
    def exact(self) -> dict[tuple[int, int], Gradients]:
        """Computed once for all contestants."""
        return {pair: exact_gradients(self.cell, self.ops, self.dout, *pair) for pair in self.pairs}

    def session(self, contestant):
        return contestant.session(self.cell.deterministic)

    def graph(self, contestant):
        return contestant.graph(*self.ops, *arguments(self.cell), self.cell.deterministic)

    def bind(self, contestant) -> Callable:
        """Runs the forward; call it inside the session."""
        leaves, out = self.graph(contestant)
        dout = contestant.layout(self.dout)
        return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)

    def judge(self, contestant, found) -> tuple[dict, str | None]:
        """(errors, None) or (errors, what is wrong)."""
        grads = Gradients(*map(contestant.layout, found))
        for name, grad, operand in zip(Gradients._fields, grads, self.ops):
            must_have(name, grad, operand.shape)
            if not grad.isfinite().all():
                return {}, f"wrong result: {name} is not finite everywhere"
        errors = gradient_errors(self.cell, grads, self.exact)
        relative = worst_of(errors[name] for name in Gradients._fields)
        why = verdict(self.cell, relative, what=f"relative error of {max(Gradients._fields, key=errors.get)}")
        why = why or verdict(self.cell, errors["block_error"], BLOCK_SLACK, f"relative error of some {BLOCK} rows")
        return {name: rounded(value) for name, value in (errors | {"rel_error": relative}).items()}, why

    def extra_bytes(self, contestant) -> int | None:
        """Peak memory of one forward and backward, beside q, k, v, dout and out, dq, dk, dv; None without CUDA.

        The same call must have run before: what is allocated once and kept does not count.
        """
        dout = contestant.layout(self.dout)

        def step():
            leaves, out = self.graph(contestant)
            return out.detach(), *torch.autograd.grad(out, leaves, dout)

        return peak_beside_results(step, self.dout.device)


def peak_beside_results(step: Callable[[], Sequence[torch.Tensor]], device) -> int | None:
    """Bytes that `step` takes at its peak, beside what was allocated before and what it returns; None without CUDA."""
    if torch.device(device).type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    results = step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before - sum(t.nbytes for t in results)


TASKS = {FWD: ForwardTask, BWD: BackwardTask}
