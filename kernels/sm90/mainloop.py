"""S = QK^T, P = softmax(S), O += PV as hooks of a walk over KV tiles: one set for the producer, one for a consumer.

Both are frozen dataclasses: what is fixed for a kernel is given once, what belongs to a query tile by `replace`.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from ..common.mask import BandMask
from ..common.softmax import Softmax
from ..common.work import Place
from .pipeline import Ring, Slot, arrive_after_stores
from .pv_operand import InPlace, Promoted, gemm

# KV tiles that are fetched into L2 before they are loaded, where all query tiles of a head start with the same one.
FETCHED = 8


def as_floats(S):
    """Scores as the softmax takes them: an int8 product is exact in int32, and in float32 up to 2^24."""
    if S.element_type is Float32:
        return S
    floats = cute.make_rmem_tensor(S.shape, Float32)
    for i in range(cute.size(S)):
        floats[i] = S[i].to(Float32)
    return floats


@dataclass(frozen=True)
class Asynchronous:
    """Products of warpgroups: O may be touched once every group has finished."""

    def drain(self):
        warpgroup.wait_group(0)


class Drawn(NamedTuple):
    """A slot of the producer, and the ticket of the next query tile as soon as it is drawn."""

    index: Int32
    phase: Int32
    ticket: Int32

    @property
    def slot(self):
        return Slot(self.index, self.phase)


@dataclass(frozen=True)
class Loads:
    """Producer warp. K runs one tile ahead of V, as the consumers want them; Q comes slab by slab, 64 rows each.

    `copy_*` are (TMA atom, partitioned source, partitioned destination). The ticket of the next query tile is drawn
    with the last K of this one: early enough for its latency, and not earlier, because a block that draws long before
    it is done keeps a tile from others that are idle.
    """

    ring_q: Ring
    ring_k: Ring
    ring_v: Ring
    copy_q: tuple
    copy_k: tuple
    copy_v: tuple
    stores: Any  # where O is staged in V's stages: a barrier for each, which its store completes
    slabs: int
    # for each query tile
    slot_q: Slot
    first_slab: Int32
    item: Int32  # parity of the query tiles done before
    last: Int32  # KV tile that the walk ends with
    back: int  # from a KV tile to the one before it in the walk: 1, or -1 where it rises
    board: Any = None  # of a dynamic schedule, where the next ticket is drawn
    behind: Any = None  # the Loads of the query tile before, whose last V comes after the first K and Q of this one
    behind_n: Int32 | None = None  # its last KV tile; -1 where there is none
    leads: Any = None  # whether this query tile fetches K and V of its head into L2 for those behind it

    def copy(self, what, block, stage, barrier):
        atom, src, dst = what
        cute.copy(atom, src[None, block], dst[None, stage], tma_bar_ptr=barrier)

    @cute.jit
    def draw(self, n, ticket):
        if const_expr(self.board is not None):
            if n == self.last:
                ticket = self.board.draw()
        return ticket

    @cute.jit
    def begin(self, n, drawn):
        slot, ticket = drawn.slot, self.draw(n, drawn.ticket)
        if const_expr(self.behind is None):
            self.copy(self.copy_k, n, slot.index, self.ring_k.acquire(slot))
        for w in range(self.slabs):
            slab = Slot(self.slot_q.index * self.slabs + w, self.slot_q.phase)
            self.copy(self.copy_q, self.first_slab + w, slab.index, self.ring_q.acquire(slab))
        if const_expr(self.behind is not None):
            self.copy(self.copy_k, n, slot.index, self.ring_k.acquire(slot))
            if self.behind_n >= 0:
                self.behind.load_v(self.behind_n, slot.before())
        if const_expr(self.leads is not None):
            self.fetch(n - 1, cutlass.min(n, FETCHED))
        return Drawn(*slot, ticket)

    @cute.jit
    def fetch(self, n, count):
        """K and V of `count` tiles from n down into L2."""
        if self.leads != 0:
            for i in cutlass.range(count, unroll=1):
                for atom, src, _ in (self.copy_k, self.copy_v):
                    cute.prefetch(atom, src[None, n - i])

    def load_v(self, n, slot):
        if self.stores is not None:
            cute.arch.mbarrier_wait(self.stores + slot.index, self.item ^ 1)
        self.copy(self.copy_v, n, slot.index, self.ring_v.acquire(slot))

    def step(self, n, drawn, masked):
        slot, ticket = drawn.slot, self.draw(n, drawn.ticket)
        following = slot.next()
        self.copy(self.copy_k, n, following.index, self.ring_k.acquire(following))
        self.load_v(n + self.back, slot)
        if self.leads is not None:
            self.fetch(n - FETCHED, cutlass.min(cutlass.max(n - FETCHED + 1, 0), 1))
        return Drawn(*following, ticket)

    def drain(self, n, drawn):
        if self.behind is None:
            self.load_v(n, drawn.slot)
        return Drawn(*drawn.slot.next(), drawn.ticket)


@dataclass(frozen=True)
class Overlapped:
    """Consumer warpgroup: QK of a tile is issued before PV of the previous one."""

    mma_qk: cute.TiledMma
    ring_q: Ring
    ring_k: Ring
    ring_v: Ring
    turns: Any
    softmax: Softmax
    pv: InPlace | Promoted
    rQ: cute.Tensor
    rK: cute.Tensor
    shape_s: tuple
    score: Any  # type of the accumulator of S
    frees_q: bool  # with its last QK; otherwise the epilogue, which stages O there, gives Q's slab back
    place: Place
    # for each query tile
    mask: BandMask | None = None
    mask_first: Int32 | None = None  # whether the tile that begin takes needs the mask at all
    exact: bool = False  # second attempt
    ahead: Any = None  # scores of the first KV tile, where they are computed under the epilogue of the tile before
    begun: Any = None  # called when the first tile is done but for its product
    slab: Slot | None = None  # this warpgroup's 64 rows of Q
    last: Int32 | None = None  # KV tile that the walk ends with
    unread: Any = None  # barrier of the stage of V in which the previous tile's O was, until its store has read it
    pending: Int32 | None = None  # whether there is one

    def fragment(self):
        return cute.make_rmem_tensor(self.shape_s, self.score)

    def scores(self, slot, S=None):
        S = self.fragment() if S is None else S
        gemm(self.mma_qk, S, self.rQ[None, None, None, self.slab.index], self.rK[None, None, None, slot.index], True)
        return S

    def first_scores(self, slot):
        self.ring_q.wait(self.slab)
        self.ring_k.wait(slot)
        return self.scores(slot)

    @cute.jit
    def begin(self, n, slot):
        self.softmax.reset()
        softmax = self.softmax.of_tile(n)
        S = self.first_scores(slot) if const_expr(self.ahead is None) else self.ahead
        if const_expr(self.unread is not None):
            self.give_back(self.pending)
        warpgroup.wait_group(0)
        self.ring_k.release(slot)
        self.free_q(n)
        S = as_floats(S)
        if self.mask_first != 0:
            self.mask.apply(S, n)
        self.pv.start(softmax.first(S, self.exact))
        if const_expr(self.begun is not None):
            self.begun()
        return slot

    def step(self, n, slot, masked):
        following = slot.next()
        self.ring_k.wait(following)
        self.turns.wait()
        S = self.scores(following)
        softmax = self.softmax.of_tile(n)
        self.ring_v.wait(slot)
        self.pv.issue(slot)
        self.turns.pass_on()
        warpgroup.wait_group(1)
        P, alpha = self.probabilities(softmax, S, n, following, masked)
        self.pv.hold(slot)
        warpgroup.wait_group(0)
        self.pv.collect(slot)
        self.pv.take(P, alpha)
        return following

    def probabilities(self, softmax, S, n, following, masked):
        """P of tile n and the factors for O, once its QK is done."""
        self.ring_k.release(following)
        self.free_q(n)
        softmax, S = softmax.of_scores(S), as_floats(S)
        if masked:
            self.mask.apply(S, n)
        return softmax.tile(S, masked, self.exact, self.pv.O)

    def free_q(self, n):
        """After QK of a tile: where it was the last one, Q is not needed any more."""
        if self.frees_q:
            self.ring_q.release_if(n == self.last, self.slab)

    def give_back(self, pending):
        """The stage of V in which the previous tile's O was: now is a time when its store need not be waited for."""
        mine = cutlass.select_(self.place.warp == 0, pending, Int32(0))
        arrive_after_stores(self.unread, mine, self.place.lane)

    def drain(self, n, slot):
        self.ring_v.wait(slot)
        self.pv.issue(slot)
        if self.ahead is None:
            warpgroup.wait_group(0)
            self.pv.end(slot)
        return slot.next()

    def finish(self, slot):
        """Where scores are computed ahead, after those of the next tile are issued: the last product of this tile."""
        warpgroup.wait_group(1)
        self.pv.end(slot)

    def skip(self, slot):
        """A KV tile that other warpgroups of the block see and this one does not."""
        self.turns.wait()
        self.turns.pass_on()
        self.ring_k.wait(slot)
        self.ring_k.release(slot)
        self.ring_v.wait(slot)
        self.ring_v.release(slot)
        return slot.next()


class Polled(NamedTuple):
    """A slot, and whether its V and the K of the one behind it have landed."""

    index: Int32
    phase: Int32
    landed: Int32

    @property
    def slot(self):
        return Slot(self.index, self.phase)


@dataclass(frozen=True)
class Polling(Overlapped):
    """For 8-bit operands: asks for the K and V of a step at the end of the step before, under what it moves there.

    Why: a try of a barrier takes 25 cycles, and the tensor cores are not what this loop waits for.
    """

    def begin(self, n, slot):
        return Polled(*Overlapped.begin(self, n, slot), Int32(0))

    @cute.jit
    def wait(self, polled, following):
        if polled.landed == 0:
            self.ring_k.wait(following)
            self.ring_v.wait(polled.slot)

    def step(self, n, polled, masked):
        slot = polled.slot
        following = slot.next()
        self.wait(polled, following)
        self.turns.wait()
        S = self.scores(following)
        softmax = self.softmax.of_tile(n)
        self.pv.issue(slot)
        self.turns.pass_on()
        warpgroup.wait_group(1)
        P, alpha = self.probabilities(softmax, S, n, following, masked)
        self.pv.hold(slot)
        warpgroup.wait_group(0)
        landed = self.ring_v.landed(following) & self.ring_k.landed(following.next())
        self.pv.collect(slot)
        self.pv.take(P, alpha)
        return Polled(*following, Int32(landed))

    def drain(self, n, polled):
        return Overlapped.drain(self, n, polled.slot)


@dataclass(frozen=True)
class Serial(Overlapped):
    """The same with PV of the previous tile done before QK of this one is issued: their accumulators share registers.

    For 8-bit operands at large head dimensions, where a tile's own accumulator does not fit beside S.
    """

    def step(self, n, slot, masked):
        following, softmax = slot.next(), self.softmax.of_tile(n)
        self.ring_v.wait(slot)
        self.turns.wait()
        self.pv.issue(slot)
        warpgroup.wait_group(0)
        self.pv.collect(slot)
        self.ring_k.wait(following)
        S = self.scores(following)
        self.turns.pass_on()
        warpgroup.wait_group(0)
        self.pv.take(*self.probabilities(softmax, S, n, following, masked))
        return following
