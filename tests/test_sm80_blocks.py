"""Whole blocks of the sm80 kernels on a CPU, against float64: the hooks of their loops, masks, softmax, statistics.

As in test_sm80_fragments.py device code runs on arrays of one value for each lane; copies happen at once.
"""

import collections
import math
import threading
import types
from functools import partial

import numpy as np
import pytest

from flashattn_hopper.kernels.sm80.specs import BACKWARD
from flashattn_hopper.spec.mask import Band, PythonArith, Seqlens
from flashattn_hopper.spec.problem import Traits
from flashattn_hopper.spec.tile import Sm80BwdTile, Sm80FwdTile

from . import cases
from .test_sm80_fragments import BASE, LANES, Fragment, device_code, filled, matrix, memory  # noqa: F401

pytestmark = pytest.mark.own_process  # device functions run on numpy: no compiler may have rewritten them before

# Modules of kernels/common and kernels/sm80, imported when a test runs: see cases.device_code.
mask = softmax = walk = work = forward = mainloop = products = shared = None
backward_ends = key_gradient = key_products = query_gradient = None


@pytest.fixture(scope="module", autouse=True)
def more_device_code():
    common = [f"common.{name}" for name in ("mask", "softmax", "walk", "work")]
    gradients = ("backward_ends", "key_gradient", "key_products", "query_gradient")
    names = [*common, *(f"sm80.{name}" for name in ("forward", "mainloop", "products", "shared", *gradients))]
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
    for module in (mask, softmax, walk, mainloop, products, forward, key_gradient, key_products, query_gradient):
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
    for module in (products, key_products, query_gradient):
        monkeypatch.setattr(module, "packed", pairs)
    plain = [
        (softmax.Softmax, "update", "settle", "finish"),
        (mainloop.InOrder, "begin", "first_update"),
        (walk.Walk, "down"),
        (forward.Forward, "attempt"),
        (query_gradient.Queries, "begin"),
        (key_products.KeyProducts, "step", "hide", "late_query"),
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


def grouped(seqlens, headdim, band, scale, group):
    """Operands of `group` query heads of one head of K and V, their statistics as `prepare` leaves them, and their
    gradients by name and head."""
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
    return (q, k, v, do), Stats([(lse, delta) for (_, _, lse), delta in zip(heads, deltas)]), expected


def launched(operands, scale):
    q, k, v, do = operands
    return query_gradient.Device(Heads(q), Heads([k]), Heads([v]), Heads(do), None, scale, None, None)


@pytest.fixture
def gradients(device, monkeypatch):
    """What the kernels of the backward see of a GPU."""
    cute = key_gradient.cute
    cute.arch.cp_async_commit_group = lambda: None
    cute.arch.thread_idx = lambda: (None,)
    cute.ceil_div = lambda a, b: -(-a // b)
    for module in (key_gradient, key_products, query_gradient):
        for name, value in {
            "operand_again": same,
            "again": same,
            "Int64": same,
            "thread_again": lambda: LANES,
            "DeviceArith": PythonArith,
        }.items():
            monkeypatch.setattr(module, name, value, raising=False)
    monkeypatch.setattr(key_gradient.InOrder, "work", key_gradient.InOrder.work.__wrapped__)
    return device


def in_memory(*shapes):
    """(tiles of (rows, width, stages), one after the other; the address behind them); None for those of no stage."""
    tiles, at = [], BASE
    for rows, width, stages in shapes:
        tiles.append(shared.Swizzled(at, rows, width) if stages else None)
        at += 2 * rows * width * stages
    return tiles, at


class Block:
    """The warps of a thread block as threads: barriers, shared words, sums in global memory."""

    def __init__(self, memory, tile):  # noqa: F811
        self.memory, self.tile, self.lock = memory, tile, threading.Lock()
        self.sums, self.own = collections.defaultdict(float), threading.local()
        teams = range(1, 1 + tile.num_warps // tile.split)
        self.barriers = {0: threading.Barrier(tile.num_warps)} | {team: threading.Barrier(tile.split) for team in teams}

    def barrier(self, barrier_id=0, number_of_threads=None):
        meeting = self.barriers[barrier_id]
        assert number_of_threads in (None, 32 * meeting.parties)
        meeting.wait(60)

    def word(self, address, count):
        """A word of two numbers for every lane."""
        assert count == 1 and not (address % 4).any()
        assert len(set(address // 4 % 32)) == 32, "a bank conflict"

        def put(_, i, word):
            for j in range(2):
                self.memory.halves[address // 2 + j] = word[:, j]

        return type("Word", (), {"__setitem__": put})()

    def floats(self, address):
        """Floats are kept where their first half would lie."""
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


class Stored:
    """In place of Outlet: rows of a gradient that begins at `base`, each once."""

    def __init__(self, bases, seqlen, headdim):
        self.bases = bases
        self.found = {name: np.full((seqlen, headdim), np.nan) for name in bases.values()}

    def outlet(self, place, lane, dtype):
        rows = {}

        def store(row, count, address, row_bytes, limit, width):
            base, offset = divmod(address, 1 << 30)
            target = self.found[self.bases[base]]
            (first, column), (seqlen, headdim) = (offset // row_bytes, offset % row_bytes // 2), target.shape
            assert (row, count, row_bytes) == (0, 16 * len(rows), 2 * headdim)
            assert (limit, width) == (seqlen - first, headdim - column)
            part = target[first : first + count, column : column + place.width]
            assert np.isnan(part).all(), "stored twice"
            part[:] = np.concatenate([rows[i] for i in range(0, count, 16)])[: len(part)]

        stage = lambda acc, row: rows.__setitem__(row, matrix(acc, place.width))
        return types.SimpleNamespace(stage=stage, store=store)


# Every tile of the tables, and what none of them has: dQ summed at once by warps that share nothing, or in two stages.
TABLES = (BACKWARD.tiles, *(tiles for _, tiles in BACKWARD.ports))
KEY_TILES = [
    *dict.fromkeys((row.headdim, row.tile) for table in TABLES for row in table),
    (128, Sm80BwdTile(64)),
    (64, Sm80BwdTile(128, split=2)),
]


# Each tile has one row of one key, and one of the two ragged cases in turn.
KEY_CASES = [
    (*key_tile, *case)
    for i, key_tile in enumerate(KEY_TILES)
    for case in (("full", (1, 1)), (("causal", (150, 170)), ("window", (170, 70)))[i % 2])
]


@pytest.mark.parametrize("headdim, tile, band, seqlens", KEY_CASES, ids=str)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_dk_and_dv_and_sums_of_dq(gradients, monkeypatch, headdim, tile, band, seqlens):
    """Three query heads share one head of K and V."""
    seqlens, band, scale, group = Seqlens(*seqlens), BANDS[band], 0.11, 3
    operands, stats, expected = grouped(seqlens, headdim, band, scale, group)
    block, stored = Block(gradients, tile), Stored({1: "dk", 2: "dv"}, seqlens.k, headdim)
    arch = key_gradient.cute.arch
    arch.sync_threads = arch.barrier = block.barrier
    monkeypatch.setattr(key_gradient, "landed", lambda pending: block.barrier())
    monkeypatch.setattr(key_gradient, "Outlet", stored.outlet)
    monkeypatch.setattr(key_products, "shared_words", block.word)
    monkeypatch.setattr(key_products, "shared_floats", block.floats)
    monkeypatch.setattr(key_products, "add_to_memory", block.add)
    kernel = key_gradient.KeyGradient(Traits("bwd", "bf16", headdim, headdim), tile)
    rings = [(tile.tile_m, headdim, tile.num_stages)] * 2
    scores = [(tile.tile_n, tile.tile_m, stages) for stages in tile.score_stages]
    kernel.memory = lambda: in_memory(*[(tile.tile_n, headdim, 1)] * 2, *rings, *scores)
    kernel.copier = lambda tensor, head, batch, tile, tidx: Copies(gradients, tensor, head, tile)

    def copy_tile(dev, rings, lse, batch, head, m, stage):
        for tensor, ring in zip((dev.q, dev.do), rings):
            put(gradients, ring, stage, tensor.values[head], m)
        rows = stats.rows[head][m * tile.tile_m : (m + 1) * tile.tile_m].flatten()
        gradients.halves[(lse + stage * 8 * tile.tile_m) // 2 + 2 * np.arange(len(rows))] = rows

    kernel.copy_tile = copy_tile
    kernel.copy_next = partial(key_gradient.KeyGradient.copy_next.__wrapped__, kernel)
    kernel.where = lambda tidx: key_products.Warp(LANES, block.own.index, *divmod(block.own.index, tile.split))
    dev = launched(operands, scale)
    monkeypatch.setattr(key_gradient.Device, "band", lambda dev, mask: band)
    for linear in range(-(-seqlens.k // tile.tile_n)):
        arch.block_idx = lambda linear=linear: (linear,)
        block.run(lambda: key_gradient.KeyGradient.keys.__wrapped__(kernel, dev, 0, 1 << 30, 2 << 30))
    for name, found in stored.found.items():
        np.testing.assert_allclose(found, expected[name][0], atol=1e-11, err_msg=name)
    if not tile.summed:
        assert not block.sums
        return
    found = finished(tile, headdim, monkeypatch, block.sums, (1, seqlens.q, group, headdim), scale)
    for head in range(group):
        np.testing.assert_allclose(found[:, head], expected["dq"][head], atol=1e-11, err_msg=f"dq, head {head}")


def finished(tile, headdim, monkeypatch, sums, shape, scale):
    """dQ (S, H, D) as `finish` makes it of its sums, thread by thread."""
    _, seqlen_q, heads, _ = shape
    out, far = np.full(seqlen_q * heads * headdim, np.nan), 1 << 40

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
            first = (self.at - far) // 2
            assert self.at % 16 == 0 and np.isnan(out[first : first + 8]).all()
            out[first : first + 8] = values

    cute = types.SimpleNamespace(
        arch=types.SimpleNamespace(),
        ceil_div=lambda a, b: -(-a // b),
        make_rmem_tensor=lambda size, dtype: Values([None] * size),
        make_tensor=View,
        make_layout=same,
    )
    for name, value in {
        "cute": cute,
        "cutlass": types.SimpleNamespace(range_constexpr=range),
        "at": lambda dtype, address, align: address,
        "to_half": lambda src, dst: dst.__setitem__(slice(None), src),
        "Int64": same,
    }.items():
        monkeypatch.setattr(backward_ends, name, value)
    ends = backward_ends.Ends(Traits("bwd", "bf16", headdim, headdim), tile)
    for linear in range(-(-seqlen_q // 128) * heads):
        cute.arch.block_idx = lambda linear=linear: (linear,)
        for thread in range(backward_ends.THREADS):
            cute.arch.thread_idx = lambda thread=thread: (thread,)
            backward_ends.Ends.finish.__wrapped__(ends, types.SimpleNamespace(shape=shape), 0, far, scale)
    return out.reshape(seqlen_q, heads, headdim)


@each_mask
@each_length
@pytest.mark.parametrize(
    "tile", [Sm80BwdTile(32, query_n=32, query_m=64), Sm80BwdTile(64, query_n=64)], ids=lambda tile: f"{tile.query_m}"
)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_dq_of_its_own_kernel(gradients, monkeypatch, tile, band, seqlens):
    """Three query heads share one head of K and V."""
    seqlens, headdim, scale, group = Seqlens(*seqlens), 64, 0.11, 3
    operands, stats, expected = grouped(seqlens, headdim, band, scale, group)
    monkeypatch.setattr(query_gradient, "statistics", stats)
    monkeypatch.setattr(query_gradient, "order_of", lambda mask, extent, size: work.InOrder(extent))

    def staged(query, key, value, m_block, last, stages):
        query.copy(m_block, 0, True)
        values = [x.tensor.values[x.head] for x in (key, value)]
        return AtOnce(gradients, (key.tile, value.tile), values, stages)

    monkeypatch.setattr(query_gradient, "Staged", staged)
    monkeypatch.setattr(query_gradient.Device, "band", lambda dev, mask: band)
    kernel = query_gradient.QueryGradient(Traits("bwd", "bf16", headdim, headdim), tile)
    shapes = [(tile.query_m, headdim, 1)] * 2 + [(tile.query_n, headdim, 2)] * 2
    kernel.memory = lambda: in_memory(*shapes)[0]
    kernel.copier = lambda tensor, head, batch, tile, tidx: Copies(gradients, tensor, head, tile)
    found = np.full((group, seqlens.q, headdim), np.nan)

    def store(acc, where, address, width, extents, head, block, lane, first):
        part = found[head][block * where.rows + first :][:16]
        assert np.isnan(part).all(), "stored twice"
        part[:] = matrix(acc, width)[: len(part)]

    kernel.store = store
    for linear in range(-(-seqlens.q // tile.query_m) * group):
        query_gradient.cute.arch.block_idx = lambda linear=linear: (linear,)
        for first in range(0, tile.query_m, 16):
            kernel.place = lambda tidx, first=first: (None, LANES, first)
            query_gradient.QueryGradient.queries.__wrapped__(kernel, launched(operands, scale), "dq")
    np.testing.assert_allclose(found, np.stack([*expected["dq"].values()]), atol=1e-11)
