"""sm90.quantize: FP16 or BF16 q, k, v to FP8 operands of the forward, in three launches of one call.

    sums    a thread block for each chunk of keys and kv head: sums of K over the keys, largest magnitude of V
    means   a thread block for each kv head: mean of K, scale of V
    codes   a thread block for each 128 rows of q or k and head, or some 128-key tiles of v

    K, Q:   subtract the mean (K) | signs, Hadamard | largest magnitude of a row (Q) or tile (K) | divide, round, store
    V:      divide, round, transpose in registers, keys of 16 in the order that the product P V takes them in

K and V are read twice, because mean and scale of a head must be known before its first code; Q is read once. What the
second reading of K and V finds in L2 is why `codes` starts with them. docs/kernels/sm90_fp8.md has the layouts.
"""

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator

from ..common.convert import ELEMENT
from ..common.eight_bit import (
    LARGEST,
    PACK4,
    divide,
    half_of,
    magnitude,
    max_halves,
    max_over,
    quotient,
    reciprocal,
    scale_of,
)
from ..common.operands import QuantizeOperands
from ..common.rotation import PER_LANE, NoRotation, Rotation
from ..common.tensors import at, fake_operand

TILE = 128  # keys that share a scale, and rows of one block of `codes`
CHUNK, MOST_CHUNKS = 256, 64  # keys that one block of `sums` takes at least, and blocks of a head at most
THREADS = 256  # of `sums` and `means`
RESIDENT = 512  # threads of a multiprocessor at least: 128 registers for each
SMEM_PERCENT = 10  # of a multiprocessor's memory as shared memory: more than RESIDENT threads need
UNROLL = 4  # rows that a thread of `sums` has in flight


class Device(NamedTuple):
    mQ: cute.Tensor
    mK: cute.Tensor
    mV: cute.Tensor
    q8: Int64
    k8: Int64
    v8: Int64
    q_descale: Int64
    k_descale: Int64
    v_descale: Int64
    k_mean: Any
    logit_offset: Any
    peaks: Int64
    sums: Int64
    chunk: Int32  # keys of a chunk
    chunks: Int32


def floats(address, n):
    return cute.make_tensor(at(Float32, address, 4), cute.make_layout(n))


def put(address, value):
    floats(address, 1)[0] = value


def lanes_for(headdim):
    """Lanes that share a row: a power of two, so that exchanges between lanes stay inside."""
    return 1 << (-(-headdim // PER_LANE) - 1).bit_length()


class Quantize:
    def __init__(self, traits, tile=None):
        self.traits = traits
        self.dtype = ELEMENT[traits.dtype]
        self.headdim, self.headdim_v = traits.headdim, traits.headdim_v
        self.code = "int8" if traits.int8_qk else "e4m3"
        self.lanes = lanes_for(self.headdim)
        self.threads = 32 * max(self.lanes, lanes_for(self.headdim_v))
        self.rows = self.threads // self.lanes  # that a block holds at once
        if self.rows > TILE:
            raise ValueError(f"{traits.slug}: headdim_v is more than four times headdim")

    def arguments(self):
        B, Sq, Sk, Hq, Hk, D, Dv = [cute.sym_int() for _ in range(7)]
        operand = lambda *shape: fake_operand(self.dtype, B, *shape)
        smooth = Int64(0) if self.traits.smooth_k else None
        operands = QuantizeOperands(
            operand(Sq, Hq, D), operand(Sk, Hk, D), operand(Sk, Hk, Dv),
            *[Int64(0)] * 6, k_mean=smooth, logit_offset=smooth, workspace=Int64(0),
        )  # fmt: skip
        return operands, make_fake_stream(use_tvm_ffi_env_stream=True)

    # ---------------------------------------------------------------------------------------------- host half
    @cute.jit
    def __call__(self, ops: QuantizeOperands, stream: cuda.CUstream):
        batch, seqlen_k, heads_kv, _ = ops.k.shape
        _, seqlen_q, heads, _ = ops.q.shape
        chunk = cute.ceil_div(cute.ceil_div(seqlen_k, MOST_CHUNKS), CHUNK) * CHUNK
        chunks = cute.ceil_div(seqlen_k, chunk)
        dev = Device(
            *ops[:11], ops.workspace, ops.workspace + Int64(batch * heads_kv * chunks) * 4, Int32(chunk), Int32(chunks)
        )
        tiles = cute.ceil_div(seqlen_k, TILE)
        k_blocks = tiles * heads_kv * batch
        v_blocks = cute.ceil_div(tiles, self.threads // self.headdim_v) * heads_kv * batch
        q_blocks = cute.ceil_div(seqlen_q, TILE) * heads * batch
        # Why a carveout: for several resident blocks the compiler would otherwise ask the driver, if there is one.
        launch = lambda kernel, blocks, threads: kernel.launch(
            grid=[blocks, 1, 1], block=[threads, 1, 1], stream=stream,
            min_blocks_per_mp=RESIDENT // threads, preferred_smem_carveout=SMEM_PERCENT,
        )  # fmt: skip
        launch(self.sums(dev), chunks * heads_kv * batch, THREADS)
        launch(self.means(dev), heads_kv * batch, THREADS)
        launch(self.codes(dev, Int32(k_blocks), Int32(v_blocks)), k_blocks + v_blocks + q_blocks, self.threads)

    # ------------------------------------------------------------------------------------------------ addresses
    def split(self, linear, blocks, heads):
        """(block, head, batch) of a linear index, blocks of one head next to each other."""
        head_batch = linear // blocks
        batch = head_batch // heads
        return linear - head_batch * blocks, head_batch - batch * heads, batch

    def eight(self, tensor, batch, row, head, column):
        """Eight neighbouring elements as four words, one load; every stride but the last is a multiple of them."""
        where = (Int64(batch), Int64(row), Int64(head), Int64(column))
        pointer = tensor.iterator + cute.crd2idx(where, tensor.layout)
        return cute.make_tensor(at(Int32, pointer.toint(), 16), cute.make_layout(4)).load()

    # ------------------------------------------------------------------------------------------- sums and means
    @cute.kernel
    def sums(self, dev: Device):
        _, seqlen_k, heads_kv, _ = dev.mK.shape
        tidx, linear = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        c, head, batch = self.split(linear, dev.chunks, heads_kv)
        begin = c * dev.chunk
        end = cutlass.min(begin + dev.chunk, seqlen_k)

        @cute.struct
        class Smem:
            parts: cute.struct.Align[cute.struct.MemRange[Float32, THREADS * 8], 16]
            peaks: cute.struct.MemRange[Int32, THREADS // 32]

        st = SmemAllocator().allocate(Smem)
        peaks = st.peaks.get_tensor(cute.make_layout(THREADS // 32))
        if const_expr(self.traits.smooth_k):
            width = self.headdim // 8
            at_once = THREADS // width
            own, column = tidx // width, tidx % width * 8
            total = cute.make_rmem_tensor(8, Float32)
            total.fill(0.0)
            for i in cutlass.range(cute.ceil_div(end - begin, at_once * UNROLL), unroll=1):
                first = begin + i * (at_once * UNROLL) + own
                loaded = [
                    self.eight(dev.mK, batch, cutlass.min(first + u * at_once, end - 1), head, column)
                    for u in range(UNROLL)
                ]
                for u in cutlass.range_constexpr(UNROLL):
                    inside = first + u * at_once < end
                    for j in cutlass.range_constexpr(8):
                        value = half_of(loaded[u][j // 2], j % 2, self.dtype)
                        total[j] = total[j] + cutlass.select_(inside, value, Float32(0.0))
            parts = st.parts.get_tensor(cute.make_layout((8, width, at_once)))
            if tidx < width * at_once:
                for j in cutlass.range_constexpr(8):
                    parts[j, tidx % width, own] = total[j]
            cute.arch.barrier()
            if tidx < self.headdim:
                column_sum = Float32(0.0)
                for g in cutlass.range_constexpr(at_once):
                    column_sum = column_sum + parts[tidx % 8, tidx // 8, g]
                put(dev.sums + (Int64(linear) * self.headdim + tidx) * 4, column_sum)
        # V: 16-bit magnitudes order as integers, two in a word, NaN above infinity above the rest.
        width = self.headdim_v // 8
        at_once = THREADS // width
        own, column = tidx // width, tidx % width * 8
        top = Int32(0)
        for i in cutlass.range(cute.ceil_div(end - begin, at_once * UNROLL), unroll=1):
            first = begin + i * (at_once * UNROLL) + own
            loaded = [
                self.eight(dev.mV, batch, cutlass.min(first + u * at_once, end - 1), head, column)
                for u in range(UNROLL)
            ]
            for u in cutlass.range_constexpr(UNROLL):
                for j in cutlass.range_constexpr(4):
                    top = max_halves(top, loaded[u][j] & 0x7FFF7FFF)
        top = max_over(cutlass.max(top & 0xFFFF, top >> 16), 32)
        if tidx % 32 == 0:
            peaks[tidx // 32] = top
        cute.arch.barrier()
        if tidx == 0:
            for w in cutlass.range_constexpr(1, THREADS // 32):
                top = cutlass.max(top, peaks[w])
            put(dev.peaks + Int64(linear) * 4, half_of(top, 0, self.dtype))

    @cute.kernel
    def means(self, dev: Device):
        tidx, head = cute.arch.thread_idx()[0], Int64(cute.arch.block_idx()[0])
        first = head * dev.chunks
        if const_expr(self.traits.smooth_k):
            if tidx < self.headdim:
                total = Float32(0.0)
                parts = floats(dev.sums + first * (4 * self.headdim), self.headdim * dev.chunks)
                for c in cutlass.range(dev.chunks, unroll=4):
                    total = total + parts[c * self.headdim + tidx]
                mean = divide(total, Int32(dev.mK.shape[1]).to(Float32))
                put(dev.k_mean + (head * self.headdim + tidx) * 4, mean)
        if tidx < 32:
            top = Int32(0)
            peaks = floats(dev.peaks + first * 4, dev.chunks)
            for c in cutlass.range(tidx, dev.chunks, 32, unroll=1):
                top = cutlass.max(top, magnitude(peaks[c]))
            top = max_over(top, 32)
            if tidx == 0:
                put(dev.v_descale + head * 4, scale_of(top, LARGEST["e4m3"]))

    # ------------------------------------------------------------------------------------------------- codes
    @cute.kernel
    def codes(self, dev: Device, k_blocks: Int32, v_blocks: Int32):
        @cute.struct
        class Smem:
            peaks: cute.struct.MemRange[Int32, 32]

        peaks = SmemAllocator().allocate(Smem).peaks.get_tensor(cute.make_layout(32))
        linear = cute.arch.block_idx()[0]
        if linear < k_blocks:
            self.keys(dev, linear, peaks)
        elif linear < k_blocks + v_blocks:
            self.values(dev, linear - k_blocks)
        else:
            self.queries(dev, linear - k_blocks - v_blocks)

    def rotation(self, lane):
        return Rotation.of(self.headdim, lane) if self.traits.hadamard else NoRotation()

    def place(self):
        """(lane of the row, first row of the tile, whether the lane has columns, its first one) of this thread."""
        tidx = cute.arch.thread_idx()[0]
        lane = tidx % self.lanes
        active = lane < self.headdim // PER_LANE
        return lane, tidx // self.lanes, active, cutlass.select_(active, lane, Int32(0)) * PER_LANE

    def load(self, tensor, batch, first, head, column):
        """This thread's raw values of the tile: for each of its rows, PER_LANE columns. Rows past the end repeat the
        last one, which changes no maximum of the tile."""
        last = tensor.shape[1] - 1
        rows = [cutlass.min(first + i * self.rows, last) for i in range(TILE // self.rows)]
        return [[self.eight(tensor, batch, row, head, column + half) for half in (0, 8)] for row in rows]

    def unpack(self, raw, active):
        """Float32 of one row; zeros in a lane without columns, which takes part in exchanges and maxima."""
        x = cute.make_rmem_tensor(PER_LANE, Float32)
        for e in range(PER_LANE):
            value = half_of(raw[e // 8][e % 8 // 2], e % 2, self.dtype)
            if const_expr(self.lanes * PER_LANE != self.headdim):
                value = cutlass.select_(active, value, Float32(0.0))
            x[e] = value
        return x

    def mean_of(self, dev, head_batch, column):
        mean = cute.make_rmem_tensor(PER_LANE, Float32)
        source = dev.k_mean + (Int64(head_batch) * self.headdim + column) * 4
        for e in range(0, PER_LANE, 4):
            four = cute.make_tensor(at(Float32, source + 4 * e, 16), cute.make_layout(4)).load()
            for j in range(4):
                mean[e + j] = four[j]
        return mean

    def top_of(self, x):
        top = magnitude(x[0])
        for e in range(1, PER_LANE):
            top = cutlass.max(top, magnitude(x[e]))
        return top

    def encode(self, x, scale, inverse):
        words = cute.make_rmem_tensor(PER_LANE // 4, Int32)
        for w in range(PER_LANE // 4):
            words[w] = PACK4[self.code](*[quotient(x[4 * w + e], scale, inverse) for e in range(4)])
        return words

    def store16(self, address, words):
        cute.make_tensor(at(Int32, address, 16), cute.make_layout(4)).store(words.load())

    @cute.jit
    def keys(self, dev, linear, peaks):
        _, seqlen_k, heads_kv, _ = dev.mK.shape
        tiles = cute.ceil_div(seqlen_k, TILE)
        n_block, head, batch = self.split(linear, tiles, heads_kv)
        lane, own, active, column = self.place()
        first = n_block * TILE + own
        raw = self.load(dev.mK, batch, first, head, column)
        rotation = self.rotation(lane)
        head_batch = batch * heads_kv + head
        tile, top = [], Int32(0)
        for i in cutlass.range_constexpr(TILE // self.rows):
            x = self.unpack(raw[i], active)
            if const_expr(self.traits.smooth_k):
                mean = self.mean_of(dev, head_batch, column)
                for e in cutlass.range_constexpr(PER_LANE):
                    x[e] = x[e] - mean[e]
                    if const_expr(self.lanes * PER_LANE != self.headdim):
                        x[e] = cutlass.select_(active, x[e], Float32(0.0))
            rotation.apply(x)
            top = cutlass.max(top, self.top_of(x))
            tile.append(x)
        top = max_over(top, 32)
        warp, warps = cute.arch.warp_idx(), self.threads // 32
        if cute.arch.lane_idx() == 0:
            peaks[warp] = top
        cute.arch.barrier()
        for w in cutlass.range_constexpr(warps):
            top = cutlass.max(top, peaks[w])
        scale = scale_of(top, LARGEST[self.code])
        inverse = reciprocal(scale)
        if cute.arch.thread_idx()[0] == 0:
            put(dev.k_descale + Int64(linear) * 4, scale)
        for i in cutlass.range_constexpr(TILE // self.rows):
            row = first + i * self.rows
            words = self.encode(tile[i], scale, inverse)
            if active and row < seqlen_k:
                place = (Int64(batch) * seqlen_k + row) * heads_kv + head
                self.store16(dev.k8 + place * self.headdim + column, words)

    @cute.jit
    def queries(self, dev, linear):
        _, seqlen_q, heads, _ = dev.mQ.shape
        m_block, head, batch = self.split(linear, cute.ceil_div(seqlen_q, TILE), heads)
        lane, own, active, column = self.place()
        first = m_block * TILE + own
        raw = self.load(dev.mQ, batch, first, head, column)
        rotation = self.rotation(lane)
        head_row = (Int64(batch) * heads + head) * seqlen_q
        if const_expr(self.traits.smooth_k):
            heads_kv = dev.mK.shape[2]
            mean = self.mean_of(dev, batch * heads_kv + head // (heads // heads_kv), column)
        for i in cutlass.range_constexpr(TILE // self.rows):
            row = first + i * self.rows
            x = self.unpack(raw[i], active)
            if const_expr(self.traits.smooth_k):
                offset = Float32(0.0)
                for e in cutlass.range_constexpr(PER_LANE):
                    offset = offset + x[e] * mean[e]
                if const_expr(self.lanes * PER_LANE != self.headdim):
                    offset = Float32(cutlass.select_(active, offset, Float32(0.0)))
                for bit in cutlass.range_constexpr(self.lanes.bit_length() - 1):
                    offset = offset + cute.arch.shuffle_sync_bfly(offset, offset=1 << bit)
            rotation.apply(x)
            scale = scale_of(max_over(self.top_of(x), self.lanes), LARGEST[self.code])
            words = self.encode(x, scale, reciprocal(scale))
            if row < seqlen_q:
                if active:
                    place = (Int64(batch) * seqlen_q + row) * heads + head
                    self.store16(dev.q8 + place * self.headdim + column, words)
                if lane == 0:
                    put(dev.q_descale + (head_row + row) * 4, scale)
                    if const_expr(self.traits.smooth_k):
                        put(dev.logit_offset + (head_row + row) * 4, offset)

    @cute.jit
    def values(self, dev, linear):
        """A thread takes eight columns of 16 keys and stores 16 codes of each column."""
        _, seqlen_k, heads_kv, _ = dev.mV.shape
        at_once = self.threads // self.headdim_v  # tiles of a block: 8 groups of 16 keys by headdim_v / 8
        tiles = cute.ceil_div(seqlen_k, TILE)
        block, head, batch = self.split(linear, cute.ceil_div(tiles, at_once), heads_kv)
        tidx = cute.arch.thread_idx()[0]
        group, rest = tidx % 8, tidx // 8
        column, which = rest % (self.headdim_v // 8) * 8, rest // (self.headdim_v // 8)
        n_block = block * at_once + which
        if which < at_once and n_block < tiles:
            key = n_block * TILE + group * 16
            head_batch = Int64(batch) * heads_kv + head
            scale = floats(dev.v_descale + head_batch * 4, 1)[0]
            loaded = [self.eight(dev.mV, batch, cutlass.min(key + j, seqlen_k - 1), head, column) for j in range(16)]
            inverse = reciprocal(scale)
            target = dev.v8 + (head_batch * self.headdim_v + column) * (tiles * TILE) + key
            for c in cutlass.range_constexpr(8):
                column_of = [half_of(loaded[j][c // 2], c % 2, self.dtype) for j in range(16)]
                codes = [
                    cutlass.select_(key + j < seqlen_k, quotient(x, scale, inverse), Float32(0.0))
                    for j, x in enumerate(column_of)
                ]
                words = cute.make_rmem_tensor(4, Int32)
                for w in cutlass.range_constexpr(4):
                    words[w] = PACK4["e4m3"](*[codes[2 * w + e] for e in (0, 1, 8, 9)])
                self.store16(target + Int64(c) * (tiles * TILE), words)
