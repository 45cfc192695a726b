"""The public function: what the arguments mean, and the hand-over to validation and the operators."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.compiler import is_compiling

from . import planner, runner, runner_fp8
from .arguments import WORDS, Request, are_scaled, autocast_dtype, check, problem_of
from .ops import FWD, Eager, intercepted, prepared, register_sharding_rules
from .ops_fp8 import FWD_FP8, EagerFP8, attend_scaled, dispatch_scaled, prepared_fp8, problem_fp8
from .quantize import BlockScaled
from .runner import Memo
from .spec.problem import BWD
from .spec.tile import FwdTile

# Trap: private; without it the autocast state is looked up in full.
_any_autocast = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)


def hopper_attention(
    q: torch.Tensor | BlockScaled,
    k: torch.Tensor | BlockScaled,
    v: torch.Tensor | BlockScaled,
    *,
    causal: bool = False,
    window_size: tuple[int | None, int | None] | None = None,
    softmax_scale: float | None = None,
    precision: str = "auto",
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact attention, `softmax(q k^T * softmax_scale + mask) v`.

    Shapes: q (B, Sq, Hq, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv), out (B, Sq, Hq, Dv), lse (B, Hq, Sq), with B batch,
    Sq and Sk sequence lengths, Hq query heads, Hk key/value heads (Hq a multiple of Hk), D and Dv head dimensions.
    SDPA's layout (B, H, S, D) goes in and out through `transpose(1, 2)`, without a copy. Any strides are accepted.

    q, k and v may be codes of `quantize_fp8`, all three: FP8 without gradients, out in the dtype they were made from.

    Masks are bottom-right aligned: query i sits on key i + Sk - Sq. A query that sees no key gets out 0, lse -inf
    and zero gradients.

    Args:
        causal: hide the keys behind the diagonal.
        window_size: (left, right), how many keys before and behind the diagonal are seen, the diagonal's own not
            counted; -1 or None leaves a side open. A causal window of w tokens that counts the current one is
            (w - 1, 0).
        softmax_scale: a positive number; None is 1 / sqrt(D).
        precision: what is computed in. "auto" is the dtype of q, k and v, which must be float16 or bfloat16, or the
            dtype of torch.autocast, which casts all three. "bf16", "fp16": inputs are cast to it. "fp32", "fp64":
            the same, on the reference only. "fp8": quantized by the defaults of `quantize_fp8` on every call, 8-bit
            products; the gradient is that of the quantized attention, in the inputs' dtype. A Hopper GPU has a kernel
            for it, a CPU emulates it; other GPUs need backend="reference", which does the same.
        return_lse: also return the natural logarithm of the softmax denominator, float32 (float64 where computed in
            float64). It is differentiable.
        deterministic: results repeat bit by bit; torch.use_deterministic_algorithms(True) sets it too.
        backend: "auto", "sm90" (Hopper kernels), "sm80" (kernels for Ampere and newer), "reference" (tiled PyTorch).
            CPU tensors take the reference, CUDA tensors never do unless it is named.

    Returns out, in the dtype of q (of autocast where it is on), or (out, lse).

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: shapes, devices or values that do not fit together. A dtype that cannot be computed with, or
            three that differ, is both this and TypeError.
        NotImplementedError: no kernel runs this; the message has the reason of each.

    Example:
        >>> import torch
        >>> from flashattn_hopper import hopper_attention
        >>> q = torch.randn(1, 5, 4, 64, dtype=torch.bfloat16)
        >>> k, v = torch.randn(2, 1, 9, 2, 64, dtype=torch.bfloat16)
        >>> hopper_attention(q, k, v, causal=True).shape
        torch.Size([1, 5, 4, 64])

    Source: Dao, FlashAttention-2 (arXiv 2307.08691); Shah et al., FlashAttention-3 (arXiv 2407.08608).
    """
    if is_compiling() or intercepted(q, k, v):
        request = check(q, k, v, causal, window_size, softmax_scale, precision, return_lse, deterministic, backend)
        if are_scaled(q, k, v):
            return _scaled(q, k, v, request, return_lse)
        return _dispatched(q, k, v, request, return_lse)
    # Why the classes: True == 1 and (True, 0) == (1, 0), and a wrong argument must not find a right one's record.
    key = (
        q.shape, q.stride(), q.dtype, q.device,
        k.shape, k.stride(), k.dtype, k.device,
        v.shape, v.stride(), v.dtype, v.device,
        causal, causal.__class__, deterministic, deterministic.__class__, return_lse.__class__,
        softmax_scale, softmax_scale.__class__, precision, backend,
        window_size if window_size is None else _window_key(window_size),
        _any_autocast() and autocast_dtype(q.device.type), torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
    try:
        call = _calls.get(key)
    except TypeError:
        call = None  # an argument that has no hash: the wrong one, as the next line says
    if call is None:
        request = check(q, k, v, causal, window_size, softmax_scale, precision, return_lse, deterministic, backend)
        if q.is_meta:
            return _dispatched(q, k, v, request, return_lse)
        call = _calls.remember(key, _eager_call(q, k, v, request))
    decided, compute_dtype, out_dtype, recorded = call
    if compute_dtype is not None:
        q, k, v = _cast(q, k, v, compute_dtype)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        out, lse = recorded(q, k, v, decided)
    else:
        out, lse = decided.forward(q, k, v, return_lse)
    if out_dtype is not None:
        out = out.to(out_dtype)
    return (out, lse) if return_lse else out


# Validated eager calls: everything but the tensors
# -> (what the operators decided for them, dtype to cast to, dtype to return, forward that records a graph)
_calls = Memo()


def _window_key(window_size):
    """Hashable, and telling (1, 0) from (True, 0); a wrong argument equals only itself and is never remembered."""
    if isinstance(window_size, (tuple, list)):
        return *window_size, *(edge.__class__ for edge in window_size)
    return window_size


def _eager_call(q, k, v, request: Request):
    operands = _cast(q, k, v, request.compute_dtype)
    prepare, recorded = (prepared_fp8, EagerFP8.apply) if request.dtype == "fp8" else (prepared, Eager.apply)
    call = prepare(*operands, _scalars(request))
    cast = None if all(a is b for a, b in zip(operands, (q, k, v))) else request.compute_dtype
    back = None if request.out_dtype == request.compute_dtype else request.out_dtype
    return call, cast, back, recorded


def _dispatched(q, k, v, request: Request, return_lse):
    if not is_compiling() and type(q).__module__.startswith("torch.distributed."):
        register_sharding_rules()
    q, k, v = _cast(q, k, v, request.compute_dtype)
    out, lse = FWD_FP8(q, k, v, *_scalars(request))[:2] if request.dtype == "fp8" else FWD(q, k, v, *_scalars(request))
    if out.dtype != request.out_dtype:
        out = out.to(request.out_dtype)
    return (out, lse) if return_lse else out


def _scaled(q, k, v, request: Request, return_lse):
    """Codes and scales: through the operator where somebody traces or intercepts, else straight to the runner."""
    door = dispatch_scaled if is_compiling() or intercepted(q.data, k.data, v.data) or q.data.is_meta else attend_scaled
    out, lse = door(q, k, v, _scalars(request))
    return (out, lse) if return_lse else out


def _scalars(request: Request):
    """The operators' arguments behind the tensors."""
    return (
        request.softmax_scale,
        request.window_left,
        request.window_right,
        request.deterministic,
        request.backend,
    )


def _cast(q, k, v, dtype):
    return q.to(dtype), k.to(dtype), v.to(dtype)


@dataclass(frozen=True)
class Explanation:
    """Which kernels one call would run, and why. `str()` of it is a few lines to read.

    `kernel`, `backend` and `backward` are None where nothing runs the call; `tile` is None for PyTorch code.
    `slug` names what is asked, `compiled` what is compiled for it. `refused`: (kernel, reason) of the forward rows.
    """

    kernel: str | None
    backend: str | None
    slug: str
    compiled: str | None
    tile: FwdTile | None
    backward: str | None
    refused: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{self.slug}: {self.kernel or 'no kernel runs this'}"]
        if self.compiled not in (None, self.slug):
            lines.append(f"  compiled as {self.compiled}")
        if self.tile is not None:
            lines.append(f"  {self.tile}")
        if self.backward is not None:
            lines.append(f"  gradients by {self.backward}")
        lines += [f"  {note}" for note in self.notes]
        lines += [f"  not {name}: {reason}" for name, reason in self.refused]
        return "\n".join(lines)


def explain(
    q: torch.Tensor | BlockScaled,
    k: torch.Tensor | BlockScaled,
    v: torch.Tensor | BlockScaled,
    *,
    causal: bool = False,
    window_size: tuple[int | None, int | None] | None = None,
    softmax_scale: float | None = None,
    precision: str = "auto",
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str = "auto",
) -> Explanation:
    """What `hopper_attention` would do with these arguments. Launches and compiles nothing.

    Raises what `hopper_attention` raises for bad arguments. A call that no kernel runs is answered, with `kernel`
    None and the reasons.
    """
    request = check(q, k, v, causal, window_size, softmax_scale, precision, return_lse, deterministic, backend)
    if request.dtype == "fp8":
        problem = problem_fp8(q, k, v, _scalars(request), request.compute_dtype)
    else:
        problem = problem_of(q.shape, k.shape, v.shape, request.dtype, *_scalars(request)[:-1])
    device = planner.capability_of(q.device)
    refused = tuple(planner.refusals(problem.traits, device, backend).items())
    try:
        chosen = planner.plan(problem.traits, device, backend, problem.shape)
    except NotImplementedError:
        return Explanation(None, None, problem.traits.slug, None, None, None, refused, ())
    gradients = None
    behind = _gradient_problem(problem, backend, device)
    if not isinstance(q, BlockScaled):
        gradients = planner.plan(behind.traits, device, backend, problem.shape).spec
    return Explanation(
        chosen.spec.name,
        chosen.spec.backend,
        problem.traits.slug,
        chosen.traits.slug,
        chosen.tile,
        gradients and gradients.name,
        refused,
        tuple(_notes(q, k, v, request, problem, chosen, behind, gradients)),
    )


def _gradient_problem(problem, backend, device):
    """What the planner is asked for the gradients."""
    if problem.traits.dtype == "fp8":
        return runner_fp8.gradient_problem(problem, backend, device)
    return problem.for_phase(BWD)


def _notes(q, k, v, request, problem, chosen, behind, gradients):
    """What a call costs beside its kernel, and what it silently is not."""
    spec, traits = chosen.spec, problem.traits
    if spec.note:
        yield f"forward: {spec.note}"
    for word in ("headdim", "headdim_v"):
        asked, runs = getattr(traits, word), getattr(chosen.traits, word)
        if asked != runs and not (word == "headdim_v" and traits.headdim == traits.headdim_v):
            yield f"{word} {asked} runs as {runs}"
    if problem.shape.empty:
        yield "nothing to compute: no launch"
    if gradients is None:
        yield "q, k, v: codes with scales, which carry no gradient"
        return
    if request.dtype == "fp8":
        yield "q, k, v: quantized on every call"
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dtype != request.compute_dtype:
            yield f"{name}: cast from {WORDS[tensor.dtype]} to {WORDS[request.compute_dtype]}"
        elif spec.arch is not None and (note := runner.layout_note(tensor)):
            yield f"{name}: {note}"
    if gradients.note:
        yield f"backward: {gradients.note}"
    if behind.traits.dtype != traits.dtype:
        yield f"backward: {behind.traits.dtype} products on the dequantized codes"
    device = planner.capability_of(q.device)
    for name, reason in planner.refusals(behind.traits, device, request.backend).items():
        yield f"backward not {name}: {reason}"
