"""Shared-memory rings fed by TMA, the turns of the consumer warpgroups, and one vote of the whole thread block."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T

from flashattn_hopper.spec.tile import WARPGROUP

# Named barriers: 0 belongs to the whole block, 1 to 3 to the warpgroups' epilogues, 4 to 6 to their turns, 7 to votes.
# Where warpgroups meet in place of taking turns: 4 and 5.
EPILOGUE_BARRIER, TURN_BARRIER, VOTE_BARRIER = 1, 4, 7
MEET_BARRIER = 4


class Slot(NamedTuple):
    """A place in a two-stage ring: its index, and the phase of its barriers in this lap."""

    index: Int32
    phase: Int32

    def next(self):
        return Slot(self.index ^ 1, self.phase ^ self.index)

    def before(self):
        """The slot that this one is the next of."""
        return Slot(self.index ^ 1, self.phase ^ self.index ^ 1)

    def again(self):
        """The next lap of a one-stage ring."""
        return Slot(self.index, self.phase ^ 1)


def first_slot():
    return Slot(Int32(0), Int32(0))


@dataclass(frozen=True)
class Ring:
    """Full and empty mbarriers of one operand, a pair for each stage. `full` counts TMA bytes."""

    full: cute.Pointer
    empty: cute.Pointer
    num_bytes: int

    def init(self, stages, arrivals):
        """One thread of the block; `arrivals` consumer warps together release a stage."""
        for s in range(stages):
            cute.arch.mbarrier_init(self.full + s, 1)
            cute.arch.mbarrier_init(self.empty + s, arrivals)

    def acquire(self, slot):
        """Producer warp: wait until the stage is free, arm it, return the barrier for the copy."""
        cute.arch.mbarrier_wait(self.empty + slot.index, slot.phase ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(self.full + slot.index, self.num_bytes)
        return self.full + slot.index

    def wait(self, slot):
        """Consumer warps: wait until the stage has landed."""
        cute.arch.mbarrier_wait(self.full + slot.index, slot.phase)

    def landed(self, slot):
        """Whether it has, without waiting."""
        return cute.arch.mbarrier_test_wait(self.full + slot.index, slot.phase)

    def wait_released(self, slot):
        """Wait until every consumer has released this use of the stage."""
        cute.arch.mbarrier_wait(self.empty + slot.index, slot.phase)

    def release(self, slot):
        """One arrival for each calling warp."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.empty + slot.index)

    @cute.jit
    def release_if(self, condition, slot):
        with cute.arch.elect_one():
            if condition:
                cute.arch.mbarrier_arrive(self.empty + slot.index)


@dataclass(frozen=True)
class Exchange:
    """Two stages of shared memory that all consumers write their parts of and read whole one step later.

    In step i a consumer writes stage i once all have read stage i - 2, which they do in step i - 1, and then reads
    stage i - 1, which all had written before that. In its first step it reads what is there, for nothing, so that each
    step has the same arrivals.
    """

    written: cute.Pointer
    read: cute.Pointer

    def init(self, warps):
        """One thread of the block."""
        for s in range(2):
            cute.arch.mbarrier_init(self.written + s, warps)
            cute.arch.mbarrier_init(self.read + s, warps)

    def to_write(self, slot):
        """Wait until the stage has been read, in the step before; the very first of them is read by nobody before."""
        cute.arch.mbarrier_wait(self.read + slot.index, slot.before().phase)

    def wrote(self, slot):
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.written + slot.index)

    def to_read(self, slot):
        cute.arch.mbarrier_wait(self.written + slot.index, slot.phase)

    def did_read(self, slot):
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.read + slot.index)


@dataclass(frozen=True)
class NoTurns:
    def start(self): ...
    def wait(self): ...
    def pass_on(self): ...


@dataclass(frozen=True)
class PingPong:
    """Warpgroups take turns issuing their matrix products, so one's softmax runs under the tensor work of the others.

    Invariant: every warpgroup takes as many turns as the others, also for KV tiles that it skips.
    """

    me: Int32
    turns: int

    @cute.jit
    def start(self):
        if self.me == self.turns - 1:
            cute.arch.barrier_arrive(barrier_id=TURN_BARRIER, number_of_threads=2 * WARPGROUP)

    def wait(self):
        cute.arch.barrier(barrier_id=TURN_BARRIER + self.me, number_of_threads=2 * WARPGROUP)

    def pass_on(self):
        after = cutlass.select_(self.me == self.turns - 1, Int32(0), self.me + 1)
        cute.arch.barrier_arrive(barrier_id=TURN_BARRIER + after, number_of_threads=2 * WARPGROUP)


def arrive_after_stores(barrier, wanted, lane):
    """In a warp whose `wanted` is not 0: wait until its bulk stores have read shared memory, then arrive at `barrier`.

    Why predicates: a branch between matrix instructions can make the compiler wait for each of them.
    """
    llvm.inline_asm(
        None,
        [Int32(wanted).ir_value(), Int32(lane).ir_value(), barrier.toint().ir_value()],
        "{ .reg .pred p, q; setp.ne.b32 p, $0, 0; setp.eq.and.b32 q, $1, 0, p; "
        "@p cp.async.bulk.wait_group.read 0; bar.warp.sync 0xffffffff; @q mbarrier.arrive.shared::cta.b64 _, [$2]; }",
        "r,r,r",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


def any_of(flag, num_consumers):
    """Consumers and the producer warp agree whether `flag` is set in any of their threads: a barrier that ORs."""
    vote = Int32(
        llvm.inline_asm(
            T.i32(),
            [Int32(flag).ir_value()],
            "{ .reg .pred p, q; setp.ne.b32 p, $1, 0; "
            f"barrier.cta.red.or.pred q, {VOTE_BARRIER}, {num_consumers * WARPGROUP + 32}, p; selp.b32 $0, 1, 0, q; }}",
            "=r,r",
            has_side_effects=True,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
        )
    )
    return cute.arch.make_warp_uniform(vote)  # uniform control flow keeps TMA coordinates in uniform registers


def round_barrier(num_consumers):
    """Consumers and the producer warp meet, around the second attempts of a round.

    Before them, so that all see the marks on the board; after them, so that none marks or posts a tile of the next
    round while another still reads this one's.
    """
    cute.arch.barrier(barrier_id=VOTE_BARRIER, number_of_threads=num_consumers * WARPGROUP + 32)
