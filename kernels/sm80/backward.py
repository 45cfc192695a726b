"""sm80.backward: dQ, dK and dV from matrix instructions of one warp, FP16 and BF16, for archs since Ampere.

Three kernels in one call. Nothing is added up in memory, so results repeat bit by bit.

    prepare   lse in log2 units and delta = sum(dO * O) - dlse of every query row
    keys      128 keys of a block stay, 16 for each warp; Q and dO of every head of the group stream by:
              S^T = K Q^T | dP^T = V dO^T | P^T = exp2(S^T c - lse) | dS^T = P^T (dP^T - delta)
              dV += P^T dO | dK += dS^T Q
    queries   128 queries stay, K and V stream by: S = Q K^T | dP = dO V^T | P, dS | dQ += dS K

P and dS go from the accumulators to the next product in registers. Two stages: a tile is copied under the one before.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator

from flashattn_hopper.spec.mask import Seqlens
from flashattn_hopper.spec.tile import ROW_PAD as PAD

from ..common.convert import ELEMENT, to_half
from ..common.mask import BandMask, ColumnMask
from ..common.operands import BwdOperands
from ..common.softmax import LOG2_E
from ..common.tensors import at, band_of, fake_operand, operand_again
from ..common.walk import Walk
from ..common.work import DeviceArith, Extent, HeadMap, InOrder, again, order_of, thread_again
from .copies import Both, copy_chunk, rows_of
from .epilogue import Outlet
from .one_pass import Warp, one_pass
from .pipeline import Staged, landed
from .products import Products, differentiate, fragment, packed, scale
from .shared import Reader, Swizzled, columns_first, rows_first

PREPARE_THREADS = 256
STAGES = 2


class Device(NamedTuple):
    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    do: cute.Tensor
    stats: Int64  # (lse, delta) of padded query rows, float32
    scale: Float32
    window_left: Any
    window_right: Any


class Cut(NamedTuple):
    """A tile as Band.kv_tiles and Band.q_tiles want it."""

    tile_m: int
    tile_n: int


def statistics(stats, head_row, seqlen_q, first, count):
    """(lse, delta) of `count` rows from `first` on of one head: 2 * count floats."""
    rows = Int64(head_row) * (cute.ceil_div(seqlen_q, PAD) * PAD) + first
    return cute.make_tensor(at(Float32, stats + rows * 8, 8 * count), cute.make_layout(2 * count))


@dataclass(frozen=True)
class Queries:
    """Hooks of a walk over KV tiles: dQ of this warp's 16 queries."""

    products: Products
    loads: Staged
    q: Reader
    do: Reader
    k: Reader  # its rows are the columns of S
    v: Reader
    k_turned: Reader  # its rows are summed over
    widths: tuple
    dQ: cute.Tensor
    rows: cute.Tensor  # lse, delta of the two rows of a thread
    mask: BandMask
    scale_log2: Float32

    @cute.jit
    def begin(self, n, slot):
        self.loads.start(n)
        return self.tile(n, slot, True, True)

    def step(self, n, slot, masked):
        return self.tile(n, slot, masked, False)

    def drain(self, n, slot):
        return slot

    def tile(self, n, slot, masked, first):
        headdim, headdim_v = self.widths
        self.loads.before_scores(n, slot, first)
        S = self.products.scores(self.q, self.k, headdim, slot)
        dP = self.products.scores(self.do, self.v, headdim_v, slot)
        if masked:
            self.mask.apply(S, n)
        for i in range(cute.size(S)):
            r = i // 2 % 2
            differentiate(S, dP, i, self.scale_log2, self.rows[2 * r], self.rows[2 * r + 1])
        self.products.add(self.dQ, packed(dP, self.products.dtype), self.k_turned, headdim, slot)
        return self.loads.next(slot)


class Backward:
    def __init__(self, traits, tile):
        self.traits, self.tile = traits, tile
        self.headdim, self.headdim_v = traits.headdim, traits.headdim_v
        self.summed = tile.query_n is None
        self.dtype = ELEMENT[traits.dtype]
        self.products = Products(self.dtype, tile.tile_m)
        self.lanes = 1 << (self.headdim_v // 8 - 1).bit_length()  # threads that share a row in prepare, 8 elements each

    def arguments(self):
        B, Sq, Sk, Hq, Hk, D, Dv = [cute.sym_int() for _ in range(7)]
        operand = lambda *shape: fake_operand(self.dtype, B, *shape)
        window = self.traits.mask == "window"
        addresses = dict.fromkeys(("o", "lse", "dlse", "dq", "dk", "dv", "workspace"), Int64(0))
        operands = BwdOperands(
            q=operand(Sq, Hq, D),
            k=operand(Sk, Hk, D),
            v=operand(Sk, Hk, Dv),
            do=operand(Sq, Hq, Dv),
            **addresses,
            softmax_scale=Float32(1.0),
            window_left=Int32(0) if window else None,
            window_right=Int32(0) if window else None,
        )
        return operands, make_fake_stream(use_tvm_ffi_env_stream=True)

    # ---------------------------------------------------------------------------------------------- host half
    @cute.jit
    def __call__(self, ops: BwdOperands, stream: cuda.CUstream):
        t = self.tile
        batch, seqlen_q, heads, _ = ops.q.shape
        _, seqlen_k, kv_heads, _ = ops.k.shape
        dev = Device(
            ops.q, ops.k, ops.v, ops.do, ops.workspace, ops.softmax_scale, ops.window_left, ops.window_right
        )  # fmt: skip
        launch = {"block": [t.num_threads, 1, 1], "min_blocks_per_mp": 1, "stream": stream}
        rows = {
            "grid": [cute.ceil_div(seqlen_q, PAD) * heads * batch, 1, 1],
            "block": [PREPARE_THREADS, 1, 1],
            "stream": stream,
        }
        sums = ops.workspace + Int64(cute.ceil_div(seqlen_q, PAD) * PAD) * heads * batch * 8
        self.prepare(ops.do, ops.o, ops.lse, ops.dlse, ops.workspace, sums).launch(**rows)
        if const_expr(self.summed):
            self.gradients(dev, sums, ops.dk, ops.dv).launch(
                grid=[cute.ceil_div(seqlen_k, t.tile_n) * kv_heads * batch, 1, 1], **launch
            )
            self.finish(ops.q, sums, ops.dq, ops.softmax_scale).launch(**rows)
            return
        if const_expr(t.wanted != "dq"):
            self.keys(dev, ops.dk, ops.dv).launch(
                grid=[cute.ceil_div(seqlen_k, t.tile_n) * kv_heads * batch, 1, 1], **launch
            )
        if const_expr(t.wanted != "dkdv"):
            self.queries(dev, ops.dq).launch(grid=[cute.ceil_div(seqlen_q, t.tile_n) * heads * batch, 1, 1], **launch)

    def band(self, dev):
        return band_of(self.traits.mask, dev.window_left, dev.window_right)

    # --------------------------------------------------------------------------------------------- device half
    @cute.kernel
    def prepare(self, mdO: cute.Tensor, o: Int64, lse: Int64, dlse: Int64, stats: Int64, sums: Int64):
        """Every padded row; past the end and in rows without keys P = exp2(S - inf) is 0."""
        _, seqlen_q, heads, d_v = mdO.shape
        blocks = cute.ceil_div(seqlen_q, PAD)
        head_row = cute.arch.block_idx()[0] // blocks
        block, batch = cute.arch.block_idx()[0] - head_row * blocks, head_row // heads
        head, tidx = head_row - batch * heads, cute.arch.thread_idx()[0]
        lane, own = tidx % self.lanes, tidx // self.lanes
        per_batch, per_row, per_head, _ = mdO.stride
        floats = lambda address, i: cute.make_tensor(at(Float32, address + i * 4, 4), cute.make_layout(1))
        vector = lambda address: cute.make_tensor(at(self.dtype, address, 16), cute.make_layout(8)).load().to(Float32)
        for i in cutlass.range_constexpr(0, PAD, PREPARE_THREADS // self.lanes):
            row = block * PAD + i + own
            total = Float32(0.0)
            if row < seqlen_q and lane * 8 < d_v:
                there = Int64(batch) * per_batch + Int64(head) * per_head + Int64(row) * per_row + lane * 8
                here = ((Int64(batch) * seqlen_q + row) * heads + head) * d_v + lane * 8
                product = vector(mdO.iterator.toint() + there * 2) * vector(o + here * 2)
                for j in cutlass.range_constexpr(8):
                    total = total + product[j]
            for bit in cutlass.range_constexpr(self.lanes.bit_length() - 1):
                total = total + cute.arch.shuffle_sync_bfly(total, offset=1 << bit)
            if lane == 0:
                log2, delta = Float32(math.inf), Float32(0.0)
                if row < seqlen_q:
                    at_row = Int64(head_row) * seqlen_q + row
                    natural = floats(lse, at_row)[0]
                    delta = total
                    if dlse != 0:
                        delta = delta - floats(dlse, at_row)[0]
                    empty = natural == -math.inf
                    log2 = Float32(cutlass.select_(empty, Float32(math.inf), natural * LOG2_E))
                    delta = Float32(cutlass.select_(empty, Float32(0.0), delta))
                out = statistics(stats, head_row, seqlen_q, row, 1)
                out[0] = log2
                out[1] = delta
        if const_expr(self.summed):
            zero = cute.make_rmem_tensor(4, Float32)
            zero.fill(0.0)
            mine = sums + (Int64(head_row) * blocks + block) * (4 * PAD * self.headdim) + tidx * 16
            for i in cutlass.range(self.headdim * PAD // (4 * PREPARE_THREADS), unroll=4):
                cute.make_tensor(at(Float32, mine + i * (16 * PREPARE_THREADS), 16), cute.make_layout(4)).store(zero.load())

    def memory(self, resident, streaming):
        """(two tiles that stay, two rings) of `resident` and `streaming` rows: as wide as q and k, and as v and do."""
        t = self.tile
        halves = [rows * width for rows in (t.tile_n, STAGES * t.tile_m) for width in (self.headdim, self.headdim_v)]

        @cute.struct
        class Smem:
            one: cute.struct.Align[cute.struct.MemRange[self.dtype, halves[0]], 1024]
            two: cute.struct.Align[cute.struct.MemRange[self.dtype, halves[1]], 1024]
            ring: cute.struct.Align[cute.struct.MemRange[self.dtype, halves[2]], 1024]
            ring_two: cute.struct.Align[cute.struct.MemRange[self.dtype, halves[3]], 1024]

        # Too much shared memory is not a compile error: the launch fails.
        assert Smem.size_in_bytes() <= t.smem_bytes(self.traits), Smem.size_in_bytes()
        st = SmemAllocator().allocate(Smem)
        swizzled = lambda m, rows, width: Swizzled(Int32(m.data_ptr().toint()), rows, width)
        return (
            swizzled(st.one, resident, self.headdim),
            swizzled(st.two, resident, self.headdim_v),
            swizzled(st.ring, streaming, self.headdim),
            swizzled(st.ring_two, streaming, self.headdim_v),
        )

    def place(self, tidx):
        """(thread, lane, the first row of its warp)"""
        return tidx, tidx % 32, cute.arch.make_warp_uniform(tidx // 32) * 16

    def copier(self, tensor, head, batch, tile, tidx):
        return rows_of(tensor, head, batch, tile, tidx, self.tile.num_threads)

    @cute.kernel
    def keys(self, dev: Device, dk: Int64, dv: Int64):
        t, band = self.tile, self.band(dev)
        sK, sV, sQ, sdO = self.memory(t.tile_n, t.tile_m)
        tidx, lane, first = self.place(cute.arch.thread_idx()[0])
        _, seqlen_q, heads, _ = dev.q.shape
        seqlens = Seqlens(seqlen_q, dev.k.shape[1])
        kv_heads = dev.k.shape[2]
        n_block, kv_head, batch = self.key_work(dev, cute.arch.block_idx()[0])
        segments = band.q_tiles(n_block, t, seqlens, DeviceArith)
        group, count = heads // kv_heads, segments.end - segments.begin
        head = kv_head * group
        q, do = self.copier(dev.q, head, batch, sQ, tidx), self.copier(dev.do, head, batch, sdO, tidx)
        self.copier(dev.k, kv_head, batch, sK, tidx).copy(n_block, 0, ragged=True)
        self.copier(dev.v, kv_head, batch, sV, tidx).copy(n_block, 0, ragged=True)
        steps = Int64(dev.q.stride[2]) * 2, Int64(dev.do.stride[2]) * 2
        total = group * count
        if total > 0:
            self.copy_queries(q, do, steps, segments.begin, Int32(0), Int32(0))
        cute.arch.cp_async_commit_group()
        key = n_block * t.tile_n + first + lane // 4
        mask = ColumnMask(band, t.tile_m, seqlens, key, 2 * (lane % 4))
        resident = lambda tile: Reader(tile, rows_first(tile, lane, first))
        streaming = lambda tile: Reader(tile, columns_first(tile, lane))
        turned = lambda tile: Reader(tile, rows_first(tile, lane), transpose=True)
        readers = (resident(sK), resident(sV), streaming(sQ), streaming(sdO), turned(sQ), turned(sdO))
        dK, dV = fragment(self.headdim), fragment(self.headdim_v)
        slot = Int32(0)
        for i in cutlass.range(total, unroll=1):
            landed(0)
            if i + 1 < total:
                other = (i + 1) // count
                self.copy_queries(q, do, steps, segments.begin + i + 1 - other * count, other, slot ^ 1)
            cute.arch.cp_async_commit_group()
            member = i // count
            m = segments.begin + i - member * count
            self.key_tile(dev, readers, mask, segments, dK, dV, batch * heads + head + member, m, slot, lane)
            slot = slot ^ 1
        landed(0)  # K and V too, where no query sees these keys
        scale(dK, dev.scale)
        k, v = operand_again(dev.k), operand_again(dev.v)
        _, lane, first = self.place(thread_again())
        n_block, kv_head, batch = self.key_work(dev._replace(k=k), again(cute.arch.block_idx()[0]))
        _, seqlen_k, kv_heads, _ = k.shape
        for acc, tile, address, x in ((dK, sK, dk, k), (dV, sV, dv, v)):
            self.store(acc, tile, address, x.shape[3], (batch, seqlen_k, kv_heads), kv_head, n_block, lane, first)

    def shared_tiles(self):
        """K, V, rings of Q and dO, P (None where no warps share keys) and dS."""
        t, pair = self.tile, (self.headdim, self.headdim_v)
        shapes = [(t.tile_n, w, 1) for w in pair] + [(t.tile_m, w, STAGES) for w in pair]
        shapes += [(t.tile_n, t.tile_m, int(t.split > 1)), (t.tile_n, t.tile_m, 1 + t.late)]
        sizes = [rows * width * stages for rows, width, stages in shapes]

        @cute.struct
        class Smem:
            k: cute.struct.Align[cute.struct.MemRange[self.dtype, sizes[0]], 1024]
            v: cute.struct.Align[cute.struct.MemRange[self.dtype, sizes[1]], 1024]
            q: cute.struct.Align[cute.struct.MemRange[self.dtype, sizes[2]], 1024]
            do: cute.struct.Align[cute.struct.MemRange[self.dtype, sizes[3]], 1024]
            scores: cute.struct.Align[cute.struct.MemRange[self.dtype, sizes[4] + sizes[5]], 1024]
            stats: cute.struct.Align[cute.struct.MemRange[Float32, STAGES * 2 * t.tile_m], 16]

        # Too much shared memory is not a compile error: the launch fails.
        assert Smem.size_in_bytes() <= t.smem_bytes(self.traits), Smem.size_in_bytes()
        st = SmemAllocator().allocate(Smem)
        bases = [Int32(m.data_ptr().toint()) for m in (st.k, st.v, st.q, st.do, st.scores)]
        bases.append(bases[-1] + 2 * sizes[4])
        tiles = [Swizzled(base, rows, width) for base, (rows, width, _) in zip(bases, shapes)]
        return (*tiles[:4], tiles[4] if t.split > 1 else None, tiles[5]), Int32(st.stats.data_ptr().toint())

    def where(self, tidx):
        index = cute.arch.make_warp_uniform(tidx // 32)
        return Warp(tidx % 32, index, index // self.tile.split, index % self.tile.split)

    @cute.jit
    def copy_tile(self, dev, rings, batch, head, m, stage):
        """Q, dO, lse and delta of a tile of queries. Why the thread is read anew: what derives from it would be kept."""
        t, tidx, heads = self.tile, thread_again(), dev.q.shape[2]
        for tensor, ring in zip((dev.q, dev.do), rings):
            self.copier(tensor, head, batch, ring, tidx).copy(m, stage, ragged=True)
        if tidx < t.tile_m // 2:
            row = Int64(batch * heads + head) * (cute.ceil_div(dev.q.shape[1], PAD) * PAD) + m * t.tile_m
            copy_chunk(rings[2] + stage * (8 * t.tile_m) + tidx * 16, dev.stats + row * 8 + tidx * 16, 16)

    @cute.kernel
    def gradients(self, dev: Device, sums: Int64, dk: Int64, dv: Int64):
        t, band = self.tile, self.band(dev)
        tiles, stats = self.shared_tiles()
        sK, sV, sQ, sdO, _, _ = tiles
        tidx = cute.arch.thread_idx()[0]
        warp = self.where(tidx)
        _, seqlen_q, heads, _ = dev.q.shape
        seqlens = Seqlens(seqlen_q, dev.k.shape[1])
        kv_heads = dev.k.shape[2]
        n_block, kv_head, batch = self.key_work(dev, cute.arch.block_idx()[0])
        segments = band.q_tiles(n_block, t, seqlens, DeviceArith)
        group, count = heads // kv_heads, segments.end - segments.begin
        head = kv_head * group
        self.copier(dev.k, kv_head, batch, sK, tidx).copy(n_block, 0, ragged=True)
        self.copier(dev.v, kv_head, batch, sV, tidx).copy(n_block, 0, ragged=True)
        total = group * count
        if total > 0:
            self.copy_tile(dev, (sQ, sdO, stats), batch, head, segments.begin, Int32(0))
        cute.arch.cp_async_commit_group()
        mask_of = lambda row, column: ColumnMask(band, t.at_once, seqlens, n_block * t.tile_n + row, column)
        sums_of = lambda row: sums + Int64(row) * (4 * self.headdim)
        hooks = one_pass(t, self.dtype, (self.headdim, self.headdim_v), tiles, warp, mask_of, sums_of)
        own = stats + (t.queries * warp.member + 2 * (warp.lane % 4)) * 8
        slot, before = Int32(0), Int32(0)
        for i in cutlass.range(total, unroll=1):
            landed(0)
            if i + 1 < total:
                other = (i + 1) // count
                following = segments.begin + i + 1 - other * count
                self.copy_tile(dev, (sQ, sdO, stats), batch, head + other, following, slot ^ 1)
            cute.arch.cp_async_commit_group()
            member = i // count
            m = segments.begin + i - member * count
            head_row = batch * heads + head + member
            edge = (m < segments.full_begin) | (m >= segments.full_end)
            place = head_row * (cute.ceil_div(seqlen_q, PAD) * PAD) + m * t.tile_m
            stage = slot if const_expr(t.late) else Int32(0)
            lse = own + slot * (8 * t.tile_m)
            hooks.step(lse, dev.scale * LOG2_E, edge, m, slot, stage, place, before, i > 0)
            before = place
            slot = slot ^ 1
        landed(0)  # K and V too, where no query sees these keys
        if const_expr(t.late):
            if total > 0:
                hooks.last_query(before, slot ^ 1)
        cute.arch.sync_threads()
        for part in hooks.dK:
            scale(part, dev.scale)
        k, v = operand_again(dev.k), operand_again(dev.v)
        warp = self.where(thread_again())
        n_block, kv_head, batch = self.key_work(dev._replace(k=k), again(cute.arch.block_idx()[0]))
        _, seqlen_k, kv_heads, _ = k.shape
        for parts, tile, address, x in ((hooks.dK, sK, dk, k), (hooks.dV, sV, dv, v)):
            part = tile.width // t.split
            place = Swizzled(tile.base + warp.index * (t.keys * part * 2), t.keys, part)
            outlet = Outlet(place, warp.lane, self.dtype)
            for i, acc in enumerate(parts):
                outlet.stage(acc, 16 * i)
            row_bytes = Int64(kv_heads) * x.shape[3] * 2
            first, column = n_block * t.tile_n + warp.team * t.keys, warp.member * part
            origin = address + (Int64(batch) * seqlen_k + first) * row_bytes
            origin = origin + (Int64(kv_head) * (2 * x.shape[3]) + 2 * column)
            outlet.store(0, t.keys, origin, row_bytes, seqlen_k - first, x.shape[3] - column)

    @cute.kernel
    def finish(self, mQ: cute.Tensor, sums: Int64, dq: Int64, factor: Float32):
        """dQ from its sums: of 64 rows and 8 columns, 16 sums to a thread, of two rows and the lanes that share them."""
        t = self.tile
        _, seqlen_q, heads, d = mQ.shape
        blocks = cute.ceil_div(seqlen_q, PAD)
        head_row = cute.arch.block_idx()[0] // blocks
        block, batch = cute.arch.block_idx()[0] - head_row * blocks, head_row // heads
        head, tidx = head_row - batch * heads, cute.arch.thread_idx()[0]
        rows, columns = t.dq_part(self.headdim)
        across, chunks = self.headdim // columns, self.headdim // 8
        mine = sums + (Int64(head_row) * blocks + block) * (4 * PAD * self.headdim)
        for i in cutlass.range_constexpr(PAD * chunks // (2 * PREPARE_THREADS)):
            unit = i * PREPARE_THREADS + tidx
            pair, column = unit // chunks, unit % chunks * 8
            row = pair // 8 * 16 + pair % 8
            tile, inner = row // t.tile_m, row % t.tile_m
            warp = inner // rows * across + column // columns
            atom = inner % rows // 16 * (columns // 8) + column % columns // 8
            place = tile * (t.tile_m * self.headdim) + warp * (rows * columns) + atom * 128
            place = place + pair % 8 * (16 if t.vector else 4)
            values = cute.make_rmem_tensor(16, Float32)
            halves = cute.make_rmem_tensor(16, self.dtype)
            for x in cutlass.range_constexpr(4):
                at_x = mine + (place + x * (4 if t.vector else 32)) * 4
                four = cute.make_tensor(at(Float32, at_x, 16), cute.make_layout(4)).load() * factor
                for y in cutlass.range_constexpr(4):
                    lane, e = (x, y) if t.vector else (y, x)
                    values[e // 2 * 8 + lane * 2 + e % 2] = four[y]
            to_half(values, halves)
            for r in cutlass.range_constexpr(2):
                out = block * PAD + row + 8 * r
                if out < seqlen_q and column < d:
                    to = dq + (((Int64(batch) * seqlen_q + out) * heads + head) * d + column) * 2
                    eight = cute.make_tensor(halves.iterator + 8 * r, cute.make_layout(8))
                    cute.make_tensor(at(self.dtype, to, 16), cute.make_layout(8)).store(eight.load())

    def key_work(self, dev, linear):
        """(key tile, head, batch) of a thread block."""
        batches, seqlen_k, kv_heads, _ = dev.k.shape
        return InOrder(Extent(cute.ceil_div(seqlen_k, self.tile.tile_n), kv_heads, batches, seqlen_k)).work(linear)

    def copy_queries(self, q, do, steps, m, member, stage):
        """Tile m of Q and dO of one head of the group; the last one of a head may be ragged."""
        for rows, step in zip((q, do), steps):
            rows.copy(m, stage, True, Int64(member) * step)

    @cute.jit
    def key_tile(self, dev, readers, mask, segments, dK, dV, head_row, m, slot, lane):
        k, v, q, do, q_turned, do_turned = readers
        t = self.tile
        S = self.products.scores(k, q, self.headdim, slot)
        dP = self.products.scores(v, do, self.headdim_v, slot)
        if (m < segments.full_begin) | (m >= segments.full_end):
            mask.apply(S, m)
        scale_log2 = dev.scale * LOG2_E
        for column in cutlass.range_constexpr(0, t.tile_m, 8):
            pair = statistics(dev.stats, head_row, dev.q.shape[1], m * t.tile_m + column + 2 * (lane % 4), 2).load()
            for j in cutlass.range_constexpr(4):
                differentiate(S, dP, column // 2 + j, scale_log2, pair[j % 2 * 2], pair[j % 2 * 2 + 1])
        self.products.add(dV, packed(S, self.dtype), do_turned, self.headdim_v, slot)
        self.products.add(dK, packed(dP, self.dtype), q_turned, self.headdim, slot)

    @cute.kernel
    def queries(self, dev: Device, dq: Int64):
        t, band = self.tile, self.band(dev)
        sQ, sdO, sK, sV = self.memory(t.tile_n, t.tile_m)
        tidx, lane, first = self.place(cute.arch.thread_idx()[0])
        batches, seqlen_q, heads, d = dev.q.shape
        seqlens = Seqlens(seqlen_q, dev.k.shape[1])
        extent = Extent(cute.ceil_div(seqlen_q, t.tile_n), heads, batches, seqlens.k)
        m_block, head, batch = order_of(self.traits.mask, extent, 2 * (self.headdim + self.headdim_v)).work(
            cute.arch.block_idx()[0]
        )
        segments = band.kv_tiles(m_block, Cut(t.tile_n, t.tile_m), seqlens, DeviceArith)
        kv_head = HeadMap(heads // dev.k.shape[2]).kv(head)
        loads = Staged(
            Both(self.copier(dev.q, head, batch, sQ, tidx), self.copier(dev.do, head, batch, sdO, tidx)),
            self.copier(dev.k, kv_head, batch, sK, tidx),
            self.copier(dev.v, kv_head, batch, sV, tidx),
            m_block,
            segments.begin,
            STAGES,
        )
        rows = cute.make_rmem_tensor(4, Float32)
        row = m_block * t.tile_n + first + lane // 4
        for r in cutlass.range_constexpr(2):
            pair = statistics(dev.stats, batch * heads + head, seqlen_q, row + 8 * r, 1).load()
            rows[2 * r], rows[2 * r + 1] = pair[0], pair[1]
        dQ = fragment(self.headdim)
        hooks = Queries(
            self.products,
            loads,
            Reader(sQ, rows_first(sQ, lane, first)),
            Reader(sdO, rows_first(sdO, lane, first)),
            Reader(sK, columns_first(sK, lane)),
            Reader(sV, columns_first(sV, lane)),
            Reader(sK, rows_first(sK, lane), transpose=True),
            (self.headdim, self.headdim_v),
            dQ,
            rows,
            BandMask(band, t.tile_m, seqlens, row, 2 * (lane % 4)),
            dev.scale * LOG2_E,
        )
        Walk(band).kv(segments, hooks, Int32(0))
        scale(dQ, dev.scale)
        self.store(dQ, sQ, dq, d, (batch, seqlen_q, heads), head, m_block, lane, first)

    def store(self, acc, tile, address, width, extents, head, block, lane, first):
        """A warp's 16 rows, in the place of its rows of what stayed; `extents` are batch index, seqlen and heads."""
        batch, seqlen, heads = extents
        row_bytes = Int64(heads) * width * 2
        origin = Int64(batch) * seqlen + block * tile.rows
        outlet = Outlet(tile, lane, self.dtype)
        outlet.stage(acc, first)
        outlet.store(
            first, 16, address + origin * row_bytes + Int64(head) * (2 * width), row_bytes,
            seqlen - block * tile.rows, width,
        )  # fmt: skip
