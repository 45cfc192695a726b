"""Plan and tensors -> outputs: allocation, the layout that a kernel needs, the launch.

Everything that depends on shapes, strides, dtypes and device only is decided once, by `prepare`, which returns a
function of the tensors. A warm call pays for an alignment check, two allocations and the launch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib import import_module

import torch

from . import jit, planner
from .spec.mask import Band, Seqlens
from .spec.problem import BWD, AttentionProblem
from .spec.tile import ROW_PAD

logger = logging.getLogger("flashattn_hopper")

Forward = Callable[..., tuple[torch.Tensor, "torch.Tensor | None"]]
Backward = Callable[..., tuple["torch.Tensor | None", "torch.Tensor | None", "torch.Tensor | None"]]

ALIGNMENT = 16  # bytes: base pointers and strides of a tensor that TMA reads
MAX_STRIDE = 2**40  # bytes

# Private names of torch, absent from builds without CUDA.
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_current_device = getattr(torch._C, "_cuda_getDevice", None)
_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)
# A torch.empty for the current device, which inductor calls from its generated code: a third of the host time.
_empty_strided = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_empty_strided = getattr(_empty_strided, "_empty_strided_cuda", None) if torch.backends.cuda.is_built() else None


class Memo(dict):
    """A bounded dict: emptied when full, so a lookup costs no bookkeeping. Single operations are atomic."""

    limit = 4096

    def remember(self, key, value):
        if len(self) >= self.limit:
            self.clear()
        self[key] = value
        return value


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """What is decided for calls with the same shapes, strides, dtypes, devices and scalars: the forward, and, once
    they have run, the backwards by strides and by what is needed."""

    problem: AttentionProblem
    backend: str
    forward: Forward | None  # None where only gradients are asked for
    backwards: Memo = field(default_factory=Memo)

    def backward(self, dout, dlse, q, k, v, out, lse, needs):
        # The strides again: what was saved for the backward may come back as a copy.
        key = needs, q.stride(), k.stride(), v.stride(), dout is not None and dout.stride()
        run = self.backwards.get(key)
        if run is None:
            run = prepare_backward(self.problem, self.backend, dout, q, k, v, needs)
            self.backwards.remember(key, run)
        return run(dout, dlse, q, k, v, out, lse)


def prepare(problem: AttentionProblem, backend: str, q, k, v) -> Forward:
    """The forward of every call that agrees with this one in problem, strides, dtypes and device.

    It maps q, k, v (of the problem's dtype) to out (B, Sq, Hq, Dv) and lse (B, Hq, Sq), both contiguous, lse in
    float32 (float64 for float64 inputs). With `want_lse=False` lse may be None. No tensor is kept.

    Raises: NotImplementedError where no kernel runs the problem.
    """
    capability = planner.capability_of(q.device)
    chosen = planner.plan(problem.traits, capability, backend, problem.shape)
    _announce(chosen.spec, problem, capability, backend)
    if chosen.spec.arch is None:
        return _in_pytorch(chosen.spec, problem)
    if problem.shape.empty:
        return _without_keys(problem, q.dtype, q.device)
    fn = jit.compiled(chosen.spec, chosen.traits, chosen.tile, chosen.spec.arch)
    return bind(fn, chosen, problem, q, k, v)


def backward(problem: AttentionProblem, backend: str, dout, dlse, q, k, v, out, lse, needs):
    """(dq, dk, dv) of a forward problem, contiguous, None where `needs` says so.

    `dout` (B, Sq, Hq, Dv) or `dlse` (B, Hq, Sq) is None where no gradient arrives.
    """
    return prepare_backward(problem, backend, dout, q, k, v, needs)(dout, dlse, q, k, v, out, lse)


def prepare_backward(problem: AttentionProblem, backend: str, dout, q, k, v, needs) -> Backward:
    """The backward of every call that agrees with this one in problem, strides (of `dout` too), dtypes and device.

    It maps dout, dlse, q, k, v, out, lse to (dq, dk, dv). No tensor is kept.
    """
    problem, needs = problem.for_phase(BWD), tuple(needs)
    capability = planner.capability_of(q.device)
    chosen = planner.plan(problem.traits, capability, backend, problem.shape)
    _announce(chosen.spec, problem, capability, backend)
    if chosen.spec.arch is None:
        entry, band, scale = _entry(chosen.spec), problem.band, problem.softmax_scale
        return lambda *operands: entry(*operands, band, scale, needs)
    if problem.shape.empty:
        return lambda dout, dlse, q, k, v, out, lse: tuple(
            torch.zeros_like(t, memory_format=torch.contiguous_format) if n else None for t, n in zip((q, k, v), needs)
        )
    wanted = "all" if needs[0] and (needs[1] or needs[2]) else "dq" if needs[0] else "dkdv"
    if wanted != "all":
        # Tiles of the deterministic order have a kernel for dQ alone, so what nobody wants is left out.
        alone = replace(problem.traits, deterministic=True)
        chosen = planner.plan(alone, capability, chosen.spec.backend, problem.shape)
        chosen = chosen._replace(tile=replace(chosen.tile, wanted=wanted))
    fn = jit.compiled(chosen.spec, chosen.traits, chosen.tile, chosen.spec.arch)
    return bind_backward(fn, chosen, problem, dout, q, k, v, needs)


def bind(fn, chosen: planner.Plan, problem: AttentionProblem, q, k, v) -> Forward:
    """A forward that hands `fn` one tuple in the order of FwdOperands; q, k, v lend strides, dtype and device."""
    shape, traits = problem.shape, problem.traits
    device, dtype = q.device, q.dtype
    out_shape = (shape.batch, shape.seqlen_q, shape.num_heads_q, traits.headdim_v)
    lse_shape = (shape.batch, shape.num_heads_q, shape.seqlen_q)
    scale = problem.softmax_scale
    left, right = window_edges(problem.band, shape.seqlens) if traits.mask == "window" else (None, None)
    dynamic = chosen.tile.schedule == "dynamic"
    num_ctas = planner.num_sms(device) if dynamic else None
    layouts = [_layout(t) for t in (q, k, v)]
    fix_q, fix_k, fix_v = layouts
    any_fix = layouts != [None, None, None]
    elsewhere = device.index if device.type == "cuda" else None
    new_out = _allocator(out_shape, dtype, device)
    new_lse = _allocator(lse_shape, torch.float32, device)

    def forward(q, k, v, want_lse=True):
        if elsewhere is not None and _current_device() != elsewhere:
            with torch.cuda.device(elsewhere):
                return forward(q, k, v, want_lse)
        if any_fix:
            q, k, v = _laid_out(q, fix_q), _laid_out(k, fix_k), _laid_out(v, fix_v)
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) % ALIGNMENT:
            q, k, v = _aligned(q), _aligned(k), _aligned(v)
        out = new_out()
        lse = new_lse() if want_lse else None
        counters = tickets(device) if dynamic else None
        fn(
            (
                q, k, v, out.data_ptr(), lse.data_ptr() if want_lse else 0, scale, left, right,
                num_ctas, counters.data_ptr() if dynamic else None,
            )
        )  # fmt: skip
        return out, lse

    return forward


def _allocator(shape, dtype, device):
    """A function that allocates this contiguous tensor; on CUDA, on the current device, which is `device`."""
    if device.type == "cuda" and _empty_strided is not None:
        strides = torch.empty(shape, device="meta").stride()
        return lambda: _empty_strided(shape, strides, dtype)
    return lambda: _empty(shape, dtype, device)


def _empty(shape, dtype, device):
    return torch.empty(shape, dtype=dtype, device=device)


def bind_backward(fn, chosen: planner.Plan, problem: AttentionProblem, dout, q, k, v, needs) -> Backward:
    """A backward that hands `fn` one tuple in the order of BwdOperands.

    A dout that a kernel cannot read in place is copied, as q, k and v are; `out` and `lse` are as the forward left
    them, and copied where they are not.
    """
    shape, tile = problem.shape, chosen.tile
    device = q.device
    elsewhere = device.index if device.type == "cuda" else None
    left, right = window_edges(problem.band, shape.seqlens) if problem.traits.mask == "window" else (None, None)
    num_ctas = planner.num_sms(device) if tile.kv_stages == 2 else None
    scalars = problem.softmax_scale, left, right, num_ctas
    layouts = [_layout(t) for t in (q, k, v)] + [None if dout is None else _layout(dout)]
    fix_q, fix_k, fix_v, fix_dout = layouts
    any_fix = layouts != [None, None, None, None]
    computed = {"dq": (True, False, False), "dkdv": (False, True, True)}.get(tile.wanted, (True, True, True))
    nothing = lambda: None
    new_dq, new_dk, new_dv = (
        _allocator(tuple(t.shape), t.dtype, device) if used else nothing for t, used in zip((q, k, v), computed)
    )
    rows = shape.batch * shape.num_heads_q * -(-shape.seqlen_q // ROW_PAD) * ROW_PAD
    new_workspace = _allocator((tile.workspace_floats(rows, chosen.traits.headdim),), torch.float32, device)
    need_q, need_k, need_v = needs

    def backward(dout, dlse, q, k, v, out, lse):
        if elsewhere is not None and _current_device() != elsewhere:
            with torch.cuda.device(elsewhere):
                return backward(dout, dlse, q, k, v, out, lse)
        if dout is None:
            dout = torch.zeros_like(out)
        if any_fix:
            q, k, v, dout = _laid_out(q, fix_q), _laid_out(k, fix_k), _laid_out(v, fix_v), _laid_out(dout, fix_dout)
        out, lse = out.contiguous(), lse.contiguous()
        if (q.data_ptr() | k.data_ptr() | v.data_ptr() | dout.data_ptr() | out.data_ptr()) % ALIGNMENT:
            q, k, v, dout, out = map(_aligned, (q, k, v, dout, out))
        if dlse is not None:
            dlse = dlse.to(lse.dtype).contiguous()
        dq, dk, dv, workspace = new_dq(), new_dk(), new_dv(), new_workspace()
        fn(
            (
                q, k, v, dout, out.data_ptr(), lse.data_ptr(), 0 if dlse is None else dlse.data_ptr(),
                0 if dq is None else dq.data_ptr(), 0 if dk is None else dk.data_ptr(),
                0 if dv is None else dv.data_ptr(), workspace.data_ptr(), *scalars,
            )
        )  # fmt: skip
        return dq if need_q else None, dk if need_k else None, dv if need_v else None

    return backward


def window_edges(band: Band, seqlens: Seqlens) -> tuple[int, int]:
    """The band's edges for device int32 arithmetic: an edge further than Sq + Sk keys hides or shows no more."""
    far = seqlens.q + seqlens.k
    return tuple(far if edge is None else max(-far, min(far, edge)) for edge in (band.left, band.right))


# Layout

COPY = "copied once"


def _layout(tensor):
    """None where a kernel reads `tensor` as it is, the strides to view it with, or COPY.

    A kernel wants the last dimension contiguous and every other stride a multiple of 16 bytes; 0 is one, so an
    expanded tensor is read in place. The stride of a dimension of extent 1 means nothing and is replaced.
    """
    size, stride, itemsize = tensor.shape, tensor.stride(), tensor.element_size()
    legal = [step * itemsize % ALIGNMENT == 0 and step * itemsize < MAX_STRIDE for step in stride[:-1]] + [
        stride[-1] == 1
    ]
    if all(legal):
        return None
    if not all(ok or extent == 1 for ok, extent in zip(legal, size)):
        return COPY
    steps = list(stride)
    for dim in reversed(range(len(steps))):
        if not legal[dim]:
            steps[dim] = 1 if dim == len(steps) - 1 else size[dim + 1] * steps[dim + 1]
    return tuple(steps)


def _laid_out(tensor, layout):
    if layout is None:
        return tensor
    if layout is COPY:
        return tensor.contiguous()
    return tensor.as_strided(tensor.shape, layout)


def _aligned(tensor):
    """A copy where the base pointer is off; the allocator's own are aligned."""
    return tensor.clone(memory_format=torch.contiguous_format) if tensor.data_ptr() % ALIGNMENT else tensor


def layout_note(tensor) -> str | None:
    """Why a kernel of the catalog copies `tensor`, for explain(); None where it is read in place."""
    if _layout(tensor) is COPY:
        if tensor.stride(-1) != 1:
            return f"last dimension is not contiguous: {COPY}"
        return f"strides {tuple(tensor.stride())} are not multiples of {ALIGNMENT} bytes: {COPY}"
    return None


# Ticket counters of schedule="dynamic"

_tickets: dict[tuple[int | None, int], torch.Tensor] = {}


def tickets(device: torch.device, count: int = 2) -> torch.Tensor:
    """Zeroed int32 counters of the current stream, `count` or more; every kernel leaves them zero again.

    Invariant: two launches that may overlap never share counters. Launches on one stream do not overlap; two graphs
    captured on one stream may be replayed side by side, so a captured launch gets counters of its own.
    """
    if _capturing is not None and _capturing():
        return _new_counters(device, count)
    key = (device.index, _raw_stream(device.index))
    counters = _tickets.get(key)
    if counters is None or counters.numel() < count:
        counters = _tickets[key] = _new_counters(device, count)
    return counters


def _new_counters(device, count):
    return torch.zeros(count, dtype=torch.int32, device=device)


# Calls without a compiled kernel


def _in_pytorch(spec, problem):
    entry, band, scale = _entry(spec), problem.band, problem.softmax_scale

    def forward(q, k, v, want_lse=True):
        return entry(q, k, v, band, scale)

    return forward


def _without_keys(problem, dtype, device):
    """Nothing to launch: every output element is 0 and every lse -inf, if there are any."""
    shape = problem.shape
    out_shape = (shape.batch, shape.seqlen_q, shape.num_heads_q, problem.traits.headdim_v)
    lse_shape = (shape.batch, shape.num_heads_q, shape.seqlen_q)

    def forward(q, k, v, want_lse=True):
        lse = torch.full(lse_shape, -float("inf"), dtype=torch.float32, device=device)
        return torch.zeros(out_shape, dtype=dtype, device=device), lse

    return forward


def _entry(spec):
    module, _, name = spec.entry.partition(":")
    return getattr(import_module(module), name)


# One line per kernel in the log

_announced: set[str] = set()


def _announce(spec, problem, capability, backend):
    if spec.name in _announced:
        return
    _announced.add(spec.name)
    refused = planner.refusals(problem.traits, capability, backend)
    why = "; ".join(f"not {name}: {reason}" for name, reason in refused.items()) or "no other row was preferred"
    logger.info("%s runs %s (%s)", spec.name, problem.traits.slug, why)
