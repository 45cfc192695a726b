"""The order in which every role visits tiles: producer and consumers share it, so they cannot disagree."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import const_expr

from flashattn_hopper.spec.mask import Band, Segments


@dataclass(frozen=True)
class Walk:
    """KV tiles from the last one down: `begin` on the last, `step` on partial, full, partial ones, then `drain`.

    Hooks get and return the ring slot. `masked` reaches them as a Python bool, so a full tile has no mask code.
    """

    band: Band

    @cute.jit
    def kv(self, seg, hooks, slot):
        slot = hooks.begin(seg.end - 1, slot)
        top = cutlass.min(seg.full_end, seg.end - 1)
        bottom = seg.begin
        if const_expr(self.band.left is not None):
            bottom = cutlass.min(seg.full_begin, top)
        for n in cutlass.range(seg.end - 1 - top, unroll=1):
            slot = hooks.step(seg.end - 2 - n, slot, True)
        for n in cutlass.range(top - bottom, unroll=1):
            slot = hooks.step(top - 1 - n, slot, False)
        if const_expr(self.band.left is not None):
            for n in cutlass.range(bottom - seg.begin, unroll=1):
                slot = hooks.step(bottom - 1 - n, slot, True)
        return hooks.drain(seg.begin, slot)


@cute.jit
def careful(seg, exact):
    """`seg` as it is, or, where `exact` is set, with every tile counted as partial."""
    if exact != 0:
        seg = Segments(seg.begin, seg.begin, seg.begin, seg.end)
    return seg
