"""How far one real batch's attention is from float64, next to plain PyTorch in the same dtype."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from .model import GPT, Attend


class Batch(NamedTuple):
    """What layer 0 saw in one training step: q, k, v `(B, S, H, D)` and the gradient of its output."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor

    def cast(self, dtype: torch.dtype) -> Batch:
        return Batch(*(x.to(dtype) for x in self))


class Grads(NamedTuple):
    out: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


@dataclass(frozen=True)
class ErrorRow:
    """Largest and root-mean-square error of one tensor against float64: ours, and plain PyTorch's."""

    name: str
    scale: float  # root mean square of the exact tensor
    ours_max: float
    plain_max: float
    ours_rms: float
    plain_rms: float

    @property
    def ratio_max(self) -> float:
        return _ratio(self.ours_max, self.plain_max)

    @property
    def ratio_rms(self) -> float:
        return _ratio(self.ours_rms, self.plain_rms)


def _ratio(ours: float, plain: float) -> float:
    if plain == 0:
        return 1.0 if ours == 0 else float("inf")
    return ours / plain


def capture(model: GPT, loss_of, tokens: torch.Tensor, scale: float = 1.0) -> Batch:
    """Run one step through `loss_of(model, tokens)` and keep layer 0's attention inputs and output gradient.

    `scale` multiplies the loss, as a gradient scaler does, so that 16-bit gradients do not underflow.
    """
    seen: dict[str, torch.Tensor] = {}

    def keep(_module, inputs, out):
        seen.update(zip("qkv", (x.detach() for x in inputs)))
        out.register_hook(lambda grad: seen.update(dout=grad.detach()))

    handle = model.blocks[0].attention.core.register_forward_hook(keep)
    try:
        (loss_of(model, tokens) * scale).backward()
    finally:
        handle.remove()
        model.zero_grad(set_to_none=True)
    return Batch(**seen)


def gradients(attend: Attend, batch: Batch) -> Grads:
    """The output and input gradients of `attend` on a captured batch."""
    q, k, v = (x.clone().requires_grad_() for x in batch[:3])
    out = attend(q, k, v)
    return Grads(out.detach(), *torch.autograd.grad(out, (q, k, v), batch.dout.to(out.dtype)))


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention as matmul, softmax, matmul in the inputs' dtype: the whole score matrix at once."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(hidden, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2)


def by_sequence(attend: Attend, batch: Batch) -> Grads:
    """`gradients`, one sequence at a time: the dense score matrices of a whole batch need not fit in memory."""
    parts = [gradients(attend, Batch(*(x[i : i + 1] for x in batch))) for i in range(len(batch.q))]
    return Grads(*(torch.cat(xs) for xs in zip(*parts)))


def measure(attend: Attend, batch: Batch, dtype: torch.dtype) -> list[ErrorRow]:
    """Errors of `attend` and of plain PyTorch, both in `dtype`, against float64 on the same rounded inputs."""
    batch = batch.cast(dtype)
    exact = by_sequence(plain, batch.cast(torch.float64))
    ours, theirs = gradients(attend, batch), by_sequence(plain, batch)
    rows = []
    for name, truth, a, b in zip(Grads._fields, exact, ours, theirs):
        errors = [(x.double() - truth).abs() for x in (a, b)]
        peaks = (error.max().item() for error in errors)
        means = (error.square().mean().sqrt().item() for error in errors)
        rows.append(ErrorRow(name, truth.square().mean().sqrt().item(), *peaks, *means))
    return rows
