"""FP8 by kernel: the forward, from 16-bit tensors through the fused quantizer or from codes that somebody else made,
and gradients, by a 16-bit kernel on the dequantized codes.

The forward takes V transposed, with the keys of every 16 in the order in which P leaves the scores (`pack_values`); the
fused quantizer writes it so, codes of a BlockScaled are turned by PyTorch.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch

from . import buffers, jit, planner, runner
from .kernels.sm90.specs import QUANTIZER
from .quantize import E4M3, TILE, BlockScaled, decode_as, rotation_matrix, row_scales, tile_scales
from .spec.problem import BWD, FP8_FEATURES, AttentionProblem, QuantizeTraits, int8_by_default


class Codes(NamedTuple):
    """Operands of the attention kernel, contiguous. B batch, S sequence length, H heads, D head dimension."""

    q: torch.Tensor  # (B, Sq, Hq, D)
    k: torch.Tensor  # (B, Sk, Hk, D)
    v: torch.Tensor  # (B, Hk, Dv, 128 * tiles), see pack_values
    q_descale: torch.Tensor  # (B, Hq, Sq)
    k_descale: torch.Tensor  # (B, Hk, tiles)
    v_descale: torch.Tensor  # (B, Hk, 1)
    k_mean: torch.Tensor | None = None  # (B, Hk, D)
    logit_offset: torch.Tensor | None = None  # (B, Hq, Sq)


def plan(problem: AttentionProblem, backend: str, device: torch.device) -> planner.Plan:
    return planner.plan(problem.traits, planner.capability_of(device), backend, problem.shape)


def prepare(problem: AttentionProblem, backend: str, q, k, v):
    """As runner.prepare, for BlockScaled operands."""
    chosen = plan(problem, backend, q.device)
    if chosen.spec.arch is None or problem.shape.empty:
        return runner.prepare(problem, backend, q, k, v)
    attend = bind(chosen, problem, q.dtype, q.device)

    def forward(q, k, v, want_lse=True):
        return attend(from_scaled(q, k, v), want_lse)[:2]

    return forward


def bind(chosen: planner.Plan, problem: AttentionProblem, dtype, device):
    """A function of Codes that gives out, lse of the scores that the codes give, and lse with what they lack."""
    fn = jit.compiled(chosen.spec, chosen.traits, chosen.tile, chosen.spec.arch)
    shape, band = problem.shape, problem.band
    left, right = runner.window_edges(band, shape.seqlens) if chosen.traits.mask == "window" else (None, None)
    dynamic = chosen.tile.schedule == "dynamic"
    num_ctas = planner.num_sms(device) if dynamic else None
    heads = shape.batch, shape.num_heads_q, shape.seqlen_q
    new_out = runner._allocator(
        (shape.batch, shape.seqlen_q, shape.num_heads_q, problem.traits.headdim_v), dtype, device
    )
    new_lse = runner._allocator(heads, torch.float32, device)

    def attend(codes: Codes, want_lse=True):
        with torch.cuda.device(device):
            out = new_out()
            lse = new_lse() if want_lse else None
            restored = new_lse() if want_lse and codes.logit_offset is not None else None
            counters = runner.tickets(device) if dynamic else None
            address = lambda tensor: 0 if tensor is None else tensor.data_ptr()
            fn(
                (
                    codes.q, codes.k, codes.v, address(out), address(lse), problem.softmax_scale, left, right,
                    num_ctas, address(counters) if dynamic else None,
                    *map(address, (codes.q_descale, codes.k_descale, codes.v_descale, codes.logit_offset, restored)),
                )
            )  # fmt: skip
        return out, lse, lse if restored is None else restored

    return attend


def quantize(q, k, v, *, hadamard=True, smooth_k=True, int8_qk=None) -> Codes:
    """What quantize_fp8 computes, by the fused kernel: FP16 or BF16 tensors on a Hopper GPU, none of them empty.
    `int8_qk` None: as precision="fp8" has it.

    Raises: ValueError for head dimensions that are not multiples of 16 up to 256.
    """
    headdim, headdim_v = q.shape[3], v.shape[3]
    int8_qk = int8_by_default(headdim) if int8_qk is None else int8_qk
    word = {torch.float16: "fp16", torch.bfloat16: "bf16"}.get(q.dtype)
    traits = QuantizeTraits(str(word), headdim, headdim_v, hadamard, smooth_k, int8_qk)
    fn = jit.compiled(QUANTIZER, traits, None, QUANTIZER.arch)
    q, k, v = (runner._aligned(runner._laid_out(x, runner._layout(x))) for x in (q, k, v))
    with torch.cuda.device(q.device):
        *codes, workspace = [new and new() for new in _allocators(q.shape, v.shape, smooth_k, int8_qk, q.device)]
        counters = runner.tickets(q.device, k.shape[0] * k.shape[2])
        fn((q, k, v, *(None if x is None else x.data_ptr() for x in (*codes, workspace, counters))))
    return Codes(*codes)


@lru_cache(maxsize=4096)
def _allocators(q, v, smooth_k, int8_qk, device):
    """Of the fields of Codes and of the workspace, for q and v of these shapes; None: not in this recipe."""
    dtypes = {"qk": torch.int8 if int8_qk else E4M3, "v": E4M3, "float32": torch.float32}
    needed = buffers.of(q, v, smooth_k)
    new = {name: runner._allocator(shape, dtypes[kind], device) for name, (kind, shape) in needed.items()}
    return tuple(map(new.get, buffers.NAMES))


def from_scaled(q: BlockScaled, k: BlockScaled, v: BlockScaled) -> Codes:
    """Codes of any layout, with the scales that a kernel takes."""
    scale = lambda tensor: tensor.to(torch.float32).contiguous()
    return Codes(
        runner._aligned(q.data.contiguous()),
        runner._aligned(k.data.contiguous()),
        pack_values(v.data),
        scale(row_scales(q)),
        scale(tile_scales(k)),
        scale(v.descale),
    )


def to_scaled(codes: Codes, dtype, hadamard=True) -> tuple[BlockScaled, BlockScaled, BlockScaled]:
    """Codes of the fused quantizer as quantize_fp8 gives them."""
    return (
        BlockScaled(codes.q, codes.q_descale, 1, dtype, hadamard, logit_offset=codes.logit_offset),
        BlockScaled(codes.k, codes.k_descale, TILE, dtype, hadamard, mean=codes.k_mean),
        BlockScaled(unpack_values(codes.v, codes.k.shape[1]), codes.v_descale, None, dtype),
    )


def pack_values(v: torch.Tensor) -> torch.Tensor:
    """Codes (B, Sk, Hk, Dv) as a kernel takes them: (B, Hk, Dv, 128 * tiles), zeros behind the last key.

    Inside every 16 keys, key 8j + 2t + i lies at 4t + 2j + i (i, j in {0, 1}, t in 0..3).
    """
    batch, seqlen, heads, headdim = v.shape
    tiles = -(-seqlen // TILE)
    bytes_ = v.view(torch.uint8).permute(0, 2, 3, 1)
    bytes_ = torch.nn.functional.pad(bytes_, (0, tiles * TILE - seqlen))
    groups = bytes_.reshape(batch, heads, headdim, tiles * TILE // 16, 2, 4, 2)
    return groups.transpose(-3, -2).reshape(batch, heads, headdim, tiles * TILE).contiguous().view(v.dtype)


def unpack_values(v: torch.Tensor, seqlen: int) -> torch.Tensor:
    """The inverse of pack_values: (B, Sk, Hk, Dv), contiguous. Order and transposition in one copy."""
    batch, heads, headdim, keys = v.shape
    groups = v.view(torch.uint8).view(batch, heads, headdim, keys // 16, 4, 2, 2)  # t, j, i
    rows = groups.permute(0, 3, 5, 4, 6, 1, 2).reshape(batch, keys, heads, headdim)
    return rows[:, :seqlen].contiguous().view(v.dtype)


# Gradients


@lru_cache(maxsize=4096)
def gradient_problem(problem: AttentionProblem, backend: str, capability: planner.Capability) -> AttentionProblem:
    """What the gradients of an FP8 problem are planned as: the 16-bit problem of the dequantized codes where a kernel
    runs that, else the FP8 problem, which the reference runs."""
    problem = problem.for_phase(BWD)
    if capability is None or backend == "reference" or problem.traits.fp32_out:
        return problem
    word = "fp16" if problem.traits.fp16_out else "bf16"
    half = replace(problem, traits=replace(problem.traits, dtype=word, **dict.fromkeys(FP8_FEATURES, False)))
    chosen = planner.plan(half.traits, capability, backend, half.shape)
    return problem if chosen.spec.arch is None else half


def backward(half: AttentionProblem, backend: str, dout, dlse, q, k, v, out, lse, needs):
    """What reference_fp8.backward computes, by a 16-bit kernel. `half` is what gradient_problem gave.

    Shapes: dout, out (B, Sq, Hq, Dv); dlse, lse (B, Hq, Sq); q, k, v as codes. `out` and `lse` are the forward's own,
    of the scores that the codes give, so P sums to 1. The kernel's dq and dk are turned back in 16 bits: a rotation
    keeps lengths, so what their rounding adds is as small as that of any result.
    """
    operands = (decode_as(x, out.dtype) for x in (q, k, v))
    key = half, backend, out.device
    found = _prepared.get(key) or _prepared.remember(key, runner.Prepared(half, backend, None))
    dq, dk, dv = found.backward(dout, dlse, *operands, out, lse, tuple(needs))
    if q.rotated:
        dq, dk = (None if grad is None else _unrotated(grad) for grad in (dq, dk))
    if dq is not None and dlse is not None and k.mean is not None and k.shape[2]:
        mean = k.mean.repeat_interleave(q.shape[2] // k.shape[2], 1)[:, None]
        push = dlse.float().masked_fill(lse == -torch.inf, 0) * half.softmax_scale
        dq = dq.add_(push.transpose(1, 2).unsqueeze(-1) * mean)
    return dq, dk, dv


_prepared = runner.Memo()  # backwards of 16-bit problems, by problem, backend and device
_matrices = runner.Memo()


def _unrotated(grad):
    """quantize.unrotate of contiguous 16-bit values: products with 1 and -1, summed in float32, rounded once."""
    headdim, device = grad.shape[-1], grad.device
    key = headdim, grad.dtype, device
    found = _matrices.get(key)
    if found is None:
        found = rotation_matrix(*key)
        # Trap: what a captured graph fills is filled when the graph is replayed, for nobody else.
        if not (grad.is_cuda and torch.cuda.is_current_stream_capturing()):
            _matrices.remember(key, found)
    matrix, scale = found
    with torch.autocast(device.type, enabled=False):
        # Why addmm: its alpha multiplies the float32 sums. With beta=0 nothing of the first operand is read.
        turned = torch.addmm(matrix[0], grad.view(-1, headdim), matrix, beta=0, alpha=scale)
    return turned.view(grad.shape)
