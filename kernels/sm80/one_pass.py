"""dQ, dK and dV in one kernel of five products, with dQ summed in float32 memory.

A thread block keeps tile_n keys, tiles of tile_m queries stream by. `split` warps form a team that shares keys:

    scores    S^T and dP^T of the team's keys, each warp for its part of the queries -> P^T, dS^T
    own       dV += P^T dO, dK += dS^T Q: the team's keys, each warp its part of the columns; first over its own
              queries, from registers
    others    then over those of the rest of its team, by way of shared memory
    query     dQ = dS K of a part of the tile, from the dS of every warp, added to memory
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from flashattn_hopper.spec.tile import ROW_PAD as PAD

from ..common.convert import to_half
from ..common.tensors import at
from ..common.work import thread_again
from .epilogue import shared_words
from .products import Products, differentiate, fragment, packed
from .shared import CHUNK, Reader, Swizzled, columns_first, rows_first
from .warp import accumulate, add_to_memory


def shared_floats(address):
    """Four floats at a shared address."""
    pointer = cute.make_ptr(Float32, address, cute.AddressSpace.smem, assumed_align=16)
    return cute.make_tensor(pointer, cute.make_layout(4)).load()


@dataclass(frozen=True)
class Warp:
    """Where a warp is."""

    lane: Int32
    index: Int32
    team: Int32
    member: Int32


@dataclass(frozen=True)
class Writer:
    """Words of an accumulator to rows of a tile, from the place of this lane on."""

    tile: Swizzled
    lane: Int32  # bytes to the word of this lane at (0, 0)
    warp: Int32  # bytes to where the warp begins

    def put(self, words, index, row, column):
        """`words` of 16 rows from `row`, columns from `column` on, into a stage."""
        t = self.tile
        outer, inner = split_column(t, column)
        lane, start = self.lane ^ (2 * inner), t.stage(index) + (self.warp + outer)
        for i in range(cute.size(words) // 2):
            unit, within = divmod(CHUNK * i, t.unit)
            for r in range(2):
                place = (lane ^ (2 * within)) + (start + ((row + 8 * r) * t.row_bytes + unit * t.unit_bytes))
                shared_words(place, 1)[0] = words[2 * i + r]


def split_column(tile, column):
    """(bytes to the unit, column within it)"""
    return column // tile.unit * tile.unit_bytes, column % tile.unit


def product(dtype, accs, a, b, depth, width):
    """accs[i] += A_i B, 16 by `width`, over `depth`: a(i, k) and b(k, n) are their blocks of 16 by 16."""
    for k in range(0, depth, 16):
        left = [a(i, k) for i in range(len(accs))]
        for n in range(0, width, 16):
            right = b(k, n)
            for half in range(2):
                for acc, words in zip(accs, left):
                    accumulate(dtype, acc, n // 8 + half, words, right[2 * half : 2 * half + 2])


@dataclass(frozen=True)
class Operand:
    """How a warp reads a tile of Q or dO, `width` columns wide."""

    rows: Reader  # its own queries, for scores
    turned: tuple  # Readers of its part of the columns: over its own queries, then over those of each other member
    width: int
    part: int  # columns

    def words(self, reader, slot, first=0):
        """b(k, n) of `product`, with k in the queries from `first` on of those that `reader` begins with."""
        start = reader.start(slot) + first * reader.tile.row_bytes
        return lambda k, n: reader.block(start, k, n)


@dataclass(frozen=True)
class Exchange:
    """P^T or dS^T on the way to other warps."""

    writer: Writer
    others: tuple  # Readers: the team's keys, the queries of each other member


@dataclass(frozen=True)
class OnePass:
    """The parts of one warp. `step` is a tile."""

    tile: Any
    dtype: Any
    warp: Warp
    sums_of: Any  # padded row of all heads -> address of the sums of the tile that begins there
    k: Reader
    v: Reader
    q: Operand
    do: Operand
    p: Any  # Exchange; None where a warp has its keys alone
    ds: Exchange
    ds_turned: Reader
    k_turned: Reader
    mask_of: Any  # (key, query) of a lane in their tiles -> ColumnMask of `at_once` queries
    dK: tuple  # fragments, for every 16 keys
    dV: tuple

    def scores(self, stay, come, slot, first):
        """stay come^T of `at_once` queries from `first` on: a fragment for every 16 keys."""
        accs = [fragment(self.tile.at_once) for _ in self.dK]
        mine, theirs = stay.start(0), come.rows.start(slot) + first * come.rows.tile.row_bytes
        a = lambda i, k: stay.block(mine, 16 * i, k)
        b = lambda k, n: come.rows.block(theirs, n, k)
        product(self.dtype, accs, a, b, come.width, self.tile.at_once)
        return accs

    @cute.jit
    def step(self, stats, scale_log2, edge, m, slot, stage, before, follows):
        """`stats`: shared address of (lse, delta) of this lane's first query; `before`: padded row of the tile whose dQ
        `follows`."""
        t = self.tile
        if const_expr(t.at_once == t.queries):
            self.some(stats, scale_log2, edge, m, slot, stage, 0)
        else:
            # Why a loop: unrolled, the products of one turn are mixed with those of the next and take its registers.
            for turn in cutlass.range(t.queries // t.at_once, unroll=1):
                self.some(stats, scale_log2, edge, m, slot, stage, turn * t.at_once)
        if const_expr(t.late):
            if follows:
                self.query(self.sums_of(before), stage ^ 1)
        self.met()
        self.others(slot, stage)

    def some(self, stats, scale_log2, edge, m, slot, stage, first):
        """Scores of `at_once` of this warp's queries, and what they add to the columns that are its own."""
        t = self.tile
        S = self.scores(self.k, self.q, slot, first)
        dP = self.scores(self.v, self.do, slot, first)
        self.hide(S, first, m, edge)
        for column in range(0, t.at_once, 8):
            pair = shared_floats(stats + (first + column) * 8)
            for s, dp in zip(S, dP):
                for j in range(4):
                    differentiate(s, dp, column // 2 + j, scale_log2, pair[j % 2 * 2], pair[j % 2 * 2 + 1])
        P, dS = [packed(s, self.dtype) for s in S], [packed(dp, self.dtype) for dp in dP]
        for exchange, of, at_stage in ((self.p, P, 0), (self.ds, dS, stage)):
            if exchange is not None:
                for i, words in enumerate(of):
                    exchange.writer.put(words, at_stage, 16 * i, first)
        for grad, words, operand in ((self.dV, P, self.do), (self.dK, dS, self.q)):
            a = lambda i, k, words=words: [words[i][k // 4 + j] for j in range(4)]
            product(self.dtype, grad, a, operand.words(operand.turned[0], slot, first), t.at_once, operand.part)

    def others(self, slot, stage):
        """The same products over the queries of the rest of the team."""
        t = self.tile
        for other in range(t.split - 1):
            for grad, exchange, at_stage, operand in ((self.dV, self.p, 0, self.do), (self.dK, self.ds, stage, self.q)):
                reader = exchange.others[other]
                start = reader.start(at_stage)
                a = lambda i, k, reader=reader, start=start: reader.block(start, 16 * i, k)
                product(self.dtype, grad, a, operand.words(operand.turned[1 + other], slot), t.queries, operand.part)

    @cute.jit
    def hide(self, S, first, m, edge):
        if edge:
            self.mask(S, first, m)

    def mask(self, S, first, m):
        t, lane = self.tile, thread_again() % 32
        for i, s in enumerate(S):
            row, column = self.warp.team * t.keys + 16 * i + lane // 4, self.warp.member * t.queries + first
            self.mask_of(row, column + 2 * (lane % 4)).apply(s, m * (t.tile_m // t.at_once))

    def met(self):
        """The team's P and dS can be read; those of the whole block, where this tile's dQ follows."""
        t = self.tile
        if not t.late:
            cute.arch.sync_threads()
        elif t.split > 1:
            cute.arch.barrier(barrier_id=1 + self.warp.team, number_of_threads=32 * t.split)

    def query(self, target, stage):
        """dQ of this warp's part of a tile, added to the sums of the tile at `target`."""
        t, width = self.tile, self.q.width
        rows, columns = t.dq_part(width)
        target = target + (self.warp.index * (rows * columns * 4) + thread_again() % 32 * (16 if t.vector else 4))
        accs = [fragment(columns) for _ in range(rows // 16)]
        scores, keys = self.ds_turned.start(stage), self.k_turned.start(0)
        a = lambda i, k: self.ds_turned.block(scores, k, 16 * i)
        b = lambda k, n: self.k_turned.block(keys, k, n)
        product(self.dtype, accs, a, b, t.tile_n, columns)
        for i, acc in enumerate(accs):
            for j in range(columns // 8):
                place = (i * (columns // 8) + j) * 512
                add_to_memory(target + place, [acc[4 * j + e] for e in range(4)], t.vector)


def one_pass(tile, dtype, widths, tiles, warp, mask_of, sums_of):
    """The parts of a warp. `tiles`: K, V, Q, dO, P (or None) and dS in shared memory."""
    sK, sV, sQ, sdO, sP, sdS = tiles
    lane, first = warp.lane, warp.team * tile.keys
    members = [(warp.member + i) % tile.split * tile.queries for i in range(tile.split)] if tile.split > 1 else [0]

    def reader(lanes, of, row=0, column=0, transpose=False):
        """Of a warp that begins at (row, column): what is the same in a warp is kept apart from the lane."""
        outer, inner = split_column(of, column)
        return Reader(of, lanes(of, lane, 0, inner), transpose, row * of.row_bytes + outer)

    def operand(ring, width):
        part = width // tile.split
        column = warp.member * part if tile.split > 1 else 0
        turned = [reader(rows_first, ring, rows, column, transpose=True) for rows in members]
        return Operand(reader(columns_first, ring, members[0]), tuple(turned), width, part)

    def exchange(scores):
        outer, inner = split_column(scores, members[0])
        own = scores.place(lane // 4, inner) + 4 * (lane % 4)
        others = [reader(rows_first, scores, first, columns) for columns in members[1:]]
        return Exchange(Writer(scores, own, first * scores.row_bytes + outer), tuple(others))

    rows, columns = tile.dq_part(widths[0])
    across = widths[0] // columns
    part, column = warp.index // across * rows, warp.index % across * columns
    atoms = range(tile.keys // 16)
    return OnePass(
        tile,
        dtype,
        warp,
        sums_of,
        reader(rows_first, sK, first),
        reader(rows_first, sV, first),
        operand(sQ, widths[0]),
        operand(sdO, widths[1]),
        exchange(sP) if tile.split > 1 else None,
        exchange(sdS),
        reader(columns_first, sdS, 0, part, transpose=True),
        reader(rows_first, sK, 0, column, transpose=True),
        mask_of,
        tuple(fragment(widths[0] // tile.split) for _ in atoms),
        tuple(fragment(widths[1] // tile.split) for _ in atoms),
    )
