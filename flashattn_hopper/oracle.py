"""Dense float64 attention, plain PyTorch attention, and the error that an implementation may make.

The rule: the largest absolute error against float64 is at most `FACTOR` times the error that plain PyTorch makes on the
same inputs in the same dtype, plus a floor for rounding that plain PyTorch escapes by chance. inf and NaN must stand
exactly where float64 (rounded to the dtype) has them.

    exact, usual = (f(q, k, v, causal=True) for f in (attention, plain))
    verdict = judge(out, exact.out, usual.out, q.dtype, "out", exact.terms["out"])

Everything here is O(Sq * Sk) per head in float64: for small and medium sizes. Tensors may be on any device.
Layout (B, S, H, D); masks are bottom-right aligned; `window_size` (left, right) in keys, None or -1 is an open edge.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

FACTOR = 2.0

# Floors, as multiples of the dtype's epsilon times the largest sum of absolute terms (`Dense.terms`).
#   half: the result is rounded once (epsilon / 2), and so are the operands of the second product, P and dS, or
#         `out` inside delta: as much again.
#   wide: nothing is rounded between; what is left is the order of summation, and exp and log to a few units.
# lse is float32 whatever the inputs are, so its epsilon is float32's, and its terms are the products of one logit.
_HALF = {"out": 1.0, "lse": 4.0, "dq": 1.0, "dk": 1.0, "dv": 1.0}
_WIDE = {"out": 8.0, "lse": 4.0, "dq": 8.0, "dk": 8.0, "dv": 8.0}
FLOORS = {torch.float16: _HALF, torch.bfloat16: _HALF, torch.float32: _WIDE, torch.float64: _WIDE}


class Dense(NamedTuple):
    """out (B, Sq, Hq, Dv), lse (B, Hq, Sq); gradients None unless dout or dlse was given.

    `terms`: by output name, the sums of absolute values of what each element adds up: the yardstick for its rounding.
    """

    out: torch.Tensor
    lse: torch.Tensor
    dq: torch.Tensor | None = None
    dk: torch.Tensor | None = None
    dv: torch.Tensor | None = None
    terms: dict[str, torch.Tensor] | None = None


def visible(seqlen_q, seqlen_k, causal=False, window_size=None, device=None):
    """(Sq, Sk) bool: the keys each query sees, by index arithmetic."""
    left, right = (None if edge in (None, -1) else edge for edge in window_size or (None, None))
    if causal:
        right = 0
    query = torch.arange(seqlen_q, device=device).view(-1, 1)
    key = torch.arange(seqlen_k, device=device).view(1, -1)
    ahead = key - (query + seqlen_k - seqlen_q)  # how far the key lies behind the diagonal
    seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    if right is not None:
        seen &= ahead <= right
    if left is not None:
        seen &= ahead >= -left
    return seen


def attention(q, k, v, *, causal=False, window_size=None, softmax_scale=None, dout=None, dlse=None) -> Dense:
    """Attention in float64 from the definition, gradients written out."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    group = q.shape[2] // max(k.shape[2], 1)
    seen = visible(q.shape[1], k.shape[1], causal, window_size, q.device)
    q, k, v = (_heads_first(x) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    logits = (q @ k.mT * scale).masked_fill(~seen, -torch.inf)
    if k.shape[2] == 0:
        logits = logits.new_full((*logits.shape[:-1], 1), -torch.inf)
        seen = seen.new_zeros(seen.shape[0], 1)
        k, v = (x.new_zeros(*x.shape[:2], 1, x.shape[-1]) for x in (k, v))
        group_keys = 0
    else:
        group_keys = k.shape[2]
    top = logits.amax(-1, keepdim=True)
    weights = (logits - top.masked_fill(top == -torch.inf, 0)).exp()
    total = weights.sum(-1, keepdim=True)
    lse = (top + total.masked_fill(top == -torch.inf, 1).log()).squeeze(-1)
    p = weights / total.masked_fill(top == -torch.inf, 1)
    p = p.masked_fill(~seen, 0)
    out = _sum_seen(p, v, seen)
    logit_terms = (q.abs() @ k.abs().mT * abs(scale)).masked_fill(~seen, 0).amax(-1)
    terms = {"out": _sum_seen(p, v.abs(), seen), "lse": logit_terms + total.squeeze(-1).clamp(min=1).log() + 1}
    if dout is None and dlse is None:
        return Dense(_heads_last(out), lse, terms=_named(terms))
    do = torch.zeros_like(out) if dout is None else _heads_first(dout)
    push = torch.zeros_like(lse) if dlse is None else dlse.double()
    dp = do @ v.mT
    delta = (do * out).sum(-1, keepdim=True) - push.unsqueeze(-1)
    ds = (p * (dp - delta)).masked_fill(~seen, 0) * scale
    # |dP| and |delta| as sums of absolute products: in a one-key row they cancel to an exact 0.
    spread = do.abs() @ v.abs().mT + (do * out).abs().sum(-1, keepdim=True) + push.abs().unsqueeze(-1)
    spread = (p * spread).masked_fill(~seen, 0) * abs(scale)
    shrink = lambda x: x.unflatten(1, (-1, group)).sum(2)[:, :, :group_keys] if group else x
    terms |= {
        "dq": _sum_seen(spread, k.abs(), seen),
        "dk": shrink(_sum_seen(spread.mT, q.abs(), seen.mT)),
        "dv": shrink(_sum_seen(p.mT, do.abs(), seen.mT)),
    }
    dq = _sum_seen(ds, k, seen)
    dk = shrink(_sum_seen(ds.mT, q, seen.mT))
    dv = shrink(_sum_seen(p.mT, do, seen.mT))
    return Dense(_heads_last(out), lse, *(_heads_last(x) for x in (dq, dk, dv)), terms=_named(terms))


def plain(q, k, v, *, causal=False, window_size=None, softmax_scale=None, dout=None, dlse=None) -> Dense:
    """Attention as one writes it in PyTorch, in the inputs' dtype: matmul, float32 softmax, matmul; autograd."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    group = q.shape[2] // max(k.shape[2], 1)
    hidden = ~visible(q.shape[1], k.shape[1], causal, window_size, q.device)
    leaves = [x.detach().requires_grad_(dout is not None or dlse is not None) for x in (q, k, v)]
    heads_q = leaves[0].transpose(1, 2)
    heads_k, heads_v = (x.transpose(1, 2).repeat_interleave(group, dim=1) for x in leaves[1:])
    scores = (heads_q @ heads_k.mT * scale).to(wide)
    # The lowest finite number and not -inf, whose softmax gradient is NaN in a row that sees nothing.
    p = scores.masked_fill(hidden, torch.finfo(wide).min).softmax(-1).masked_fill(hidden, 0)
    out = (p.to(q.dtype) @ heads_v).transpose(1, 2)
    blind = hidden.all(-1)
    lse = scores.masked_fill(hidden, torch.finfo(wide).min).logsumexp(-1) if k.shape[1] else scores.sum(-1)
    lse = lse.masked_fill(blind, -torch.inf)
    if dout is None and dlse is None:
        return Dense(out, lse)
    flows = [(x, g.to(x.dtype)) for x, g in ((out, dout), (lse, dlse)) if g is not None]
    grads = torch.autograd.grad([x for x, _ in flows], leaves, [g for _, g in flows], allow_unused=True)
    return Dense(out.detach(), lse.detach(), *(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads)))


def error(actual, ref) -> float:
    """Largest absolute difference in float64, over the elements that are finite in both."""
    actual, ref = actual.detach().double(), ref.detach().double()
    both = actual.isfinite() & ref.isfinite()
    return (actual - ref)[both].abs().max().item() if bool(both.any()) else 0.0


def budget(plain_error: float, ref, dtype, what: str, terms=None) -> float:
    """What the error of output `what` ("out", "lse", "dq", "dk", "dv") may be for inputs of `dtype`."""
    size = (ref if terms is None else terms).detach().double().abs()
    size = size[size.isfinite()]
    stored = torch.float32 if what == "lse" and dtype != torch.float64 else dtype
    floor = FLOORS[dtype][what] * torch.finfo(stored).eps * (size.max().item() if size.numel() else 0.0)
    return FACTOR * plain_error + floor


class Verdict(NamedTuple):
    """One output held against float64: its largest error, plain PyTorch's, what is allowed, and what is wrong ("")."""

    error: float
    plain: float
    allowed: float
    wrong: str

    @property
    def multiple(self) -> float:
        """error / plain PyTorch's error."""
        return self.error / self.plain if self.plain else (0.0 if self.error == 0 else float("inf"))


def judge(actual, oracle, plain, dtype, what: str, terms=None) -> Verdict:
    """Hold output `what` to the rule above. `oracle` and `plain` are the tensors that float64 and PyTorch gave."""
    if actual.shape != oracle.shape:
        return _unlike(f"shape {tuple(actual.shape)}, expected {tuple(oracle.shape)}")
    rounded = oracle.to(actual.dtype)
    for pattern, test in (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        has, want = test(actual), test(rounded)
        differs = has != want
        if bool(differs.any()):
            return _unlike(
                f"{pattern} in {int(has.sum())} elements, expected in {int(want.sum())}; "
                f"first difference at {tuple(differs.nonzero()[0].tolist())}"
            )
    ours, theirs = error(actual, oracle), error(plain, oracle)
    allowed = budget(theirs, oracle, dtype, what, terms)
    wrong = f"largest error {ours:.3e}; plain PyTorch in {dtype} makes {theirs:.3e}, allowed are {allowed:.3e}"
    return Verdict(ours, theirs, allowed, "" if ours <= allowed else wrong)


def _unlike(wrong):
    return Verdict(float("inf"), 0.0, 0.0, wrong)


def _heads_first(x):
    return x.detach().double().transpose(1, 2)


def _heads_last(x):
    return x.transpose(1, 2)


def _named(terms):
    return {name: x if name == "lse" else _heads_last(x) for name, x in terms.items()}


def _sum_seen(weights, values, seen):
    """weights @ values over what is seen: a hidden inf or NaN adds nothing."""
    if bool(values.isfinite().all()):
        return weights @ values
    products = weights.unsqueeze(-1) * values.unsqueeze(-3)
    return products.masked_fill(~seen.unsqueeze(-1), 0).sum(-2)
