"""FP8 attention on codes, emulated in PyTorch: what a kernel with FP8 matrix products has to compute.

    for each tile of queries
        for each 128 keys that the Band lets it see, last to first
            S = q8 k8^T * (q_descale[row] * k_descale[tile] * softmax_scale * log2 e)
            m = max(m, rowmax S)                  P = 2^(S - m + 8), at most 256
            l = l * alpha + rowsum P              of P before it is rounded
            O = O * alpha + (e4m3(P) v8)          the product of one tile in an accumulator of its own
    out = O / l * v_descale                       lse = ln 2 * (m + log2 l - 8)

- 2^8: P = 1 must be a code (256 is), so that a row with one dominant key is exact, and small P need the exponents.
- Last to first: where a sink or the first keys hold the maximum, the keys before them meet a low maximum and keep more
  bits of P than the final one would leave them.
- An accumulator per tile: a Hopper FP8 product keeps 13 fraction bits of its running sum. Over many keys a small term
  is lost beside a large sum; the float32 sum of tiles keeps it. Here sums within a tile are float32 too.

The backward is that of the function that was evaluated: the ordinary float32 backward on the dequantized codes and the
lse of their scores. P then sums to 1 whatever the quantization did. Scales, signs and mean count as constants.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from . import reference
from .quantize import E4M3, LARGEST, TILE, BlockScaled, decode, row_scales, tile_scales, unrotate
from .reference import _as_heads, _Cut, _rows, _store, _Tile
from .spec.mask import Band

P_SHIFT = 8.0  # log2 of the scale of P
_INF = float("inf")


@torch.no_grad()
def forward(
    q: BlockScaled,
    k: BlockScaled,
    v: BlockScaled,
    band: Band,
    softmax_scale: float,
    product=torch.bmm,
    exp2=torch.Tensor.exp2_,
):
    """Attention on codes.

    Shapes: q (B, Sq, Hq, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv) with Hq a multiple of Hk.
    B batch, Sq and Sk sequence lengths, Hq and Hk query and key heads, D and Dv head dimensions.
    `product` multiplies one tile of P by one tile of v codes, (pairs, rows, keys) by (pairs, keys, Dv) in float32:
    where a test puts the accumulator of the hardware. `exp2`, of a tile's exponents in place, likewise.

    Returns out (B, Sq, Hq, Dv) in `q.dtype` and float32 lse (B, Hq, Sq), natural log, of the scores that the codes
    give: `quantize.restore_lse` adds what the mean of k took away. A query that sees no key gets out 0 and lse -inf.
    """
    batch, seqlen_q, num_heads_q, _ = q.shape
    out = torch.zeros(batch, seqlen_q, num_heads_q, v.shape[-1], dtype=q.dtype, device=q.device)
    lse = torch.full((batch, num_heads_q, seqlen_q), -_INF, dtype=torch.float32, device=q.device)
    if not (lse.numel() and k.shape[1]):
        return out, lse
    cut = _Cut.of(q.data, k.data, v.data)
    cut = replace(cut, tile=_Tile(cut.tile.tile_m, TILE))
    q_rows, k_tiles = row_scales(q), tile_scales(k)
    with torch.autocast(q.device.type, enabled=False):
        for chunk in cut.chunks():
            operands = (
                _rows(q.data, chunk, cut.group, torch.float32),
                _rows(k.data, chunk, 1, torch.float32),
                _rows(v.data, chunk, 1, torch.float32),
                _rows(_as_heads(q_rows), chunk, cut.group, torch.float32) * (softmax_scale * math.log2(math.e)),
                _rows(_as_heads(k_tiles), chunk, 1, torch.float32),
                _rows(_as_heads(v.descale), chunk, 1, torch.float32),
            )
            out_rows, lse_rows = _forward_chunk(cut, band, product, exp2, *operands)
            _store(out_rows, out, chunk, cut.group)
            _store(lse_rows, _as_heads(lse), chunk, cut.group)
    return out, lse


def _forward_chunk(cut, band, product, exp2, query, key, value, q_scale, k_scale, v_scale):
    out = query.new_empty(*query.shape[:2], value.shape[-1])
    lse = query.new_empty(*query.shape[:2], 1)
    largest = LARGEST[E4M3]
    for m_block, rows in cut.query_tiles():
        q = query[:, rows]
        top = q.new_full((*q.shape[:2], 1), -_INF)  # running maximum, in log2 units
        total = torch.zeros_like(top)
        acc = q.new_zeros(*q.shape[:2], value.shape[-1])
        for keys, hidden in reversed(list(cut.key_tiles(band, m_block, rows))):
            n_block = keys.start // TILE
            s = torch.bmm(q, key[:, keys].mT).mul_(q_scale[:, rows] * k_scale[:, n_block, None])
            if hidden is not None:
                s.masked_fill_(hidden, -_INF)
            top, before = torch.maximum(top, s.amax(-1, keepdim=True)), top
            # Why: a row that has not seen a key yet would compute exp2(-inf + inf).
            base = top.masked_fill(top == -_INF, 0)
            p = exp2(s.sub_(base).add_(P_SHIFT))
            shrink = before.sub_(base).exp2_()
            total.mul_(shrink).add_(p.sum(-1, keepdim=True))
            codes = p.clamp_(max=largest).to(E4M3).float()
            acc.mul_(shrink).add_(product(codes, value[:, keys]))
        blind = top == -_INF
        total.masked_fill_(blind, 1)
        out[:, rows] = (acc / total * v_scale).masked_fill_(blind, 0)
        lse[:, rows] = torch.where(blind, top, (top + total.log2_() - P_SHIFT) * math.log(2))
    return out, lse


@torch.no_grad()
def backward(
    dout,
    dlse,
    q: BlockScaled,
    k: BlockScaled,
    v: BlockScaled,
    out,
    lse,
    band: Band,
    softmax_scale: float,
    needs=(True, True, True),
):
    """Gradients into the tensors that q, k and v were quantized from, straight through the rounding.

    Shapes: dout and out (B, Sq, Hq, Dv); dlse and lse (B, Hq, Sq). `lse` is the one that `forward` returned; `dlse` is
    the gradient of the restored one. `dout` or `dlse` is None where no gradient flows into that result.

    Returns (dq, dk, dv), contiguous, in `q.dtype`, None where `needs` says so.

    Why the mean needs no term in dk: rows of dS sum to dlse, and what subtracting the mean takes from dk is what the
    restored lse gives back. dq gets dlse * mean(k).
    """
    grads = reference.backward(dout, dlse, decode(q), decode(k), decode(v), out, lse, band, softmax_scale, needs)
    dq, dk, dv = grads
    if q.rotated:
        dq, dk = (None if grad is None else unrotate(grad) for grad in (dq, dk))
    if dq is not None and dlse is not None and k.mean is not None and k.shape[2]:
        mean = k.mean.repeat_interleave(q.shape[2] // k.shape[2], 1)[:, None]
        push = dlse.float().masked_fill(lse == -_INF, 0) * softmax_scale
        dq = dq + _as_heads(push) * mean
    return tuple(None if grad is None else grad.to(q.dtype).contiguous() for grad in (dq, dk, dv))
