"""dQ in a kernel of its own: queries stay, keys stream by, nothing is summed in memory.

    S = Q K^T | dP = dO V^T | P = exp2(S c - lse) | dS = P (dP - delta) | dQ += dS K

Every consumer warpgroup owns 64 queries; dS leaves the accumulator as the register operand of the last product.
One thread block for each tile of 128 queries; KV tiles from the last one down, as in the forward.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.memory import SmemAllocator

from flashattn_hopper.spec.mask import Seqlens
from flashattn_hopper.spec.tile import ROW_PAD as PAD
from flashattn_hopper.spec.tile import WARPGROUP

from ..common.convert import ELEMENT, to_half
from ..common.mask import BandMask
from ..common.softmax import LOG2_E, probability
from ..common.tensors import at, band_of
from ..common.walk import Walk
from ..common.work import DeviceArith, Extent, HeadMap, Place, order_of
from .forward import Slabs
from .mainloop import gemm
from .pipeline import EPILOGUE_BARRIER, PingPong, Ring, Slot, first_slot
from .tensors import SLAB, fence, one_stage, slices, stage_bytes, staged, write_slab

CONSUMERS = 2
TILE_M = SLAB * CONSUMERS
THREADS = WARPGROUP * (1 + CONSUMERS)


class Device(NamedTuple):
    tma_q: cute.CopyAtom
    mQ: cute.Tensor
    tma_do: cute.CopyAtom
    mdO: cute.Tensor
    tma_k: cute.CopyAtom
    mK: cute.Tensor
    tma_v: cute.CopyAtom
    mV: cute.Tensor
    tma_dq: cute.CopyAtom
    mdQ: cute.Tensor
    mma_s: cute.TiledMma
    mma_dp: cute.TiledMma
    mma_dq: cute.TiledMma
    lay_q: cute.ComposedLayout
    lay_do: cute.ComposedLayout
    lay_k: cute.ComposedLayout
    lay_v: cute.ComposedLayout
    scale: Float32
    window_left: Any
    window_right: Any
    stats: Int64


class Shared(NamedTuple):
    Q: cute.Tensor
    dO: cute.Tensor
    K: cute.Tensor
    V: cute.Tensor


def single(slot):
    """The same use of a one-stage ring that `slot` is of a two-stage one: a lap of it takes one tile, not two."""
    return Slot(Int32(0), slot.index)


@dataclass(frozen=True)
class Loads:
    """Producer warp: K of a tile, then its V."""

    ring_k: Ring
    ring_v: Ring
    copy_k: tuple
    copy_v: tuple

    def tile(self, n, slot):
        for ring, (atom, src, dst), stage in (
            (self.ring_k, self.copy_k, slot),
            (self.ring_v, self.copy_v, single(slot)),
        ):
            cute.copy(atom, src[None, n], dst[None, stage.index], tma_bar_ptr=ring.acquire(stage))

    def begin(self, n, slot):
        self.tile(n, slot)
        return slot

    def step(self, n, slot, masked):
        self.tile(n, slot.next())
        return slot.next()

    def drain(self, n, slot):
        return slot


@dataclass(frozen=True)
class Products:
    """Consumer warpgroup. dQ of a tile is still under way when S of the next one is issued."""

    mma_s: cute.TiledMma
    mma_dp: cute.TiledMma
    mma_dq: cute.TiledMma
    ring_k: Ring
    ring_v: Ring
    turns: Any
    rQ: cute.Tensor
    rdO: cute.Tensor
    rK: cute.Tensor
    rV: cute.Tensor
    rKt: cute.Tensor
    dS: cute.Tensor
    dQ: cute.Tensor
    shape_s: tuple
    scale_log2: Float32
    mask: BandMask
    mask_first: Int32
    lse2: cute.Tensor  # of this thread's two rows
    delta: cute.Tensor

    def scores(self, slot):
        """Issue S and dP of a tile."""
        S, dP = [cute.make_rmem_tensor(self.shape_s, Float32) for _ in range(2)]
        self.ring_k.wait(slot)
        gemm(self.mma_s, S, self.rQ, self.rK[None, None, None, slot.index], True)
        self.ring_v.wait(single(slot))
        gemm(self.mma_dp, dP, self.rdO, self.rV[None, None, None, 0], True)
        return S, dP

    def exponentiate(self, S):
        for i in range(cute.size(S)):
            S[i] = probability(S[i] * self.scale_log2 - self.lse2[(i // 2) % 2])

    def gradient(self, S, dP, slot):
        """dS from P and dP, and dQ issued."""
        warpgroup.wait_group(0)
        self.ring_v.release(single(slot))
        for i in range(cute.size(S)):
            dP[i] = S[i] * (dP[i] - self.delta[(i // 2) % 2])
        to_half(dP, self.dS)
        gemm(self.mma_dq, self.dQ, self.dS, self.rKt[None, None, None, slot.index], False)

    @cute.jit
    def begin(self, n, slot):
        S, dP = self.scores(slot)
        warpgroup.wait_group(1)
        if self.mask_first != 0:
            self.mask.apply(S, n)
        self.exponentiate(S)
        self.gradient(S, dP, slot)
        return slot

    def step(self, n, slot, masked):
        following = slot.next()
        self.turns.wait()
        S, dP = self.scores(following)
        self.turns.pass_on()
        warpgroup.wait_group(1)  # dQ of the previous tile and S
        self.ring_k.release(slot)
        if masked:
            self.mask.apply(S, n)
        self.exponentiate(S)
        self.gradient(S, dP, following)
        return following

    def drain(self, n, slot):
        warpgroup.wait_group(0)
        self.ring_k.release(slot)
        return slot


class QueryGradient:
    def __init__(self, traits, tile):
        self.traits = traits
        # Keys of a tile here, and queries of one in the main kernel, by which lse and delta are laid out.
        self.tile_n, self.tile_m, self.wanted = tile.query_n, tile.tile_m, tile.wanted
        self.headdim, self.headdim_v = traits.headdim, traits.headdim_v
        self.dtype = ELEMENT[traits.dtype]
        # (producer, consumer): a producer can spill with 24, and products of headdim 256 are serialised with 232.
        self.registers = (24, 240) if self.headdim == 256 else (40, 232)

    def launch(self, q, k, v, do, dq, stats, scale, window_left, window_right, stream):
        """From a host function; tensors as (S, D, H, B)."""
        hd, hd_v, n = self.headdim, self.headdim_v, self.tile_n
        K, MN = OperandMajorMode.K, OperandMajorMode.MN
        S, R = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM
        mma = lambda b_major, width, source: hopper.make_trivial_tiled_mma(
            self.dtype, self.dtype, K, b_major, Float32, (1, 1, 1), (SLAB, width), source
        )

        lay_q, lay_do = staged(self.dtype, SLAB, hd, CONSUMERS), staged(self.dtype, SLAB, hd_v, CONSUMERS)
        lay_k, lay_v = staged(self.dtype, n, hd, 2), staged(self.dtype, n, hd_v, 1)
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        atom = cpasync.make_tiled_tma_atom
        dev = Device(
            *atom(load, q, one_stage(lay_q), (SLAB, hd)),
            *atom(load, do, one_stage(lay_do), (SLAB, hd_v)),
            *atom(load, k, one_stage(lay_k), (n, hd)),
            *atom(load, v, one_stage(lay_v), (n, hd_v)),
            *atom(store, dq, one_stage(lay_q), (SLAB, hd)),
            mma(K, n, S), mma(K, n, S), mma(MN, hd, R), lay_q, lay_do, lay_k, lay_v,
            scale, window_left, window_right, stats,
        )  # fmt: skip
        tiles = cute.ceil_div(q.shape[0], TILE_M) * q.shape[2] * q.shape[3]
        # Beside the end of the kernel of dK and dV, of which it needs nothing but that it began after `prepare`.
        block, beside = [THREADS, 1, 1], self.wanted == "all"
        self.kernel(dev).launch(grid=[tiles, 1, 1], block=block, min_blocks_per_mp=1, stream=stream, use_pdl=beside)

    def band(self, dev):
        return band_of(self.traits.mask, dev.window_left, dev.window_right)

    @cute.jit
    def work(self, dev):
        m_blocks = cute.ceil_div(dev.mQ.shape[0], TILE_M)
        extent = Extent(m_blocks, dev.mQ.shape[2], dev.mQ.shape[3], dev.mK.shape[0])
        order = order_of(self.traits.mask, extent, 2 * (self.headdim + self.headdim_v), narrow=False)
        return order.work(cute.arch.block_idx()[0])

    @cute.kernel
    def kernel(self, dev: Device):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for tma in (dev.tma_q, dev.tma_do, dev.tma_k, dev.tma_v, dev.tma_dq):
                cpasync.prefetch_descriptor(tma)
        buffer = lambda layout: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout)], 1024]

        @cute.struct
        class Smem:
            bar_q: cute.struct.MemRange[Int64, CONSUMERS]
            bar_k: cute.struct.MemRange[Int64, 4]
            bar_v: cute.struct.MemRange[Int64, 2]
            sQ: buffer(dev.lay_q)
            sdO: buffer(dev.lay_do)
            sK: buffer(dev.lay_k)
            sV: buffer(dev.lay_v)

        assert Smem.size_in_bytes() <= SmemAllocator.capacity_in_bytes("sm_90"), Smem.size_in_bytes()
        st = SmemAllocator().allocate(Smem)
        tensor = lambda m, layout: m.get_tensor(layout.outer, swizzle=layout.inner)
        smem = Shared(
            tensor(st.sQ, dev.lay_q), tensor(st.sdO, dev.lay_do), tensor(st.sK, dev.lay_k), tensor(st.sV, dev.lay_v)
        )
        num_bytes = lambda layout: stage_bytes(self.dtype, layout)
        ring = lambda m, stages, layout: Ring(m.data_ptr(), m.data_ptr() + stages, num_bytes(layout))
        ring_k, ring_v = ring(st.bar_k, 2, dev.lay_k), ring(st.bar_v, 1, dev.lay_v)
        ready = st.bar_q.data_ptr()  # one for each warpgroup: its 64 rows of Q and dO
        if warp == 0:
            with cute.arch.elect_one():
                for wg in cutlass.range_constexpr(CONSUMERS):
                    cute.arch.mbarrier_init(ready + wg, 1)
                ring_k.init(2, 4 * CONSUMERS)
                ring_v.init(1, 4 * CONSUMERS)
        cute.arch.mbarrier_init_fence()
        cute.arch.barrier()
        if warp < 4:
            cute.arch.setmaxregister_decrease(self.registers[0])
            if warp == 1:
                # This kernel ends after the one beside which it runs, or what follows could not rely on that one's end.
                cute.arch.griddepcontrol_wait()
            if warp == 0:
                self.load(dev, ring_k, ring_v, ready, smem, num_bytes(dev.lay_q) + num_bytes(dev.lay_do))
        else:
            cute.arch.setmaxregister_increase(self.registers[1])
            self.consume(dev, ring_k, ring_v, ready, smem)

    def seqlens(self, dev):
        return Seqlens(dev.mQ.shape[0], dev.mK.shape[0])

    def segments(self, dev, m_block, rows):
        return self.band(dev).kv_tiles(m_block, Slabs(rows, self.tile_n), self.seqlens(dev), DeviceArith)

    @cute.jit
    def load(self, dev, ring_k, ring_v, ready, smem, slab_bytes):
        """Producer warp: Q and dO once, then K and V tile after tile."""
        work = self.work(dev)

        kv_head = HeadMap(dev.mQ.shape[2] // dev.mK.shape[2]).kv(work.head)
        copies = (
            slices(dev.tma_q, smem.Q, dev.mQ, (SLAB, self.headdim), work.head, work.batch),
            slices(dev.tma_do, smem.dO, dev.mdO, (SLAB, self.headdim_v), work.head, work.batch),
        )
        for wg in cutlass.range_constexpr(CONSUMERS):
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(ready + wg, slab_bytes)
            for atom, src, dst in copies:
                cute.copy(atom, src[None, work.m_block * CONSUMERS + wg], dst[None, wg], tma_bar_ptr=ready + wg)
        hooks = Loads(
            ring_k,
            ring_v,
            slices(dev.tma_k, smem.K, dev.mK, (self.tile_n, self.headdim), kv_head, work.batch),
            slices(dev.tma_v, smem.V, dev.mV, (self.tile_n, self.headdim_v), kv_head, work.batch),
        )
        Walk(self.band(dev)).kv(self.segments(dev, work.m_block, TILE_M), hooks, first_slot())

    @cute.jit
    def consume(self, dev, ring_k, ring_v, ready, smem):
        """Consumer warpgroups: 64 queries each."""
        work = self.work(dev)
        tidx = cute.arch.thread_idx()[0] - WARPGROUP
        wg = cute.arch.make_warp_uniform(tidx // WARPGROUP)
        place = Place(wg, cute.arch.make_warp_uniform((tidx % WARPGROUP) // 32), tidx % 32)
        seqlens = self.seqlens(dev)
        row = work.m_block * TILE_M + wg * SLAB + place.warp * 16 + place.lane // 4
        # Both warpgroups walk the tiles of the block: one that a warpgroup does not see is masked to zero.
        seg = self.segments(dev, work.m_block, TILE_M)
        partial = (seg.end > seg.full_end) | (seg.full_begin >= seg.end)
        a = lambda m, s: m.make_fragment_A(m.get_slice(0).partition_A(s))
        b = lambda m, s: m.make_fragment_B(m.get_slice(0).partition_B(s))
        sKt = cute.make_tensor(smem.K.iterator, cute.select(smem.K.layout, mode=[1, 0, 2]))
        rQ, rdO = a(dev.mma_s, smem.Q), a(dev.mma_dp, smem.dO)
        dQ = cute.make_rmem_tensor(dev.mma_dq.get_slice(0).partition_shape_C((SLAB, self.headdim)), Float32)
        dQ.fill(0.0)
        lse2, delta = [cute.make_rmem_tensor(2, Float32) for _ in range(2)]
        padded = cute.ceil_div(seqlens.q, PAD) * PAD
        first = (Int64(work.batch) * dev.mQ.shape[2] + work.head) * padded
        for r in cutlass.range_constexpr(2):
            mine = row + 8 * r
            offset = first * 2 + mine // self.tile_m * (2 * self.tile_m) + mine % self.tile_m
            both = cute.make_tensor(
                at(Float32, dev.stats + offset * 4, 4), cute.make_layout((2,), stride=(self.tile_m,))
            )
            lse2[r], delta[r] = both[0], both[1]
        turns = PingPong(wg, CONSUMERS)
        turns.start()
        hooks = Products(
            dev.mma_s,
            dev.mma_dp,
            dev.mma_dq,
            ring_k,
            ring_v,
            turns,
            rQ[None, None, None, wg],
            rdO[None, None, None, wg],
            b(dev.mma_s, smem.K),
            b(dev.mma_dp, smem.V),
            b(dev.mma_dq, sKt),
            dev.mma_dq.make_fragment_A(dev.mma_dq.get_slice(0).partition_shape_A((SLAB, self.tile_n))),
            dQ,
            dev.mma_s.get_slice(0).partition_shape_C((SLAB, self.tile_n)),
            dev.scale * LOG2_E,
            BandMask(self.band(dev), self.tile_n, seqlens, row, 2 * (place.lane % 4)),
            Int32(cutlass.select_(partial, Int32(1), Int32(0))),
            lse2,
            delta,
        )
        cute.arch.mbarrier_wait(ready + wg, 0)
        # Whole, for want of registers: without the code of masked tiles the compiler spills some at headdim 192.
        Walk(self.band(dev), whole=True).kv(seg, hooks, first_slot())
        self.store(dev, smem, work, place, dQ)

    @cute.jit
    def store(self, dev, smem, work, place, dQ):
        """Epilogue: dQ takes the place of this warpgroup's Q."""
        for i in range(cute.size(dQ)):
            dQ[i] = dQ[i] * dev.scale
        out = cute.make_rmem_tensor_like(dQ, self.dtype)
        to_half(dQ, out)
        together = lambda: cute.arch.barrier(barrier_id=EPILOGUE_BARRIER + place.wg, number_of_threads=WARPGROUP)
        together()
        slab = smem.Q[None, None, place.wg]
        write_slab(out, slab, self.headdim, place)
        fence()
        together()
        _, target, source = slices(dev.tma_dq, slab, dev.mdQ, (SLAB, self.headdim), work.head, work.batch)
        if place.warp == 0:
            cute.copy(dev.tma_dq, source, target[None, work.m_block * CONSUMERS + place.wg])
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)
