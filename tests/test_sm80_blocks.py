"""Whole blocks of the sm80 kernels on a CPU, against float64: the hooks of their loops, masks, softmax, statistics.

As in test_sm80_fragments.py device code runs on arrays of one value for each lane; copies happen at once.
"""

import collections
import math
import threading
import types

import numpy as np
import pytest

from flashattn_hopper.spec.mask import Band, PythonArith, Seqlens
from flashattn_hopper.spec.problem import Traits
from flashattn_hopper.spec.tile import Sm80BwdTile, Sm80FwdTile, Sm80SumTile

from . import cases
from .test_sm80_fragments import BASE, LANES, Fragment, device_code, filled, matrix, memory  # noqa: F401

pytestmark = pytest.mark.own_process  # device functions run on numpy: no compiler may have rewritten them before

# Modules of kernels/common and kernels/sm80, imported when a test runs: see cases.device_code.
mask = softmax = walk = work = backward = forward = mainloop = one_pass = products = shared = None


@pytest.fixture(scope="module", autouse=True)
def more_device_code():
    common = [f"common.{name}" for name in ("mask", "softmax", "walk", "work")]
    names = [*common, *(f"sm80.{name}" for name in ("backward", "forward", "mainloop", "one_pass", "products", "shared"))]
    globals().update(zip((name.split(".")[1] for name in names), cases.device_code(*names)))


BANDS = {"full": Band(), "causal": Band(None, 0), "window": Band(37, 11), "negative": Band(60, -5)}
SEQLENS = [(1, 1), (110, 170), (170, 70)]
each_mask = pytest.mark.parametrize("band", BANDS.values(), ids=BANDS)
each_length = pytest.mark.parametrize("seqlens", SEQLENS, ids=str)


def same(x):
    return x


@pytest.fixture
def device(monkeypatch, memory):  # noqa: F811
    """Arithmetic of the device on arrays, control flow on the numbers that all lanes share."""
    arch = types.SimpleNamespace(
        fmax=np.maximum,
        fmin=lambda a, b, nan: np.minimum(a, b),
        exp2=np.exp2,
        shuffle_sync_bfly=lambda x, offset: x[LANES ^ offset],
        vote_any_sync=lambda flag: bool(flag.any()),
        rcp_approx=lambda x: 1 / x,
    )
    cute = types.SimpleNamespace(
        arch=arch,
        size=len,
        make_rmem_tensor=lambda size, dtype: Fragment([None] * size),
        math=types.SimpleNamespace(log2=lambda x, fastmath: np.log2(x)),
    )
    cutlass = types.SimpleNamespace(
        select_=np.where,
        min=np.minimum,
        max=np.maximum,
        range=lambda n, unroll: range(n),
        range_constexpr=range,
    )
    pairs = lambda s, dtype=None: [np.stack(s[2 * i : 2 * i + 2], -1) for i in range(len(s) // 2)]
    for module in (mask, softmax, walk, mainloop, one_pass, products, forward, backward):
        for name, value in {
            "cute": cute,
            "cutlass": cutlass,
            "const_expr": same,
            "Float32": same,
            "Int32": same,
        }.items():
            monkeypatch.setattr(module, name, value, raising=False)
    monkeypatch.setattr(forward, "DeviceArith", PythonArith)
    monkeypatch.setattr(mainloop.InOrder, "packed", lambda self, s: pairs(s))
    for module in (products, one_pass):
        monkeypatch.setattr(module, "packed", pairs)
    plain = [
        (softmax.Softmax, "update", "settle", "finish"),
        (mainloop.InOrder, "begin", "first_update"),
        (walk.Walk, "kv"),
        (forward.Forward, "attempt"),
        (backward.Queries, "begin"),
        (backward.Backward, "key_tile"),
        (one_pass.OnePass, "step", "hide", "query_of"),
    ]
    for owner, *names in plain:
        for name in names:
            monkeypatch.setattr(owner, name, getattr(owner, name).__wrapped__)
    return memory


class AtOnce:
    """The pipeline: tile n of K and V is in its stage when it is asked for."""

    def __init__(self, memory, rings, values, stages):  # noqa: F811
        self.memory, self.rings, self.values, self.stages = memory, rings, values, stages

    def start(self, n): ...

    def before_scores(self, n, slot, first):
        for ring, values in zip(self.rings, self.values):
            put(self.memory, ring, slot, values, n)

    def before_values(self, n): ...

    def next(self, slot):
        return (slot + 1) % self.stages


def put(memory, ring, stage, values, block):  # noqa: F811
    """Tile `block` of `values` into a stage, zeros beyond its end."""
    tile = np.zeros((ring.rows, ring.width))
    part = values[block * ring.rows : (block + 1) * ring.rows]
    tile[: len(part)] = part
    filled(memory, ring, stage, tile)


def made(seqlens, headdim):
    rng = np.random.default_rng(sum(seqlens))
    q, k, v, do = (rng.normal(size=(n, headdim)) for n in (seqlens.q, seqlens.k, seqlens.k, seqlens.q))
    return q, k, v, do


def dense(q, k, v, band, seqlens, scale):
    """(P, out, lse) in float64, natural logarithm; rows without keys are 0 and -inf."""
    seen = band.keep(np.arange(seqlens.q)[:, None], np.arange(seqlens.k)[None, :], seqlens)
    scores = np.where(seen, q @ k.T * scale, -np.inf)
    top = scores.max(1, keepdims=True)
    top = np.where(np.isinf(top), 0.0, top)
    weights = np.exp(scores - top)
    total = weights.sum(1, keepdims=True)
    P = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
    with np.errstate(divide="ignore"):
        return P, P @ v, (np.log(total) + top)[:, 0]


class Tensor:
    """An operand (B, S, H, D) of one head, as far as a kernel looks at it."""

    def __init__(self, values):
        self.values, self.shape = values, (1, len(values), 1, values.shape[1])


@each_mask
@each_length
@pytest.mark.parametrize("tile", [Sm80FwdTile(64, 32), Sm80FwdTile(128, 32, q_in_registers=True)], ids=str)
@pytest.mark.parametrize("exact", [False, True], ids=["optimistic", "exact"])
@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
def test_the_forward_of_a_block(device, monkeypatch, tile, band, seqlens, exact):
    seqlens, headdim, scale = Seqlens(*seqlens), 64, 0.11
    q, k, v, _ = made(seqlens, headdim)
    _, out, lse = dense(q, k, v, band, seqlens, scale)
    sQ = shared.Swizzled(BASE, tile.tile_m, headdim)
    sK = shared.Swizzled(sQ.stage(1), tile.tile_n, headdim)
    sV = shared.Swizzled(sK.stage(tile.num_stages), tile.tile_n, headdim)
    kernel = forward.Forward(Traits("fwd", "bf16", headdim, headdim, "window"), tile)
    dev = types.SimpleNamespace(q=Tensor(q), k=Tensor(k), v=Tensor(v))
    monkeypatch.setattr(kernel, "band", lambda dev: band, raising=False)
    monkeypatch.setattr(forward, "rows_of", lambda tensor, head, batch, tile, tidx, threads: (tile, tensor.values))

    def staged(query, key, value, m_block, last, stages=1):
        put(device, *query[:1], 0, query[1], m_block)
        return AtOnce(device, (key[0], value[0]), (key[1], value[1]), stages)

    monkeypatch.setattr(forward, "Staged", staged)
    scale_log2 = scale * math.log2(math.e)
    for m_block in range(-(-seqlens.q // tile.tile_m)):
        for w in range(tile.num_warps):
            pair = lambda: Fragment([None] * 2)
            atoms = [
                mainloop.Atom(softmax.Softmax(pair(), pair(), scale_log2, 2.0**40), Fragment([None] * (headdim // 2)))
                for _ in range(tile.atoms)
            ]
            first = w * 16 * tile.atoms
            at, place = work.Work(m_block, 0, 0), forward.Place(None, LANES, first)
            monkeypatch.setattr(kernel, "anew", lambda dev, found=(at, place): (dev, *found), raising=False)
            bad = kernel.attempt(dev, forward.Shared(sQ, sK, sV), atoms, exact)
            assert not bad.any() or exact
            for i, atom in enumerate(atoms):
                if exact:
                    atom.softmax.bias[:] = [bias * scale_log2 for bias in atom.softmax.bias]
                inverse, logs = atom.softmax.finish(False)
                atom.softmax.rescale(atom.O, inverse)
                begin = m_block * tile.tile_m + first + 16 * i
                visible = min(16, seqlens.q - begin)
                if visible > 0:
                    found = np.stack(logs)[:, ::4].flatten()  # rows 0 to 7, 8 to 15
                    np.testing.assert_allclose(matrix(atom.O, headdim)[:visible], out[begin:][:visible], atol=1e-12)
                    np.testing.assert_allclose(found[:visible], lse[begin:][:visible], rtol=1e-12)


class Stats:
    """What prepare leaves: (lse in log2 units, delta) of padded rows of every head; `load` gives the lanes' own."""

    def __init__(self, heads):
        self.rows = []
        for lse, delta in heads:
            sees, padded = np.isfinite(lse), np.zeros((-(-len(lse) // 128) * 128, 2))
            padded[:, 0] = np.inf
            padded[: len(lse)][sees] = np.stack([lse * math.log2(math.e), delta], -1)[sees]
            self.rows.append(padded)

    def __call__(self, stats, head_row, seqlen_q, first, count):
        return types.SimpleNamespace(
            load=lambda: [self.rows[head_row][first + i // 2, i % 2] for i in range(2 * count)]
        )


class Copies:
    """Stands in for Rows: tiles of one head arrive at once; `offset` counts heads."""

    def __init__(self, memory, tensor, head, tile):  # noqa: F811
        self.memory, self.tensor, self.head, self.tile = memory, tensor, head, tile

    def copy(self, block, stage, ragged, offset=0):
        put(self.memory, self.tile, stage, self.tensor.values[self.head + offset // 2], block)


class Heads(Tensor):
    """An operand (1, S, H, D); two bytes from a head to the next."""

    stride = (0, 0, 1, 1)

    def __init__(self, values):
        self.values, self.shape = values, (1, len(values[0]), len(values), values[0].shape[1])


@pytest.fixture
def gradient_kernels(device, monkeypatch):
    """(run, dims) -> what every warp of every block stores: {(kernel, head, row): (16, width)}."""
    arch = backward.cute.arch
    arch.cp_async_commit_group = lambda: None
    arch.thread_idx = lambda: (None,)
    backward.cute.ceil_div = lambda a, b: -(-a // b)
    same_names = ("operand_again", "again", "Int64")
    for name in same_names:
        monkeypatch.setattr(backward, name, same)
    monkeypatch.setattr(backward, "thread_again", lambda: None)
    monkeypatch.setattr(backward, "landed", lambda pending: None)
    monkeypatch.setattr(backward, "DeviceArith", PythonArith)
    monkeypatch.setattr(backward.InOrder, "work", backward.InOrder.work.__wrapped__)
    monkeypatch.setattr(backward, "order_of", lambda mask, extent, size: backward.InOrder(extent))

    def staged(query, key, value, m_block, last, stages):
        query.copy(m_block, 0, True)
        heads = key.head, value.head
        values = [x.tensor.values[head] for x, head in zip((key, value), heads)]
        return AtOnce(device, (key.tile, value.tile), values, stages)

    monkeypatch.setattr(backward, "Staged", staged)

    def run(kernel, name, dev, blocks, *addresses):
        tile, headdim, stored = kernel.tile, kernel.headdim, {}
        sizes = (tile.tile_n, tile.tile_n, tile.tile_m, tile.tile_m)
        memory_of, at = [], BASE
        for rows, stages in zip(sizes, (1, 1, 2, 2)):
            memory_of.append(shared.Swizzled(at, rows, headdim))
            at = memory_of[-1].stage(stages)
        kernel.memory = lambda resident, streaming: memory_of
        kernel.copier = lambda tensor, head, batch, tile, tidx: Copies(device, tensor, head, tile)

        def store(acc, where, address, width, extents, head, block, lane, first):
            stored[address, head, block * where.rows + first] = matrix(acc, width)

        kernel.store = store
        for linear in range(blocks):
            arch.block_idx = lambda linear=linear: (linear,)
            for first in range(0, tile.tile_n, 16):
                kernel.place = lambda tidx, first=first: (None, LANES, first)
                getattr(backward.Backward, name).__wrapped__(kernel, dev, *addresses)
        return stored

    return run


def grouped(seqlens, headdim, band, scale, group):
    """Operands of `group` query heads of one head of K and V, their (P, out, lse), deltas, and gradients by name and
    head."""
    _, k, v, _ = made(seqlens, headdim)
    rng = np.random.default_rng(1)
    q, do = (rng.normal(size=(group, seqlens.q, headdim)) for _ in range(2))
    heads = [dense(one, k, v, band, seqlens, scale) for one in q]
    deltas = [(out * d).sum(1) for (_, out, _), d in zip(heads, do)]
    dS = [P * (d @ v.T - delta[:, None]) * scale for (P, _, _), d, delta in zip(heads, do, deltas)]
    expected = {
        "dk": {0: sum(s.T @ one for s, one in zip(dS, q))},
        "dv": {0: sum(P.T @ d for (P, _, _), d in zip(heads, do))},
        "dq": {head: s @ k for head, s in enumerate(dS)},
    }
    return q, k, v, do, heads, deltas, expected


@each_mask
@each_length
@pytest.mark.parametrize("tile", [Sm80BwdTile(32, 64), Sm80BwdTile(64)], ids=str)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_the_backward(gradient_kernels, monkeypatch, tile, band, seqlens):
    """Three query heads share one head of K and V."""
    seqlens, headdim, scale, group = Seqlens(*seqlens), 64, 0.11, 3
    q, k, v, do, heads, deltas, expected = grouped(seqlens, headdim, band, scale, group)
    monkeypatch.setattr(backward, "statistics", Stats([(lse, delta) for (_, _, lse), delta in zip(heads, deltas)]))
    kernel = backward.Backward(Traits("bwd", "bf16", headdim, headdim), tile)
    kernel.band = lambda dev: band
    dev = backward.Device(Heads(q), Heads([k]), Heads([v]), Heads(do), None, scale, None, None)
    blocks = lambda seqlen: -(-seqlen // tile.tile_n)
    stored = gradient_kernels(kernel, "keys", dev, blocks(seqlens.k), "dk", "dv")
    stored |= gradient_kernels(kernel, "queries", dev, blocks(seqlens.q) * group, "dq")
    seen = {name: np.zeros((len(of), len(of[0]))) for name, of in expected.items()}
    for (name, head, begin), rows in stored.items():
        exact = expected[name][head][begin : begin + 16]
        np.testing.assert_allclose(rows[: len(exact)], exact, atol=1e-11, err_msg=f"{name}, head {head}, row {begin}")
        seen[name][head, begin : begin + 16] += 1
    assert all((count == 1).all() for count in seen.values()), "rows that nobody stores, or two warps"


class Block:
    """The warps of a thread block as threads: barriers, sums in memory, and what is stored."""

    def __init__(self, memory, tile):  # noqa: F811
        self.memory, self.tile, self.lock = memory, tile, threading.Lock()
        self.sums, self.stored, self.own = collections.defaultdict(float), {}, threading.local()
        whole, teams = threading.Barrier(tile.num_warps), range(1, 1 + tile.num_warps // tile.split)
        self.barriers = {0: whole} | {team: threading.Barrier(tile.split) for team in teams}

    def barrier(self, barrier_id=0, number_of_threads=None):
        meeting = self.barriers[barrier_id]
        assert number_of_threads in (None, 32 * meeting.parties)
        meeting.wait(20)

    def word(self, address, count):
        """A word of two numbers for every lane."""
        assert count == 1 and not (address % 4).any()
        banks = address // 4 % 32
        assert len(set(banks)) == 32, "a bank conflict"

        def put(_, i, word):
            for j in range(2):
                self.memory.halves[address // 2 + j] = word[:, j]

        return type("Word", (), {"__setitem__": put})()

    def floats(self, address):
        return [self.memory.halves[(address + 4 * j) // 2] for j in range(4)]

    def add(self, target, values, vector):
        with self.lock:
            for e, value in enumerate(values):
                for address, x in zip(target + (4 if vector else 128) * e, value):
                    self.sums[address // 4] += x

    def run(self, body):
        """body() for each warp, all at once; `own.index` is its number."""

        def warp(index):
            self.own.index = index
            try:
                body()
            except BaseException as error:
                failed.append(error)
                for meeting in self.barriers.values():
                    meeting.abort()

        failed = []
        threads = [threading.Thread(target=warp, args=(i,)) for i in range(self.tile.num_warps)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in failed:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        assert not failed, "warps wait for each other"


ONE_PASS = [
    ((64, 64), Sm80SumTile(64, 128, num_warps=4, step=32, vector=True)),
    ((64, 64), Sm80SumTile(128, 128, split=2)),
    ((128, 128), Sm80SumTile(64, 128, split=2, vector=True)),
    ((128, 128), Sm80SumTile(64, 128, split=2, late=False)),
    ((128, 128), Sm80SumTile(64, 128, split=2, staggered=True)),
    ((128, 128), Sm80SumTile(64, 128)),
    ((256, 256), Sm80SumTile(64, 64, split=4)),
]


@pytest.mark.parametrize("band", [BANDS["causal"], BANDS["window"]], ids=["causal", "window"])
@pytest.mark.parametrize("seqlens", [(1, 1), (150, 170)], ids=str)
@pytest.mark.parametrize("dims, tile", ONE_PASS, ids=str)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_the_backward_in_one_pass(gradient_kernels, device, monkeypatch, dims, tile, band, seqlens):
    """Three query heads share one head of K and V."""
    seqlens, headdim, scale, group = Seqlens(*seqlens), dims[0], 0.11, 3
    q, k, v, do, heads, deltas, expected = grouped(seqlens, headdim, band, scale, group)
    block = Block(device, tile)
    arch = backward.cute.arch
    arch.sync_threads, arch.barrier = block.barrier, block.barrier
    monkeypatch.setattr(backward, "landed", lambda pending: block.barrier())
    for module in (backward, one_pass):
        monkeypatch.setattr(module, "thread_again", lambda: LANES)
    monkeypatch.setattr(one_pass, "shared_words", block.word)
    monkeypatch.setattr(one_pass, "shared_floats", block.floats)
    monkeypatch.setattr(one_pass, "add_to_memory", block.add)
    monkeypatch.setattr(one_pass.cutlass, "range", lambda n, unroll: range(n))
    kernel = backward.Backward(Traits("bwd", "bf16", *dims), tile)
    kernel.band = lambda dev: band
    tiles, at = [], BASE
    for rows, width, stages in (
        *[(tile.tile_n, headdim, 1)] * 2,
        *[(tile.tile_m, headdim, 2)] * 2,
        (tile.tile_n, tile.tile_m, 1),
        (tile.tile_n, tile.tile_m, 1 + tile.late),
    ):
        tiles.append(shared.Swizzled(at, rows, width))
        at = tiles[-1].stage(stages)
    if tile.split == 1:
        tiles[4] = None
    stats = Stats([(lse, delta) for (_, _, lse), delta in zip(heads, deltas)])
    kernel.shared_tiles = lambda: (tiles, at)
    kernel.copier = lambda tensor, head, batch, tile, tidx: Copies(device, tensor, head, tile)

    def copy_tile(dev, rings, batch, head, m, stage):
        for tensor, ring in zip((dev.q, dev.do), rings):
            put(device, ring, stage, tensor.values[head], m)
        rows = stats.rows[head][m * tile.tile_m : (m + 1) * tile.tile_m].flatten()
        device.halves[(rings[2] + stage * 8 * tile.tile_m) // 2 + 2 * np.arange(len(rows))] = rows

    kernel.copy_tile = copy_tile
    kernel.where = lambda tidx: one_pass.Warp(LANES, block.own.index, *divmod(block.own.index, tile.split))
    found = {name: np.full((seqlens.k, headdim), np.nan) for name in ("dk", "dv")}

    class Outlet:
        def __init__(self, place, lane, dtype):
            self.width, self.rows = place.width, {}

        def stage(self, acc, row):
            self.rows[row] = matrix(acc, self.width)

        def store(self, row, rows, address, row_bytes, limit, width):
            base, offset = divmod(address, 1 << 30)
            first, column = offset // row_bytes, offset % row_bytes // 2
            assert (row, rows, row_bytes) == (0, 16 * len(self.rows), 2 * headdim)
            assert (limit, width) == (seqlens.k - first, headdim - column)
            values = np.concatenate([self.rows[i] for i in range(0, rows, 16)])
            target = found[("dk", "dv")[base - 1]][first : first + rows, column : column + self.width]
            assert np.isnan(target).all(), "stored twice"
            target[:] = values[: len(target)]

    monkeypatch.setattr(backward, "Outlet", Outlet)
    dev = backward.Device(Heads(q), Heads([k]), Heads([v]), Heads(do), None, scale, None, None)
    for linear in range(-(-seqlens.k // tile.tile_n)):
        arch.block_idx = lambda linear=linear: (linear,)
        block.run(lambda: backward.Backward.gradients.__wrapped__(kernel, dev, 0, 1 << 30, 2 << 30))
    np.testing.assert_allclose(found["dk"], expected["dk"][0], atol=1e-11)
    np.testing.assert_allclose(found["dv"], expected["dv"][0], atol=1e-11)
    found = finished(kernel, monkeypatch, block.sums, (1, seqlens.q, group, headdim), scale)
    for head in range(group):
        np.testing.assert_allclose(found[:, head], expected["dq"][head], atol=1e-11, err_msg=f"dq, head {head}")


def finished(kernel, monkeypatch, sums, shape, scale):
    """dQ (S, H, D) as `finish` makes it of its sums, thread by thread."""
    _, seqlen_q, heads, headdim = shape
    out = np.full(seqlen_q * heads * headdim, np.nan)
    BEYOND = 1 << 40

    class Values(list):
        iterator = property(lambda self: Part(self, 0))

    class Part:
        def __init__(self, values, first):
            self.values, self.first = values, first

        def __add__(self, n):
            return Part(self.values, self.first + n)

    class View:
        def __init__(self, at, count):
            self.at, self.count = at, count

        def load(self):
            if isinstance(self.at, Part):
                return self.at.values[self.at.first : self.at.first + self.count]
            assert self.at % 16 == 0
            return np.array([sums[self.at // 4 + i] for i in range(self.count)])

        def store(self, values):
            first = (self.at - BEYOND) // 2
            assert self.at % 16 == 0 and np.isnan(out[first : first + 8]).all()
            out[first : first + 8] = values

    cute = types.SimpleNamespace(
        arch=types.SimpleNamespace(),
        ceil_div=lambda a, b: -(-a // b),
        make_rmem_tensor=lambda size, dtype: Values([None] * size),
        make_tensor=View,
        make_layout=same,
    )
    monkeypatch.setattr(backward, "cute", cute)
    monkeypatch.setattr(backward, "at", lambda dtype, address, align: address)
    monkeypatch.setattr(backward, "to_half", lambda src, dst: dst.__setitem__(slice(None), src))
    for linear in range(-(-seqlen_q // 128) * heads):
        cute.arch.block_idx = lambda linear=linear: (linear,)
        for thread in range(backward.PREPARE_THREADS):
            cute.arch.thread_idx = lambda thread=thread: (thread,)
            backward.Backward.finish.__wrapped__(kernel, types.SimpleNamespace(shape=shape), 0, BEYOND, scale)
    return out.reshape(seqlen_q, heads, headdim)
