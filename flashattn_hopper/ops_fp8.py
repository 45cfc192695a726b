"""The FP8 operators: 16-bit tensors quantized inside, or codes that somebody else made. Both doors, as in `ops`.

    fwd_fp8(q, k, v, ...scalars) -> (out, lse, core_lse, codes and scales of q, k, v, mean of k)
    bwd_fp8(dout, dlse, out, core_lse, ...codes..., ...scalars, needs) -> (dq, dk, dv)
    fwd_scaled(codes and scales, logit_offset, int8_qk, q_rows, k_rows, dtype, ...scalars) -> (out, lse)

Quantizing is part of the operator, so a tracer sees one node, and what is kept for the backward is one byte an element
in place of two. Codes pass as uint8 (Trap: what checks operators does arithmetic on tensors, and float8 has none).
`core_lse` is the lse of the scores that the codes give, `lse` has the share of the mean of k as well.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from . import planner, runner, runner_fp8
from .arguments import problem_of
from .quantize import E4M3, QK_DTYPES, TILE, BlockScaled, default_qk_dtype, quantize_fp8, restore_lse

SCALARS = "float softmax_scale, int? window_left, int? window_right, bool deterministic, str backend"

_CODES = "q8 k8 v8 q_descale k_descale v_descale".split()
_tensors = lambda names: ", ".join(f"Tensor {name}" for name in names)
_lib = torch.library.Library("flashattn_hopper", "FRAGMENT")
_lib.define(
    f"fwd_fp8(Tensor q, Tensor k, Tensor v, {SCALARS}) -> ({_tensors(['out', 'lse', 'core_lse', *_CODES, 'k_mean'])})"
)
_lib.define(
    f"bwd_fp8(Tensor? dout, Tensor? dlse, {_tensors(['out', 'core_lse', *_CODES, 'k_mean'])}, {SCALARS}, bool[3] needs)"
    " -> (Tensor dq, Tensor dk, Tensor dv)"
)
_lib.define(
    f"fwd_scaled({_tensors(_CODES)}, Tensor? logit_offset, bool int8_qk, int? q_rows, int? k_rows, ScalarType dtype, "
    f"{SCALARS}) -> (Tensor out, Tensor lse)"
)
FWD_FP8 = torch.ops.flashattn_hopper.fwd_fp8.default
BWD_FP8 = torch.ops.flashattn_hopper.bwd_fp8.default
FWD_SCALED = torch.ops.flashattn_hopper.fwd_scaled.default


# What the operators compute


def problem_fp8(q, k, v, scalars, out_dtype=None):
    """`out_dtype` None: that of q."""
    problem = problem_of(q.shape, k.shape, v.shape, "fp8", *scalars[:-1])
    out_dtype = q.dtype if out_dtype is None else out_dtype
    codes = q.data.dtype if isinstance(q, BlockScaled) else QK_DTYPES[default_qk_dtype(q.shape[3])]
    words = {
        "int8_qk": codes == torch.int8,
        "fp16_out": out_dtype == torch.float16,
        "fp32_out": out_dtype in (torch.float32, torch.float64),
    }
    return replace(problem, traits=replace(problem.traits, **words))


def prepared_fp8(q, k, v, scalars):
    """For 16-bit tensors; `forward(..., saving=True)` returns what the backward needs, too.

    Raises: NotImplementedError where no kernel runs the problem.
    """
    problem = problem_fp8(q, k, v, scalars)
    if runner_fp8.plan(problem, scalars[-1], q.device).spec.arch is not None and not problem.shape.empty:
        return runner.Prepared(problem, scalars[-1], _by_kernel(problem, scalars[-1], q))
    attend = runner.prepare(problem, scalars[-1], q, k, v)

    def forward(q, k, v, want_lse=True, saving=False):
        q8, k8, v8 = quantize_fp8(q, k, v)
        out, core_lse = attend(q8, k8, v8)
        lse = restore_lse(core_lse, q8, problem.softmax_scale)
        if not saving:
            return out, lse
        codes = (x.data.view(torch.uint8) for x in (q8, k8, v8))
        return out, lse, core_lse, *codes, q8.descale, k8.descale, v8.descale, k8.mean

    return runner.Prepared(problem, scalars[-1], forward)


def _by_kernel(problem, backend, q):
    """`prepared_fp8` with the fused quantizer."""
    attend = runner_fp8.bind(runner_fp8.plan(problem, backend, q.device), problem, q.dtype, q.device)

    def forward(q, k, v, want_lse=True, saving=False):
        codes = runner_fp8.quantize(q, k, v)
        out, core_lse, lse = attend(codes, want_lse or saving)
        if not saving:
            return out, lse
        q8, k8, v8 = (x.data.view(torch.uint8) for x in runner_fp8.to_scaled(codes, q.dtype))
        return out, lse, core_lse, q8, k8, v8, codes.q_descale, codes.k_descale, codes.v_descale, codes.k_mean

    return forward


def _operands(dtype, q8, k8, v8, q_descale, k_descale, v_descale, k_mean):
    """The operands of the default recipe again."""
    qk = QK_DTYPES[default_qk_dtype(q8.shape[3])]
    return (
        BlockScaled(q8.view(qk), q_descale, 1, dtype, rotated=True),
        BlockScaled(k8.view(qk), k_descale, TILE, dtype, rotated=True, mean=k_mean),
        BlockScaled(v8.view(E4M3), v_descale, None, dtype),
    )


def _grads(problem, backend, dout, dlse, out, core_lse, saved, needs):
    planned = runner_fp8.gradient_problem(problem, backend, planner.capability_of(out.device))
    run = runner.backward if planned.traits.dtype == "fp8" else runner_fp8.backward
    return run(planned, backend, dout, dlse, *_operands(out.dtype, *saved), out, core_lse, needs)


def _fwd(q, k, v, *scalars):
    return prepared_fp8(q, k, v, scalars).forward(q, k, v, saving=True)


def _bwd(dout, dlse, out, core_lse, *rest):
    saved, scalars, needs = rest[:7], rest[7:-1], rest[-1]
    problem = problem_fp8(*saved[:3], scalars, out.dtype)
    grads = _grads(problem, scalars[-1], dout, dlse, out, core_lse, saved, needs)
    return tuple(out.new_empty(0) if grad is None else grad for grad in grads)


def attend_scaled(q: BlockScaled, k: BlockScaled, v: BlockScaled, scalars):
    """(out, lse) of codes that the caller quantized."""
    out, lse = runner_fp8.prepare(problem_fp8(q, k, v, scalars), scalars[-1], q, k, v)(q, k, v)
    return out, restore_lse(lse, q, scalars[0])


def _fwd_scaled(q8, k8, v8, q_descale, k_descale, v_descale, offset, int8_qk, q_rows, k_rows, dtype, *scalars):
    qk = torch.int8 if int8_qk else E4M3
    q = BlockScaled(q8.view(qk), q_descale, q_rows, dtype, logit_offset=offset)
    k = BlockScaled(k8.view(qk), k_descale, k_rows, dtype)
    return attend_scaled(q, k, BlockScaled(v8.view(E4M3), v_descale, None, dtype), scalars)


def dispatch_scaled(q: BlockScaled, k: BlockScaled, v: BlockScaled, scalars):
    """`attend_scaled` as one operator."""
    codes = (x.data.view(torch.uint8) for x in (q, k, v))
    scales = (x.descale for x in (q, k, v))
    int8_qk = q.data.dtype == torch.int8
    return FWD_SCALED(*codes, *scales, q.logit_offset, int8_qk, q.rows, k.rows, q.dtype, *scalars)


# What they look like to a tracer. Invariant: shapes, dtypes and strides are those of the real ones.


def _results_fake(q, v, dtype):
    batch, seqlen_q, num_heads_q, _ = q.shape
    out = q.new_empty((batch, seqlen_q, num_heads_q, v.shape[3]), dtype=dtype)
    return out, q.new_empty((batch, num_heads_q, seqlen_q), dtype=torch.float32)


def _fwd_fake(q, k, v, *scalars):
    (batch, seqlen_q, heads_q, headdim), (_, seqlen_k, heads_kv, _) = q.shape, k.shape
    out, lse = _results_fake(q, v, q.dtype)
    codes = [t.new_empty(t.shape, dtype=torch.uint8) for t in (q, k, v)]
    float32 = lambda *shape: q.new_empty(shape, dtype=torch.float32)
    return (
        out,
        lse,
        torch.empty_like(lse),
        *codes,
        float32(batch, heads_q, seqlen_q),
        float32(batch, heads_kv, (seqlen_k + TILE - 1) // TILE),
        float32(batch, heads_kv, 1),
        float32(batch, heads_kv, headdim),
    )


def _bwd_fake(dout, dlse, out, core_lse, q8, k8, v8, *rest):
    return tuple(out.new_empty(t.shape if need else 0) for t, need in zip((q8, k8, v8), rest[-1]))


def _fwd_scaled_fake(q8, k8, v8, q_descale, k_descale, v_descale, offset, int8_qk, q_rows, k_rows, dtype, *scalars):
    return _results_fake(q8, v8, dtype)


# The autograd formula of the dispatched door


def _setup(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    out, _, *saved = output
    ctx.mark_non_differentiable(*saved)
    ctx.save_for_backward(out, *saved)
    ctx.scalars = inputs[3:]


def formula(operator):
    """The backward that `torch.library` wants of a forward whose gradients `operator` computes."""

    def backward(ctx, dout, dlse, *_):
        nothing = (None,) * len(ctx.scalars)
        if dout is None and dlse is None:
            return None, None, None, *nothing
        return *dispatched_grads(operator, ctx, ctx.scalars, dout, dlse), *nothing

    return backward


def dispatched_grads(operator, ctx, scalars, dout, dlse):
    needs = ctx.needs_input_grad[:3]
    grads = operator(dout, dlse, *ctx.saved_tensors, *scalars, needs)
    return tuple(grad if need else None for grad, need in zip(grads, needs))


def twice(ctx, *grads):
    raise NotImplementedError("flashattn_hopper: the backward of attention is not differentiable itself")


for _name, _real, _fake in (
    ("fwd_fp8", _fwd, _fwd_fake),
    ("bwd_fp8", _bwd, _bwd_fake),
    ("fwd_scaled", _fwd_scaled, _fwd_scaled_fake),
):
    for _key in ("CPU", "CUDA"):
        _lib.impl(_name, _real, _key)
    torch.library.register_fake(f"flashattn_hopper::{_name}", _fake, lib=_lib)
torch.library.register_autograd("flashattn_hopper::fwd_fp8", formula(BWD_FP8), setup_context=_setup, lib=_lib)
torch.library.register_autograd("flashattn_hopper::bwd_fp8", twice, lib=_lib)


# The eager door


class EagerFP8(torch.autograd.Function):
    """The same formula without the host time of the dispatcher."""

    @staticmethod
    def forward(ctx, q, k, v, call):
        out, lse, *saved = call.forward(q, k, v, saving=True)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(out, *saved)
        ctx.call = call.problem, call.backend
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        if dout is None and dlse is None:
            return (None,) * 4
        problem, backend = ctx.call
        if torch.is_grad_enabled():
            # Why: under create_graph the operator's formula refuses a second derivative.
            band = problem.band
            scalars = problem.softmax_scale, band.left, band.right, problem.traits.deterministic, backend
            return *dispatched_grads(BWD_FP8, ctx, scalars, dout, dlse), None
        out, core_lse, *saved = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        return *_grads(problem, backend, dout, dlse, out, core_lse, saved, needs), None
