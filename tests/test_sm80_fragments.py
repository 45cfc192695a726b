"""The data path of sm80.forward on a CPU: addresses, fragments and the order of copies, with instructions stood in for.

Device code runs on arrays of one value for each lane. ldmatrix, mma and cp.async do what the PTX manual says.
"""

import types

import numpy as np
import pytest
import torch

from flashattn_hopper.kernels.sm80 import specs
from flashattn_hopper.spec.problem import Traits
from flashattn_hopper.spec.tile import Sm80FwdTile

from . import cases

pytestmark = pytest.mark.own_process  # device functions run on numpy: no compiler may have rewritten them before

# Modules of kernels/sm80, imported when a test runs: see cases.device_code.
copies = epilogue = forward = mainloop = pipeline = products = shared = warp = None

LANES = np.arange(32)
BASE = 4096
SIZES = [(128, 64), (128, 96), (32, 128), (64, 192), (128, 256)]
TILES = {
    (dims, tile): None for table in (specs.LARGE, specs.SMALL) for dims, tile in ((row.dims, row.tile) for row in table)
} | {((64, 64), Sm80FwdTile(64, 32)): None, ((96, 96), Sm80FwdTile(128, 64, num_warps=8, num_stages=3)): None}
each_tile = pytest.mark.parametrize("dims, tile", TILES, ids=str)


@pytest.fixture(scope="module", autouse=True)
def device_code():
    names = ("copies", "epilogue", "forward", "mainloop", "pipeline", "products", "shared", "warp")
    globals().update(zip(names, cases.device_code(*(f"sm80.{name}" for name in names))))


class Memory:
    """Shared memory of 16-bit numbers, by byte address. What nobody wrote is NaN."""

    def __init__(self):
        self.halves = np.full(1 << 17, np.nan)

    def ldmatrix(self, address, transpose=False):
        """Four words, each of two numbers for every lane."""
        assert address.shape == (32,) and not (address % 16).any()
        words = []
        for matrix in range(4):
            rows = address[8 * matrix : 8 * matrix + 8]
            banks = (rows // 16) % 8
            assert len(set(banks)) == 8, "a bank conflict"
            m = np.stack([self.halves[a // 2 : a // 2 + 8] for a in rows])
            m = m.T if transpose else m
            words.append(np.stack([m[LANES // 4, 2 * (LANES % 4)], m[LANES // 4, 2 * (LANES % 4) + 1]], -1))
        return words


def mma(dtype, acc, a, b):
    """D = A B + C of m16n8k16, from and to the registers of 32 lanes."""
    g, t = LANES // 4, LANES % 4
    A, B, C = np.zeros((16, 16)), np.zeros((16, 8)), np.zeros((16, 8))
    for i, (row, column) in enumerate(((0, 0), (8, 0), (0, 8), (8, 8))):
        for j in range(2):
            A[g + row, 2 * t + j + column] = a[i][:, j]
    for i in range(2):
        for j in range(2):
            B[2 * t + j + 8 * i, g] = b[i][:, j]
    where = [(g + 8 * (i // 2), 2 * t + i % 2) for i in range(4)]
    for i, place in enumerate(where):
        C[place] = acc[i]
    D = A @ B + C
    return [D[place] for place in where]


class Fragment(list):
    def fill(self, value):
        self[:] = [np.full(32, value) for _ in self]


@pytest.fixture
def memory(monkeypatch):
    memory = Memory()
    monkeypatch.setattr(shared, "ldmatrix", memory.ldmatrix)
    monkeypatch.setattr(warp, "mma", mma)
    monkeypatch.setattr(mainloop.cute, "make_rmem_tensor", lambda size, dtype: Fragment([None] * size))
    return memory


def places(tile, stage, row):
    """Where the chunks of a row begin in Memory.halves, from left to right."""
    for chunk in range(tile.width // 8):
        unit, within = divmod(chunk, tile.unit // 8)
        yield (tile.stage(stage) + tile.chunk(row, within) + unit * tile.unit_bytes) // 2


def chunks(memory, tile, stage, row):
    return np.concatenate([memory.halves[at : at + 8] for at in places(tile, stage, row)])


def filled(memory, tile, stage, values):
    """Put `values` (rows, width) into a stage, chunk by chunk."""
    for row in range(tile.rows):
        for i, at in enumerate(places(tile, stage, row)):
            memory.halves[at : at + 8] = values[row, 8 * i : 8 * i + 8]


@pytest.mark.parametrize("rows, width", SIZES)
def test_a_swizzled_tile_holds_every_chunk_once(rows, width):
    tile = shared.Swizzled(BASE, rows, width)
    lanes = range(tile.unit // 8)
    found = [at for row in range(rows) for at in places(tile, 0, row)]
    assert sorted(found) == list(range(BASE // 2, (BASE + tile.stage_bytes) // 2, 8))
    assert tile.stage_bytes == 2 * rows * width
    assert all(tile.chunk(r + 8, c) - tile.chunk(r, c) == 8 * tile.row_bytes for r in range(rows - 8) for c in lanes)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("rows, width", SIZES)
def test_a_reader_finds_every_block(memory, rows, width, transpose):
    tile = shared.Swizzled(BASE, rows, width)
    values = np.arange(rows * width, dtype=float).reshape(rows, width)
    filled(memory, tile, 1, values)
    lane = shared.rows_first(tile, LANES)
    reader = shared.Reader(tile, lane, transpose)
    for row in range(0, rows, 16):
        for column in range(0, width, 16):
            words = reader.block(reader.start(1), row, column)
            for i, (r, c) in enumerate(((0, 0), (8, 0), (0, 8), (8, 8))):
                block = values[row + r : row + r + 8, column + c : column + c + 8]
                block = block.T if transpose else block
                assert (words[i].reshape(8, 8) == block).all()


def loops(tile, dims, warp_index, slot, lane=LANES):
    """The main loop's hooks for one warp, and its tiles in memory."""
    q = shared.Swizzled(BASE, tile.tile_m, dims[0])
    k = shared.Swizzled(q.stage(1), tile.tile_n, dims[0])
    v = shared.Swizzled(k.stage(tile.num_stages), tile.tile_n, dims[1])
    first = warp_index * 16 * tile.atoms
    atoms = tuple(mainloop.Atom(None, Fragment([np.zeros(32)] * (dims[1] // 2))) for _ in range(tile.atoms))
    hooks = mainloop.InOrder(
        None, tile.tile_n, *dims, None,
        shared.Reader(q, shared.rows_first(q, lane, first)),
        shared.Reader(k, shared.columns_first(k, lane)),
        shared.Reader(v, shared.rows_first(v, lane), transpose=True),
        atoms, None, False,
        Fragment([None] * (tile.atoms * dims[0] // 4)) if tile.q_in_registers else None,
    )  # fmt: skip
    return hooks, (q, k, v)


def matrix(fragment, columns):
    """The 16 rows of an atom from its accumulator."""
    found = np.full((16, columns), np.nan)
    for i, value in enumerate(fragment):
        found[LANES // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (LANES % 4) + i % 2] = value
    return found


@each_tile
def test_products_of_a_tile(memory, dims, tile):
    """S and O of every warp are matrix products of the rows that are its own."""
    rng = np.random.default_rng(0)
    integers = lambda *shape: rng.integers(-3, 4, shape).astype(float)
    Q, K, V = integers(tile.tile_m, dims[0]), integers(tile.tile_n, dims[0]), integers(tile.tile_n, dims[1])
    slot = tile.num_stages - 1
    for w in range(tile.num_warps):
        hooks, tiles = loops(tile, dims, w, slot)
        for swizzled, stage, values in zip(tiles, (0, slot, slot), (Q, K, V)):
            filled(memory, swizzled, stage, values)
        if tile.q_in_registers:
            hooks.keep_q()
        S = hooks.scores(slot)
        P = [[np.stack(s[2 * i : 2 * i + 2], -1) for i in range(len(s) // 2)] for s in S]  # packed, not rounded
        hooks.values(P, slot)
        for i, (s, atom) in enumerate(zip(S, hooks.atoms)):
            first = 16 * (w * tile.atoms + i)
            expected = Q[first : first + 16] @ K.T
            assert (matrix(s, tile.tile_n) == expected).all()
            assert (matrix(atom.O, dims[1]) == expected @ V).all()


BACKWARD_ROWS = [
    row for table in (specs.BACKWARD.tiles, *(tiles for _, tiles in specs.BACKWARD.ports)) for row in table
]
OWN_QUERIES = dict.fromkeys((row.dims, row.tile) for row in BACKWARD_ROWS if row.tile.query_n)


@pytest.mark.parametrize("dims, tile", OWN_QUERIES, ids=str)
def test_products_of_the_backward(memory, dims, tile):
    """S and dP of queries that stay, and what dS adds to dQ in the kernel for it alone."""
    rng = np.random.default_rng(0)
    integers = lambda *shape: rng.integers(-3, 4, shape).astype(float)
    stay, come = integers(tile.query_m, dims[0]), integers(tile.query_n, dims[0])
    one = shared.Swizzled(BASE, tile.query_m, dims[0])
    ring = shared.Swizzled(one.stage(1), tile.query_n, dims[0])
    filled(memory, one, 0, stay)
    filled(memory, ring, 1, come)
    parts = products.Products(None, tile.query_n)
    for first in range(0, tile.query_m, 16):
        resident = shared.Reader(one, shared.rows_first(one, LANES, first))
        S = parts.scores(resident, shared.Reader(ring, shared.columns_first(ring, LANES)), dims[0], 1)
        expected = stay[first : first + 16] @ come.T
        assert (matrix(S, tile.query_n) == expected).all()
        words = [np.stack(S[2 * i : 2 * i + 2], -1) for i in range(len(S) // 2)]
        acc = products.fragment(dims[0])
        parts.add(acc, words, shared.Reader(ring, shared.rows_first(ring, LANES), transpose=True), dims[0], 1)
        assert (matrix(acc, dims[0]) == expected @ come).all()


class Recorded:
    """A (B, S, H, D) tensor of 16-bit numbers in one array, as rows_of reads it."""

    def __init__(self, tensor):
        self.tensor, self.shape, self.stride = tensor, tensor.shape, tensor.stride()
        self.iterator = types.SimpleNamespace(toint=lambda: 0)


@pytest.fixture
def copied(monkeypatch, memory):
    """cp.async into `memory` from `source`, with numbers of Python."""
    state = types.SimpleNamespace(memory=memory, source=None)

    def copy_chunk(target, source, num_bytes):
        assert num_bytes in (0, 16) and target % 16 == 0
        chunk = np.zeros(8)
        if num_bytes:
            chunk = state.source[source // 2 : source // 2 + 8]
        assert np.isnan(memory.halves[target // 2 : target // 2 + 8]).all(), "a chunk is copied twice"
        memory.halves[target // 2 : target // 2 + 8] = chunk

    plain = types.SimpleNamespace(select_=lambda c, a, b: a if c else b)
    monkeypatch.setattr(copies, "copy_chunk", copy_chunk)
    monkeypatch.setattr(copies, "cutlass", plain)
    monkeypatch.setattr(copies, "Int32", int)
    monkeypatch.setattr(copies, "Int64", int)
    return state


@each_tile
@pytest.mark.parametrize("short", [0, 8, 40], ids="short {}".format)
def test_tiles_are_copied_whole_and_padded_with_zeros(copied, dims, tile, short):
    """Rows beyond seqlen and columns beyond the caller's headdim become zeros; nothing outside is read."""
    for width, rows in ((dims[0] - short, tile.tile_m), (dims[1] - short, tile.tile_n)):
        compiled = width + short
        seqlen = 2 * rows + 5
        space = torch.full((2, 3, seqlen, width + 24), float("nan"), dtype=torch.float64)  # (B, H, S, D), padded rows
        numbers = space[..., :width]
        numbers.copy_(torch.arange(numbers.numel()).view(numbers.shape))
        tensor = Recorded(numbers.transpose(1, 2))
        copied.source = space.flatten().numpy()
        swizzled = shared.Swizzled(BASE, rows, compiled)
        for block in range(3):
            copied.memory.halves[:] = np.nan
            for thread in range(tile.num_threads):
                part = copies.rows_of(tensor, 2, 1, swizzled, thread, tile.num_threads)
                part.copy(block, 1, ragged=block == 2)
            expected = np.zeros((rows, compiled))
            there = min(rows, seqlen - block * rows)
            expected[:there, :width] = numbers[1, 2, block * rows :][:there].numpy()
            found = np.stack([chunks(copied.memory, swizzled, 1, row) for row in range(rows)])
            assert (found == expected).all()


# Out


class Pointer(int):
    """A global address of 32-bit elements."""

    def __add__(self, elements):
        return Pointer(int(self) + 4 * elements)


class Lane:
    """What one thread stores: `shared` words of two numbers, and 16 bytes or a float to a global address."""

    def __init__(self, monkeypatch, memory):
        self.memory, self.written = memory, {}
        tensor = lambda pointer, _: types.SimpleNamespace(store=lambda words: self.write(pointer, words))
        cute = types.SimpleNamespace(
            arch=types.SimpleNamespace(sync_warp=lambda: None),
            make_layout=lambda extent: extent,
            make_tensor=lambda pointer, extent: tensor(pointer, extent) if extent == 4 else Floats(self, pointer),
        )
        for module in (forward, epilogue):
            monkeypatch.setattr(module, "cute", cute)
            monkeypatch.setattr(module, "cutlass", types.SimpleNamespace(range_constexpr=range))
            monkeypatch.setattr(module, "Int64", int)
            monkeypatch.setattr(module, "at", lambda dtype, address, align: Pointer(address))
        monkeypatch.setattr(epilogue, "pack2", lambda lo, hi, dtype: (lo, hi))
        monkeypatch.setattr(epilogue, "shared_words", self.words)
        monkeypatch.setattr(epilogue.Outlet, "store", epilogue.Outlet.store.__wrapped__)

    def words(self, address, count):
        assert address % (4 * count) == 0
        halves = self.memory.halves[address // 2 : address // 2 + 2 * count]
        put = lambda i, word: halves.__setitem__(slice(2 * i, 2 * i + 2), word)
        return type("Words", (), {"__setitem__": lambda _, i, word: put(i, word), "load": lambda _: halves.copy()})()

    def write(self, pointer, value):
        assert int(pointer) not in self.written or self.again, "written twice"
        self.written[int(pointer)] = value


class Floats:
    def __init__(self, lane, pointer):
        self.lane, self.pointer = lane, pointer

    def __setitem__(self, i, value):
        self.lane.write(self.pointer + i, value)


@each_tile
@pytest.mark.parametrize("width_less, seqlen_q", [(0, 500), (8, 130), (24, 1)], ids=str)
def test_out_and_lse_are_stored_whole(monkeypatch, memory, dims, tile, width_less, seqlen_q):
    """Every element of the visible rows once, from the registers that hold it; nothing else."""
    lane_of = Lane(monkeypatch, memory)
    kernel = forward.Forward(Traits("fwd", "bf16", *dims), tile)
    heads, batch, width = 3, 2, dims[1] - width_less
    work = types.SimpleNamespace(m_block=(seqlen_q - 1) // tile.tile_m, head=1, batch=1)
    first_query = work.m_block * tile.tile_m
    dev = types.SimpleNamespace(
        q=types.SimpleNamespace(shape=(batch, seqlen_q, heads, dims[0])),
        v=types.SimpleNamespace(shape=(batch, 9, heads, width)),
        o=1 << 30,
        lse=1 << 40,
    )
    smem = types.SimpleNamespace(Q=shared.Swizzled(BASE, tile.tile_m, dims[0]))
    O = np.arange(tile.tile_m * dims[1], dtype=float).reshape(tile.tile_m, dims[1])
    for turn in range(2):  # a warp's lanes wait for each other in between: only the second time all words are there
        lane_of.written, lane_of.again = {}, turn == 0
        for thread in range(tile.num_threads):
            lane, first = thread % 32, thread // 32 * 16 * tile.atoms
            place = forward.Place(thread, lane, first)
            monkeypatch.setattr(kernel, "anew", lambda _, place=place: (dev, work, place), raising=False)
            atoms = []
            for i in range(tile.atoms):
                rows = first + 16 * i + lane // 4 + np.array([0, 8])
                held = [O[rows[j // 2 % 2], 8 * (j // 4) + 2 * (lane % 4) + j % 2] for j in range(dims[1] // 2)]
                softmax = types.SimpleNamespace(
                    finish=lambda exact, rows=rows: (None, rows + 0.5), rescale=lambda out, by: None
                )
                atoms.append(mainloop.Atom(softmax, held))
            undecorated(kernel, "store")(dev, smem, atoms)
    expected = {}
    for row in range(min(tile.tile_m, seqlen_q - first_query)):
        query = first_query + row
        expected[dev.lse + 4 * ((1 * heads + 1) * seqlen_q + query)] = row + 0.5
        for column in range(0, width, 8):
            element = ((1 * seqlen_q + query) * heads + 1) * width + column
            expected[dev.o + 2 * element] = O[row, column : column + 8]
    assert lane_of.written.keys() == expected.keys()
    assert all(np.array_equal(lane_of.written[at], value) for at, value in expected.items())


# The order of copies and barriers


class Stages:
    """Stands in for Rows: what is under way, what has arrived, and what may still be read."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def copy(self, block, stage, ragged):
        self.log.append(("copy", self.name, block, stage, ragged))


@pytest.fixture
def events(monkeypatch):
    log = []
    arch = types.SimpleNamespace(
        cp_async_commit_group=lambda: log.append(("commit",)),
        cp_async_wait_group=lambda n: log.append(("wait", n)),
        sync_threads=lambda: log.append(("sync",)),
    )
    plain = types.SimpleNamespace(select_=lambda c, a, b: a if c else b, range_constexpr=range)
    monkeypatch.setattr(pipeline, "cute", types.SimpleNamespace(arch=arch))
    monkeypatch.setattr(pipeline, "cutlass", plain)
    monkeypatch.setattr(pipeline, "Int32", int)
    return log


def undecorated(part, name):
    method = getattr(type(part), name)
    return getattr(method, "__wrapped__", method).__get__(part)


@pytest.mark.parametrize("last, first", [(0, 0), (0, 1), (3, 9), (2, 3), (0, 5)])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_every_tile_has_landed_before_it_is_read_and_is_read_before_it_is_overwritten(events, stages, last, first):
    """A walk from tile `first` down to `last`, played by the rules of cp.async groups."""
    rows = [Stages(name, events) for name in "QKV"]
    part = pipeline.Single(*rows, 7, last) if stages == 1 else pipeline.Staged(*rows, 7, last, stages)
    undecorated(part, "start")(first)
    slot = 0
    for n in range(first, last - 1, -1):
        undecorated(part, "before_scores")(n, slot, n == first)
        events.append(("read", "K", n, slot))
        if n == first:
            events.append(("read", "Q", 7, 0))
        undecorated(part, "before_values")(n)
        events.append(("read", "V", n, slot))
        slot = part.next(slot)
    group, groups, holds, dirty = [], [], {}, set()
    for event, *what in events:
        if event == "copy":
            name, block, stage, ragged = what
            assert (name, stage) not in dirty, "a warp may still read what is overwritten"
            assert ragged == (name == "Q" or block == first), "only the first tile of a walk can end the sequence"
            holds[name, stage] = None
            group.append((name, stage, block))
        elif event == "commit":
            groups.append(group)
            group = []
        elif event == "wait":
            for landed in groups[: len(groups) - what[0]]:
                for name, stage, block in landed:
                    holds[name, stage] = block
            del groups[: len(groups) - what[0]]
        elif event == "sync":
            dirty.clear()
        else:
            name, block, stage = what
            assert holds[name, stage] == block
            dirty.add((name, stage))
    assert not group and not any(groups), "copies that nobody waits for"
    copies_of = [what for event, *what in events if event == "copy"]
    assert len(copies_of) == 1 + 2 * (first - last + 1)
