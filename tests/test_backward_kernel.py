"""The compiled backward without a GPU: its PTX, kernel by kernel, run by hopper_machine, against the error budget.

Of resident blocks there are two: the first works off what the tickets have left, the second does its first tile only.
"""

import functools
import struct
import tempfile
from dataclasses import replace

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
LATE = {
    "all late": ("products", "loads", "stores"),
    "loads early": ("products", "stores"),
    "far apart": ("products", "stores", "others"),
}
ENDS = 256  # threads of prepare and finish


@functools.cache
def ptx(traits, ordered=False, served=4096):
    """`ordered`: sums of dQ in turn, whatever the table says. `served`: the tile of so many keys."""
    tile = BACKWARD.tiles.find(traits, served)
    tile = replace(tile, ordered=True) if ordered else tile
    with tempfile.TemporaryDirectory() as folder:
        return jit._compile(BACKWARD, traits, tile, BACKWARD.arch, f"--keep-ptx --dump-dir {folder}").__ptx__, tile


def gradients(q, k, v, dout, out, lse, band, scale, deterministic=False, late=(), num_ctas=2, **order):
    """(dq, dk, dv), handed over as the host half of the kernel does.

    `order` is for sums in turn. `ordered`: have them whatever the table says. `resident`: how many blocks run at once;
    by default all that may wait for each other. `keep`: a list that gets the sums of dQ, not rounded to 16 bits yet.
    `served`: have the tile of so many keys.
    """
    keep, resident = order.get("keep"), order.get("resident")
    (batch, seqlen_q, heads, d), (_, seqlen_k, heads_kv, _), d_v = q.shape, k.shape, v.shape[3]
    dtype = next(name for name, kind in DTYPES.items() if kind == q.dtype)
    traits = BACKWARD.compiled(Traits(BWD, dtype, d, d_v, band.kind, deterministic=deterministic))
    text, tile = ptx(traits, order.get("ordered", False), order.get("served", 4096))
    summed, wide, hd, hd_v = tile.summed, tile.tile_n == 64, traits.headdim, traits.headdim_v
    memory = Memory(1 << 24)
    dq, dk, dv = grads = [torch.full_like(x, float("nan")) for x in (q, k, v)]

    row_blocks = -(-seqlen_q // ROW_PAD)
    rows = batch * heads * row_blocks * ROW_PAD
    sums = memory.empty(4 * tile.workspace_floats(rows, hd))
    stats = sums + (4 * rows * hd if summed else 0)
    counters = stats + 8 * rows
    ticket = counters + 4 * rows * tile.in_turn
    workspace = [struct.pack("<Q", a) for a in (stats, sums, ticket, counters)]
    address, numbers = lambda a: struct.pack("<Q", a), lambda *x: struct.pack(f"<{len(x)}i", *x)
    shape = lambda x: numbers(x.shape[1], x.shape[3], x.shape[2], batch)
    tensor = lambda x, a: address(a) + shape(x) + struct.pack("<3q", x.stride(1), x.stride(2), x.stride(0))
    mapped = lambda *tensors: [part for x in tensors for part in (b"", shape(x))]
    edges = runner.window_edges(band, Seqlens(seqlen_q, seqlen_k)) if traits.mask == "window" else ()
    edges = [*map(numbers, edges)]
    tile_of = lambda x, *cut: Map(x.transpose(1, 2), *cut)

    def launch(kernel, blocks, parameters, maps=()):
        threads = tile.num_threads if maps else ENDS
        together = resident or (blocks if tile.in_turn else 1)
        maps = dict(zip(range(0, 99, 2), maps))
        run(text, parameters, maps, threads, blocks, memory, late if maps else (), kernel, together)

    launch(
        "prepare",
        row_blocks * heads * batch,
        [tensor(x, memory.add(x)) for x in (out, dout)]
        + [address(a) for a in (memory.add(lse.float().contiguous()), 0, stats, sums, ticket, counters)],
    )
    half, half_v = [w // 2 if wide else w for w in (hd, hd_v)]
    unit = tile.dq_columns(hd) if summed else half
    tiles = -(-seqlen_k // tile.tile_n) * heads_kv * batch
    launch(
        "main",
        min(num_ctas, tiles) if tile.kv_stages == 2 else tiles,
        mapped(q, dout, k, v, k, v)
        + [b""] * (4 + summed)  # the matrix products
        + [struct.pack("<f", x) for x in (scale, np.float32(scale) * np.float32(np.log2(np.e)))]
        + edges
        + workspace,
        (
            tile_of(q, hd, tile.tile_m, half),
            tile_of(dout, hd_v, tile.tile_m, half_v),
            tile_of(k, hd, tile.tile_n, unit),
            tile_of(v, hd_v, tile.tile_n, half_v),
            tile_of(dk, half, 64, unit),
            tile_of(dv, half_v, 64),
        ),
    )
    if summed:
        if keep is not None:
            keep.append(memory.read(sums, 4 * rows * hd).clone())
        place = memory.add(dq)
        launch("finish", row_blocks * heads * batch, [tensor(q, place), struct.pack("<f", scale), address(sums)])
        grads[0] = memory.read(place, dq.numel() * 2).view(q.dtype).view(q.shape)
    else:
        launch(
            "kernel",
            row_blocks * heads * batch,
            [*mapped(q, dout, k, v, q), b"", b"", b"", struct.pack("<f", scale), *edges, address(stats)],
            (
                tile_of(q, hd, 64),
                tile_of(dout, hd_v, 64),
                tile_of(k, hd, tile.query_n),
                tile_of(v, hd_v, tile.query_n),
                tile_of(dq, hd, 64),
            ),
        )
    return grads


def operands(shape=PLAIN, dims=(96, 96), dtype="bf16"):
    batch, seqlen_q, seqlen_k, heads, heads_kv = shape
    sizes = (
        (seqlen_q, heads, dims[0]),
        (seqlen_k, heads_kv, dims[0]),
        (seqlen_k, heads_kv, dims[1]),
        (seqlen_q, heads, dims[1]),
    )
    return [torch.randn(batch, *size).to(DTYPES[dtype]) for size in sizes]


def check(q, k, v, dout, mask, late=(), deterministic=False, **order):
    band, words = MASKS[mask]
    exact = attention(q, k, v, **words)
    scale = q.shape[3] ** -0.5
    grads = gradients(q, k, v, dout, exact.out.to(q.dtype), exact.lse, band, scale, deterministic, late, **order)
    return check_grads(grads, q, k, v, dout, **words)


@pytest.mark.parametrize(
    "dims, mask, words",
    [
        ((64, 64), "causal", {"dtype": "fp16"}),
        ((64, 64), "full", {"deterministic": True}),
        ((64, 64), "window", {"served": 512}),
        ((96, 96), "full", {"dtype": "fp16"}),
        ((96, 96), "causal", {}),
        ((96, 96), "window", {}),
        ((96, 96), "causal", {"deterministic": True}),
        ((80, 72), "causal", {}),
        ((128, 128), "window", {}),
        ((128, 128), "window", {"deterministic": True}),
        ((192, 128), "causal", {}),
        ((192, 192), "window", {"dtype": "fp16"}),
        ((256, 256), "full", {}),
    ],
    ids=str,
)
def test_against_float64(dims, mask, words):
    how = {name: value for name, value in words.items() if name != "dtype"}
    check(*operands(dims=dims, dtype=words.get("dtype", "bf16")), mask, **how)


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 128)], ids=str)
def test_waits_are_where_they_must_be(dims, late):
    """Up to four tiles of keys of one block, in two stages; beyond headdim 128 four of queries."""
    check(*operands((1, 200, 560, 1, 1) if dims[0] <= 128 else (1, 300, 130, 2, 1), dims), "causal", LATE[late])


@pytest.mark.parametrize(
    "words, late",
    [
        ({}, "all late"),
        ({}, "far apart"),
        ({"deterministic": True}, "all late"),
        ({"deterministic": True}, "far apart"),
        ({"served": 512}, "far apart"),
        ({"served": 512, "deterministic": True}, "far apart"),
    ],
    ids=str,
)
def test_waits_over_many_query_tiles(words, late):
    """Four of 128 for each of two heads, whose dQ is late, and in turn, or neither."""
    check(*operands((1, 400, 200, 2, 1), (64, 64)), "full", LATE[late], **words)


@pytest.mark.parametrize(
    "shape, dims",
    [
        ((2, 70, 129, 4, 2), (96, 96)),
        ((1, 1, 1, 1, 1), (96, 96)),
        ((1, 300, 100, 2, 2), (96, 96)),
        ((1, 140, 300, 4, 2), (64, 64)),
        ((1, 300, 100, 2, 2), (64, 64)),
        ((1, 140, 300, 4, 2), (128, 128)),
        ((2, 200, 130, 2, 1), (128, 128)),
    ],
    ids=str,
)
def test_shapes(shape, dims):
    """With more queries than keys, some have none."""
    check(*operands(shape, dims), "causal")


def test_a_missing_meeting_is_seen(monkeypatch):
    """dQ is computed from what both warpgroups leave in shared memory."""
    from flashattn_hopper.kernels.sm90.key_products import Products

    fails(monkeypatch, Products, "meet", lambda self: None)
    fails(monkeypatch, Products, "meet", lambda self: None, (64, 64), "far apart", served=512)


@pytest.mark.parametrize("wait", ["to_read", "to_write"])
def test_a_missing_wait_for_the_exchange_is_seen(wait, monkeypatch):
    """Where dQ is late, warpgroups wait for what the others have written, and read, a step ago."""
    from flashattn_hopper.kernels.sm90.pipeline import Exchange

    fails(monkeypatch, Exchange, wait, lambda self, slot: None, (64, 64), "far apart")


def test_a_missing_meeting_is_seen_beyond_128(monkeypatch):
    """There P and dS of the same keys are exchanged."""
    from flashattn_hopper.kernels.sm90.key_gradient import KeyGradient

    fails(monkeypatch, KeyGradient, "meet", lambda self, barrier: None, (192, 128))


def test_a_missing_wait_is_seen(monkeypatch):
    from flashattn_hopper.kernels.sm90.pipeline import Ring

    fails(monkeypatch, Ring, "wait", lambda self, slot: None)


def test_another_order_of_the_sums_is_seen(monkeypatch):
    """Sums of dQ that are put off, added where the next ones belong."""
    from flashattn_hopper.kernels.sm90.key_products import Products

    monkeypatch.setattr(Products, "add_late", lambda self, _, to, wanted: self.add(to, self.late, 0, wanted))
    fails(monkeypatch)


def fails(monkeypatch, owner=None, name=None, function=None, dims=(96, 96), late="all late", **words):
    """A check must, with a method of the kernel replaced."""
    if owner is not None:
        monkeypatch.setattr(owner, name, function)
    ptx.cache_clear()
    try:
        with pytest.raises(AssertionError):
            check(*operands((1, 300, 300, 1, 1), dims), "full", LATE[late], **words)
    finally:
        ptx.cache_clear()


def sums_in_turn(dims, mask):
    """Of float32, by one block, by three that wait for each other, and by one of three before the others run."""
    q, k, v, dout = operands((1, 140 if dims[0] > 64 else 400, 300, 2, 1), dims)
    band, words = MASKS[mask]
    exact = attention(q, k, v, **words)
    given = q, k, v, dout, exact.out.to(q.dtype), exact.lse, band, dims[0] ** -0.5, True
    sums = []
    one, *others = (
        gradients(*given, num_ctas=blocks, ordered=True, resident=resident, keep=sums)
        for blocks, resident in ((1, 1), (3, 3), (3, 1))
    )
    check_grads(one, q, k, v, dout, **words)
    assert all(torch.equal(a, b) for grads in others for a, b in zip(one, grads))
    return sums


@pytest.mark.parametrize(
    "dims, mask",
    [((64, 64), "causal"), ((64, 64), "full"), ((96, 96), "full"), ((128, 128), "window")],
    ids=str,
)
def test_sums_in_turn_do_not_depend_on_who_does_which_tile(dims, mask):
    """One block does all key tiles; as many blocks as tiles wait for each other; or two of them do not run yet."""
    first, *others = sums_in_turn(dims, mask)
    assert all(torch.equal(first, each) for each in others)


def test_a_counter_that_is_not_waited_for_is_seen(monkeypatch):
    """Rounded to 16 bits the gradients are the same all the same; the sums are not."""
    import cutlass.cute as cute

    from flashattn_hopper.kernels.sm90.sum_order import Turns

    def take(self, slot, counter, place):
        cute.arch.mbarrier_wait(self.seen + slot.index, slot.phase ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.turn + slot.index)

    monkeypatch.setattr(Turns, "take", take)
    ptx.cache_clear()
    try:
        first, together, _ = sums_in_turn((64, 64), "causal")
    finally:
        ptx.cache_clear()
    assert not torch.equal(first, together)


def test_a_turn_that_is_not_passed_on_is_seen(monkeypatch):
    """Whoever comes next waits for ever."""
    from flashattn_hopper.kernels.sm90.sum_order import Turns

    monkeypatch.setattr(Turns, "pass_on", lambda self, index, wanted: None)
    fails(monkeypatch, deterministic=True)
