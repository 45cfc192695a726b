"""The dynamic schedule: resident thread blocks draw tickets, and a board tells their consumers what comes next."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T


def count_up(counter, wanted):
    """Add one to a word of global memory in the lane that wants it; what it was, 0 in other lanes.

    Why not an addition: the compiler aggregates it over the warp, and waits for it at once to tell each lane its share.
    """
    asm = llvm.inline_asm(
        T.i32(), [counter.toint().ir_value(), Int32(wanted).ir_value()],
        "{ .reg .pred p; setp.ne.u32 p, $2, 0; mov.b32 $0, 0; "
        "@p atom.relaxed.gpu.global.inc.u32 $0, [$1], 0x7fffffff; }",
        "=&r,l,r", has_side_effects=True, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT,
    )  # fmt: skip
    return Int32(asm)


# Tiles that a block does before its roles agree whether one of them needs a second attempt; the board remembers them.
ROUND = 128


@dataclass(frozen=True)
class Board:
    """The producer warp draws and posts; consumers look what comes next.

    `tickets`: words in global memory, the next ticket and, for `close`, the blocks that are done. Trap: launches that
    run at the same time must not share them.
    """

    ring: object  # Ring of two slots, released once by each consumer warp
    next: cute.Tensor  # shared, (2 slots, linear index + the three fields of a tile's work)
    tickets: cute.Tensor
    history: Any = None  # shared, (ROUND,): linear indices of this round's tiles, complemented if to be redone

    def draw(self):
        """In lane 0; the caller broadcasts it later, which keeps the atomic's latency off the loads."""
        return count_up(self.tickets.iterator, cute.arch.lane_idx() == 0)

    @cute.jit
    def post(self, slot, following, work, i=None, done=None):
        """Post the following tile, decoded, so that consumers need no divisions; record tile i of the round as done."""
        cute.arch.mbarrier_wait(self.ring.empty + slot.index, slot.phase ^ 1)
        if cute.arch.lane_idx() == 0:
            for j in cutlass.range_constexpr(4):
                self.next[slot.index, j] = (following, *work)[j]
            if const_expr(self.history is not None):
                self.history[i] = done
            cute.arch.mbarrier_arrive(self.ring.full + slot.index)

    def look(self, slot):
        """Consumer warps: (linear index, fields of the work) of the tile in a slot. As often as wanted, then `done`."""
        self.ring.wait(slot)
        # Why uniform: TMA takes its coordinates from uniform registers, and the compiler cannot see that lanes agree.
        linear, *work = [cute.arch.make_warp_uniform(self.next[slot.index, j]) for j in range(4)]
        return linear, work

    def done(self, slot):
        cute.arch.sync_warp()
        self.ring.release(slot)

    @cute.jit
    def mark(self, i, linear, bad):
        """Consumer threads, after `look`: tile i of the round needs a second attempt.

        Why not the whole round: which tiles share one depends on timing, and the two attempts round differently, so
        results would not repeat bit by bit.
        """
        if bad != 0:
            self.history[i] = -1 - linear

    def marked(self, i):
        """After the vote: (whether tile i of the round must be redone, its linear index)."""
        code = cute.arch.make_warp_uniform(self.history[i])
        return code < 0, -1 - code

    @cute.jit
    def close(self):
        """The last block to finish leaves both words at zero."""
        if cute.arch.lane_idx() == 0:
            done = cute.arch.atomic_add(self.tickets.iterator + 1, Int32(1), sem="acq_rel", scope="gpu")
            if done == cute.arch.grid_dim()[0] - 1:
                self.tickets[0] = Int32(0)
                self.tickets[1] = Int32(0)
