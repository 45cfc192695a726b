"""The order in which every role visits tiles: producer and consumers share it, so they cannot disagree."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import const_expr

from flashattn_hopper.spec.mask import Band


@dataclass(frozen=True)
class Walk:
    """KV tiles from the last one down: `begin` on the last, `step` on partial, full, partial ones, then `drain`.

    Hooks get and return the ring slot. `masked` reaches them as a Python bool, so a full tile has no mask code.
    `careful`: every tile counts as partial. `rising`: from the first one up, full ones before partial ones, for a band
    without a left edge. `whole`: tiles that only the band's edges would make partial have code even without an edge.
    """

    band: Band
    careful: bool = False
    rising: bool = False
    whole: bool = False

    def kv(self, seg, hooks, slot):
        return self.up(seg, hooks, slot) if self.rising else self.down(seg, hooks, slot)

    @cute.jit
    def down(self, seg, hooks, slot):
        slot = hooks.begin(seg.end - 1, slot)
        bottom = top = seg.begin
        if const_expr(not self.careful):
            top = cutlass.min(seg.full_end, seg.end - 1)
            if const_expr(self.band.left is not None):
                bottom = cutlass.min(seg.full_begin, top)
        # Without an edge every tile but the last, which `begin` took, is full.
        if const_expr(self.careful or self.whole or self.band.right is not None or self.band.left is not None):
            for n in cutlass.range(seg.end - 1 - top, unroll=1):
                slot = hooks.step(seg.end - 2 - n, slot, True)
        if const_expr(not self.careful):
            for n in cutlass.range(top - bottom, unroll=1):
                slot = hooks.step(top - 1 - n, slot, False)
        if const_expr(not self.careful and self.band.left is not None):
            for n in cutlass.range(bottom - seg.begin, unroll=1):
                slot = hooks.step(bottom - 1 - n, slot, True)
        return hooks.drain(seg.begin, slot)

    @cute.jit
    def up(self, seg, hooks, slot):
        slot = hooks.begin(seg.begin, slot)
        top = seg.begin + 1
        if const_expr(not self.careful):
            top = cutlass.max(top, seg.full_end)
            for n in cutlass.range(seg.begin + 1, top, unroll=1):
                slot = hooks.step(n, slot, False)
        for n in cutlass.range(top, seg.end, unroll=1):
            slot = hooks.step(n, slot, True)
        return hooks.drain(seg.end - 1, slot)
