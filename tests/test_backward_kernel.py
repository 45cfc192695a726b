"""The compiled main kernel of sm90.backward without a GPU: its PTX, run by hopper_machine, against float64.

What prepare leaves (lse and delta) is made here, and the sums of dQ are read in the order that finish knows.
"""

import functools
import math
import struct
import tempfile
from dataclasses import replace

import numpy as np
import pytest
import torch

from flashattn_hopper import jit, runner
from flashattn_hopper.kernels.sm90.specs import BACKWARD
from flashattn_hopper.spec.mask import Band, Seqlens
from flashattn_hopper.spec.problem import BWD, Traits
from flashattn_hopper.spec.tile import ROW_PAD, WARPGROUP

from .hopper_machine import Map, run
from .ptx_machine import Memory

pytestmark = pytest.mark.compile

NAN = float("nan")
SLAB = 64
MASKS = {"full": Band(), "causal": Band(right=0), "window": Band(100, 30), "narrow": Band(2, 0)}
LATE = {"in order": (), "all late": ("products", "loads", "stores"), "loads early": ("products", "stores")}


@functools.cache
def ptx(traits, kv_stages):
    tile = replace(BACKWARD.tiles.find(traits, 4096), kv_stages=kv_stages)
    with tempfile.TemporaryDirectory() as folder:
        options = f"--keep-ptx --dump-dir {folder}"
        return jit._compile(BACKWARD, traits, tile, BACKWARD.arch, options).__ptx__, tile


def sums_in_order(raw, tile, rows, headdim):
    """(rows, headdim) of what the kernel has added to memory, rows a multiple of ROW_PAD."""
    row, column = np.arange(rows)[:, None], np.arange(headdim)[None]
    inner, chunk, chunks = row % tile.tile_m, column // 8, tile.dq_columns(headdim) // 8
    half = inner // SLAB + 0 * column if tile.dq_by_rows else chunk // chunks
    thread = inner % SLAB // 16 * 32 + inner % 8 * 4 + column % 8 // 2
    vector = (half * chunks + chunk % chunks) * WARPGROUP + thread
    return raw[row // tile.tile_m * (tile.tile_m * headdim) + vector * 4 + inner % 16 // 8 * 2 + column % 2]


def expected(q, k, v, dout, dlse, band):
    """Gradients, lse and delta in float64."""
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    keys, values = (x.repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, keys) * q.shape[3] ** -0.5
    rows, columns = torch.arange(q.shape[1])[:, None], torch.arange(k.shape[1])[None]
    seen = band.keep(rows, columns, Seqlens(q.shape[1], k.shape[1])) | torch.zeros(1, 1, dtype=torch.bool)
    scores = scores.masked_fill(~seen, -math.inf)
    lse = scores.logsumexp(-1)
    p = (scores - lse.masked_fill(lse.isneginf(), 0)[..., None]).exp()
    out = torch.einsum("bhqk,bkhd->bqhd", p, values)
    finite = torch.where(lse.isneginf(), 0, lse)
    grads = torch.autograd.grad((out * dout).sum() + (finite * dlse).sum(), (q, k, v))
    delta = (out.detach() * dout).sum(-1).transpose(1, 2) - dlse
    return grads, lse.detach(), delta


def gradients(q, k, v, dout, lse, delta, band, late, num_ctas):
    """dq, dk, dv of the kernel; dq unscaled."""
    (batch, seqlen_q, heads, d), (_, seqlen_k, heads_kv, _) = q.shape, k.shape
    dtype = {torch.bfloat16: "bf16", torch.float16: "fp16"}[q.dtype]
    traits = BACKWARD.compiled(Traits(BWD, dtype, d, d, band.kind, heads != heads_kv))
    text, tile = ptx(traits, 1 if num_ctas is None else 2)
    memory, padded = Memory(1 << 25), -(-seqlen_q // ROW_PAD) * ROW_PAD
    dk, dv = (torch.full_like(x, NAN) for x in (k, v))
    lines = torch.zeros(batch, heads, 2, padded)
    lines[:, :, 0] = math.inf
    seen = ~lse.isneginf()
    lines[:, :, 0, :seqlen_q][seen] = (lse * math.log2(math.e)).float()[seen]
    lines[:, :, 1, :seqlen_q][seen] = delta.float()[seen]
    lines = lines.unflatten(3, (-1, tile.tile_m)).transpose(2, 3).contiguous()  # lse and delta of a tile side by side
    stats, sums = memory.add(lines), memory.add(torch.zeros(batch, heads, padded, d))
    ticket = memory.add(torch.zeros(1, dtype=torch.int32))
    numbers = lambda *x: struct.pack(f"<{len(x)}i", *x)
    sizes = (seqlen_q, heads), (seqlen_q, heads), *4 * [(seqlen_k, heads_kv)]
    edges = runner.window_edges(band, Seqlens(seqlen_q, seqlen_k)) if traits.mask == "window" else ()
    scale = np.float32(d**-0.5)
    parameters = [
        *(part for rows, h in sizes for part in (b"", numbers(rows, d, h, batch))),
        *5 * [b""], struct.pack("<f", scale), struct.pack("<f", scale * np.float32(math.log2(math.e))),
        *map(numbers, edges), *(struct.pack("<Q", x) for x in (stats, sums, ticket)),
    ]  # fmt: skip
    rows = tile.tile_m, tile.tile_m, tile.tile_n, tile.tile_n, SLAB, SLAB
    tensors = zip((q, dout, k, v, dk, dv), rows)
    maps = {2 * i: Map(x.transpose(1, 2), traits.headdim, r) for i, (x, r) in enumerate(tensors)}
    blocks = num_ctas or -(-seqlen_k // tile.tile_n) * heads_kv * batch
    run(text, parameters, maps, tile.num_threads, blocks, memory, late, name="main")
    raw = memory.read(sums, 4 * batch * heads * padded * d).view(torch.float32).view(batch * heads, -1).numpy()
    dq = torch.stack([torch.from_numpy(sums_in_order(x, tile, padded, d)) for x in raw])
    return dq.view(batch, heads, padded, d)[:, :, :seqlen_q].transpose(1, 2), dk, dv


def check(shape, d, mask, late="in order", num_ctas=None, dtype=torch.bfloat16):
    batch, seqlen_q, seqlen_k, heads, heads_kv = shape
    q, dout = (torch.randn(batch, seqlen_q, heads, d).to(dtype) for _ in range(2))
    k, v = (torch.randn(batch, seqlen_k, heads_kv, d).to(dtype) for _ in range(2))
    dlse = torch.randn(batch, heads, seqlen_q)
    wanted, lse, delta = expected(q, k, v, dout, dlse, MASKS[mask])
    dq, dk, dv = gradients(q, k, v, dout, lse, delta, MASKS[mask], LATE[late], num_ctas)
    for found, exact in zip((dq * d**-0.5, dk, dv), wanted):
        assert (found.double() - exact).norm() <= 6e-3 * exact.norm()
        assert (found.double() - exact).abs().max() <= 0.03 * exact.abs().max()


@pytest.mark.parametrize(
    "shape, d, mask",
    [
        ((1, 200, 300, 1, 1), 64, "full"),
        ((1, 300, 300, 2, 1), 64, "causal"),
        ((1, 200, 150, 1, 1), 128, "full"),
        ((1, 150, 200, 4, 2), 128, "causal"),
    ],
    ids=str,
)
def test_against_float64(shape, d, mask):
    check(shape, d, mask)


@pytest.mark.parametrize("d, mask", [(64, "narrow"), (128, "window")])
@pytest.mark.parametrize("shape", [(1, 260, 300, 2, 1), (1, 300, 100, 1, 1), (2, 1, 130, 2, 2)], ids=str)
def test_windows(shape, mask, d):
    """Among them keys that no query sees, and queries without keys."""
    check(shape, d, mask, dtype=torch.float16)


@pytest.mark.parametrize("late", [late for late in LATE if LATE[late]])
@pytest.mark.parametrize("d, mask", [(64, "causal"), (128, "full"), (128, "window")])
def test_many_tiles_of_a_block(d, mask, late):
    """Two resident blocks: what a key tile leaves behind for the next. A missing wait shows in what is late."""
    check((1, 140, 390, 4, 2), d, mask, late, num_ctas=2)


def test_a_missing_wait_is_seen(monkeypatch):
    from flashattn_hopper.kernels.sm90.pipeline import Ring

    monkeypatch.setattr(Ring, "wait", lambda self, slot: None)
    ptx.cache_clear()
    try:
        with pytest.raises(AssertionError):
            check((1, 150, 200, 1, 1), 128, "full", "all late")
    finally:
        ptx.cache_clear()
