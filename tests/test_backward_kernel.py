"""The compiled backward without a GPU: its PTX, kernel by kernel, run by hopper_machine, against the error budget.

Tiles are those of the table that sum dQ in memory. Its resident blocks draw tickets: the first block works off what is
left, the second does its first tile only.
"""

import functools
import struct
import tempfile

import numpy as np
import pytest
import torch

from flashattn_hopper import jit, runner
from flashattn_hopper.kernels.sm90.specs import BACKWARD
from flashattn_hopper.oracle import attention
from flashattn_hopper.spec.mask import Band, Seqlens
from flashattn_hopper.spec.problem import BWD, Traits
from flashattn_hopper.spec.tile import ROW_PAD

from .hopper_machine import Map, run
from .oracle import check_grads
from .ptx_machine import Memory

pytestmark = pytest.mark.compile

MASKS = {
    "full": (Band(), {}),
    "causal": (Band(right=0), {"causal": True}),
    "window": (Band(90, 3), {"window_size": (90, 3)}),
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
PLAIN = (1, 150, 300, 2, 1)  # batch, seqlen_q, seqlen_k, heads, kv heads
LATE = {"all late": ("products", "loads", "stores"), "loads early": ("products", "stores")}
ENDS = 256  # threads of prepare and finish


@functools.cache
def ptx(traits):
    tile = BACKWARD.tiles.find(traits, 4096)
    assert tile.query_n is None and tile.kv_stages == 2
    with tempfile.TemporaryDirectory() as folder:
        return jit._compile(BACKWARD, traits, tile, BACKWARD.arch, f"--keep-ptx --dump-dir {folder}").__ptx__, tile


def gradients(q, k, v, dout, out, lse, band, scale, late=(), num_ctas=2):
    """(dq, dk, dv), handed over as the host half of the kernel does."""
    (batch, seqlen_q, heads, d), (_, seqlen_k, heads_kv, _), d_v = q.shape, k.shape, v.shape[3]
    dtype = next(name for name, kind in DTYPES.items() if kind == q.dtype)
    traits = BACKWARD.compiled(Traits(BWD, dtype, d, d_v, band.kind))
    text, tile = ptx(traits)
    memory, grads = Memory(1 << 24), [torch.full_like(x, float("nan")) for x in (q, k, v)]
    row_blocks = -(-seqlen_q // ROW_PAD)
    floats = tile.workspace_floats(batch * heads * row_blocks * ROW_PAD, traits.headdim)
    sums = memory.empty(4 * floats)
    stats = sums + 4 * batch * heads * row_blocks * ROW_PAD * traits.headdim
    ticket = stats + 8 * batch * heads * row_blocks * ROW_PAD
    assert ticket + 16 == sums + 4 * floats
    address, numbers = lambda a: struct.pack("<Q", a), lambda *x: struct.pack(f"<{len(x)}i", *x)
    shape = lambda x: numbers(x.shape[1], x.shape[3], x.shape[2], batch)
    strides = lambda x: struct.pack("<3q", x.stride(1), x.stride(2), x.stride(0))
    tensor = lambda x, a: address(a) + shape(x) + strides(x)
    dq = memory.add(grads[0])
    first = [tensor(x, memory.add(x)) for x in (out, dout)]
    first += [address(a) for a in (memory.add(lse.float().contiguous()), 0, stats, sums, ticket)]
    last = [tensor(q, dq), struct.pack("<f", scale), address(sums)]
    heads_first = lambda x: x.transpose(1, 2)
    unit = tile.dq_columns(traits.headdim)
    maps = {
        0: Map(heads_first(q), traits.headdim, tile.tile_m),
        2: Map(heads_first(dout), traits.headdim_v, tile.tile_m),
        4: Map(heads_first(k), traits.headdim, tile.tile_n, unit),
        6: Map(heads_first(v), traits.headdim_v, tile.tile_n),
        8: Map(heads_first(grads[1]), traits.headdim, 64, unit),
        10: Map(heads_first(grads[2]), traits.headdim_v, 64),
    }
    edges = runner.window_edges(band, Seqlens(seqlen_q, seqlen_k)) if traits.mask == "window" else ()
    main = [part for x in (q, dout, k, v, k, v) for part in (b"", shape(x))]
    main += [b""] * 5  # the matrix products
    main += [struct.pack("<f", x) for x in (scale, np.float32(scale) * np.float32(np.log2(np.e)))]
    main += [*map(numbers, edges), *map(address, (stats, sums, ticket))]
    blocks = min(num_ctas, -(-seqlen_k // tile.tile_n) * heads_kv * batch)
    ends = row_blocks * heads * batch
    run(text, first, {}, ENDS, ends, memory, kernel="prepare")
    run(text, main, maps, tile.num_threads, blocks, memory, late, kernel="main")
    run(text, last, {}, ENDS, ends, memory, kernel="finish")
    raw = memory.read(dq, grads[0].numel() * 2)
    return raw.view(q.dtype).view(q.shape), *grads[1:]


def operands(shape=PLAIN, dims=(96, 96), dtype="bf16"):
    batch, seqlen_q, seqlen_k, heads, heads_kv = shape
    sizes = (
        (seqlen_q, heads, dims[0]),
        (seqlen_k, heads_kv, dims[0]),
        (seqlen_k, heads_kv, dims[1]),
        (seqlen_q, heads, dims[1]),
    )
    return [torch.randn(batch, *size).to(DTYPES[dtype]) for size in sizes]


def check(q, k, v, dout, mask, late=()):
    band, words = MASKS[mask]
    exact = attention(q, k, v, **words)
    scale = q.shape[3] ** -0.5
    grads = gradients(q, k, v, dout, exact.out.to(q.dtype), exact.lse, band, scale, late)
    return check_grads(grads, q, k, v, dout, **words)


@pytest.mark.parametrize(
    "dims, mask, dtype",
    [
        ((64, 64), "causal", "fp16"),
        ((96, 96), "full", "fp16"),
        ((96, 96), "causal", "bf16"),
        ((96, 96), "window", "bf16"),
        ((80, 72), "causal", "bf16"),
        ((128, 128), "window", "bf16"),
    ],
    ids=str,
)
def test_against_float64(dims, mask, dtype):
    check(*operands(dims=dims, dtype=dtype), mask)


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("headdim", [64, 96, 128])
def test_waits_are_where_they_must_be(headdim, late):
    """Four tiles of keys of one block, in two stages."""
    check(*operands((1, 200, 560, 1, 1), (headdim, headdim)), "causal", LATE[late])


@pytest.mark.parametrize("shape", [(2, 70, 129, 4, 2), (1, 1, 1, 1, 1), (1, 300, 100, 2, 2)], ids=str)
def test_shapes(shape):
    """With more queries than keys, some have none."""
    check(*operands(shape), "causal")


def test_a_missing_meeting_is_seen(monkeypatch):
    """dQ is computed from what both warpgroups leave in shared memory."""
    from flashattn_hopper.kernels.sm90.key_products import Products

    fails(monkeypatch, Products, "meet", lambda self: None)


def test_a_missing_wait_is_seen(monkeypatch):
    from flashattn_hopper.kernels.sm90.pipeline import Ring

    fails(monkeypatch, Ring, "wait", lambda self, slot: None)


def test_another_order_of_the_sums_is_seen(monkeypatch):
    """Sums of dQ that are put off, added where the next ones belong."""
    from flashattn_hopper.kernels.sm90.key_products import Products

    monkeypatch.setattr(Products, "add_late", lambda self, to, wanted: self.add(to, self.late, 0, wanted))
    fails(monkeypatch)


def fails(monkeypatch, owner=None, name=None, function=None):
    """A check must, with a method of the kernel replaced."""
    if owner is not None:
        monkeypatch.setattr(owner, name, function)
    ptx.cache_clear()
    try:
        with pytest.raises(AssertionError):
            check(*operands((1, 200, 300, 1, 1)), "full", LATE["all late"])
    finally:
        ptx.cache_clear()
