"""The end of a query tile, each warpgroup for its 64 rows: O through shared memory to global memory by TMA, and lse.

Where O is staged is the tile's `output`: docs/kernels/sm90_forward.md has a table.
"""

import math
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from flashattn_hopper.spec.tile import WARPGROUP

from ..common.convert import to_half
from ..common.softmax import LN_2
from ..common.tensors import at
from ..common.work import Place
from .pipeline import EPILOGUE_BARRIER, Slot
from .tensors import SLAB, fence, slices, write_slab


@dataclass(frozen=True)
class Epilogue:
    """`dev` is what the host half hands over, `smem` the shared tensors."""

    dev: Any
    smem: Any
    place: Place
    output: str
    num_consumers: int
    element: Any  # type of O
    headdim_v: int

    @property
    def slab(self):
        """This warpgroup's own."""
        return self.smem.O[None, None, self.place.wg]

    @cute.jit
    def store(self, hooks, slot, work, row, later=False, stores=None, item=None):
        """O and lse of a query tile. `slot` is the ring slot after the tile's last one.

        `later`: O stays in the warpgroup's own slab, which is free, until `send`. `stores` and `item`: as in Loads.
        Returns 1 + the stage of V from which the store reads, or 0.
        """
        dev, place = self.dev, self.place
        inverse, lse = hooks.softmax.finish(hooks.exact)
        hooks.softmax.rescale(hooks.pv.O, inverse)
        if dev.lse != 0:
            mLSE = self.rows(dev.lse, work)
            if place.lane % 4 == 0:
                for r in cutlass.range_constexpr(2):
                    if row + 8 * r < dev.mQ.shape[0]:
                        mLSE[row + 8 * r] = lse[r]
        if const_expr(dev.scales is not None):
            self.restore(lse, work, row)
        out = cute.make_rmem_tensor_like(hooks.pv.O, self.element)
        to_half(hooks.pv.O, out)
        unread = Int32(0)
        if const_expr(self.output == "v"):
            # The first warpgroup takes the stage of the last V but one, which is free earlier, the second the last one.
            last = slot.before()
            index = cutlass.select_(place.wg == 0, slot.index, last.index)
            phase = cutlass.select_(place.wg == 0, slot.phase ^ 1, last.phase)
            stage = cute.arch.make_warp_uniform(Int32(index))
            unread = stage + 1
            hooks.ring_v.wait_released(Slot(stage, Int32(phase)))
            # In a walk of one KV tile no V has taken the first one's stage: the second one's O of the query tile before
            # is there, maybe unread.
            cute.arch.mbarrier_wait(stores + stage, item ^ 1)
            layout = cute.slice_(dev.lay_o, (None, None, 0)).outer
            sO = cute.make_tensor(self.smem.V[None, None, stage].iterator, layout)
        else:
            sO = self.slab
            if const_expr(self.output == "q"):
                self.together()  # every warp must have finished reading Q
            elif const_expr(not later):
                self.await_slab()
        write_slab(out, sO, self.headdim_v, place)
        if const_expr(not later):
            self.send(sO, work)
            if const_expr(self.output == "q"):
                if place.warp == 0:
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                    hooks.ring_q.release(hooks.slab)
        return unread

    @cute.jit
    def send(self, sO, work):
        """O of a query tile from where this warpgroup has put it to global memory."""
        dev, place = self.dev, self.place
        fence()
        self.together()
        _, target, slab = slices(dev.tma_o, sO, dev.mO, (SLAB, self.headdim_v), work.head, work.batch)
        if place.warp == 0:
            cute.copy(dev.tma_o, slab, target[None, work.m_block * self.num_consumers + place.wg])
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def send_if(self, wanted, work):
        """`send` from the warpgroup's own slab."""
        if wanted:
            self.send(self.slab, work)

    def together(self):
        cute.arch.barrier(barrier_id=EPILOGUE_BARRIER + self.place.wg, number_of_threads=WARPGROUP)

    def await_slab(self):
        """Until the last store from the own slab has read it. All threads ask, for want of a branch: only the one that
        stored has something to wait for."""
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        self.together()

    def await_sent(self):
        """Until all stores have written: what is computed again must not be overtaken by the first attempt."""
        cute.arch.cp_async_bulk_wait_group(0)

    def rows(self, address, work):
        """float32, one for each query of the tile's head."""
        seqlen_q, _, heads, _ = self.dev.mQ.shape
        first = (Int64(work.batch) * heads + work.head) * seqlen_q
        return cute.make_tensor(at(Float32, address + first * 4, 4), cute.make_layout(seqlen_q))

    @cute.jit
    def restore(self, lse, work, row):
        """FP8: lse with what the mean of K took from the scores. Rows without keys keep -inf."""
        dev = self.dev
        _, _, _, offsets, restored = dev.scales
        if restored != 0 and self.place.lane % 4 == 0:
            source, target = self.rows(offsets, work), self.rows(restored, work)
            for r in cutlass.range_constexpr(2):
                if row + 8 * r < dev.mQ.shape[0]:
                    value = lse[r]
                    if offsets != 0:
                        if value != -math.inf:
                            value = value + source[row + 8 * r] * (dev.scale_log2 * LN_2)
                    target[row + 8 * r] = value
