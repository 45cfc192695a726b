"""The two ends of the backward pass: what goes through memory once, before and after the products.

prepare   delta = rowsum(dO * O) - dlse and lse in log2 units, padded to whole tiles; zeroes the float32 dQ
finish    dQ from float32, scaled, to the operands' dtype
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64, const_expr

from flashattn_hopper.spec.tile import ROW_PAD as PAD

from ..common.convert import ELEMENT, to_half
from ..common.softmax import LOG2_E
from ..common.tensors import at

THREADS = 256


def statistics(stats, head_row, seqlen_q, first, count):
    """(lse, delta) of `count` rows from `first` on of one head: 2 * count floats."""
    rows = Int64(head_row) * (cute.ceil_div(seqlen_q, PAD) * PAD) + first
    return cute.make_tensor(at(Float32, stats + rows * 8, 8 * count), cute.make_layout(2 * count))


class Ends:
    def __init__(self, traits, tile):
        self.tile = tile
        self.headdim, self.headdim_v = traits.headdim, traits.headdim_v
        self.dtype = ELEMENT[traits.dtype]
        self.lanes = 1 << (self.headdim_v // 8 - 1).bit_length()  # threads that share a row in prepare, 8 elements each

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
        for i in cutlass.range_constexpr(0, PAD, THREADS // self.lanes):
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
        if const_expr(self.tile.summed):
            zero = cute.make_rmem_tensor(4, Float32)
            zero.fill(0.0)
            mine = sums + (Int64(head_row) * blocks + block) * (4 * PAD * self.headdim) + tidx * 16
            for i in cutlass.range(self.headdim * PAD // (4 * THREADS), unroll=4):
                cute.make_tensor(at(Float32, mine + i * (16 * THREADS), 16), cute.make_layout(4)).store(zero.load())

    @cute.kernel
    def finish(self, mQ: cute.Tensor, sums: Int64, dq: Int64, factor: Float32):
        """Two rows of eight columns to a thread: from the sums of the four lanes that shared the rows."""
        t = self.tile
        _, seqlen_q, heads, d = mQ.shape
        blocks = cute.ceil_div(seqlen_q, PAD)
        head_row = cute.arch.block_idx()[0] // blocks
        block, batch = cute.arch.block_idx()[0] - head_row * blocks, head_row // heads
        head, tidx = head_row - batch * heads, cute.arch.thread_idx()[0]
        rows, columns = t.dq_part(self.headdim)
        across, chunks = self.headdim // columns, self.headdim // 8
        mine = sums + (Int64(head_row) * blocks + block) * (4 * PAD * self.headdim)
        for i in cutlass.range_constexpr(PAD * chunks // (2 * THREADS)):
            unit = i * THREADS + tidx
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
