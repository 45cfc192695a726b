"""dK, dV and the sums of dQ: keys stay, queries stream by.

Keys are rows, so that P and dS leave the accumulators as the register operand of the next product:

    S^T = K Q^T | P^T = exp2(S^T c - lse) | dV += P^T dO | dP^T = V dO^T | dS^T = P^T (dP^T - delta) | dK += dS^T Q
    dS -> shared memory, all consumers meet | dQ += dS K, added to global memory by vector reductions

A tile of keys of one kv head takes the queries of all its query heads. Every consumer warpgroup owns 64 keys and their
dK and dV; only dQ sums over keys of other warpgroups and blocks. Its part is left out where it has a kernel of its own.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from flashattn_hopper.spec.mask import Seqlens
from flashattn_hopper.spec.tile import ROW_PAD as PAD
from flashattn_hopper.spec.tile import WARPGROUP

from ..common.convert import ELEMENT, to_half
from ..common.mask import ColumnMask
from ..common.schedule import Board
from ..common.softmax import LOG2_E
from ..common.tensors import at, band_of
from ..common.work import DeviceArith, Extent, InOrder, Place, again, kept, longest_first, thread_again
from .key_products import AHEAD, Products
from .pipeline import EPILOGUE_BARRIER, MEET_BARRIER, Exchange, Ring, arrive_after_stores, first_slot
from .sum_order import Turns, counter_of
from .tensors import SLAB, fence, one_stage, slices, stage_bytes, staged, write_slab

# Taken off the first ticket of a block where that is drawn too.
FIRST = 1 << 30

# The next ticket is drawn with the query tile so many before the end: early enough for its latency, and not earlier,
# because a block that draws long before it is done keeps a key tile from others that are idle.
DRAWN_BEFORE_END = 4


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
    counters: Int64  # of dQ's sums


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


class KeyGradient:
    wide = False  # two warpgroups share 64 keys, each has half of the columns

    def __init__(self, traits, tile):
        self.traits, self.tile = traits, tile
        self.headdim, self.headdim_v = traits.headdim, traits.headdim_v
        self.dtype = ELEMENT[traits.dtype]
        self.num_consumers = tile.num_consumers
        self.split = not tile.summed
        self.dynamic = tile.kv_stages == 2
        # Key tiles in turn come from many heads at once, so that those of one do not wait for each other.
        self.sections = traits.mask == "causal" or (tile.in_turn and traits.mask == "full")
        self.key_width, self.value_width = [w // 2 if self.wide else w for w in (self.headdim, self.headdim_v)]

    def launch(self, q, k, v, do, dk, dv, addresses, scalars, num_ctas, stream):
        """From a host function; tensors as (S, D, H, B). `addresses`: the last fields of Device."""
        t, hd, hd_v = self.tile, self.headdim, self.headdim_v
        K, MN = OperandMajorMode.K, OperandMajorMode.MN
        S, R = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM
        mma = lambda a_major, b_major, n, source: hopper.make_trivial_tiled_mma(
            self.dtype, self.dtype, a_major, b_major, Float32, (1, 1, 1), (SLAB, n), source
        )
        half, half_v = self.key_width, self.value_width
        lay_q, lay_do = staged(self.dtype, t.tile_m, hd, 2, half), staged(self.dtype, t.tile_m, hd_v, 2, half_v)
        # Why: a warpgroup's columns of dQ must be whole swizzle atoms of K, and 48 columns are so only of 32 bytes.
        unit_k = half if const_expr(self.split) else t.dq_columns(hd)
        lay_k, lay_v = [
            staged(self.dtype, t.tile_n, width, t.kv_stages, unit) for width, unit in ((hd, unit_k), (hd_v, half_v))
        ]
        lay_ds = staged(self.dtype, t.tile_n, t.tile_m, 2, t.tile_m)
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        atom = cpasync.make_tiled_tma_atom
        scale, window_left, window_right = scalars
        dev = Device(
            *atom(load, q, one_stage(lay_q), (t.tile_m, hd)),
            *atom(load, do, one_stage(lay_do), (t.tile_m, hd_v)),
            *atom(load, k, one_stage(lay_k), (t.tile_n, hd)),
            *atom(load, v, one_stage(lay_v), (t.tile_n, hd_v)),
            *atom(store, dk, one_stage(staged(self.dtype, SLAB, half, 1, unit_k)), (SLAB, half)),
            *atom(store, dv, one_stage(staged(self.dtype, SLAB, half_v, 1, half_v)), (SLAB, half_v)),
            mma(K, K, t.tile_m, S),
            mma(K, K, t.tile_m, S),
            mma(K, MN, half_v, S if const_expr(self.wide) else R),
            mma(K, MN, half, S if const_expr(self.wide) else R),
            None if const_expr(self.split) else mma(MN, MN, t.dq_columns(hd), S),
            lay_q, lay_do, lay_k, lay_v, lay_ds,
            scale, scale * LOG2_E, window_left, window_right, *addresses,
        )  # fmt: skip
        tiles = cute.ceil_div(k.shape[0], t.tile_n) * k.shape[2] * k.shape[3]
        grid = cutlass.min(tiles, num_ctas) if const_expr(self.dynamic) else tiles
        block = [t.num_threads, 1, 1]
        self.main(dev).launch(grid=[grid, 1, 1], block=block, min_blocks_per_mp=1, stream=stream, use_pdl=True)

    def band(self, dev):
        return band_of(self.traits.mask, dev.window_left, dev.window_right)

    def seqlens(self, dev):
        return Seqlens(dev.mQ.shape[0], dev.mK.shape[0])

    def segments(self, dev, work):
        return self.band(dev).q_tiles(work.n_block, self.tile, self.seqlens(dev), DeviceArith)

    def order(self, dev):
        n_blocks = cute.ceil_div(dev.mK.shape[0], self.tile.tile_n)
        extent = Extent(n_blocks, dev.mK.shape[2], dev.mK.shape[3], dev.mQ.shape[0])
        if const_expr(self.sections):
            group = dev.mQ.shape[2] // dev.mK.shape[2]
            bytes_per_query = group * (2 * self.headdim + 2 * self.headdim_v + 4 * self.headdim)
            return longest_first(extent, bytes_per_query, narrow=self.split)
        return InOrder(extent)

    def work(self, order, linear):
        """The key tile with a number; under causal the first ones have the most queries."""
        n, head, batch = order.work(linear)
        if const_expr(self.sections):
            n = order.extent.m_blocks - 1 - n
        return Work(n, head, batch)

    def query_tile(self, seg, i):
        """The query tile that comes in place i of begin .. end."""
        return seg.begin + (seg.end - 1) - i if self.tile.in_turn else i

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
            bar_ds: cute.struct.MemRange[Int64, 4 * t.delayed]
            bar_sums: cute.struct.MemRange[Int64, 6 * t.in_turn]
            stats: cute.struct.Align[cute.struct.MemRange[Float32, 4 * t.tile_m], 128]
            sQ: buffer(dev.lay_q)
            sdO: buffer(dev.lay_do)
            sK: buffer(dev.lay_k)
            sV: buffer(dev.lay_v)
            sP: buffer(dev.lay_ds, self.wide)
            sdS: buffer(dev.lay_ds, self.wide or not self.split)

        assert Smem.size_in_bytes() <= SmemAllocator.capacity_in_bytes("sm_90"), Smem.size_in_bytes()
        st = SmemAllocator().allocate(Smem)
        tensor = lambda m, layout: m.get_tensor(layout.outer, swizzle=layout.inner)
        smem = Shared(
            tensor(st.sQ, dev.lay_q), tensor(st.sdO, dev.lay_do), tensor(st.sK, dev.lay_k), tensor(st.sV, dev.lay_v),
            tensor(st.sP, dev.lay_ds) if const_expr(self.wide) else None,
            tensor(st.sdS, dev.lay_ds) if const_expr(self.wide or not self.split) else None,
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
        exchange = turns = None
        if const_expr(t.delayed):
            bars = st.bar_ds.data_ptr()
            exchange = Exchange(bars, bars + 2)
        if const_expr(t.in_turn):
            bars = st.bar_sums.data_ptr()
            turns = Turns(bars, bars + 2, bars + 4)
        if warp == 0:
            with cute.arch.elect_one():
                warps = 4 * self.num_consumers
                rings.kv.init(t.kv_stages, self.num_consumers)
                rings.q.init(2, warps)
                rings.do.init(2, warps)
                if const_expr(self.dynamic):
                    board.ring.init(2, warps + 2 * t.in_turn)
                if const_expr(t.delayed):
                    exchange.init(warps)
                if const_expr(t.in_turn):
                    turns.init(warps)
        cute.arch.mbarrier_init_fence()
        cute.arch.barrier()
        if warp < 4:
            cute.arch.setmaxregister_decrease(t.registers[0])
            if warp == 0:
                self.load(dev, rings, smem, board)
            if const_expr(t.in_turn):
                if warp == 1:
                    self.keep_order(dev, board, turns.take)
                if warp == 2:
                    self.keep_order(dev, board, turns.hand_on)
        else:
            cute.arch.setmaxregister_increase(t.registers[1])
            self.consume(dev, rings, smem, board, exchange, turns)

    # ---- role: producer
    @cute.jit
    def load(self, dev, rings, smem, board):
        """Producer warp: K and V, then Q with lse and delta, and dO, tile after tile, head after head."""
        slot, kv, linear = first_slot(), first_slot(), cute.arch.block_idx()[0]
        order, begin, shown = self.order(dev), cute.arch.grid_dim()[0], linear
        if const_expr(self.tile.in_turn):
            # Why: a block that waits for a multiprocessor may not hold a ticket that others wait for.
            self.after_prepare()
            begin, linear = Int32(0), cute.arch.shuffle_sync(board.draw(), 0)
            shown = Int32(cutlass.select_(linear < order.extent.tiles(), linear - FIRST, linear))
        work = self.work(order, linear)
        if const_expr(self.dynamic):
            board.post(kv, shown, work)
            while linear < order.extent.tiles():
                self.load_keys(dev, rings, smem, work, kv)
                self.after_prepare()
                slot, ticket = self.load_queries(dev, rings, smem, work, slot, board)
                linear = cute.arch.shuffle_sync(ticket, 0) + begin
                work = self.work(order, linear)
                kv = kv.next()
                board.post(kv, linear, work)
        else:
            self.load_keys(dev, rings, smem, work, kv)
            self.after_prepare()
            self.load_queries(dev, rings, smem, work, slot)

    def after_prepare(self):
        """Wait for lse, delta, the zeroed sums and the ticket; K and V need not wait. Free but for the first time.

        Only then may the next launch begin: the kernel of dQ, which takes lse and delta too, relies on it.
        """
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def load_keys(self, dev, rings, smem, work, kv):
        t = self.tile
        ready = rings.kv.acquire(kv)
        for tma, shared, tensor, width in (
            (dev.tma_k, smem.K, dev.mK, self.headdim),
            (dev.tma_v, smem.V, dev.mV, self.headdim_v),
        ):
            _, src, dst = slices(tma, shared, tensor, (t.tile_n, width), work.head, work.batch)
            cute.copy(tma, src[None, work.n_block], dst[None, kv.index], tma_bar_ptr=ready)

    @cute.jit
    def load_queries(self, dev, rings, smem, work, slot, board=None):
        """Returns the next slot, and what was drawn from `board`."""
        t = self.tile
        seqlen_q, _, heads, _ = dev.mQ.shape
        group = heads // dev.mK.shape[2]
        padded = cute.ceil_div(seqlen_q, PAD) * PAD
        seg = self.segments(dev, work)
        bulk = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32, num_bits_per_copy=64 * t.tile_m)
        ticket, drawn_with = Int32(0), cutlass.max(seg.end - DRAWN_BEFORE_END, seg.begin)
        if const_expr(board is not None):
            if seg.begin >= seg.end:
                ticket = board.draw()
        for g in cutlass.range(group, unroll=1):
            head = work.head * group + g
            _, q_src, q_dst = slices(dev.tma_q, smem.Q, dev.mQ, (t.tile_m, self.headdim), head, work.batch)
            _, do_src, do_dst = slices(dev.tma_do, smem.dO, dev.mdO, (t.tile_m, self.headdim_v), head, work.batch)
            first = dev.stats + (Int64(work.batch) * heads + head) * padded * 8
            line = cute.make_tensor(at(Float32, first, 16), cute.make_layout(2 * padded))
            stats = Stats(bulk, line, smem.stats)
            for i in cutlass.range(seg.begin, seg.end, unroll=1):
                if const_expr(board is not None):
                    if (g == group - 1) & (i == drawn_with):
                        ticket = board.draw()
                m = self.query_tile(seg, i)
                bar = rings.q.acquire(slot)
                cute.copy(dev.tma_q, q_src[None, m], q_dst[None, slot.index], tma_bar_ptr=bar)
                stats.load(m, slot.index, bar)
                bar = rings.do.acquire(slot)
                cute.copy(dev.tma_do, do_src[None, m], do_dst[None, slot.index], tma_bar_ptr=bar)
                slot = slot.next()
        return slot, ticket

    # ---- roles: who keeps the order of the sums
    @cute.jit
    def keep_order(self, dev, board, keep):
        """A warp beside the producer: every query tile of every key tile, as the consumers take them."""
        cute.arch.griddepcontrol_wait()
        seqlen_q, _, heads, _ = dev.mQ.shape
        group = heads // dev.mK.shape[2]
        padded = cute.ceil_div(seqlen_q, PAD) * PAD
        slot, at, order = first_slot(), first_slot(), self.order(dev)
        linear, work = board.look(at)
        while linear < order.extent.tiles():
            tile = Work(*work)
            seg = self.segments(dev, tile)
            for g in cutlass.range(group, unroll=1):
                head = (Int64(tile.batch) * heads + tile.head * group + g) * padded
                for i in cutlass.range(seg.begin, seg.end, unroll=1):
                    m = self.query_tile(seg, i)
                    place = self.band(dev).q_tile_turn(tile.n_block, m, self.tile, self.seqlens(dev), DeviceArith)
                    keep(slot, counter_of(dev.counters, head + m * self.tile.tile_m), place)
                    slot = slot.next()
            board.done(at)
            at = at.next()
            linear, work = board.look(at)

    # ---- role: consumers
    @cute.jit
    def consume(self, dev, rings, smem, board, exchange=None, turns=None):
        """Consumer warpgroups: 64 keys each."""
        t, dq_n, ahead = self.tile, self.tile.dq_columns(self.headdim), AHEAD[self.tile.tile_m]
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
            m_half, n_half = (wg, 0) if const_expr(t.dq_by_rows) else (0, wg)
            rdS = a(dev.mma_dq, part(flip(smem.dS), (SLAB, t.tile_n, 2), (m_half, 0, 0)))
            rKt = b(dev.mma_dq, part(flip(smem.K), (dq_n, t.tile_n, t.kv_stages), (n_half, 0, 0)))
            store = hopper.get_smem_store_op(LayoutEnum.ROW_MAJOR, self.dtype, Float32)
            thr = cute.make_tiled_copy_C(store, dev.mma_s).get_slice(place.warp * 32 + place.lane)
            put = store, thr, part(smem.dS, (SLAB, t.tile_m, 2), (wg, 0, 0))
        hooks = Products(
            dev.mma_s, dev.mma_dp, dev.mma_dv, dev.mma_dk, dev.mma_dq, rings,
            a(dev.mma_s, part(smem.K, (SLAB, self.headdim, t.kv_stages), (wg, 0, 0))),
            a(dev.mma_dp, part(smem.V, (SLAB, self.headdim_v, t.kv_stages), (wg, 0, 0))),
            b(dev.mma_s, smem.Q), b(dev.mma_dp, smem.dO), b(dev.mma_dk, flip(smem.Q)), b(dev.mma_dv, flip(smem.dO)),
            rdS, rKt, put, exchange,
            fragment(dev.mma_s, t.tile_m), operand(dev.mma_dv), operand(dev.mma_dk),
            fragment(dev.mma_dk, self.headdim), fragment(dev.mma_dv, self.headdim_v),
            cute.make_rmem_tensor(ahead.lse, Float32),
            None if const_expr(self.split) else cute.make_rmem_tensor(4 * ahead.late, Float32),
            smem.stats, dev.scale_log2, 2 * kept(place.lane % 4, place.lane),
            not t.dq_by_rows, dq_n, self.num_consumers, ahead, turns,
        )  # fmt: skip
        slot, kv, order = first_slot(), first_slot(), self.order(dev)
        if const_expr(self.dynamic):
            linear, work = board.look(kv)
            while linear < order.extent.tiles():
                slot = self.consume_tile(dev, hooks, place, Work(*work), slot, kv)
                # Looked up again, so as not to occupy registers through the main loop.
                linear, work = board.look(kv)
                # Tickets begin at the number of blocks, or the first is marked: this one has done a tile before.
                later = 0 if const_expr(t.in_turn) else cute.arch.grid_dim()[0]
                before = (place.warp == 0) & (linear >= later)
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
        if const_expr(not self.split):
            hooks.late.fill(0.0)
        # Where this thread's sums of dQ go, one tile before the first of a head, or two if they are a step behind.
        mine = (place.wg * (SLAB * t.dq_columns(self.headdim) // 4) + place.warp * 32 + place.lane) * 16
        size = t.tile_m * self.headdim * 4
        step = -size if t.in_turn else size
        before = dev.dq_sum + (Int64(work.batch) * heads + work.head * group) * padded * (4 * self.headdim) + mine
        before = before + (self.query_tile(seg, seg.begin) * Int64(size) - (1 + t.delayed) * step)
        hooks.rings.kv.wait(kv)
        # Why kept: worked out anew in the loop, they would take registers that the sums have not left yet.
        full_begin, full_end = [kept(limit, place.lane) for limit in (seg.full_begin, seg.full_end)]
        if seg.begin < seg.end:
            hooks.rings.q.wait(slot)
        hooks.read_ahead(slot)
        for g in cutlass.range(group, unroll=1):
            target = before
            for i in cutlass.range(seg.begin, seg.end, unroll=1):
                m = self.query_tile(seg, i)
                # Why now: later it would take registers that the sums have not left yet.
                partial = again(Int32((m < full_begin) | (m >= full_end)))
                hooks.scores(slot, kv)
                dP = hooks.score_gradients(slot, kv, target, i > seg.begin + t.delayed)
                if partial != 0:
                    # Its place is worked out anew, so as not to occupy registers elsewhere.
                    self.mask(dev, work.n_block, consumer(thread_again())).apply(hooks.S, m)
                hooks.gradients(dP, slot)
                following = slot.next()
                if (i + 1 < seg.end) | (g + 1 < group):
                    hooks.rings.q.wait(following)
                hooks.read_ahead(following)  # after the last tile whatever is there, for nobody
                hooks.meet()
                # Only now: the sums of the tile before this one have read the register.
                target = again(target + step)
                hooks.products(slot, kv, target, i > seg.begin if const_expr(t.delayed) else True)
                slot = following
            hooks.add_late(slot, target, seg.end > seg.begin + t.delayed)
            if const_expr(t.delayed):
                target = target + step
                hooks.last_sums(slot.before(), kv, target, seg.end > seg.begin)
            # Why: kept through the loop it spills with sums in turn, and worked out again without them.
            start = target - Int64(seg.end - seg.begin + t.delayed) * step if const_expr(t.in_turn) else before
            before = start + padded * (4 * self.headdim)
        return slot

    def meet(self, barrier):
        cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP * self.num_consumers)

    @cute.jit
    def store(self, dev, smem, work, dK, dV, stage):
        """Epilogue: dV takes the place of V, dK that of K."""
        place = consumer(thread_again())
        for i in range(cute.size(dK)):
            dK[i] = dK[i] * dev.scale
        # Its share of the tile: 64 of the keys, or half of the columns.
        row, column = (0, place.wg) if const_expr(self.wide) else (place.wg, 0)
        block = work.n_block if const_expr(self.wide) else work.n_block * self.num_consumers + place.wg
        share = lambda shared, width: cute.local_tile(shared[None, None, stage], (SLAB, width), (row, column))
        slabs = share(smem.V, self.value_width), share(smem.K, self.key_width)
        if const_expr(self.wide):
            self.meet(MEET_BARRIER)  # all of V is read by another warpgroup
        self.put(dV, slabs[0], self.value_width, place)
        if const_expr(not self.wide):
            self.meet(MEET_BARRIER)  # other warpgroups read these rows of K for dQ, but not of V
        self.put(dK, slabs[1], self.key_width, place)
        cute.arch.barrier(barrier_id=EPILOGUE_BARRIER + place.wg, number_of_threads=WARPGROUP)
        for slab, tma, tensor, width in (
            (slabs[0], dev.tma_dv, dev.mdV, self.value_width),
            (slabs[1], dev.tma_dk, dev.mdK, self.key_width),
        ):
            _, target, source = slices(tma, slab, tensor, (SLAB, width), work.head, work.batch, column)
            if place.warp == 0:
                cute.copy(tma, source, target[None, block])
        if place.warp == 0:
            cute.arch.cp_async_bulk_commit_group()

    def put(self, acc, slab, width, place):
        out = cute.make_rmem_tensor_like(acc, self.dtype)
        to_half(acc, out)
        write_slab(out, slab, width, place)
        fence()
