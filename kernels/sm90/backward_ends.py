"""The two ends of the backward pass: what goes through memory once, before and after the products.

prepare   delta = rowsum(dO * O) - dlse and lse in log2 units, padded to whole tiles; zeroes dQ's sums and counters
finish    dQ from float32, scaled, to the operands' dtype
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from flashattn_hopper.spec.tile import ROW_PAD as PAD
from flashattn_hopper.spec.tile import WARPGROUP

from ..common.convert import ELEMENT, to_half
from ..common.softmax import LOG2_E
from ..common.tensors import at
from .sum_order import counter_of
from .tensors import SLAB

THREADS = 256


class Ends:
    """`tile`: the main kernel's, which decides how lse, delta and the sums of dQ are laid out."""

    def __init__(self, traits, tile):
        self.tile = tile
        self.headdim, self.headdim_v = traits.headdim, traits.headdim_v
        self.dtype = ELEMENT[traits.dtype]
        self.lanes = 1 << (self.headdim_v // 8 - 1).bit_length()  # threads that share a row in prepare, 8 elements each

    def grid(self, seqlen_q, heads, batch):
        return [cute.ceil_div(seqlen_q, PAD) * heads * batch, 1, 1]

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
        counters: Int64,
    ):
        cute.arch.griddepcontrol_launch_dependents()  # the main kernel loads its K and V meanwhile
        seqlen_q, d_v, heads, _ = mO.shape
        tidx = cute.arch.thread_idx()[0]
        if const_expr(self.tile.kv_stages == 2):
            if tidx == 0 and cute.arch.block_idx()[0] == 0:
                cute.make_tensor(at(Int32, ticket, 4), cute.make_layout(1))[0] = Int32(0)
        block, head, batch, first = self.end(seqlen_q, heads)
        if const_expr(self.tile.in_turn):
            tiles = PAD // self.tile.tile_m
            if tidx < tiles:
                counter = counter_of(counters, first + block * PAD + tidx * self.tile.tile_m)
                cute.make_tensor(at(Int32, counter, 4), cute.make_layout(1))[0] = Int32(0)
        lanes = self.lanes
        at_once = THREADS // lanes
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
        if const_expr(self.tile.summed):
            zero = cute.make_rmem_tensor(4, Float32)
            zero.fill(0.0)
            words = self.headdim * PAD // 4
            mine = dq + (first + block * PAD) * (4 * self.headdim)
            for i in cutlass.range(words // THREADS, unroll=4):
                target = cute.make_tensor(at(Float32, mine + (i * THREADS + tidx) * 16, 16), cute.make_layout(4))
                target.store(zero.load())

    @cute.kernel
    def finish(self, mdQ: cute.Tensor, scale: Float32, dq: Int64):
        cute.arch.griddepcontrol_wait()
        seqlen_q, d, heads, _ = mdQ.shape
        t = self.tile
        tidx = cute.arch.thread_idx()[0]
        block, head, batch, first = self.end(seqlen_q, heads)
        # What one thread turns into two rows of eight 16-bit values lies in 64 neighbouring bytes: the sums of the four
        # lanes that share the rows, each two columns of both. Neighbouring threads write neighbouring columns.
        width = self.headdim // 8
        chunks = t.dq_columns(self.headdim) // 8
        for i in cutlass.range_constexpr(PAD * width // (2 * THREADS)):
            unit = i * THREADS + tidx
            pair, chunk = unit // width, unit % width  # (rows r and r + 8 of 16, eight columns)
            row = pair // 8 * 16 + pair % 8
            tile, inner = row // t.tile_m, row % t.tile_m
            wg = inner // SLAB if const_expr(t.dq_by_rows) else chunk // chunks
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
