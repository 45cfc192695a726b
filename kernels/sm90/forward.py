"""sm90.forward: attention forward for Hopper, FP16 and BF16.

One producer warp (TMA) and one to three consumer warpgroups of 64 query rows each, with Q resident and K, V in rings:

    producer   K3 Q | K2 V3 | K1 V2 | K0 V1 | V0            KV tiles from the last one down, or, `rising`, upwards
    consumer   S3=QK3 | softmax 3 | S2=QK2, O+=P3V3 | softmax 2 | S1=QK1, O+=P2V2 | softmax 1 | ... | O+=P0V0

Consumers take turns issuing their two products (PingPong), so the softmax of one runs under the products of another.
Each walks its own 64 rows: a KV tile that only another warpgroup sees is skipped. Unmasked tiles are optimistic
(common/softmax.py); a block whose optimism failed does its tiles a second time with every tile in the careful loop.
docs/kernels/sm90_forward.md has the roofline, the steps and what each was worth.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator

from flashattn_hopper.spec.mask import Seqlens
from flashattn_hopper.spec.tile import WARPGROUP

from ..common.convert import elements_of
from ..common.mask import BandMask
from ..common.operands import FwdOperands, ScaledOperands
from ..common.scaled_softmax import ScaledSoftmax
from ..common.schedule import ROUND, Board
from ..common.softmax import CEILING, LOG2_E, Softmax
from ..common.tensors import at, band_of, fake_operand
from ..common.walk import Walk
from ..common.work import DeviceArith, Extent, HeadMap, Place, Work, again, order_of
from .epilogue import Epilogue
from .mainloop import Asynchronous, Drawn, Loads, Overlapped, Polling, Serial
from .pipeline import (
    NoTurns,
    PingPong,
    Ring,
    Slot,
    any_of,
    first_slot,
    round_barrier,
)
from .pv_operand import InPlace, Late, Promoted
from .tensors import SLAB, one_stage, slices, stage_bytes, staged

SCALE_KEYS = 128  # keys that share a scale in FP8

# Up to so many query tiles for each head, the first of them fetches K and V into L2 for all of them: they start with
# the same KV tiles, and resident blocks start with many heads at once, which two stages of loads do not hide.
FETCHED_M_BLOCKS = 16


class Device(NamedTuple):
    """What the host half hands to the device half: TMA atoms with their tensors, MMAs, layouts, scalars."""

    tma_q: cute.CopyAtom
    mQ: cute.Tensor
    tma_k: cute.CopyAtom
    mK: cute.Tensor
    tma_v: cute.CopyAtom
    mV: cute.Tensor
    tma_o: cute.CopyAtom
    mO: cute.Tensor
    lse: Int64
    mma_qk: cute.TiledMma
    mma_pv: cute.TiledMma
    lay_q: cute.ComposedLayout
    lay_k: cute.ComposedLayout
    lay_v: cute.ComposedLayout
    lay_o: cute.ComposedLayout
    scale_log2: Float32
    window_left: Any
    window_right: Any
    tickets: Any
    scales: Any  # the last five operands, of FP8


class Rings(NamedTuple):
    q: Ring
    k: Ring
    v: Ring


class Shared(NamedTuple):
    """Swizzled shared-memory tensors, stages (or slabs) as the last mode."""

    Q: cute.Tensor
    K: cute.Tensor
    V: cute.Tensor
    O: cute.Tensor


class Chain(NamedTuple):
    """What a query tile has from the one before, and leaves to the next one."""

    S: cute.Tensor  # its first scores, on their way
    i: Int32  # tiles of this round before it
    before: Work  # the last one of them, whose O is to be sent


class Slabs(NamedTuple):
    """A tile as one warpgroup cuts it, for Band.kv_tiles."""

    tile_m: int
    tile_n: int


class Forward:
    def __init__(self, traits, tile):
        self.traits, self.tile = traits, tile
        self.headdim, self.headdim_v = traits.headdim, traits.headdim_v
        self.elements = elements_of(traits)
        self.fp8 = traits.dtype == "fp8"
        self.pv = InPlace if not self.fp8 else Promoted if tile.serial else Late
        self.hooks = Serial if tile.serial else Polling if self.fp8 else Overlapped
        self.dynamic = tile.schedule == "dynamic"
        self.fetches = self.dynamic and traits.mask == "full" and traits.headdim <= 128

    def arguments(self):
        """Fake operands for the compiler. One compile serves every batch, length, head count and 16-byte stride."""
        B, Sq, Sk, Hq, Hk, D, Dv = [cute.sym_int() for _ in range(7)]
        qk, element_v, _, _ = self.elements
        v_shape = (Hk, Dv, cute.sym_int(divisibility=128)) if self.fp8 else (Sk, Hk, Dv)
        window = self.traits.mask == "window"
        operands = FwdOperands(
            q=fake_operand(qk, B, Sq, Hq, D),
            k=fake_operand(qk, B, Sk, Hk, D),
            v=fake_operand(element_v, B, *v_shape),
            o=Int64(0),
            lse=Int64(0),
            softmax_scale=Float32(1.0),
            window_left=Int32(0) if window else None,
            window_right=Int32(0) if window else None,
            num_ctas=Int32(1) if self.dynamic else None,
            tickets=Int64(0) if self.dynamic else None,
        )
        if self.fp8:
            operands = ScaledOperands(*operands, *[Int64(0)] * 5)
        return operands, make_fake_stream(use_tvm_ffi_env_stream=True)

    # ---------------------------------------------------------------------------------------------- host half
    @cute.jit
    def __call__(self, ops: FwdOperands | ScaledOperands, stream: cuda.CUstream):
        t, hd, hd_v, e = self.tile, self.headdim, self.headdim_v, self.elements
        # (B, S, H, D) -> (S, D, H, B): a view, nothing moves
        modes = (1, 3, 2, 0), (1, 3, 2, 0), self.pv.modes
        q, k, v = [
            cute.make_tensor(x.iterator, cute.select(x.layout, mode=list(mode)))
            for x, mode in zip((ops.q, ops.k, ops.v), modes)
        ]
        seqlen_q, _, heads, batch = q.shape
        width = cute.assume(v.shape[self.pv.width_mode], divby=8)
        row = Int64(heads) * width
        o = cute.make_tensor(
            at(e.o, ops.o, 16),
            cute.make_layout((seqlen_q, width, heads, batch), stride=(row, 1, Int64(width), seqlen_q * row)),
        )
        # One warpgroup's MMA: each consumer works on its own slab of Q and O, so 2 or 3 of them need no special case.
        mma = lambda element, b_major, sums, n, source: hopper.make_trivial_tiled_mma(
            element, element, OperandMajorMode.K, b_major, sums, (1, 1, 1), (SLAB, n), source
        )
        mma_qk = mma(e.qk, OperandMajorMode.K, e.score, t.tile_n, warpgroup.OperandSource.SMEM)
        mma_pv = mma(e.v, self.pv.b_major, Float32, self.pv.columns(t, hd_v), warpgroup.OperandSource.RMEM)
        block_v = self.pv.block(t, hd_v)

        lay_q, lay_o = (
            staged(e.qk, SLAB, hd, t.q_stages * t.num_consumers),
            staged(e.o, SLAB, hd_v, t.num_consumers),
        )
        lay_k, lay_v = staged(e.qk, t.tile_n, hd, t.num_stages), staged(e.v, *block_v, t.num_stages)
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        # A headdim below the compiled one needs no copy: TMA reads zeros beyond it and does not write there.
        tma_q, mQ = cpasync.make_tiled_tma_atom(load, q, one_stage(lay_q), (SLAB, hd))
        tma_k, mK = cpasync.make_tiled_tma_atom(load, k, one_stage(lay_k), (t.tile_n, hd))
        tma_v, mV = cpasync.make_tiled_tma_atom(load, v, one_stage(lay_v), block_v)
        tma_o, mO = cpasync.make_tiled_tma_atom(store, o, one_stage(lay_o), (SLAB, hd_v))
        dev = Device(
            tma_q, mQ, tma_k, mK, tma_v, mV, tma_o, mO, ops.lse, mma_qk, mma_pv, lay_q, lay_k, lay_v, lay_o,
            ops.softmax_scale * LOG2_E, ops.window_left, ops.window_right, ops.tickets,
            ops[-5:] if self.fp8 else None,
        )  # fmt: skip
        tiles = cute.ceil_div(q.shape[0], t.tile_m) * q.shape[2] * q.shape[3]
        grid = cutlass.min(tiles, ops.num_ctas) if const_expr(self.dynamic) else tiles
        self.kernel(dev).launch(grid=[grid, 1, 1], block=[t.num_threads, 1, 1], min_blocks_per_mp=1, stream=stream)

    # ------------------------------------------------------------------------------------------ parts and facts
    def band(self, dev):
        return band_of(self.traits.mask, dev.window_left, dev.window_right)

    def seqlens(self, dev):
        return Seqlens(dev.mQ.shape[0], dev.mK.shape[0])

    def extent(self, dev):
        m_blocks = cute.ceil_div(dev.mQ.shape[0], self.tile.tile_m)
        return Extent(m_blocks, dev.mQ.shape[2], dev.mQ.shape[3], dev.mK.shape[0])

    def order(self, dev):
        bytes_per_key = self.elements.v.width // 8 * (self.headdim + self.headdim_v)
        return order_of(self.traits.mask, self.extent(dev), bytes_per_key)

    def segments(self, dev, m_block, tile):
        return self.band(dev).kv_tiles(m_block, tile, self.seqlens(dev), DeviceArith)

    def softmax(self, dev):
        pair = lambda: cute.make_rmem_tensor(2, Float32)
        if self.fp8:
            votes = not (self.tile.value_columns or self.traits.int8_qk)
            return ScaledSoftmax(
                pair(), pair(), pair(), 0.0,
                tiles=SCALE_KEYS // self.tile.tile_n, votes=votes, polynomial=self.tile.polynomial,
            )  # fmt: skip
        return Softmax(pair(), pair(), dev.scale_log2, CEILING[self.traits.dtype], Asynchronous())

    def scaled(self, dev, softmax, work, row):
        """The softmax of a query tile: with FP8, the scales of this thread's rows and of its head of K and V."""
        if not self.fp8:
            return softmax
        seqlen_q, _, heads, _ = dev.mQ.shape
        heads_kv = dev.mK.shape[2]
        floats = lambda address, n: cute.make_tensor(at(Float32, address, 4), cute.make_layout(n))
        rows = floats(dev.scales[0] + (Int64(work.batch) * heads + work.head) * seqlen_q * 4, seqlen_q)
        for r in range(2):
            softmax.scale_log2[r] = rows[cutlass.min(row + 8 * r, seqlen_q - 1)] * dev.scale_log2
        head = Int64(work.batch) * heads_kv + HeadMap(heads // heads_kv).kv(work.head)
        tiles = cute.ceil_div(dev.mK.shape[0], SCALE_KEYS)
        return replace(
            softmax,
            k_scales=floats(again(dev.scales[1] + head * tiles * 4), tiles),
            v_scale=floats(dev.scales[2] + head * 4, 1),
        )

    def item(self, slot_q):
        """Parity of the query tiles that a block has done before."""
        return slot_q.index if self.tile.q_stages == 2 else slot_q.phase

    def next_q(self, slot):
        return slot.next() if self.tile.q_stages == 2 else slot.again()

    # --------------------------------------------------------------------------------------------- device half
    @cute.kernel
    def kernel(self, dev: Device):
        t = self.tile
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for atom in (dev.tma_q, dev.tma_k, dev.tma_v, dev.tma_o):
                cpasync.prefetch_descriptor(atom)
        q_slabs = t.q_stages * t.num_consumers
        buffer = lambda dtype, size: cute.struct.Align[cute.struct.MemRange[dtype, size], 1024]
        e = self.elements

        @cute.struct
        class Smem:
            bar_q: cute.struct.MemRange[Int64, 2 * q_slabs]
            bar_k: cute.struct.MemRange[Int64, 2 * t.num_stages]
            bar_v: cute.struct.MemRange[Int64, 2 * t.num_stages]
            bar_o: cute.struct.MemRange[Int64, t.num_stages]
            bar_t: cute.struct.MemRange[Int64, 4]
            board: cute.struct.MemRange[Int32, 8 + ROUND]
            sQ: buffer(e.qk, cute.cosize(dev.lay_q))
            sK: buffer(e.qk, cute.cosize(dev.lay_k))
            sV: buffer(e.v, cute.cosize(dev.lay_v))
            sO: buffer(e.o, cute.cosize(dev.lay_o) if t.output == "own" else 0)

        # Too much shared memory is not a compile error (the launch fails), so check while tracing.
        assert Smem.size_in_bytes() <= SmemAllocator.capacity_in_bytes("sm_90"), Smem.size_in_bytes()
        st = SmemAllocator().allocate(Smem)
        tensor = lambda m, layout: m.get_tensor(layout.outer, swizzle=layout.inner)
        smem = Shared(
            tensor(st.sQ, dev.lay_q),
            tensor(st.sK, dev.lay_k),
            tensor(st.sV, dev.lay_v),
            tensor(st.sO if const_expr(t.output == "own") else st.sQ, dev.lay_o),
        )
        ring = lambda m, stages, dtype, layout: Ring(m.data_ptr(), m.data_ptr() + stages, stage_bytes(dtype, layout))
        rings = Rings(
            ring(st.bar_q, q_slabs, e.qk, dev.lay_q),
            ring(st.bar_k, t.num_stages, e.qk, dev.lay_k),
            ring(st.bar_v, t.num_stages, e.v, dev.lay_v),
        )
        stores = st.bar_o.data_ptr() if const_expr(t.output == "v") else None
        board = None
        if const_expr(self.dynamic):
            words = st.board.data_ptr()
            board = Board(
                Ring(st.bar_t.data_ptr(), st.bar_t.data_ptr() + 2, 0),
                cute.make_tensor(words, cute.make_layout((2, 4))),
                cute.make_tensor(at(Int32, dev.tickets, 4), cute.make_layout(2)),
                cute.make_tensor(words + 8, cute.make_layout(ROUND)),
            )
        if warp == 0:
            with cute.arch.elect_one():
                warps = 4 * t.num_consumers
                rings.q.init(q_slabs, 1 if t.output == "q" else 4)
                rings.k.init(t.num_stages, warps)
                rings.v.init(t.num_stages, warps)
                if const_expr(t.output == "v"):
                    for stage in cutlass.range_constexpr(t.num_stages):
                        cute.arch.mbarrier_init(stores + stage, 1)
                if const_expr(self.dynamic):
                    board.ring.init(2, warps)
        cute.arch.mbarrier_init_fence()
        cute.arch.barrier()

        if warp < 4:
            cute.arch.setmaxregister_decrease(t.registers[0])
            if warp == 0:
                self.load(dev, rings, stores, smem, board)
        else:
            cute.arch.setmaxregister_increase(t.registers[1])
            self.consume(dev, rings, stores, smem, board)

    # ---- role: producer
    @cute.jit
    def load(self, dev, rings, stores, smem, board):
        """Producer warp: issues every copy, and in a dynamic schedule draws and posts the tiles."""
        t, order = self.tile, self.order(dev)
        slot, slot_q = first_slot(), first_slot()
        if const_expr(self.dynamic):
            linear, at, total = cute.arch.block_idx()[0], first_slot(), self.extent(dev).tiles()
            work = order.work(linear)
            while linear < total:
                i = Int32(0)
                before, last = work, Int32(-1)
                while linear < total and i < ROUND:
                    behind = (before, last) if const_expr(t.ahead) else None
                    slot, slot_q, ticket = self.load_tile(
                        dev, rings, stores, smem, work, slot, slot_q, False, board, behind
                    )
                    if const_expr(t.ahead):
                        before, last = work, self.last(self.segments(dev, work.m_block, t))
                    following = cute.arch.shuffle_sync(ticket, 0) + cute.arch.grid_dim()[0]
                    work = order.work(following)
                    board.post(at, following, work, i, linear)
                    linear, i, at = following, i + 1, at.next()
                if const_expr(t.ahead):
                    self.loads(dev, rings, stores, smem, before, slot, slot_q, last).load_v(last, slot.before())
                if any_of(Int32(0), t.num_consumers) != 0:
                    round_barrier(t.num_consumers)
                    for j in cutlass.range(i, unroll=1):
                        again, linear_j = board.marked(j)
                        if again:
                            redo = order.work(linear_j)
                            slot, slot_q, _ = self.load_tile(dev, rings, stores, smem, redo, slot, slot_q, True)
                    round_barrier(t.num_consumers)
            board.close()
        else:
            work = order.work(cute.arch.block_idx()[0])
            slot, slot_q, _ = self.load_tile(dev, rings, stores, smem, work, slot, slot_q, False)
            if any_of(Int32(0), t.num_consumers) != 0:
                slot, slot_q, _ = self.load_tile(dev, rings, stores, smem, work, slot, slot_q, True)

    def last(self, segments):
        """The KV tile that a walk ends with."""
        return segments.end - 1 if self.tile.rising else segments.begin

    def loads(self, dev, rings, stores, smem, work, slot, slot_q, last):
        """The producer's hooks for a query tile that ends with KV tile `last`."""
        t = self.tile
        kv_head = HeadMap(dev.mQ.shape[2] // dev.mK.shape[2]).kv(work.head)
        return Loads(
            *rings,
            slices(dev.tma_q, smem.Q, dev.mQ, (SLAB, self.headdim), work.head, work.batch),
            slices(dev.tma_k, smem.K, dev.mK, (t.tile_n, self.headdim), kv_head, work.batch),
            self.pv.slices(dev.tma_v, smem.V, dev.mV, self.pv.block(t, self.headdim_v), kv_head, work.batch),
            stores,
            t.num_consumers,
            slot_q,
            work.m_block * t.num_consumers,
            self.item(slot_q),
            last,
            -1 if t.rising else 1,
        )

    @cute.jit
    def load_tile(self, dev, rings, stores, smem, work, slot, slot_q, exact, board=None, behind=None):
        """`behind`: the work and the last KV tile of the query tile before, whose V is still to be loaded. Returns, for
        the next tile, the slots and what was drawn from `board`."""
        seg = self.segments(dev, work.m_block, self.tile)
        hooks = replace(self.loads(dev, rings, stores, smem, work, slot, slot_q, self.last(seg)), board=board)
        if const_expr(self.fetches):
            first = (work.m_block == 0) & (work.head % (dev.mQ.shape[2] // dev.mK.shape[2]) == 0)
            leads = first & (self.extent(dev).m_blocks <= FETCHED_M_BLOCKS)
            hooks = replace(hooks, leads=Int32(cutlass.select_(leads, Int32(1), Int32(0))))
        if const_expr(behind is not None):
            before, last = behind
            behind = self.loads(dev, rings, stores, smem, before, slot, slot_q, last)
            hooks = replace(hooks, behind=behind, behind_n=last)
        drawn = Walk(self.band(dev), exact, self.tile.rising).kv(seg, hooks, Drawn(*slot, Int32(0)))
        return drawn.slot, self.next_q(slot_q), drawn.ticket

    # ---- role: consumer
    @cute.jit
    def consume(self, dev, rings, stores, smem, board):
        """Consumer warpgroups: wait on Q, K and V, release them, leave O and lse in global memory."""
        t = self.tile
        tidx = cute.arch.thread_idx()[0] - WARPGROUP
        wg = cute.arch.make_warp_uniform(tidx // WARPGROUP)
        place = Place(wg, cute.arch.make_warp_uniform((tidx % WARPGROUP) // 32), tidx % 32)
        thr_qk = dev.mma_qk.get_slice(0)
        hooks = self.hooks(
            dev.mma_qk,
            *rings,
            turns=PingPong(wg, t.num_consumers) if t.ping_pong and t.num_consumers > 1 else NoTurns(),
            softmax=self.softmax(dev),
            pv=self.pv.of(dev.mma_pv, rings.v, smem.V, t, self.headdim_v),
            rQ=dev.mma_qk.make_fragment_A(thr_qk.partition_A(smem.Q)),
            rK=dev.mma_qk.make_fragment_B(thr_qk.partition_B(smem.K)),
            shape_s=thr_qk.partition_shape_C((SLAB, t.tile_n)),
            score=self.elements.score,
            frees_q=t.output != "q",
            place=place,
        )
        end = Epilogue(dev, smem, place, t.output, t.num_consumers, self.elements.o, self.headdim_v)
        hooks.turns.start()
        slot, slot_q, order, unread = first_slot(), first_slot(), self.order(dev), Int32(0)
        if const_expr(self.dynamic):
            linear, at, total = cute.arch.block_idx()[0], first_slot(), self.extent(dev).tiles()
            work = order.work(linear)
            S = hooks.fragment() if const_expr(t.ahead) else None
            while linear < total:
                i, bad = Int32(0), Int32(0)
                before = work
                if const_expr(t.ahead):
                    slot = self.approach(dev, hooks, place, work, slot, slot_q, S, Int32(1))
                while linear < total and i < ROUND:
                    chain = Chain(S, i, before) if const_expr(t.ahead) else None
                    before = work
                    slot, slot_q, unread, bad_i, following, work = self.consume_tile(
                        dev, hooks, place, end, stores, work, slot, slot_q, unread, False, board, at, chain
                    )
                    board.mark(i, linear, bad_i)
                    linear, bad, i, at = following, bad | bad_i, i + 1, at.next()
                if const_expr(t.ahead):
                    warpgroup.wait_group(0)  # what the last tile of a round computes ahead is of no tile
                    end.send(end.slab, before)
                if any_of(bad, t.num_consumers) != 0:
                    end.await_sent()
                    round_barrier(t.num_consumers)
                    for j in cutlass.range(i, unroll=1):
                        again, linear_j = board.marked(j)
                        if again:
                            redo = order.work(linear_j)
                            slot, slot_q, unread, _, _, _ = self.consume_tile(
                                dev, hooks, place, end, stores, redo, slot, slot_q, unread, True
                            )
                    round_barrier(t.num_consumers)
        else:
            work = order.work(cute.arch.block_idx()[0])
            slot, slot_q, unread, bad, _, _ = self.consume_tile(
                dev, hooks, place, end, stores, work, slot, slot_q, unread, False
            )
            if any_of(bad, t.num_consumers) != 0:
                end.await_sent()
                slot, slot_q, unread, _, _, _ = self.consume_tile(
                    dev, hooks, place, end, stores, work, slot, slot_q, unread, True
                )
        # The last store must have read its slab before the block gives its shared memory back.
        if place.warp == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def approach(self, dev, hooks, place, work, slot, slot_q, S, more):
        """Issue the first scores of a query tile. Where there is none (`more` is 0) they are those of anything: a
        branch around matrix instructions would make the compiler wait for each of them."""
        t = self.tile
        slab = Slot(slot_q.index * t.num_consumers + place.wg, slot_q.phase)
        if more != 0:
            if const_expr(self.traits.mask != "full"):
                own = self.segments(dev, work.m_block * t.num_consumers + place.wg, Slabs(SLAB, t.tile_n))
                block = self.segments(dev, work.m_block, t)
                for _ in cutlass.range(block.end - own.end, unroll=1):
                    slot = hooks.skip(slot)
            hooks.ring_q.wait(slab)
            hooks.ring_k.wait(slot)
        replace(hooks, slab=slab).scores(slot, S)
        return slot

    @cute.jit
    def consume_tile(
        self, dev, hooks, place, end, stores, work, slot, slot_q, unread, exact, board=None, at=None, chain=None
    ):
        """`unread`: 0, or 1 + the stage of V that holds O of the tile before, which its store may not have read yet."""
        t, band = self.tile, self.band(dev)
        row = work.m_block * t.tile_m + place.wg * SLAB + place.warp * 16 + place.lane // 4
        mask = BandMask(band, t.tile_n, self.seqlens(dev), row, 2 * (place.lane % 4))
        slab = Slot(slot_q.index * t.num_consumers + place.wg, slot_q.phase)
        m_slab = work.m_block * t.num_consumers + place.wg
        own = self.segments(dev, m_slab, Slabs(SLAB, t.tile_n))
        partial = (own.end > own.full_end) | (own.full_begin >= own.end)
        if const_expr(t.rising):
            partial = own.full_end <= own.begin
        mask_first = Int32(1) if const_expr(exact) else Int32(cutlass.select_(partial, Int32(1), Int32(0)))
        softmax = self.scaled(dev, hooks.softmax, work, row)
        mine = replace(
            hooks, softmax=softmax, mask=mask, mask_first=mask_first, exact=exact, slab=slab, last=self.last(own)
        )
        if const_expr(chain is not None):
            mine = replace(mine, ahead=chain.S, begun=lambda: end.send_if(chain.i > 0, chain.before))
        if const_expr(t.output == "v"):
            mine = replace(mine, unread=stores + cutlass.max(unread - 1, 0))
        if const_expr(self.traits.mask == "full"):
            slot = Walk(band, exact).kv(own, replace(mine, pending=unread), slot)
            ended = slot.before()
        else:
            block = self.segments(dev, work.m_block, t)
            before, behind = block.end - own.end, own.begin - block.begin  # tiles that this warpgroup skips
            if const_expr(t.rising):
                before, behind = behind, before
            if const_expr(t.output == "v"):
                # A skipped tile waits for its V, which may wait for that store.
                if before > 0:
                    mine.give_back(unread)
                    unread = Int32(0)
            if const_expr(chain is None):
                for _ in cutlass.range(before, unroll=1):
                    slot = mine.skip(slot)
            slot = Walk(band, exact, t.rising).kv(own, replace(mine, pending=unread), slot)
            ended = slot.before()
            for _ in cutlass.range(behind, unroll=1):
                slot = mine.skip(slot)
        bad = mine.softmax.overflowed()
        following, after = Int32(0), work
        if const_expr(board is not None):
            following, after = board.look(at)
            board.done(at)
            after = Work(*after)
        if const_expr(chain is not None):
            more = (following < self.extent(dev).tiles()) & (chain.i + 1 < ROUND)
            more = Int32(cutlass.select_(more, Int32(1), Int32(0)))
            slot = self.approach(dev, hooks, place, after, slot, self.next_q(slot_q), chain.S, more)
            end.await_slab()
            mine.finish(ended)
        unread = end.store(mine, slot, work, row, later=chain is not None, stores=stores, item=self.item(slot_q))
        return slot, self.next_q(slot_q), unread, bad, following, after
