"""KeyGradient for headdims beyond 128: two warpgroups share 64 keys, and each has half of the columns of dK and dV.

One makes P, the other dS; both go through shared memory to the other one.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32
from cutlass.cute.nvgpu import warpgroup
from cutlass.tensor_utils import LayoutEnum

from ..common.convert import to_half
from ..common.softmax import probability
from .key_gradient import KeyGradient, consumer
from .mainloop import gemm
from .pipeline import MEET_BARRIER, Ring, first_slot
from .tensors import SLAB


@dataclass(frozen=True)
class Wide:
    """What both warpgroups of a wide headdim do with P and dS, each for its half of the columns."""

    ring_q: Ring
    ring_do: Ring
    mma_dk: cute.TiledMma
    mma_dv: cute.TiledMma
    rP: cute.Tensor
    rdS: cute.Tensor
    rQt: cute.Tensor
    rdOt: cute.Tensor
    dK: cute.Tensor
    dV: cute.Tensor

    def values(self, slot):
        """Issue dV += P^T dO."""
        gemm(
            self.mma_dv, self.dV, self.rP[None, None, None, slot.index], self.rdOt[None, None, None, slot.index], False
        )

    def keys(self, slot):
        """dK += dS^T Q, and give Q and dO back."""
        gemm(
            self.mma_dk, self.dK, self.rdS[None, None, None, slot.index], self.rQt[None, None, None, slot.index], False
        )
        warpgroup.wait_group(0)
        cute.arch.sync_warp()  # all lanes have read lse and delta
        self.ring_do.release(slot)
        self.ring_q.release(slot)


class WideKeyGradient(KeyGradient):
    wide = True

    @cute.jit
    def consume(self, dev, rings, smem, board, exchange=None, turns=None):
        t = self.tile
        work = self.work(self.order(dev), cute.arch.block_idx()[0])
        place = consumer(cute.arch.thread_idx()[0])
        wg = place.wg
        flip = lambda s: cute.make_tensor(s.iterator, cute.select(s.layout, mode=[1, 0, 2]))
        a = lambda m, s: m.make_fragment_A(m.get_slice(0).partition_A(s))
        b = lambda m, s: m.make_fragment_B(m.get_slice(0).partition_B(s))
        half = lambda s, width: cute.local_tile(flip(s), (width, t.tile_m, 2), (wg, 0, 0))
        fragment = lambda m, n: cute.make_rmem_tensor(m.get_slice(0).partition_shape_C((SLAB, n)), Float32)
        dK, dV = fragment(dev.mma_dk, self.key_width), fragment(dev.mma_dv, self.value_width)
        dK.fill(0.0)
        dV.fill(0.0)
        shared = Wide(
            rings.q, rings.do, dev.mma_dk, dev.mma_dv, a(dev.mma_dv, smem.P), a(dev.mma_dk, smem.dS),
            b(dev.mma_dk, half(smem.Q, self.key_width)), b(dev.mma_dv, half(smem.dO, self.value_width)), dK, dV,
        )  # fmt: skip
        rings.kv.wait(first_slot())
        if wg == 0:
            scores = a(dev.mma_s, smem.K), b(dev.mma_s, smem.Q)
            self.probabilities(dev, shared, smem, work, place, scores)
        else:
            scores = a(dev.mma_dp, smem.V), b(dev.mma_dp, smem.dO)
            self.score_gradients(dev, shared, smem, work, place, scores)
        self.store(dev, smem, work, dK, dV, 0)
        if place.warp == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    def loops(self, dev, work):
        """(query heads of the group, query tiles of this key tile)."""
        return dev.mQ.shape[2] // dev.mK.shape[2], self.segments(dev, work)

    @cute.jit
    def probabilities(self, dev, shared, smem, work, place, scores):
        """First warpgroup: S^T and P^T of the tile, into shared memory."""
        t = self.tile
        group, seg = self.loops(dev, work)
        mask, col = self.mask(dev, work.n_block, place), 2 * (place.lane % 4)
        store = hopper.get_smem_store_op(LayoutEnum.ROW_MAJOR, self.dtype, Float32)
        thr = cute.make_tiled_copy_C(store, dev.mma_s).get_slice(place.warp * 32 + place.lane)
        rK, rQ = scores
        slot = first_slot()
        for _ in cutlass.range(group, unroll=1):
            for m in cutlass.range(seg.begin, seg.end, unroll=1):
                shared.ring_q.wait(slot)
                S = cute.make_rmem_tensor(dev.mma_s.get_slice(0).partition_shape_C((SLAB, t.tile_m)), Float32)
                gemm(dev.mma_s, S, rK[None, None, None, 0], rQ[None, None, None, slot.index], True)
                warpgroup.wait_group(0)
                for i in range(cute.size(S)):
                    S[i] = S[i] * dev.scale_log2 - smem.stats[col + (i // 4) * 8 + i % 2, 0, slot.index]
                if (m < seg.full_begin) | (m >= seg.full_end):
                    mask.apply(S, m)
                for i in range(cute.size(S)):
                    S[i] = probability(S[i])
                P = cute.make_rmem_tensor_like(S, self.dtype)
                to_half(S, P)
                cute.copy(store, thr.retile(P), thr.partition_D(smem.P[None, None, slot.index]))
                cute.arch.fence_proxy("async.shared", space="cta")
                self.meet(MEET_BARRIER)
                shared.ring_do.wait(slot)
                shared.values(slot)
                self.meet(MEET_BARRIER + 1)
                shared.keys(slot)
                slot = slot.next()

    @cute.jit
    def score_gradients(self, dev, shared, smem, work, place, scores):
        """Second warpgroup: dP^T, and dS^T from it and the other one's P^T, into shared memory."""
        t = self.tile
        group, seg = self.loops(dev, work)
        col = 2 * (place.lane % 4)
        store = hopper.get_smem_store_op(LayoutEnum.ROW_MAJOR, self.dtype, Float32)
        put = cute.make_tiled_copy_C(store, dev.mma_dp).get_slice(place.warp * 32 + place.lane)
        load = cute.make_copy_atom(cute.nvgpu.warp.LdMatrix8x8x16bOp(transpose=False, num_matrices=4), self.dtype)
        get = cute.make_tiled_copy_C(load, dev.mma_dp).get_slice(place.warp * 32 + place.lane)
        rV, rdO = scores
        slot = first_slot()
        for _ in cutlass.range(group, unroll=1):
            for _ in cutlass.range(seg.begin, seg.end, unroll=1):
                shared.ring_do.wait(slot)
                dP = cute.make_rmem_tensor(dev.mma_dp.get_slice(0).partition_shape_C((SLAB, t.tile_m)), Float32)
                gemm(dev.mma_dp, dP, rV[None, None, None, 0], rdO[None, None, None, slot.index], True)
                warpgroup.wait_group(0)
                shared.ring_q.wait(slot)  # delta, and Q for what follows
                for i in range(cute.size(dP)):
                    dP[i] = dP[i] - smem.stats[col + (i // 4) * 8 + i % 2, 1, slot.index]
                self.meet(MEET_BARRIER)
                half = cute.make_rmem_tensor_like(dP, self.dtype)
                cute.copy(load, get.partition_S(smem.P[None, None, slot.index]), get.retile(half))
                shared.values(slot)
                for i in range(cute.size(dP)):
                    dP[i] = dP[i] * half[i].to(Float32)
                to_half(dP, half)
                cute.copy(store, put.retile(half), put.partition_D(smem.dS[None, None, slot.index]))
                cute.arch.fence_proxy("async.shared", space="cta")
                self.meet(MEET_BARRIER + 1)
                shared.keys(slot)
                slot = slot.next()
