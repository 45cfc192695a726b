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
from ..common.schedule import Board
from ..common.softmax import LOG2_E, probability
from ..common.tensors import at, band_of, fake_operand
from ..common.work import DeviceArith, Extent, InOrder, Place, longest_first, thread_again
from .mainloop import gemm
from .pipeline import EPILOGUE_BARRIER, Ring, arrive_after_stores, first_slot
from .query_gradient import QueryGradient
from .tensors import SLAB, one_stage, slices, stage_bytes, staged, write_slab

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
    scale_log2: Float32
    window_left: Any
    window_right: Any
    stats: Int64
    dq_sum: Int64
    ticket: Int64


class Rings(NamedTuple):
    kv: Ring  # a stage is free once each warpgroup's dK and dV, which take its place, have been stored
    q: Ring
    do: Ring


class Shared(NamedTuple):
    Q: cute.Tensor
    dO: cute.Tensor
    K: cute.Tensor
    V: cute.Tensor
    P: Any  # (keys, queries, stages): only where two warpgroups share keys
    dS: Any  # the same: not where it stays in registers
    stats: cute.Tensor  # (tile_m, lse or delta, stages)


def consumer(thread):
    """Place of a thread among the consumers, which follow the producer's warpgroup."""
    uniform = cute.arch.make_warp_uniform
    return Place(uniform(thread // WARPGROUP) - 1, uniform(thread % WARPGROUP // 32), thread % 32)


@dataclass(frozen=True)
class Stats:
    """lse and delta of a query tile, which lie side by side, ride on the barrier of Q."""

    atom: cute.CopyAtom
    source: cute.Tensor  # (2 * rows of one head)
    staged: cute.Tensor

    @cute.jit
    def load(self, m_block, stage, barrier):
        dst = cute.group_modes(self.staged[None, None, stage], 0, 2)
        src = cute.local_tile(self.source, (cute.size(dst),), (m_block,))
        with cute.arch.elect_one():
            cute.copy(self.atom, src, dst, mbar_ptr=barrier)


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


@dataclass(frozen=True)
class Products:
    """A consumer of 64 keys. S of a query tile is issued before dQ and dK of the one before it are."""

    mma_s: cute.TiledMma
    mma_dp: cute.TiledMma
    mma_dv: cute.TiledMma
    mma_dk: cute.TiledMma
    mma_dq: Any  # None where dQ has a kernel of its own; so are rdS, rKt and put
    rings: Rings
    rK: cute.Tensor
    rV: cute.Tensor
    rQ: cute.Tensor
    rdO: cute.Tensor
    rQt: cute.Tensor
    rdOt: cute.Tensor
    rdS: Any
    rKt: Any
    put: Any  # (copy atom, this thread's part of the copy, this warpgroup's rows of dS in shared memory)
    S: cute.Tensor
    P: cute.Tensor
    dS: cute.Tensor
    dK: cute.Tensor
    dV: cute.Tensor
    stats: cute.Tensor
    scale_log2: Float32
    col: Int32  # this thread's first query in a tile
    early: bool  # dV is issued before dP is waited for: P in 16 bits beside P and dP in 32 must fit
    dq_n: int
    num_consumers: int

    def query(self, which, i, slot):
        """lse (0) or delta (1) of the query that element i of a score fragment belongs to."""
        return self.stats[self.col + (i // 4) * 8 + i % 2, which, slot.index]

    def scores(self, slot, kv):
        """Issue S."""
        gemm(self.mma_s, self.S, self.rK[None, None, None, kv.index], self.rQ[None, None, None, slot.index], True)

    def score_gradients(self, slot, kv):
        """Issue dP; S and everything before it is done afterwards."""
        self.rings.do.wait(slot)
        dP = cute.make_rmem_tensor_like(self.S)
        gemm(self.mma_dp, dP, self.rV[None, None, None, kv.index], self.rdO[None, None, None, slot.index], True)
        warpgroup.wait_group(1)
        return dP

    def exponents(self, slot):
        for i in range(cute.size(self.S)):
            self.S[i] = self.S[i] * self.scale_log2 - self.query(0, i, slot)

    def values(self, slot):
        """Issue dV."""
        to_half(self.S, self.P)
        gemm(self.mma_dv, self.dV, self.P, self.rdOt[None, None, None, slot.index], False)

    def gradients(self, dP, slot):
        """P and dS, this one also to shared memory; dV is on its way afterwards."""
        for i in range(cute.size(self.S)):
            self.S[i] = probability(self.S[i])
        if self.early:
            self.values(slot)
        warpgroup.wait_group(1 if self.early else 0)
        for i in range(cute.size(dP)):
            dP[i] = self.S[i] * (dP[i] - self.query(1, i, slot))
        to_half(dP, self.dS)
        if not self.early:
            self.values(slot)
        if self.put is not None:
            store, thr, slab = self.put
            packed = cute.make_tensor(self.dS.iterator, dP.layout)
            cute.copy(store, thr.retile(packed), thr.partition_D(slab[None, None, slot.index]))
            cute.arch.fence_proxy("async.shared", space="cta")

    def products(self, slot, kv, target):
        """dQ, added to memory from `target` on, and dK, which is still on its way afterwards. dO is given back."""
        if self.put is not None:
            cute.arch.barrier(barrier_id=MEET_BARRIER, number_of_threads=WARPGROUP * self.num_consumers)
            if not self.early:
                warpgroup.wait_group(1)  # dV: its P would be in the way of dQ
            dQ = cute.make_rmem_tensor(self.mma_dq.get_slice(0).partition_shape_C((SLAB, self.dq_n)), Float32)
            gemm(self.mma_dq, dQ, self.rdS[None, None, None, slot.index], self.rKt[None, None, None, kv.index], True)
        gemm(self.mma_dk, self.dK, self.dS, self.rQt[None, None, None, slot.index], False)
        warpgroup.wait_group(1)
        self.rings.do.release(slot)
        if self.put is not None:
            for j in range(cute.size(dQ) // 4):
                reduce4(target + j * (WARPGROUP * 16), [dQ[4 * j + i] for i in range(4)])
        warpgroup.wait_group(0)
        cute.arch.sync_warp()  # all lanes have read lse and delta
        self.rings.q.release(slot)


class Backward:
    def __init__(self, traits, tile):
        self.traits, self.tile = traits, tile
        self.headdim, self.headdim_v = traits.headdim, traits.headdim_v
        self.dtype = ELEMENT[traits.dtype]
        self.num_consumers = tile.num_consumers
        # Split: dQ comes from a kernel of its own, which needs no sums in memory. Wide: two warpgroups share 64 keys.
        self.split, self.wide = tile.query_n is not None, tile.tile_n == SLAB
        self.dynamic = tile.kv_stages == 2
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
            num_ctas=Int32(1) if self.dynamic else None,
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
        stats = dq_sum + rows * (0 if const_expr(self.split) else 4 * hd)
        ticket = stats + rows * 8

        K, MN = OperandMajorMode.K, OperandMajorMode.MN
        S, R = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM
        mma = lambda a_major, b_major, n, source: hopper.make_trivial_tiled_mma(
            self.dtype, self.dtype, a_major, b_major, Float32, (1, 1, 1), (SLAB, n), source
        )

        half, half_v = self.key_width, self.value_width
        lay_q, lay_do = staged(self.dtype, t.tile_m, hd, 2, half), staged(self.dtype, t.tile_m, hd_v, 2, half_v)
        lay_k, lay_v = [
            staged(self.dtype, t.tile_n, width, t.kv_stages, unit) for width, unit in ((hd, half), (hd_v, half_v))
        ]
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
            ops.softmax_scale, ops.softmax_scale * LOG2_E, ops.window_left, ops.window_right, stats, dq_sum, ticket,
        )  # fmt: skip
        ends = [cute.ceil_div(seqlen_q, PAD) * heads * batch, 1, 1]
        self.prepare(o, do, ops.lse, ops.dlse, stats, dq_sum, ticket).launch(
            grid=ends, block=[ENDS_THREADS, 1, 1], stream=stream
        )
        tiles = cute.ceil_div(seqlen_k, t.tile_n) * kv_heads * batch
        grid = cutlass.min(tiles, ops.num_ctas) if const_expr(self.dynamic) else tiles
        self.main(dev).launch(grid=[grid, 1, 1], block=[t.num_threads, 1, 1], min_blocks_per_mp=1, stream=stream)
        if const_expr(self.split):
            scalars = ops.softmax_scale, ops.window_left, ops.window_right
            QueryGradient(self.traits, t).launch(q, k, v, do, dq, stats, *scalars, stream)
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
    def prepare(
        self,
        mO: cute.Tensor,
        mdO: cute.Tensor,
        lse: Int64,
        dlse: Int64,
        stats: Int64,
        dq: Int64,
        ticket: Int64,
    ):
        seqlen_q, d_v, heads, _ = mO.shape
        tidx = cute.arch.thread_idx()[0]
        if const_expr(self.dynamic):
            if tidx == 0 and cute.arch.block_idx()[0] == 0:
                cute.make_tensor(at(Int32, ticket, 4), cute.make_layout(1))[0] = Int32(0)
        block, head, batch, first = self.end(seqlen_q, heads)
        lanes = self.lanes
        at_once = ENDS_THREADS // lanes
        lane, own = tidx % lanes, tidx // lanes
        floats = lambda address, n: cute.make_tensor(at(Float32, address, 4), cute.make_layout(n))
        tile_m = self.tile.tile_m
        out = floats(stats + first * 8, 2 * PAD * (block + 1))
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
                place = row // tile_m * (2 * tile_m) + row % tile_m
                out[place] = log2
                out[place + tile_m] = shift
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
        # What one thread turns into two rows of eight 16-bit values lies in 64 neighbouring bytes: the sums of the four
        # lanes that share the rows, each two columns of both. Neighbouring threads write neighbouring columns.
        width = self.headdim // 8
        chunks = self.dq_n // 8
        for i in cutlass.range_constexpr(PAD * width // (2 * ENDS_THREADS)):
            unit = i * ENDS_THREADS + tidx
            pair, chunk = unit // width, unit % width  # (rows r and r + 8 of 16, eight columns)
            row = pair // 8 * 16 + pair % 8
            tile, inner = row // t.tile_m, row % t.tile_m
            wg = inner // SLAB if const_expr(self.dq_rows) else chunk // chunks
            thread = inner % SLAB // 16 * 32 + inner % 8 * 4
            source = dq + (first + block * PAD + tile * t.tile_m) * (4 * self.headdim)
            source = source + ((wg * chunks + chunk % chunks) * WARPGROUP + thread) * 16
            sums = cute.make_rmem_tensor(16, Float32)
            halves = cute.make_rmem_tensor(16, self.dtype)
            for lane in cutlass.range_constexpr(4):
                four = cute.make_tensor(at(Float32, source + lane * 16, 16), cute.make_layout(4)).load() * scale
                for j in cutlass.range_constexpr(4):
                    sums[j // 2 * 8 + lane * 2 + j % 2] = four[j]
            to_half(sums, halves)
            for r in cutlass.range_constexpr(2):
                out, col = block * PAD + row + 8 * r, chunk * 8
                if out < seqlen_q and col < d:
                    eight = cute.make_tensor(halves.iterator + 8 * r, cute.make_layout(8))
                    self.vector(mdQ, (Int64(out), Int64(col), Int64(head), Int64(batch))).store(eight.load())

    # ---------------------------------------------------------------------------------------------------- main
    def band(self, dev):
        return band_of(self.traits.mask, dev.window_left, dev.window_right)

    def seqlens(self, dev):
        return Seqlens(dev.mQ.shape[0], dev.mK.shape[0])

    def segments(self, dev, work):
        return self.band(dev).q_tiles(work.n_block, self.tile, self.seqlens(dev), DeviceArith)

    def order(self, dev):
        n_blocks = cute.ceil_div(dev.mK.shape[0], self.tile.tile_n)
        extent = Extent(n_blocks, dev.mK.shape[2], dev.mK.shape[3], dev.mQ.shape[0])
        if const_expr(self.traits.mask == "causal"):
            group = dev.mQ.shape[2] // dev.mK.shape[2]
            bytes_per_query = group * (2 * self.headdim + 2 * self.headdim_v + 4 * self.headdim)
            return longest_first(extent, bytes_per_query, narrow=self.split)
        return InOrder(extent)

    def work(self, order, linear):
        """The key tile with a number; under causal the first ones have the most queries."""
        n, head, batch = order.work(linear)
        if const_expr(self.traits.mask == "causal"):
            n = order.extent.m_blocks - 1 - n
        return Work(n, head, batch)

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
            bar_kv: cute.struct.MemRange[Int64, 2 * t.kv_stages]
            bar_t: cute.struct.MemRange[Int64, 4]
            next: cute.struct.MemRange[Int32, 8]
            bar_q: cute.struct.MemRange[Int64, 4]
            bar_do: cute.struct.MemRange[Int64, 4]
            stats: cute.struct.Align[cute.struct.MemRange[Float32, 4 * t.tile_m], 128]
            sQ: buffer(dev.lay_q)
            sdO: buffer(dev.lay_do)
            sK: buffer(dev.lay_k)
            sV: buffer(dev.lay_v)
            sP: buffer(dev.lay_ds, self.wide)
            sdS: buffer(dev.lay_ds, self.stages_ds)

        assert Smem.size_in_bytes() <= SmemAllocator.capacity_in_bytes("sm_90"), Smem.size_in_bytes()
        st = SmemAllocator().allocate(Smem)
        tensor = lambda m, layout: m.get_tensor(layout.outer, swizzle=layout.inner)
        smem = Shared(
            tensor(st.sQ, dev.lay_q), tensor(st.sdO, dev.lay_do), tensor(st.sK, dev.lay_k), tensor(st.sV, dev.lay_v),
            tensor(st.sP, dev.lay_ds) if const_expr(self.wide) else None,
            tensor(st.sdS, dev.lay_ds) if const_expr(self.stages_ds) else None,
            st.stats.get_tensor(cute.make_layout((t.tile_m, 2, 2))),
        )  # fmt: skip
        num_bytes = lambda layout: stage_bytes(self.dtype, layout)
        ring = lambda m, stages, size: Ring(m.data_ptr(), m.data_ptr() + stages, size)
        rings = Rings(
            ring(st.bar_kv, t.kv_stages, num_bytes(dev.lay_k) + num_bytes(dev.lay_v)),
            ring(st.bar_q, 2, num_bytes(dev.lay_q) + 8 * t.tile_m),
            ring(st.bar_do, 2, num_bytes(dev.lay_do)),
        )
        board = None
        if const_expr(self.dynamic):
            board = Board(
                ring(st.bar_t, 2, 0),
                cute.make_tensor(st.next.data_ptr(), cute.make_layout((2, 4))),
                cute.make_tensor(at(Int32, dev.ticket, 4), cute.make_layout(1)),
            )
        if warp == 0:
            with cute.arch.elect_one():
                warps = 4 * self.num_consumers
                rings.kv.init(t.kv_stages, self.num_consumers)
                rings.q.init(2, warps)
                rings.do.init(2, warps)
                if const_expr(self.dynamic):
                    board.ring.init(2, warps)
        cute.arch.mbarrier_init_fence()
        cute.arch.barrier()
        if warp < 4:
            cute.arch.setmaxregister_decrease(t.registers[0])
            if warp == 0:
                self.load(dev, rings, smem, board)
        else:
            cute.arch.setmaxregister_increase(t.registers[1])
            if const_expr(self.wide):
                self.consume_wide(dev, rings, smem)
            else:
                self.consume(dev, rings, smem, board)

    # ---- role: producer
    @cute.jit
    def load(self, dev, rings, smem, board):
        """Producer warp: K and V, then Q with lse and delta, and dO, tile after tile, head after head."""
        slot, kv, linear = first_slot(), first_slot(), cute.arch.block_idx()[0]
        order = self.order(dev)
        work = self.work(order, linear)
        if const_expr(self.dynamic):
            board.post(kv, linear, work)
            while linear < order.extent.tiles():
                ticket = board.draw()
                slot = self.load_tile(dev, rings, smem, work, slot, kv)
                linear = cute.arch.shuffle_sync(ticket, 0) + cute.arch.grid_dim()[0]
                work = self.work(order, linear)
                kv = kv.next()
                board.post(kv, linear, work)
        else:
            self.load_tile(dev, rings, smem, work, slot, kv)

    @cute.jit
    def load_tile(self, dev, rings, smem, work, slot, kv):
        t = self.tile
        seqlen_q, _, heads, _ = dev.mQ.shape
        group = heads // dev.mK.shape[2]
        padded = cute.ceil_div(seqlen_q, PAD) * PAD
        seg = self.segments(dev, work)
        ready = rings.kv.acquire(kv)
        for tma, shared, tensor, width in (
            (dev.tma_k, smem.K, dev.mK, self.headdim),
            (dev.tma_v, smem.V, dev.mV, self.headdim_v),
        ):
            _, src, dst = slices(tma, shared, tensor, (t.tile_n, width), work.head, work.batch)
            cute.copy(tma, src[None, work.n_block], dst[None, kv.index], tma_bar_ptr=ready)
        bulk = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32, num_bits_per_copy=64 * t.tile_m)
        for g in cutlass.range(group, unroll=1):
            head = work.head * group + g
            _, q_src, q_dst = slices(dev.tma_q, smem.Q, dev.mQ, (t.tile_m, self.headdim), head, work.batch)
            _, do_src, do_dst = slices(dev.tma_do, smem.dO, dev.mdO, (t.tile_m, self.headdim_v), head, work.batch)
            first = dev.stats + (Int64(work.batch) * heads + head) * padded * 8
            line = cute.make_tensor(at(Float32, first, 16), cute.make_layout(2 * padded))
            stats = Stats(bulk, line, smem.stats)
            for m in cutlass.range(seg.begin, seg.end, unroll=1):
                bar = rings.q.acquire(slot)
                cute.copy(dev.tma_q, q_src[None, m], q_dst[None, slot.index], tma_bar_ptr=bar)
                stats.load(m, slot.index, bar)
                bar = rings.do.acquire(slot)
                cute.copy(dev.tma_do, do_src[None, m], do_dst[None, slot.index], tma_bar_ptr=bar)
                slot = slot.next()
        return slot

    # ---- role: consumers of 64 keys each
    @cute.jit
    def consume(self, dev, rings, smem, board):
        t = self.tile
        place = consumer(cute.arch.thread_idx()[0])
        wg = place.wg
        flip = lambda s: cute.make_tensor(s.iterator, cute.select(s.layout, mode=[1, 0, 2]))
        a = lambda m, s: m.make_fragment_A(m.get_slice(0).partition_A(s))
        b = lambda m, s: m.make_fragment_B(m.get_slice(0).partition_B(s))
        part = lambda s, shape, at: cute.local_tile(s, shape, at)
        fragment = lambda m, n: cute.make_rmem_tensor(m.get_slice(0).partition_shape_C((SLAB, n)), Float32)
        operand = lambda m: m.make_fragment_A(m.get_slice(0).partition_shape_A((SLAB, t.tile_m)))
        rdS = rKt = put = None
        if const_expr(not self.split):
            m_half, n_half = (wg, 0) if const_expr(self.dq_rows) else (0, wg)
            rdS = a(dev.mma_dq, part(flip(smem.dS), (SLAB, t.tile_n, 2), (m_half, 0, 0)))
            rKt = b(dev.mma_dq, part(flip(smem.K), (self.dq_n, t.tile_n, t.kv_stages), (n_half, 0, 0)))
            store = hopper.get_smem_store_op(LayoutEnum.ROW_MAJOR, self.dtype, Float32)
            thr = cute.make_tiled_copy_C(store, dev.mma_s).get_slice(place.warp * 32 + place.lane)
            put = store, thr, part(smem.dS, (SLAB, t.tile_m, 2), (wg, 0, 0))
        hooks = Products(
            dev.mma_s, dev.mma_dp, dev.mma_dv, dev.mma_dk, dev.mma_dq, rings,
            a(dev.mma_s, part(smem.K, (SLAB, self.headdim, t.kv_stages), (wg, 0, 0))),
            a(dev.mma_dp, part(smem.V, (SLAB, self.headdim_v, t.kv_stages), (wg, 0, 0))),
            b(dev.mma_s, smem.Q), b(dev.mma_dp, smem.dO), b(dev.mma_dk, flip(smem.Q)), b(dev.mma_dv, flip(smem.dO)),
            rdS, rKt, put,
            fragment(dev.mma_s, t.tile_m), operand(dev.mma_dv), operand(dev.mma_dk),
            fragment(dev.mma_dk, self.headdim), fragment(dev.mma_dv, self.headdim_v),
            smem.stats, dev.scale_log2, 2 * (place.lane % 4), not self.dq_rows, self.dq_n, self.num_consumers,
        )  # fmt: skip
        slot, kv, order = first_slot(), first_slot(), self.order(dev)
        if const_expr(self.dynamic):
            linear, work = board.look(kv)
            while linear < order.extent.tiles():
                slot = self.consume_tile(dev, hooks, place, Work(*work), slot, kv)
                # Looked up again, so as not to occupy registers through the main loop.
                linear, work = board.look(kv)
                # Tickets begin at the number of blocks: this one has done a tile before.
                before = (place.warp == 0) & (linear >= cute.arch.grid_dim()[0])
                arrive_after_stores(rings.kv.empty + (kv.index ^ 1), before, place.lane)
                self.store(dev, smem, Work(*work), hooks.dK, hooks.dV, kv.index)
                board.done(kv)
                kv = kv.next()
                linear, work = board.look(kv)
        else:
            work = self.work(order, cute.arch.block_idx()[0])
            self.consume_tile(dev, hooks, place, work, slot, kv)
            self.store(dev, smem, work, hooks.dK, hooks.dV, kv.index)
        # The last stores must have read shared memory before the block gives it back.
        if place.warp == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    def mask(self, dev, n_block, place):
        row = n_block * self.tile.tile_n + place.warp * 16 + place.lane // 4
        if const_expr(not self.wide):
            row = row + place.wg * SLAB
        return ColumnMask(self.band(dev), self.tile.tile_m, self.seqlens(dev), row, 2 * (place.lane % 4))

    @cute.jit
    def consume_tile(self, dev, hooks, place, work, slot, kv):
        """dK and dV of one key tile."""
        t = self.tile
        seqlen_q, _, heads, _ = dev.mQ.shape
        group = heads // dev.mK.shape[2]
        padded = cute.ceil_div(seqlen_q, PAD) * PAD
        seg = self.segments(dev, work)
        hooks.dK.fill(0.0)
        hooks.dV.fill(0.0)
        # Where this thread's sums of dQ go, for the first query tile of a head.
        mine = (place.wg * (SLAB * self.dq_n // 4) + place.warp * 32 + place.lane) * 16
        dq_head = dev.dq_sum + (Int64(work.batch) * heads + work.head * group) * padded * (4 * self.headdim) + mine
        hooks.rings.kv.wait(kv)
        for _ in cutlass.range(group, unroll=1):
            for m in cutlass.range(seg.begin, seg.end, unroll=1):
                hooks.rings.q.wait(slot)
                hooks.scores(slot, kv)
                dP = hooks.score_gradients(slot, kv)
                hooks.exponents(slot)
                if (m < seg.full_begin) | (m >= seg.full_end):
                    # Its place is worked out anew, so as not to occupy registers elsewhere.
                    self.mask(dev, work.n_block, consumer(thread_again())).apply(hooks.S, m)
                hooks.gradients(dP, slot)
                hooks.products(slot, kv, dq_head + Int64(m) * (t.tile_m * self.headdim * 4))
                slot = slot.next()
            dq_head = dq_head + padded * (4 * self.headdim)
        return slot

    # ---- consumers that share 64 keys: one makes P, the other dS, each half of the columns of dV and dK
    @cute.jit
    def consume_wide(self, dev, rings, smem):
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

    def meet(self, barrier):
        cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP * self.num_consumers)

    @cute.jit
    def store(self, dev, smem, work, dK, dV, stage):
        """Epilogue: dV takes the place of V, whose rows only this warpgroup read, dK that of K, which all have read."""
        place = consumer(thread_again())
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
            slab = cute.local_tile(shared[None, None, stage], (SLAB, width), (row, column))
            write_slab(out, slab, width, place)
            cute.arch.barrier(barrier_id=EPILOGUE_BARRIER + place.wg, number_of_threads=WARPGROUP)
            _, target, source = slices(tma, slab, tensor, (SLAB, width), work.head, work.batch, column)
            if place.warp == 0:
                cute.copy(tma, source, target[None, block])
                cute.arch.cp_async_bulk_commit_group()
