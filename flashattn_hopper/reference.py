"""Tiled attention in PyTorch: the accurate rows of the catalog, on any device.

    for each chunk of (batch, kv head) pairs             operands copied once, in the accumulation dtype
        for each tile of queries                         the G query heads of a kv head are rows of one product
            for each tile of keys that the Band lets it see
                forward    S = Q K^T, running maximum and sum, O += P V
                backward   P = exp(S - lse), dV += P^T dO, dS = P (dO V^T - delta), dQ += dS K, dK += dS^T Q

Memory: no tensor has Sq * Sk elements. Beside the results there are a few score tiles (two in forward, three in
backward) and the chunk's copies and sums: of q, k, v in forward, also of dout, out, dk, dv in backward. A chunk takes
as many pairs as keep one score tile and each set of copies within `Limits.elements`, and never fewer than one, so a
batch of any size costs no more than max(Limits.elements, one pair: G * Sq or Sk rows of D + Dv) a few times over.

Precision: everything between the inputs and the rounded results is float32 (float64 for float64 inputs), P included.
Float32 products follow `torch.set_float32_matmul_precision`, as every matrix product of the caller's does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from .spec.mask import Band, Seqlens

_INF = float("inf")


class Limits(NamedTuple):
    """How far one matrix product goes: `rows` queries (times heads) by `keys`, and `elements` of all pairs together."""

    rows: int
    keys: int
    elements: int


# Why: on a CPU a pair's score tile stays in the second-level cache; on a GPU it must outweigh a launch.
LIMITS = {"cpu": Limits(256, 256, 2**20), "cuda": Limits(2048, 2048, 2**25)}


class _Tile(NamedTuple):
    tile_m: int
    tile_n: int


@dataclass(frozen=True)
class _Cut:
    """How one call is cut into chunks, and a chunk into tiles."""

    batch: int
    num_heads_kv: int
    group: int  # query heads per kv head
    seqlens: Seqlens
    tile: _Tile
    pairs: int  # (batch, kv head) pairs in a chunk, at most
    device: torch.device

    @classmethod
    def of(cls, q, k, v) -> _Cut:
        batch, seqlen_q, num_heads_q, headdim = q.shape
        _, seqlen_k, num_heads_kv, headdim_v = v.shape
        limits = LIMITS.get(q.device.type, LIMITS["cuda"])
        group = num_heads_q // num_heads_kv
        tile = _Tile(min(seqlen_q, max(1, limits.rows // group)), min(seqlen_k, limits.keys))
        per_pair = max(tile.tile_m * group * tile.tile_n, max(seqlen_q * group, seqlen_k) * (headdim + headdim_v))
        pairs = max(1, limits.elements // per_pair)
        return cls(batch, num_heads_kv, group, Seqlens(seqlen_q, seqlen_k), tile, pairs, q.device)

    def chunks(self):
        """(batch slice, kv head slice), together every pair once."""
        heads = min(self.num_heads_kv, self.pairs)
        batches = min(self.batch, max(1, self.pairs // self.num_heads_kv))
        for b in range(0, self.batch, batches):
            for h in range(0, self.num_heads_kv, heads):
                yield (
                    slice(b, min(b + batches, self.batch)),
                    slice(h, min(h + heads, self.num_heads_kv)),
                )

    def query_tiles(self):
        """(m_block, rows): rows of a chunk's (pairs, Sq * G, D) operand."""
        tile_m, seqlen_q = self.tile.tile_m, self.seqlens.q
        for m_block in range(-(-seqlen_q // tile_m)):
            end = min((m_block + 1) * tile_m, seqlen_q)
            yield m_block, slice(m_block * tile_m * self.group, end * self.group)

    def key_tiles(self, band: Band, m_block: int, rows: slice):
        """(keys, hidden) for the key tiles that a query tile visits; `hidden` (rows, keys) is None where nothing is."""
        segments = band.kv_tiles(m_block, self.tile, self.seqlens)
        q_idx = None
        for n_block in range(segments.begin, segments.end):
            keys = slice(n_block * self.tile.tile_n, min((n_block + 1) * self.tile.tile_n, self.seqlens.k))
            # A key tile that overhangs counts as partial, but slices end at seqlen_k: without edges nothing is hidden.
            if band.kind == "full" or segments.full_begin <= n_block < segments.full_end:
                yield keys, None
                continue
            if q_idx is None:
                q_idx = torch.arange(rows.start, rows.stop, device=self.device)[:, None] // self.group
            kv_idx = torch.arange(keys.start, keys.stop, device=self.device)
            yield keys, ~band.keep(q_idx, kv_idx, self.seqlens)


@torch.no_grad()
def forward(q, k, v, band: Band, softmax_scale: float):
    """Exact attention, `softmax(q k^T * softmax_scale) v` over the keys that `band` shows.

    Shapes: q (B, Sq, Hq, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv) with Hq a multiple of Hk; any strides.
    B batch, Sq and Sk sequence lengths, Hq and Hk query and key heads, D and Dv head dimensions.
    dtypes: fp16, bf16, fp32 or fp64, the same for all three.

    Returns out (B, Sq, Hq, Dv) in q's dtype and lse (B, Hq, Sq) in float32 (float64 for float64 inputs), the natural
    logarithm of the sum of exponentials. Both are contiguous. A query that sees no key gets out 0 and lse -inf.
    A value that is inf or NaN reaches only the queries that see it. (Trap: while a CUDA graph is captured, hidden
    inf and NaN in v are not screened, because that takes a read-back.)

    Not differentiable by itself: `backward` is its gradient.

    Source: Dao et al., FlashAttention (arXiv 2205.14135), algorithm 1; Milakov and Gimelshein, Online normalizer
    calculation for softmax (arXiv 1805.02867), algorithm 3.
    """
    dtype = _accumulator(q.dtype)
    batch, seqlen_q, num_heads_q, _ = q.shape
    out = q.new_zeros(batch, seqlen_q, num_heads_q, v.shape[-1])
    lse = q.new_full((batch, num_heads_q, seqlen_q), -_INF, dtype=dtype)
    if not (lse.numel() and k.shape[1]):
        return out, lse
    cut = _Cut.of(q, k, v)
    # Why: under a caller's autocast the products below would be rounded to 16 bits.
    with torch.autocast(q.device.type, enabled=False):
        for chunk in cut.chunks():
            query = _rows(q, chunk, cut.group, dtype)
            key, value = (_rows(x, chunk, 1, dtype) for x in (k, v))
            out_rows, lse_rows = _forward_chunk(cut, band, softmax_scale, query, key, value)
            _store(out_rows, out, chunk, cut.group)
            _store(lse_rows, _as_heads(lse), chunk, cut.group)
    return out, lse


def _forward_chunk(cut, band, softmax_scale, query, key, value):
    out = query.new_empty(*query.shape[:2], value.shape[-1])
    lse = query.new_empty(*query.shape[:2], 1)
    wild = _wild(value)
    for m_block, rows in cut.query_tiles():
        q = query[:, rows]
        top = q.new_full((*q.shape[:2], 1), -_INF)  # running maximum
        total = torch.zeros_like(top)
        acc = q.new_zeros(*q.shape[:2], value.shape[-1])
        for keys, hidden in cut.key_tiles(band, m_block, rows):
            p = _scores(q, key[:, keys], softmax_scale)
            if hidden is not None:
                p.masked_fill_(hidden, -_INF)
            top, before = torch.maximum(top, p.amax(-1, keepdim=True)), top
            # Why: a row that has not seen a key yet would compute exp(-inf + inf).
            base = top.masked_fill(top == -_INF, 0)
            p.sub_(base).exp_()
            shrink = before.sub_(base).exp_()
            total.mul_(shrink).add_(p.sum(-1, keepdim=True))
            acc.mul_(shrink)
            _accumulate(acc, p, value[:, keys], hidden, _within(wild, keys))
        total.masked_fill_(top == -_INF, 1)
        torch.div(acc, total, out=out[:, rows])
        torch.add(top, total.log_(), out=lse[:, rows])
    return out, lse


@torch.no_grad()
def backward(dout, dlse, q, k, v, out, lse, band: Band, softmax_scale: float, needs=(True, True, True)):
    """Gradients of `forward`, by recomputing P from lse.

    Shapes: dout and out (B, Sq, Hq, Dv), dlse and lse (B, Hq, Sq), the others as in `forward`; any strides. `dout` or
    `dlse` is None where no gradient flows into that result. `out` and `lse` may come from another kernel, or from
    attention over more keys than k holds: gradients over parts of the keys add up to the gradient over all.
    `needs`: which of dq, dk, dv are wanted.

    Returns (dq, dk, dv), None where not wanted: shape and dtype of q, k, v, contiguous; an expanded input gets one
    gradient per element of its expanded shape. Queries without keys have dq 0 and add nothing to dk and dv,
    whatever dout and dlse hold there.

    Source: Dao, FlashAttention-2 (arXiv 2307.08691), algorithm 2. With L the natural log of the sum of exponentials,
    dL/dS = P, so a gradient into lse only changes delta = rowsum(dout * out) - dlse.
    """
    grads = [x.new_zeros(x.shape) if need else None for x, need in zip((q, k, v), needs)]
    if (dout is None and dlse is None) or not (lse.numel() and k.shape[1]):
        return tuple(grads)
    needs = tuple(g is not None for g in grads[:2]) + (grads[2] is not None and dout is not None,)
    if not any(needs):
        return tuple(grads)
    dtype = _accumulator(q.dtype)
    cut = _Cut.of(q, k, v)
    groups = (cut.group, 1, 1)
    with torch.autocast(q.device.type, enabled=False):
        for chunk in cut.chunks():
            query, key, value = (_rows(x, chunk, g, dtype) for x, g in zip((q, k, v), groups))
            dout_rows = None if dout is None else _rows(dout, chunk, cut.group, dtype)
            # minus delta, (pairs, Sq * G, 1)
            push = 0 if dlse is None else _rows(_as_heads(dlse), chunk, cut.group, dtype)
            if dout is not None:
                push = push - _rows(out, chunk, cut.group, dtype).mul_(dout_rows).sum(-1, keepdim=True)
            lse_rows = _rows(_as_heads(lse), chunk, cut.group, dtype)
            # Why: exp(S - inf) is 0 where a row sees nothing; with -inf it would be inf or NaN.
            lse_rows.masked_fill_(lse_rows == -_INF, _INF)
            parts = _backward_chunk(cut, band, softmax_scale, needs, query, key, value, dout_rows, push, lse_rows)
            for part, grad, group in zip(parts, grads, groups):
                if part is not None:
                    _store(part, grad, chunk, group)
    return tuple(grads)


def _backward_chunk(cut, band, softmax_scale, needs, query, key, value, dout, push, lse):
    needs_q, needs_k, needs_v = needs
    dq, dk, dv = (torch.zeros_like(x) if need else None for x, need in zip((query, key, value), needs))
    wild_q = _wild(query) if needs_k else ()
    wild_k = _wild(key) if needs_q else ()
    wild_dout = _wild(dout) if needs_v else ()
    for m_block, rows in cut.query_tiles():
        q, do = query[:, rows], None if dout is None else dout[:, rows]
        for keys, hidden in cut.key_tiles(band, m_block, rows):
            # Trap: P <= 1 but for rounding. The clamp keeps it so where logits are so large that the rounding of S
            # alone, by another kernel's order of summation, is worth many powers of e.
            p = _scores(q, key[:, keys], softmax_scale).sub_(lse[:, rows]).clamp_(max=0).exp_()
            if hidden is not None:
                p.masked_fill_(hidden, 0)
            hidden_t = None if hidden is None else hidden.mT
            if needs_v:
                _accumulate(dv[:, keys], p.mT, do, hidden_t, _within(wild_dout, rows))
            if not (needs_q or needs_k):
                continue
            if do is None:
                ds = p.mul_(push[:, rows])
            else:
                ds = torch.bmm(do, value[:, keys].mT).add_(push[:, rows]).mul_(p)
            if hidden is not None:
                ds.masked_fill_(hidden, 0)  # P is 0 there, but 0 * NaN is not
            if needs_q:
                _accumulate(dq[:, rows], ds, key[:, keys], hidden, _within(wild_k, keys), softmax_scale)
            if needs_k:
                _accumulate(dk[:, keys], ds.mT, q, hidden_t, _within(wild_q, rows), softmax_scale)
    return dq, dk, dv


def _accumulator(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def _as_heads(rows):
    """(B, H, S) as (B, S, H, 1), a view."""
    return rows.transpose(1, 2).unsqueeze(-1)


def _chunk_view(x, chunk, group):
    """The pairs of a chunk in (B, S, H, D), as a view (b, h, S, group, D)."""
    batch, heads = chunk
    part = x[batch, :, heads.start * group : heads.stop * group]
    return part.unflatten(2, (-1, group)).permute(0, 2, 1, 3, 4)


def _rows(x, chunk, group, dtype):
    """The pairs of a chunk copied to (pairs, S * group, D), contiguous: position s of head g is row s * group + g."""
    part = _chunk_view(x, chunk, group)
    return part.new_empty(part.shape, dtype=dtype).copy_(part).flatten(2, 3).flatten(0, 1)


def _store(rows, into, chunk, group):
    """The inverse of `_rows`, rounding to the dtype of `into`."""
    part = _chunk_view(into, chunk, group)
    part.copy_(rows.view(part.shape))


def _scores(q, k, softmax_scale):
    """Scaled logits of one tile. Forward and backward share it, so that both round alike."""
    return torch.baddbmm(q.new_empty(()), q, k.mT, beta=0, alpha=softmax_scale)


def _wild(x):
    """Rows of (pairs, rows, D) with an inf or a NaN in any pair: 0 times those is not 0. Waits for the device."""
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return ()
    # A sum of finite values that overflows is listed too, which costs time only.
    return x.sum(-1).isfinite().logical_not_().any(0).nonzero().flatten().tolist()


def _within(wild, part: slice):
    return [row - part.start for row in wild if part.start <= row < part.stop]


def _accumulate(into, weights, values, hidden, wild, alpha: float = 1.0):
    """into += alpha * weights @ values, without the products of hidden weights and `wild` rows of values."""
    if hidden is None or not wild:
        into.baddbmm_(weights, values, alpha=alpha)
        return
    tame = values.clone()
    tame[:, wild] = 0
    into.baddbmm_(weights, tame, alpha=alpha)
    for row in wild:
        term = (weights[:, :, row, None] * alpha) * values[:, None, row]
        into.add_(term.masked_fill_(hidden[:, row, None], 0))
