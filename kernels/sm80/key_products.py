"""The products of a warp whose keys stay while tiles of queries stream by: dK, dV, and dQ into memory.

Neighbouring warps form a team of `split` that shares keys:

    some      S^T = K Q^T, dP^T = V dO^T of the team's keys, each warp for its part of the queries -> P^T, dS^T
    add       dV += P^T dO, dK += dS^T Q of the team's keys, each warp its part of the columns: over the queries that
              are its own, P^T and dS^T from registers
    others    the same over the queries of the rest of the team, by way of shared memory
    query     dQ = dS K of a part of the tile, from the dS^T of every warp, added to memory
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ..common.softmax import probability
from ..common.work import thread_again
from .epilogue import shared_words
from .products import fragment, packed
from .shared import CHUNK, Reader, Swizzled, WarpReader, columns_first, rows_first
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


def product(dtype, accs, a, b, depth, width, meanwhile=()):
    """accs[i] += A_i B, 16 by `width`, over `depth`: a(i, k) and b(k, n) are their blocks of 16 by 16.

    `meanwhile`: calls that are spread over the steps, for what has nothing to wait for.
    """
    steps = depth // 16
    for step in range(steps):
        left = [a(i, 16 * step) for i in range(len(accs))]
        for n in range(0, width, 16):
            right = b(16 * step, n)
            for half in range(2):
                for acc, words in zip(accs, left):
                    accumulate(dtype, acc, n // 8 + half, words, right[2 * half : 2 * half + 2])
        for call in meanwhile[len(meanwhile) * step // steps : len(meanwhile) * (step + 1) // steps]:
            call()


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
class KeyProducts:
    """The parts of one warp."""

    tile: Any
    dtype: Any
    warp: Warp
    sums_of: Any  # padded row of all heads -> address of the sums of the tile that begins there
    k: Reader
    v: Reader
    q: Operand
    do: Operand
    p: Any  # Exchange, or None where nobody reads it
    ds: Any
    ds_turned: Any  # Readers for dQ, or None where it is not summed in memory
    k_turned: Any
    mask_of: Any  # (key, query) of a lane in their tiles -> ColumnMask of `at_once` queries
    dK: tuple  # fragments, for every 16 keys
    dV: tuple

    def scores(self, stay, come, slot, first, meanwhile=()):
        """stay come^T of `at_once` queries from `first` on: a fragment for every 16 keys."""
        accs = [fragment(self.tile.at_once) for _ in self.dK]
        mine, theirs = stay.start(0), come.rows.start(slot) + first * come.rows.tile.row_bytes
        a = lambda i, k: stay.block(mine, 16 * i, k)
        b = lambda k, n: come.rows.block(theirs, n, k)
        product(self.dtype, accs, a, b, come.width, self.tile.at_once, meanwhile)
        return accs

    @cute.jit
    def step(self, stats, scale_log2, edge, m, slot, place, before, follows):
        """A tile. `stats`: shared address of (lse, delta) of this lane's first query. `place`: padded row of all heads
        that the tile begins with, `before` that of the tile whose dQ `follows` late."""
        t = self.tile
        stage = slot if const_expr(t.late) else 0
        own = stats, scale_log2, edge, m, slot, stage
        self.late_query(1, before, slot, follows)
        if const_expr(t.at_once == t.queries):
            P, dS = self.some(*own, 0)
            self.late_query(0, before, slot, follows)
            self.add(P, dS, slot, 0)
        else:
            # Why a loop: unrolled, the products of one turn are mixed with those of the next and take its registers.
            for turn in cutlass.range(t.queries // t.at_once, unroll=1):
                P, dS = self.some(*own, turn * t.at_once)
                self.add(P, dS, slot, turn * t.at_once)
            self.late_query(0, before, slot, follows)
        self.meet()
        if const_expr(t.summed and not t.late):
            self.query(place, 0)
        self.others(slot, stage)

    @cute.jit
    def late_query(self, half, before, slot, follows):
        """dQ of the tile before; for one half of the warps ahead of the scores of this one, so that the exponentials of
        one half run under products of the other."""
        t = self.tile
        if const_expr(t.staggered):
            follows = follows & (self.warp.index // (t.num_warps // 2) == half)
        if const_expr(t.staggered or (t.late and half == 0)):
            if follows:
                self.query(before, slot ^ 1)

    def some(self, stats, scale_log2, edge, m, slot, stage, first):
        """P^T and dS^T of `at_once` of this warp's queries as words, which others can read after they `meet`."""
        t = self.tile
        S = self.scores(self.k, self.q, slot, first)
        self.hide(S, first, m, edge)
        columns = range(0, t.at_once, 8)
        pairs = {}

        def exponentials(column):
            pairs[column] = shared_floats(stats + (first + column) * 8)
            for s in S:
                for j in range(4):
                    i = column // 2 + j
                    s[i] = probability(s[i] * scale_log2 - pairs[column][j % 2 * 2])

        dP = self.scores(self.v, self.do, slot, first, [partial(exponentials, column) for column in columns])
        P = [packed(s, self.dtype) for s in S]
        self.give(self.p, P, 0, first)
        for column in columns:
            for s, dp in zip(S, dP):
                for j in range(4):
                    i = column // 2 + j
                    dp[i] = s[i] * (dp[i] - pairs[column][j % 2 * 2 + 1])
        dS = [packed(dp, self.dtype) for dp in dP]
        self.give(self.ds, dS, stage, first)
        return P, dS

    def give(self, exchange, fragments, stage, first):
        if exchange is not None:
            for i, words in enumerate(fragments):
                exchange.writer.put(words, stage, 16 * i, first)

    def add(self, P, dS, slot, first):
        for grad, words, operand in ((self.dV, P, self.do), (self.dK, dS, self.q)):
            a = lambda i, k, words=words: [words[i][k // 4 + j] for j in range(4)]
            b = operand.words(operand.turned[0], slot, first)
            product(self.dtype, grad, a, b, self.tile.at_once, operand.part)

    def others(self, slot, stage):
        t = self.tile
        for other in range(t.split - 1):
            for grad, exchange, at, operand in ((self.dV, self.p, 0, self.do), (self.dK, self.ds, stage, self.q)):
                scores = exchange.others[other]
                start = scores.start(at)
                a = lambda i, k, scores=scores, start=start: scores.block(start, 16 * i, k)
                b = operand.words(operand.turned[1 + other], slot)
                product(self.dtype, grad, a, b, t.queries, operand.part)

    @cute.jit
    def hide(self, S, first, m, edge):
        if edge:
            self.mask(S, first, m)

    def mask(self, S, first, m):
        t, lane = self.tile, thread_again() % 32
        for i, s in enumerate(S):
            row, column = self.warp.team * t.keys + 16 * i + lane // 4, self.warp.member * t.queries + first
            self.mask_of(row, column + 2 * (lane % 4)).apply(s, m * (t.tile_m // t.at_once))

    def meet(self):
        """After this the team's P and dS can be read, and those of the whole block where dQ of this tile comes next."""
        t = self.tile
        if t.summed and not t.late:
            cute.arch.sync_threads()
        elif t.split > 1:
            cute.arch.barrier(barrier_id=1 + self.warp.team, number_of_threads=32 * t.split)

    def query(self, place, stage):
        """dQ of this warp's part of the tile that begins at padded row `place`."""
        t, width = self.tile, self.q.width
        rows, columns = t.dq_part(width)
        accs = [fragment(columns) for _ in range(rows // 16)]
        scores, keys = self.ds_turned.start(stage), self.k_turned.start(0)
        a = lambda i, k: self.ds_turned.block(scores, k, 16 * i)
        b = lambda k, n: self.k_turned.block(keys, k, n)
        product(self.dtype, accs, a, b, t.tile_n, columns)
        target = self.sums_of(place)
        target = target + (self.warp.index * (rows * columns * 4) + thread_again() % 32 * (16 if t.vector else 4))
        for i, acc in enumerate(accs):
            for j in range(columns // 8):
                add_to_memory(target + (i * (columns // 8) + j) * 512, [acc[4 * j + e] for e in range(4)], t.vector)


def products_of(tile, dtype, widths, tiles, warp, mask_of, sums_of):
    """The parts of a warp. `tiles`: K, V, Q, dO, P and dS in shared memory; the last two may be None."""
    sK, sV, sQ, sdO, sP, sdS = tiles
    lane, first = warp.lane, warp.team * tile.keys
    members = [(warp.member + i) % tile.split * tile.queries for i in range(tile.split)] if tile.split > 1 else [0]

    def reader(lanes, of, row=0, column=0, transpose=False):
        """Of a warp that begins at (row, column): what is the same in a warp is kept apart from the lane."""
        outer, inner = split_column(of, column)
        return WarpReader(of, lanes(of, lane, 0, inner), transpose, row * of.row_bytes + outer)

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

    ds_turned = k_turned = None
    if tile.summed:
        rows, columns = tile.dq_part(widths[0])
        across = widths[0] // columns
        ds_turned = reader(columns_first, sdS, 0, warp.index // across * rows, transpose=True)
        k_turned = reader(rows_first, sK, 0, warp.index % across * columns, transpose=True)
    atoms = range(tile.keys // 16)
    return KeyProducts(
        tile,
        dtype,
        warp,
        sums_of,
        reader(rows_first, sK, first),
        reader(rows_first, sV, first),
        operand(sQ, widths[0]),
        operand(sdO, widths[1]),
        None if sP is None else exchange(sP),
        None if sdS is None else exchange(sdS),
        ds_turned,
        k_turned,
        mask_of,
        tuple(fragment(widths[0] // tile.split) for _ in atoms),
        tuple(fragment(widths[1] // tile.split) for _ in atoms),
    )
