"""The operators `flashattn_hopper::fwd` and `::bwd`, their shapes for tracing, and the two doors to them.

Plain eager calls go through a bare autograd.Function straight to the runner. Whatever traces or intercepts (compile,
export, tensor subclasses, dispatch modes, functorch) sees one opaque operator with a flat schema instead.

    fwd(q, k, v, softmax_scale, window_left, window_right, deterministic, backend) -> (out, lse)
    bwd(dout, dlse, q, k, v, out, lse, ...the same..., needs) -> (dq, dk, dv)

`dout` and `dlse` are None where no gradient arrives; a gradient that `needs` does not ask for has shape (0,).
Nothing in the schema varies from step to step: sequence lengths are read from the tensors. precision="fp8" has
operators of its own, in `ops_fp8`.
"""

from __future__ import annotations

import sys
from functools import cache
from math import prod

import torch
from torch.utils.flop_counter import register_flop_formula

from . import jit, runner
from .arguments import problem_of, word_of
from .ops_fp8 import BWD_FP8, FWD_FP8, SCALARS, dispatched_grads, formula, twice
from .runner import Memo, Prepared

_lib = torch.library.Library("flashattn_hopper", "DEF")
_lib.define(f"fwd(Tensor q, Tensor k, Tensor v, {SCALARS}) -> (Tensor out, Tensor lse)")
_lib.define(
    "bwd(Tensor? dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{SCALARS}, bool[3] needs) -> (Tensor dq, Tensor dk, Tensor dv)"
)
FWD = torch.ops.flashattn_hopper.fwd.default
BWD = torch.ops.flashattn_hopper.bwd.default

# For torch.utils.checkpoint.create_selective_checkpoint_contexts: keep attention's results, recompute the rest.
SAC_SAVE_OPS = [FWD, FWD_FP8]


# What the operators compute

_prepared = Memo()


def prepared(q, k, v, scalars, with_forward: bool = True) -> Prepared:
    """Without a forward for the operator of the backward: what it needs may differ in strides from what ran before,
    and no kernel is to be compiled that nobody runs."""
    operands = tuple((t.shape, t.stride(), t.dtype, t.device) for t in (q, k, v))
    key = (operands, scalars, with_forward)
    found = _prepared.get(key)
    if found is None:
        problem, backend = _problem(q, k, v, scalars), scalars[-1]
        forward = runner.prepare(problem, backend, q, k, v) if with_forward else None
        found = _prepared.remember(key, Prepared(problem, backend, forward))
    return found


def _problem(q, k, v, scalars):
    return problem_of(q.shape, k.shape, v.shape, word_of(q.dtype), *scalars[:-1])


def _fwd(q, k, v, *scalars):
    return prepared(q, k, v, scalars).forward(q, k, v)


def _bwd(dout, dlse, q, k, v, out, lse, *rest):
    *scalars, needs = rest
    grads = prepared(q, k, v, tuple(scalars), with_forward=False).backward(dout, dlse, q, k, v, out, lse, tuple(needs))
    return tuple(q.new_empty(0) if grad is None else grad for grad in grads)


# What they look like to a tracer. Invariant: shapes, dtypes and strides are those of the real ones.


def _fwd_fake(q, k, v, *scalars):
    batch, seqlen_q, num_heads_q, _ = q.shape
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_empty((batch, seqlen_q, num_heads_q, v.shape[3]))
    return out, q.new_empty((batch, num_heads_q, seqlen_q), dtype=lse_dtype)


def _bwd_fake(dout, dlse, q, k, v, out, lse, *rest):
    # Why not empty_like: it would copy a permuted input's strides.
    return tuple(t.new_empty(t.shape if need else 0) for t, need in zip((q, k, v), rest[-1]))


# The autograd formula of the dispatched door


def _setup(ctx, inputs, output):
    q, k, v, *scalars = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output)
    ctx.scalars = scalars


for _key in ("CPU", "CUDA"):
    _lib.impl("fwd", _fwd, _key)
    _lib.impl("bwd", _bwd, _key)
torch.library.register_fake("flashattn_hopper::fwd", _fwd_fake, lib=_lib)
torch.library.register_fake("flashattn_hopper::bwd", _bwd_fake, lib=_lib)
torch.library.register_autograd("flashattn_hopper::fwd", formula(BWD), setup_context=_setup, lib=_lib)
torch.library.register_autograd("flashattn_hopper::bwd", twice, lib=_lib)


# The eager door


class Eager(torch.autograd.Function):
    """The same formula without the host time of the dispatcher."""

    @staticmethod
    def forward(ctx, q, k, v, call):
        out, lse = call.forward(q, k, v)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = call
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        if dout is None and dlse is None:
            return (None,) * 4
        call = ctx.call
        if torch.is_grad_enabled():
            # Why: under create_graph the operator's formula refuses a second derivative. once_differentiable would
            # drop the term in silence wherever dout is a constant.
            problem, band = call.problem, call.problem.band
            scalars = problem.softmax_scale, band.left, band.right, problem.traits.deterministic, call.backend
            return *dispatched_grads(BWD, ctx, scalars, dout, dlse), None
        return *call.backward(dout, dlse, *ctx.saved_tensors, ctx.needs_input_grad[:3]), None


# Trap: both are private; without them every call is taken for an intercepted one, which is slower but right.
try:
    _dispatch_modes = torch._C._len_torch_dispatch_stack
    _functorch_level = torch._C._functorch.peek_interpreter_stack
except AttributeError:
    _dispatch_modes, _functorch_level = (lambda: 1), (lambda: None)

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def intercepted(q, k, v) -> bool:
    """Whether someone wants to see an operator: a tensor subclass, a dispatch mode or a functorch transform."""
    return (
        q.__class__ not in _PLAIN
        or k.__class__ not in _PLAIN
        or v.__class__ not in _PLAIN
        or _dispatch_modes() > 0
        or _functorch_level() is not None
    )


# Distributed tensors


@cache
def register_sharding_rules() -> None:
    """Teach DTensor that batch and heads may be sharded; another sharding is gathered first.

    Why lazily: importing torch.distributed.tensor takes longer than importing this package.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    def rows(q, k, v):
        """(placement of a (B, S, H, D) tensor, placement of lse): the same for all operands of a call."""
        yield Replicate(), Replicate()
        yield Shard(0), Shard(0)
        # Trap: uneven chunks of query and of kv heads would pair heads that do not belong together. A dimension
        # sharded along the sequence may be turned to heads too, so all devices count then.
        placements = [tuple(zip(t.mesh.shape, t.placements)) for t in (q, k, v)]
        ways = max(prod(n for n, p in dims if p == Shard(2)) for dims in placements)
        if ways == 1 or any(p == Shard(1) for dims in placements for _, p in dims):
            ways = q.mesh.size()
        if k.shape[2] % ways == 0:
            yield Shard(2), Shard(1)

    @register_sharding(FWD)
    def _(q, k, v, *scalars):
        return [([t, lse], [t, t, t, *(None,) * len(scalars)]) for t, lse in rows(q, k, v)]

    @register_sharding(BWD)
    def _(dout, dlse, q, k, v, out, lse, *scalars):
        found = []
        for t, l in rows(q, k, v):
            grads = [t if need else Replicate() for need in scalars[-1]]
            arrived = [None if dout is None else t, None if dlse is None else l]
            found.append((grads, [*arrived, t, t, t, t, l, *(None,) * len(scalars)]))
        return found

    # Scales and the mean of k have their heads where lse has them.
    @register_sharding(FWD_FP8)
    def _(q, k, v, *scalars):
        return [([t, l, l, t, t, t, l, l, l, l], [t, t, t, *(None,) * len(scalars)]) for t, l in rows(q, k, v)]

    @register_sharding(BWD_FP8)
    def _(dout, dlse, out, core_lse, q, k, v, *rest):
        found = []
        for t, l in rows(q, k, v):
            grads = [t if need else Replicate() for need in rest[-1]]
            arrived = [None if dout is None else t, None if dlse is None else l]
            found.append((grads, [*arrived, t, l, t, t, t, l, l, l, l, *(None,) * len(rest[4:])]))
        return found


if "torch.distributed.tensor" in sys.modules:
    register_sharding_rules()

jit.get_ready()


# Cost


def visible_pairs(seqlen_q: int, seqlen_k: int, window_left: int | None, window_right: int | None) -> int:
    """How many (query, key) pairs a band shows."""

    def up_to(edge):
        # Row i sees clamp(i + first, 0, seqlen_k) keys: none, then one more with each row, then all of them.
        first = seqlen_k - seqlen_q + edge + 1
        begin = min(max(1 - first, 0), seqlen_q)
        full = min(max(seqlen_k - first, begin), seqlen_q)
        rising = full - begin
        return rising * (begin + first) + rising * (rising - 1) // 2 + (seqlen_q - full) * seqlen_k

    shown = seqlen_q * seqlen_k if window_right is None else up_to(window_right)
    return shown if window_left is None else max(shown - up_to(-window_left - 1), 0)


def _flops(q_shape, k_shape, v_shape, window_left, window_right, products_qk, products_v):
    batch, seqlen_q, num_heads, headdim = q_shape
    pairs = visible_pairs(seqlen_q, k_shape[1], window_left, window_right)
    return 2 * batch * num_heads * pairs * (products_qk * headdim + products_v * v_shape[3])


@register_flop_formula([torch.ops.flashattn_hopper.fwd, torch.ops.flashattn_hopper.fwd_fp8])
def _fwd_flops(q, k, v, softmax_scale, window_left, window_right, *args, out_shape=None, **kwargs) -> int:
    """S = Q K^T and O = P V, over visible pairs only."""
    return _flops(q, k, v, window_left, window_right, 1, 1)


@register_flop_formula(torch.ops.flashattn_hopper.bwd)
def _bwd_flops(dout, dlse, q, k, v, out, lse, scale, window_left, window_right, *args, out_shape=None, **kwargs) -> int:
    """S again, dQ and dK of headdim; dP and dV of headdim_v; over visible pairs only."""
    return _flops(q, k, v, window_left, window_right, 3, 2)


@register_flop_formula(torch.ops.flashattn_hopper.bwd_fp8)
def _bwd_fp8_flops(dout, dlse, out, core_lse, q8, k8, v8, q_scale, k_scale, v_scale, k_mean, *args, **kwargs) -> int:
    _, window_left, window_right, *_ = args
    return _flops(q8, k8, v8, window_left, window_right, 3, 2)


@register_flop_formula(torch.ops.flashattn_hopper.fwd_scaled)
def _fwd_scaled_flops(q8, k8, v8, *args, out_shape=None, **kwargs) -> int:
    *_, window_left, window_right, _, _ = args
    return _flops(q8, k8, v8, window_left, window_right, 1, 1)
