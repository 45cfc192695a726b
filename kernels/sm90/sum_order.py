"""Sums of dQ in the order of the key tiles, so that they repeat bit by bit.

A counter in global memory says for each query tile how many key tiles have added to it. Two warps beside the producer
keep the order, and the consumers wait in shared memory only:

    first warp     waits until the counter of query tile i has reached this key tile      -> turn i
    consumers      wait for turn i, add their part of dQ                                  -> added i
    second warp    waits for added i                                                      -> seen i
                   adds one to the counter, which publishes the sums
    first warp     waits for seen i - 2 before it looks at tile i

Invariant: the tickets of a head's key tiles rise with their keys, and only a block that runs holds one. A thread block
so waits for key tiles with lower tickets only, and the lowest unfinished one for nobody, however few blocks run.

All visit query tiles from the last one down: under a window, where key tile n + 1 begins as many queries later as it
ends, each so finds that the one before it has passed.
"""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass._mlir.dialects import llvm

from ..common.tensors import at


@dataclass(frozen=True)
class Turns:
    """Barriers, two of each kind, for query tiles in turn; their slots are those of Q."""

    turn: cute.Pointer
    added: cute.Pointer
    seen: cute.Pointer

    def init(self, warps):
        """One thread of the block; `warps`: of all consumers."""
        for s in range(2):
            for barrier, arrivals in ((self.turn, 1), (self.added, warps), (self.seen, 1)):
                cute.arch.mbarrier_init(barrier + s, arrivals)

    # ---- first and second warp: `counter` is the address of a query tile's, `place` how many key tiles come before
    @cute.jit
    def take(self, slot, counter, place):
        cute.arch.mbarrier_wait(self.seen + slot.index, slot.phase ^ 1)
        word = at(Int32, counter, 4)
        seen = cute.arch.load(word, Int32, sem="acquire", scope="gpu")
        while seen < place:
            seen = cute.arch.load(word, Int32, sem="acquire", scope="gpu")
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.turn + slot.index)

    @cute.jit
    def hand_on(self, slot, counter, place):
        cute.arch.mbarrier_wait(self.added + slot.index, slot.phase)
        with cute.arch.elect_one():
            # Why first: what follows waits for all sums on their way, a microsecond or two.
            cute.arch.mbarrier_arrive(self.seen + slot.index)
            # Release, after the barrier: what the consumers have added is there for whoever sees the counter.
            cute.arch.red(at(Int32, counter, 4), Int32(1), op="add", dtype=Int32, sem="release", scope="gpu")

    # ---- consumer warps
    @cute.jit
    def wait_if(self, wanted, slot):
        if wanted:
            cute.arch.mbarrier_wait(self.turn + slot.index, slot.phase)

    def pass_on(self, index, wanted):
        """Where `wanted`: this warp has added to the query tile of that slot. Without a branch, as it is called between
        matrix instructions."""
        llvm.inline_asm(
            None,
            [Int32(wanted).ir_value(), (self.added + index).toint().ir_value()],
            "{ .reg .pred p, q; bar.warp.sync 0xffffffff; elect.sync _|p, 0xffffffff; setp.ne.and.b32 q, $0, 0, p; "
            "@q mbarrier.arrive.shared::cta.b64 _, [$1]; }",
            "r,r",
            has_side_effects=True,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
        )


def counter_of(counters, row):
    """Address of the counter of the query tile whose first padded row that is."""
    return counters + Int64(row) * 4
