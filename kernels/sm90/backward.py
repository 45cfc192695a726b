"""sm90.backward: dQ, dK, dV for Hopper, FP16 and BF16, in three launches of one call.

    prepare   delta = rowsum(dO * O) - dlse and lse in log2 units, padded to whole tiles; zeroes the float32 dQ
    main      a thread block for each key tile and kv head: K, V resident, Q and dO of all its query heads stream by
    finish    dQ from float32, scaled, to the operands' dtype

Main keeps keys as rows, so that P and dS leave the accumulators as the register operand of the next product:

    S^T = K Q^T | P^T = exp2(S^T c - lse) | dV += P^T dO | dP^T = V dO^T | dS^T = P^T (dP^T - delta) | dK += dS^T Q
    dS -> shared memory, all consumers meet | dQ += dS K, added to global memory by vector reductions

Every consumer warpgroup owns 64 keys and their dK and dV; only dQ sums over keys of other warpgroups and blocks.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, Int64, const_expr
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from flashattn_hopper.spec.mask import Seqlens
from flashattn_hopper.spec.tile import ROW_PAD as PAD
from flashattn_hopper.spec.tile import WARPGROUP

from ..common.convert import ELEMENT, to_half
from ..common.mask import ColumnMask
from ..common.operands import BwdOperands
from ..common.softmax import LOG2_E, probability
from ..common.work import DeviceArith, Extent, InOrder, Place, longest_first
from .mainloop import gemm
from .pipeline import EPILOGUE_BARRIER, Ring, first_slot
from .query_gradient import QueryGradient
from .tensors import SLAB, at, band_of, fake_operand, one_stage, slices, stage_bytes, staged, write_slab

ENDS_THREADS = 256
MEET_BARRIER = 4


def reduce4(address, values):
    """Add four neighbouring floats to global memory in one instruction, without waiting for it."""
    llvm.inline_asm(
        None,
        [Int64(address).ir_value(), *[Float32(v).ir_value() for v in values]],
        "red.relaxed.gpu.global.add.v4.f32 [$0], {$1, $2, $3, $4};",
        "l,f,f,f,f",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


class Work(NamedTuple):
    n_block: Int32
    head: Int32  # of K and V
    batch: Int32


class Device(NamedTuple):
    tma_q: cute.CopyAtom
    mQ: cute.Tensor
    tma_do: cute.CopyAtom
    mdO: cute.Tensor
    tma_k: cute.CopyAtom
    mK: cute.Tensor
    tma_v: cute.CopyAtom
    mV: cute.Tensor
    tma_dk: cute.CopyAtom
    mdK: cute.Tensor
    tma_dv: cute.CopyAtom
    mdV: cute.Tensor
    mma_s: cute.TiledMma
    mma_dp: cute.TiledMma
    mma_dv: cute.TiledMma
    mma_dk: cute.TiledMma
    mma_dq: cute.TiledMma
    lay_q: cute.ComposedLayout
    lay_do: cute.ComposedLayout
    lay_k: cute.ComposedLayout
    lay_v: cute.ComposedLayout
    lay_ds: cute.ComposedLayout
    scale: Float32
    window_left: Any
    window_right: Any
    lse2: Int64
    delta: Int64
    dq_sum: Int64


class Shared(NamedTuple):
    Q: cute.Tensor
    dO: cute.Tensor
    K: cute.Tensor
    V: cute.Tensor
    P: Any  # (keys, queries, stages): only where two warpgroups share keys
    dS: Any  # the same: not where it stays in registers
    lse2: cute.Tensor  # (tile_m, stages)
    delta: cute.Tensor


@dataclass(frozen=True)
class Stats:
    """lse and delta of a query tile ride on the barriers of Q and dO."""

    atom: cute.CopyAtom
    source: cute.Tensor  # (rows of one head)
    staged: cute.Tensor
    rows: int

    @cute.jit
    def load(self, m_block, stage, barrier):
        src = cute.local_tile(self.source, (self.rows,), (m_block,))
        with cute.arch.elect_one():
            cute.copy(self.atom, src, self.staged[None, stage], mbar_ptr=barrier)


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
        self.ring_do.release(slot)
        self.ring_q.release(slot)


class Backward:
    def __init__(self, traits, tile):
        self.traits, self.tile = traits, tile
        self.headdim, self.headdim_v = traits.headdim, traits.headdim_v
        self.dtype = ELEMENT[traits.dtype]
        self.num_consumers = tile.num_consumers
        # Split: dQ comes from a kernel of its own, which needs no sums in memory. Wide: two warpgroups share 64 keys.
        self.split, self.wide = tile.query_n is not None, tile.tile_n == SLAB
        self.stages_ds = self.wide or not self.split  # dS goes through shared memory
        self.key_width, self.value_width = [w // 2 if self.wide else w for w in (self.headdim, self.headdim_v)]
        # A warpgroup computes half of dQ: half of its rows where the tile has 128, half of its columns where it has 64.
        self.lanes = 1 << (self.headdim_v // 8 - 1).bit_length()  # threads that share a row in prepare, 8 elements each
        self.dq_rows = tile.tile_m == 2 * SLAB
        self.dq_n = self.headdim if self.dq_rows else self.headdim // tile.num_consumers

    def arguments(self):
        B, Sq, Sk, Hq, Hk, D, Dv = [cute.sym_int() for _ in range(7)]
        operand = lambda *shape: fake_operand(self.dtype, B, *shape)
        window = self.traits.mask == "window"
        operands = BwdOperands(
            q=operand(Sq, Hq, D),
            k=operand(Sk, Hk, D),
            v=operand(Sk, Hk, Dv),
            do=operand(Sq, Hq, Dv),
            o=Int64(0),
            lse=Int64(0),
            dlse=Int64(0),
            dq=Int64(0),
            dk=Int64(0),
            dv=Int64(0),
            workspace=Int64(0),
            softmax_scale=Float32(1.0),
            window_left=Int32(0) if window else None,
            window_right=Int32(0) if window else None,
        )
        return operands, make_fake_stream(use_tvm_ffi_env_stream=True)

    # ---------------------------------------------------------------------------------------------- host half
    @cute.jit
    def __call__(self, ops: BwdOperands, stream: cuda.CUstream):
        t, hd, hd_v = self.tile, self.headdim, self.headdim_v
        q, k, v, do = [
            cute.make_tensor(x.iterator, cute.select(x.layout, mode=[1, 3, 2, 0]))
            for x in (ops.q, ops.k, ops.v, ops.do)
        ]
        seqlen_q, _, heads, batch = q.shape
        seqlen_k, _, kv_heads, _ = k.shape
        d, d_v = [cute.assume(x.shape[1], divby=8) for x in (k, v)]

        def contiguous(address, rows, heads, width):
            row = Int64(heads) * width
            layout = cute.make_layout((rows, width, heads, batch), stride=(row, 1, Int64(width), rows * row))
            return cute.make_tensor(at(self.dtype, address, 16), layout)

        o, dq = contiguous(ops.o, seqlen_q, heads, d_v), contiguous(ops.dq, seqlen_q, heads, d)
        dk, dv = contiguous(ops.dk, seqlen_k, kv_heads, d), contiguous(ops.dv, seqlen_k, kv_heads, d_v)
        rows = Int64(batch) * heads * (cute.ceil_div(seqlen_q, PAD) * PAD)
        dq_sum = ops.workspace
        lse2 = dq_sum + rows * (0 if const_expr(self.split) else 4 * hd)
        delta = lse2 + rows * 4

        K, MN = OperandMajorMode.K, OperandMajorMode.MN
        S, R = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM
        mma = lambda a_major, b_major, n, source: hopper.make_trivial_tiled_mma(
            self.dtype, self.dtype, a_major, b_major, Float32, (1, 1, 1), (SLAB, n), source
        )

        half, half_v = self.key_width, self.value_width
        lay_q, lay_do = staged(self.dtype, t.tile_m, hd, 2, half), staged(self.dtype, t.tile_m, hd_v, 2, half_v)
        lay_k, lay_v = staged(self.dtype, t.tile_n, hd, 1, half), staged(self.dtype, t.tile_n, hd_v, 1, half_v)
        lay_ds = staged(self.dtype, t.tile_n, t.tile_m, 2, t.tile_m)
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        atom = cpasync.make_tiled_tma_atom
        dev = Device(
            *atom(load, q, one_stage(lay_q), (t.tile_m, hd)),
            *atom(load, do, one_stage(lay_do), (t.tile_m, hd_v)),
            *atom(load, k, one_stage(lay_k), (t.tile_n, hd)),
            *atom(load, v, one_stage(lay_v), (t.tile_n, hd_v)),
            *atom(store, dk, one_stage(staged(self.dtype, SLAB, half, 1, half)), (SLAB, half)),
            *atom(store, dv, one_stage(staged(self.dtype, SLAB, half_v, 1, half_v)), (SLAB, half_v)),
            mma(K, K, t.tile_m, S),
            mma(K, K, t.tile_m, S),
            mma(K, MN, half_v, S if const_expr(self.wide) else R),
            mma(K, MN, half, S if const_expr(self.wide) else R),
            None if const_expr(self.split) else mma(MN, MN, self.dq_n, S),
            lay_q, lay_do, lay_k, lay_v, lay_ds,
            ops.softmax_scale, ops.window_left, ops.window_right, lse2, delta, dq_sum,
        )  # fmt: skip
        ends = [cute.ceil_div(seqlen_q, PAD) * heads * batch, 1, 1]
        self.prepare(o, do, ops.lse, ops.dlse, lse2, delta, dq_sum).launch(
            grid=ends, block=[ENDS_THREADS, 1, 1], stream=stream
        )
        tiles = cute.ceil_div(seqlen_k, t.tile_n) * kv_heads * batch
        self.main(dev).launch(grid=[tiles, 1, 1], block=[t.num_threads, 1, 1], min_blocks_per_mp=1, stream=stream)
        if const_expr(self.split):
            scalars = ops.softmax_scale, ops.window_left, ops.window_right
            QueryGradient(self.traits, t.query_n).launch(q, k, v, do, dq, lse2, delta, *scalars, stream)
        else:
            self.finish(dq, ops.softmax_scale, dq_sum).launch(grid=ends, block=[ENDS_THREADS, 1, 1], stream=stream)

    # ---------------------------------------------------------------------------------------------- the two ends
    def end(self, rows, heads):
        """(block of PAD rows, head, batch, first padded row of that head) of this thread block."""
        blocks = cute.ceil_div(rows, PAD)
        linear = cute.arch.block_idx()[0]
        head_batch = linear // blocks
        batch = head_batch // heads
        return linear - head_batch * blocks, head_batch - batch * heads, batch, Int64(head_batch) * (blocks * PAD)

    def vector(self, tensor, where):
        """Eight neighbouring elements; every stride but the last is a multiple of them."""
        pointer = tensor.iterator + cute.crd2idx(where, tensor.layout)
        return cute.make_tensor(at(self.dtype, pointer.toint(), 16), cute.make_layout(8))

    @cute.kernel
    def prepare(self, mO: cute.Tensor, mdO: cute.Tensor, lse: Int64, dlse: Int64, lse2: Int64, delta: Int64, dq: Int64):
        seqlen_q, d_v, heads, _ = mO.shape
        tidx = cute.arch.thread_idx()[0]
        block, head, batch, first = self.end(seqlen_q, heads)
        lanes = self.lanes
        at_once = ENDS_THREADS // lanes
        lane, own = tidx % lanes, tidx // lanes
        floats = lambda address, n: cute.make_tensor(at(Float32, address, 4), cute.make_layout(n))
        out_lse2, out_delta = floats(lse2 + first * 4, PAD * (block + 1)), floats(delta + first * 4, PAD * (block + 1))
        head_row = (Int64(batch) * heads + head) * seqlen_q
        for i in cutlass.range_constexpr(PAD // at_once):
            row = block * PAD + i * at_once + own
            total = Float32(0.0)
            if row < seqlen_q and lane * 8 < d_v:
                where = (Int64(row), Int64(lane * 8), Int64(head), Int64(batch))
                a, b = [self.vector(m, where).load().to(Float32) for m in (mO, mdO)]
                product = a * b
                for j in cutlass.range_constexpr(8):
                    total = total + product[j]
            for bit in cutlass.range_constexpr(lanes.bit_length() - 1):
                total = total + cute.arch.shuffle_sync_bfly(total, offset=1 << bit)
            if lane == 0:
                # Rows past the end and rows without keys: P = exp2(S - inf) = 0.
                log2, shift = Float32(math.inf), Float32(0.0)
                if row < seqlen_q:
                    natural = floats(lse + (head_row + row) * 4, 1)[0]
                    shift = total
                    if dlse != 0:
                        shift = shift - floats(dlse + (head_row + row) * 4, 1)[0]
                    empty = natural == -math.inf
                    log2 = Float32(cutlass.select_(empty, Float32(math.inf), natural * LOG2_E))
                    shift = Float32(cutlass.select_(empty, Float32(0.0), shift))
                out_lse2[row] = log2
                out_delta[row] = shift
        if const_expr(not self.split):
            zero = cute.make_rmem_tensor(4, Float32)
            zero.fill(0.0)
            words = self.headdim * PAD // 4
            mine = dq + (first + block * PAD) * (4 * self.headdim)
            for i in cutlass.range(words // ENDS_THREADS, unroll=4):
                target = cute.make_tensor(at(Float32, mine + (i * ENDS_THREADS + tidx) * 16, 16), cute.make_layout(4))
                target.store(zero.load())

    @cute.kernel
    def finish(self, mdQ: cute.Tensor, scale: Float32, dq: Int64):
        seqlen_q, d, heads, _ = mdQ.shape
        t = self.tile
        tidx = cute.arch.thread_idx()[0]
        block, head, batch, first = self.end(seqlen_q, heads)
        wg, lane, warp = tidx // WARPGROUP, tidx % 32, (tidx % WARPGROUP) // 32
        chunks = self.dq_n // 8
        for tile in cutlass.range_constexpr(PAD // t.tile_m):
            row0 = block * PAD + tile * t.tile_m + warp * 16 + lane // 4 + (wg * SLAB if self.dq_rows else 0)
            col0 = 2 * (lane % 4) + (0 if self.dq_rows else wg * self.dq_n)
            base = dq + (first + block * PAD + tile * t.tile_m) * (4 * self.headdim) + wg * (SLAB * self.dq_n * 4)
            for j in cutlass.range_constexpr(chunks):
                source = cute.make_tensor(
                    at(Float32, base + (j * WARPGROUP + tidx % WARPGROUP) * 16, 16), cute.make_layout(4)
                )
                values = cute.make_rmem_tensor(4, Float32)
                values.store(source.load() * scale)
                half = cute.make_rmem_tensor(4, self.dtype)
                to_half(values, half)
                words = cute.recast_tensor(half, Int32)
                for r in cutlass.range_constexpr(2):
                    row, col = row0 + 8 * r, col0 + 8 * j
                    if row < seqlen_q and col < d:
                        where = cute.crd2idx((Int64(row), Int64(col), Int64(head), Int64(batch)), mdQ.layout)
                        target = cute.recast_ptr(mdQ.iterator + where, dtype=Int32)
                        cute.make_tensor(target, cute.make_layout(1))[0] = words[r]

    # ---------------------------------------------------------------------------------------------------- main
    def band(self, dev):
        return band_of(self.traits.mask, dev.window_left, dev.window_right)

    def seqlens(self, dev):
        return Seqlens(dev.mQ.shape[0], dev.mK.shape[0])

    @cute.jit
    def work(self, dev):
        n_blocks = cute.ceil_div(dev.mK.shape[0], self.tile.tile_n)
        extent = Extent(n_blocks, dev.mK.shape[2], dev.mK.shape[3], dev.mQ.shape[0])
        group = dev.mQ.shape[2] // dev.mK.shape[2]
        if const_expr(self.traits.mask == "causal"):
            order = longest_first(extent, group * (2 * self.headdim + 2 * self.headdim_v + 4 * self.headdim))
            m, head, batch = order.work(cute.arch.block_idx()[0])
            return Work(n_blocks - 1 - m, head, batch)
        return Work(*InOrder(extent).work(cute.arch.block_idx()[0]))

    @cute.kernel
    def main(self, dev: Device):
        t = self.tile
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for tma in (dev.tma_q, dev.tma_do, dev.tma_k, dev.tma_v, dev.tma_dk, dev.tma_dv):
                cpasync.prefetch_descriptor(tma)
        buffer = lambda layout, used=True: cute.struct.Align[
            cute.struct.MemRange[self.dtype, cute.cosize(layout) if used else 0], 1024
        ]

        @cute.struct
        class Smem:
            bar_kv: cute.struct.MemRange[Int64, 2]
            bar_q: cute.struct.MemRange[Int64, 4]
            bar_do: cute.struct.MemRange[Int64, 4]
            lse2: cute.struct.Align[cute.struct.MemRange[Float32, 2 * t.tile_m], 128]
            delta: cute.struct.Align[cute.struct.MemRange[Float32, 2 * t.tile_m], 128]
            sQ: buffer(dev.lay_q)
            sdO: buffer(dev.lay_do)
            sK: buffer(dev.lay_k)
            sV: buffer(dev.lay_v)
            sP: buffer(dev.lay_ds, self.wide)
            sdS: buffer(dev.lay_ds, self.stages_ds)

        assert Smem.size_in_bytes() <= SmemAllocator.capacity_in_bytes("sm_90"), Smem.size_in_bytes()
        st = SmemAllocator().allocate(Smem)
        tensor = lambda m, layout: m.get_tensor(layout.outer, swizzle=layout.inner)
        rows = lambda m: m.get_tensor(cute.make_layout((t.tile_m, 2)))
        smem = Shared(
            tensor(st.sQ, dev.lay_q), tensor(st.sdO, dev.lay_do), tensor(st.sK, dev.lay_k), tensor(st.sV, dev.lay_v),
            tensor(st.sP, dev.lay_ds) if const_expr(self.wide) else None,
            tensor(st.sdS, dev.lay_ds) if const_expr(self.stages_ds) else None,
            rows(st.lse2), rows(st.delta),
        )  # fmt: skip
        num_bytes = lambda layout: stage_bytes(self.dtype, layout)
        ring = lambda m, layout: Ring(m.data_ptr(), m.data_ptr() + 2, num_bytes(layout) + 4 * t.tile_m)
        ring_q, ring_do = ring(st.bar_q, dev.lay_q), ring(st.bar_do, dev.lay_do)
        ready = st.bar_kv.data_ptr()
        if warp == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(ready, 1)
                ring_q.init(2, 4 * self.num_consumers)
                ring_do.init(2, 4 * self.num_consumers)
        cute.arch.mbarrier_init_fence()
        cute.arch.barrier()
        if warp < 4:
            cute.arch.setmaxregister_decrease(t.registers[0])
            if warp == 0:
                self.load(dev, ring_q, ring_do, ready, smem, num_bytes(dev.lay_k) + num_bytes(dev.lay_v))
        else:
            cute.arch.setmaxregister_increase(t.registers[1])
            if const_expr(self.wide):
                self.consume_wide(dev, ring_q, ring_do, ready, smem)
            else:
                self.consume(dev, ring_q, ring_do, ready, smem)

    def line(self, address, first, rows):
        """lse or delta of one head: `rows` floats from padded row `first`."""
        return cute.make_tensor(at(Float32, address + first * 4, 16), cute.make_layout(rows))

    @cute.jit
    def load(self, dev, ring_q, ring_do, ready, smem, kv_bytes):
        """Producer warp: K and V once, then Q with lse and dO with delta, tile after tile, head after head."""
        t, work = self.tile, self.work(dev)
        seqlen_q, _, heads, _ = dev.mQ.shape
        group = heads // dev.mK.shape[2]
        padded = cute.ceil_div(seqlen_q, PAD) * PAD
        seg = self.band(dev).q_tiles(work.n_block, t, self.seqlens(dev), DeviceArith)

        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(ready, kv_bytes)
        for tma, shared, tensor, width in (
            (dev.tma_k, smem.K, dev.mK, self.headdim),
            (dev.tma_v, smem.V, dev.mV, self.headdim_v),
        ):
            _, src, dst = slices(tma, shared, tensor, (t.tile_n, width), work.head, work.batch)
            cute.copy(tma, src[None, work.n_block], dst[None, 0], tma_bar_ptr=ready)
        bulk = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32, num_bits_per_copy=32 * t.tile_m)
        slot = first_slot()
        for g in cutlass.range(group, unroll=1):
            head = work.head * group + g
            _, q_src, q_dst = slices(dev.tma_q, smem.Q, dev.mQ, (t.tile_m, self.headdim), head, work.batch)
            _, do_src, do_dst = slices(dev.tma_do, smem.dO, dev.mdO, (t.tile_m, self.headdim_v), head, work.batch)
            first = (Int64(work.batch) * heads + head) * padded
            lse2 = Stats(bulk, self.line(dev.lse2, first, padded), smem.lse2, t.tile_m)
            delta = Stats(bulk, self.line(dev.delta, first, padded), smem.delta, t.tile_m)
            for m in cutlass.range(seg.begin, seg.end, unroll=1):
                bar = ring_q.acquire(slot)
                cute.copy(dev.tma_q, q_src[None, m], q_dst[None, slot.index], tma_bar_ptr=bar)
                lse2.load(m, slot.index, bar)
                bar = ring_do.acquire(slot)
                cute.copy(dev.tma_do, do_src[None, m], do_dst[None, slot.index], tma_bar_ptr=bar)
                delta.load(m, slot.index, bar)
                slot = slot.next()

    @cute.jit
    def consume(self, dev, ring_q, ring_do, ready, smem):
        """Consumer warpgroups: 64 keys each."""
        t, work = self.tile, self.work(dev)
        tidx = cute.arch.thread_idx()[0] - WARPGROUP
        wg = cute.arch.make_warp_uniform(tidx // WARPGROUP)
        place = Place(wg, cute.arch.make_warp_uniform((tidx % WARPGROUP) // 32), tidx % 32)
        seqlen_q, _, heads, _ = dev.mQ.shape
        group = heads // dev.mK.shape[2]
        padded = cute.ceil_div(seqlen_q, PAD) * PAD
        band, seqlens = self.band(dev), self.seqlens(dev)
        seg = band.q_tiles(work.n_block, t, seqlens, DeviceArith)
        flip = lambda s: cute.make_tensor(s.iterator, cute.select(s.layout, mode=[1, 0, 2]))
        a = lambda m, s: m.make_fragment_A(m.get_slice(0).partition_A(s))
        b = lambda m, s: m.make_fragment_B(m.get_slice(0).partition_B(s))
        m_half, n_half = (wg, 0) if const_expr(self.dq_rows) else (0, wg)
        part = lambda s, shape, at: cute.local_tile(s, shape, at)
        rK = a(dev.mma_s, part(smem.K, (SLAB, self.headdim, 1), (wg, 0, 0)))
        rV = a(dev.mma_dp, part(smem.V, (SLAB, self.headdim_v, 1), (wg, 0, 0)))
        rQ, rdO = b(dev.mma_s, smem.Q), b(dev.mma_dp, smem.dO)
        rQt, rdOt = b(dev.mma_dk, flip(smem.Q)), b(dev.mma_dv, flip(smem.dO))
        if const_expr(not self.split):
            rdS = a(dev.mma_dq, part(flip(smem.dS), (SLAB, t.tile_n, 2), (m_half, 0, 0)))
            rKt = b(dev.mma_dq, part(flip(smem.K), (self.dq_n, t.tile_n, 1), (n_half, 0, 0)))
            store = hopper.get_smem_store_op(LayoutEnum.ROW_MAJOR, self.dtype, Float32)
            thr = cute.make_tiled_copy_C(store, dev.mma_s).get_slice(place.warp * 32 + place.lane)
            slab = part(smem.dS, (SLAB, t.tile_m, 2), (wg, 0, 0))
        fragment = lambda m, n: cute.make_rmem_tensor(m.get_slice(0).partition_shape_C((SLAB, n)), Float32)
        operand = lambda m: m.make_fragment_A(m.get_slice(0).partition_shape_A((SLAB, t.tile_m)))
        dK, dV = fragment(dev.mma_dk, self.headdim), fragment(dev.mma_dv, self.headdim_v)
        P, dS = operand(dev.mma_dv), operand(dev.mma_dk)
        dK.fill(0.0)
        dV.fill(0.0)
        row = work.n_block * t.tile_n + wg * SLAB + place.warp * 16 + place.lane // 4
        col = 2 * (place.lane % 4)
        mask = ColumnMask(band, t.tile_m, seqlens, row, col)
        scale_log2 = dev.scale * LOG2_E

        cute.arch.mbarrier_wait(ready, 0)
        slot = first_slot()
        for g in cutlass.range(group, unroll=1):
            head_row = (Int64(work.batch) * heads + (work.head * group + g)) * padded
            dq_head = dev.dq_sum + head_row * (4 * self.headdim)
            for m in cutlass.range(seg.begin, seg.end, unroll=1):
                ring_q.wait(slot)
                S = fragment(dev.mma_s, t.tile_m)
                gemm(dev.mma_s, S, rK[None, None, None, 0], rQ[None, None, None, slot.index], True)
                ring_do.wait(slot)
                dP = fragment(dev.mma_dp, t.tile_m)
                gemm(dev.mma_dp, dP, rV[None, None, None, 0], rdO[None, None, None, slot.index], True)
                warpgroup.wait_group(1)
                for i in range(cute.size(S)):
                    lse2 = smem.lse2[col + (i // 4) * 8 + i % 2, slot.index]
                    S[i] = S[i] * scale_log2 - lse2
                if (m < seg.full_begin) | (m >= seg.full_end):
                    mask.apply(S, m)
                for i in range(cute.size(S)):
                    S[i] = probability(S[i])
                # P in 16 bits beside P and dP in 32 is too much for 128 query rows: dV then waits for dS.
                early = const_expr(not self.dq_rows)
                if const_expr(early):
                    to_half(S, P)
                    gemm(dev.mma_dv, dV, P, rdOt[None, None, None, slot.index], False)
                warpgroup.wait_group(1 if early else 0)
                for i in range(cute.size(S)):
                    delta = smem.delta[col + (i // 4) * 8 + i % 2, slot.index]
                    dP[i] = S[i] * (dP[i] - delta)
                to_half(dP, dS)
                if const_expr(not early):
                    to_half(S, P)
                    gemm(dev.mma_dv, dV, P, rdOt[None, None, None, slot.index], False)
                if const_expr(not self.split):
                    packed = cute.make_tensor(dS.iterator, dP.layout)
                    cute.copy(store, thr.retile(packed), thr.partition_D(slab[None, None, slot.index]))
                    cute.arch.fence_proxy("async.shared", space="cta")
                    cute.arch.barrier(barrier_id=MEET_BARRIER, number_of_threads=WARPGROUP * self.num_consumers)
                    dQ = fragment(dev.mma_dq, self.dq_n)
                    gemm(dev.mma_dq, dQ, rdS[None, None, None, slot.index], rKt[None, None, None, 0], True)
                gemm(dev.mma_dk, dK, dS, rQt[None, None, None, slot.index], False)
                warpgroup.wait_group(1)
                ring_do.release(slot)
                if const_expr(not self.split):
                    target = dq_head + Int64(m) * (t.tile_m * self.headdim * 4) + wg * (SLAB * self.dq_n * 4)
                    target = target + (place.warp * 32 + place.lane) * 16
                    for j in range(cute.size(dQ) // 4):
                        reduce4(target + j * (WARPGROUP * 16), [dQ[4 * j + i] for i in range(4)])
                warpgroup.wait_group(0)
                ring_q.release(slot)
                slot = slot.next()
        self.store(dev, smem, work, place, dK, dV)

    # ---- consumers that share 64 keys: one makes P, the other dS, each half of the columns of dV and dK
    @cute.jit
    def consume_wide(self, dev, ring_q, ring_do, ready, smem):
        t, work = self.tile, self.work(dev)
        tidx = cute.arch.thread_idx()[0] - WARPGROUP
        wg = cute.arch.make_warp_uniform(tidx // WARPGROUP)
        place = Place(wg, cute.arch.make_warp_uniform((tidx % WARPGROUP) // 32), tidx % 32)
        flip = lambda s: cute.make_tensor(s.iterator, cute.select(s.layout, mode=[1, 0, 2]))
        a = lambda m, s: m.make_fragment_A(m.get_slice(0).partition_A(s))
        b = lambda m, s: m.make_fragment_B(m.get_slice(0).partition_B(s))
        half = lambda s, width: cute.local_tile(flip(s), (width, t.tile_m, 2), (wg, 0, 0))
        fragment = lambda m, n: cute.make_rmem_tensor(m.get_slice(0).partition_shape_C((SLAB, n)), Float32)
        dK, dV = fragment(dev.mma_dk, self.key_width), fragment(dev.mma_dv, self.value_width)
        dK.fill(0.0)
        dV.fill(0.0)
        shared = Wide(
            ring_q, ring_do, dev.mma_dk, dev.mma_dv, a(dev.mma_dv, smem.P), a(dev.mma_dk, smem.dS),
            b(dev.mma_dk, half(smem.Q, self.key_width)), b(dev.mma_dv, half(smem.dO, self.value_width)), dK, dV,
        )  # fmt: skip
        cute.arch.mbarrier_wait(ready, 0)
        if wg == 0:
            scores = a(dev.mma_s, smem.K), b(dev.mma_s, smem.Q)
            self.probabilities(dev, shared, smem, work, place, scores)
        else:
            scores = a(dev.mma_dp, smem.V), b(dev.mma_dp, smem.dO)
            self.score_gradients(dev, shared, smem, work, place, scores)
        self.store(dev, smem, work, place, dK, dV)

    def loops(self, dev, work):
        """(query heads of the group, query tiles of this key tile)."""
        seg = self.band(dev).q_tiles(work.n_block, self.tile, self.seqlens(dev), DeviceArith)
        return dev.mQ.shape[2] // dev.mK.shape[2], seg

    @cute.jit
    def probabilities(self, dev, shared, smem, work, place, scores):
        """First warpgroup: S^T and P^T of the tile, into shared memory."""
        t = self.tile
        group, seg = self.loops(dev, work)
        row, col = work.n_block * t.tile_n + place.warp * 16 + place.lane // 4, 2 * (place.lane % 4)
        mask = ColumnMask(self.band(dev), t.tile_m, self.seqlens(dev), row, col)
        scale_log2 = dev.scale * LOG2_E
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
                    S[i] = S[i] * scale_log2 - smem.lse2[col + (i // 4) * 8 + i % 2, slot.index]
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
                for i in range(cute.size(dP)):
                    dP[i] = dP[i] - smem.delta[col + (i // 4) * 8 + i % 2, slot.index]
                self.meet(MEET_BARRIER)
                half = cute.make_rmem_tensor_like(dP, self.dtype)
                cute.copy(load, get.partition_S(smem.P[None, None, slot.index]), get.retile(half))
                shared.values(slot)
                for i in range(cute.size(dP)):
                    dP[i] = dP[i] * half[i].to(Float32)
                to_half(dP, half)
                cute.copy(store, put.retile(half), put.partition_D(smem.dS[None, None, slot.index]))
                cute.arch.fence_proxy("async.shared", space="cta")
                shared.ring_q.wait(slot)
                self.meet(MEET_BARRIER + 1)
                shared.keys(slot)
                slot = slot.next()

    def meet(self, barrier):
        cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP * self.num_consumers)

    @cute.jit
    def store(self, dev, smem, work, place, dK, dV):
        """Epilogue: dV takes the place of V, whose rows only this warpgroup read, dK that of K, which all have read."""
        for i in range(cute.size(dK)):
            dK[i] = dK[i] * dev.scale
        cute.arch.barrier(barrier_id=MEET_BARRIER, number_of_threads=WARPGROUP * self.num_consumers)
        # Its share of the tile: 64 of the keys, or half of the columns.
        row, column = (0, place.wg) if const_expr(self.wide) else (place.wg, 0)
        block = work.n_block if const_expr(self.wide) else work.n_block * self.num_consumers + place.wg
        for acc, shared, tma, tensor, width in (
            (dV, smem.V, dev.tma_dv, dev.mdV, self.value_width),
            (dK, smem.K, dev.tma_dk, dev.mdK, self.key_width),
        ):
            out = cute.make_rmem_tensor_like(acc, self.dtype)
            to_half(acc, out)
            slab = cute.local_tile(shared[None, None, 0], (SLAB, width), (row, column))
            write_slab(out, slab, width, place)
            cute.arch.barrier(barrier_id=EPILOGUE_BARRIER + place.wg, number_of_threads=WARPGROUP)
            _, target, source = slices(tma, slab, tensor, (SLAB, width), work.head, work.batch, column)
            if place.warp == 0:
                cute.copy(tma, source, target[None, block])
                cute.arch.cp_async_bulk_commit_group()
        if place.warp == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
