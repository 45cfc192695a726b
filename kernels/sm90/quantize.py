"""sm90.quantize: FP16 or BF16 q, k, v to FP8 operands of the forward, in one launch.

    sums    a thread block for each chunk of keys and kv head: sums of K over the keys, largest magnitude of V; the last
            block of a head adds them up: mean of K, scale of V
    codes   a thread block for each 128 rows of q or k and head, or some 128-key tiles of v

    K, Q:   subtract the mean (K) | signs, Hadamard | largest magnitude of a row (Q) or tile (K) | divide, round, store
    V:      divide, round, transpose in registers, keys of 16 in the order that the product P V takes them in

Codes up to headdim 128 are those of quantize_rows.py; here are the wider ones, whose rows are spread over lanes.

K and V are read twice, because mean and scale of a head must be known before its first code; Q is read once. `Order`
lets the sums run ahead of the codes by so little that the second reading finds K and V in L2, and by so much that codes
seldom wait. docs/kernels/sm90_fp8.md has the layouts.
"""

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass._mlir import ir
from cutlass.cute.runtime import make_fake_stream
from cutlass.cutlass_dsl import T
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
from ..common.rotation import OCTET, PER_LANE, NoRotation, Rotation, columns_of
from ..common.tensors import at, fake_operand
from .quantize_rows import Rows

TILE = 128  # keys that share a scale, and rows of one block of codes
CHUNK, MOST_CHUNKS = 128, 64  # keys of one block of sums at least, and such blocks of a head at most
AHEAD = 10 << 20  # bytes of K and V by which sums are ahead of the codes of whole heads
# Threads of a multiprocessor at least, and so registers of each: 96, 128, and 255 without the rotation, where all of a
# row is done at once and the compiler keeps more. Measured up to headdim 64 and beyond: docs/kernels/sm90_fp8.md.
NARROW, WIDE, UNTURNED = 640, 512, 256
KEPT = 2  # rows of K that a thread keeps in registers while the scale of the tile is not known; others are in smem
SMEM_PERCENT = 100  # of a multiprocessor's memory as shared memory
UNROLL = 8  # rows that a thread of the sums has in flight


class Order(NamedTuple):
    """Which block does what. Of one kv head: `chunks` blocks of sums, k + v + q blocks of codes, evenly mixed.

    Sums are ahead by `heads_ahead` heads, one at least, and `chunks_ahead` blocks. A block of codes waits for blocks
    with a lower index only, which a GPU starts before it: nobody waits for a block that cannot start.
    """

    heads_ahead: Int32
    chunks_ahead: Int32  # below `chunks`
    chunks: Int32
    k: Int32
    v: Int32
    m_blocks: Int32  # blocks of q for each query head
    group: Int32  # query heads for each kv head
    heads: Int32  # kv heads of all batch entries
    ratio: Int64  # chunks / per_head(), times 2^32, rounded up

    def lead(self):
        return self.heads_ahead * self.chunks + self.chunks_ahead

    def blocks(self):
        return self.lead() + self.heads * self.per_head()

    def codes(self):
        return self.k + self.v + self.m_blocks * self.group

    def per_head(self):
        return self.chunks + self.codes()

    def place(self, linear):
        """(whether sums, its chunk, head, index among the head's blocks of codes)"""
        early = linear < self.lead()
        # Why a product with a ratio: divisions are long, and any even mixture will do.
        slot, width = cutlass.select_(early, linear, linear - self.lead()), self.per_head()
        width = cutlass.select_(early, self.chunks, width)
        head = slot // width
        r = slot - head * width
        before, now = (((Int64(x) * self.ratio) >> 32).to(Int32) for x in (r, r + 1))
        chunk = before + self.chunks_ahead
        over = Int32(cutlass.select_(chunk >= self.chunks, 1, 0))
        chunk = cutlass.select_(early, r, chunk - over * self.chunks)
        ahead = cutlass.select_(early, Int32(0), self.heads_ahead + over)
        is_sums = early | (now > before)
        return is_sums, chunk, cutlass.select_(is_sums, head + ahead, head), r - before


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
    counters: Int64
    sums: Int64
    chunk: Int32  # keys of a chunk
    order: Order


def floats(address, n):
    return cute.make_tensor(at(Float32, address, 4), cute.make_layout(n))


def put(address, value):
    floats(address, 1)[0] = value


def load(kind, address, n, cop):
    """n neighbouring 32-bit values in one load."""
    element = T.f32() if kind is Float32 else T.i32()
    if cop is None:
        return cute.make_tensor(at(kind, address, 4 * n), cute.make_layout(n)).load()
    vector = cute.arch.load(at(kind, address, 4 * n), ir.VectorType.get([n], element), cop=cop)
    return cute.TensorSSA(vector, n, kind)


def load_one(kind, address, cop):
    return cute.arch.load(at(kind, address, 4), kind, cop=cop)


def store(address, words):
    """As many neighbouring words in one store that leaves L2 first."""
    n = cute.size(words)
    vector = words.load().ir_value()
    cute.arch.store(at(Int32, address, 4 * n), vector, cop="cs")


def lanes_for(headdim):
    """Lanes that share a row: a power of two, so that exchanges between lanes stay inside."""
    return 1 << (-(-headdim // PER_LANE) - 1).bit_length()


class Quantize:
    def __init__(self, traits, tile=None):
        self.traits = traits
        self.dtype = ELEMENT[traits.dtype]
        self.headdim, self.headdim_v = traits.headdim, traits.headdim_v
        self.code = "int8" if traits.int8_qk else "e4m3"
        self.block = self.headdim & -self.headdim if traits.hadamard else PER_LANE
        self.lanes = lanes_for(self.headdim)
        self.threads = 32 * max(self.lanes, lanes_for(self.headdim_v))
        self.by_rows = Rows.fits(self.headdim, self.headdim_v)
        if self.by_rows:
            self.tile_rows = Rows(traits, self.dtype, self.code, store)
            self.threads = TILE
        self.rows = self.threads // self.lanes  # that a block holds at once
        if self.rows > TILE and not self.by_rows:
            raise ValueError(f"{traits.slug}: headdim_v is more than four times headdim")
        resident = (NARROW if self.headdim <= 64 else WIDE) if traits.hadamard else UNTURNED
        self.resident = max(resident // self.threads, 1)  # blocks of a multiprocessor
        self.per_thread = TILE // self.rows
        self.parked = max(self.per_thread - KEPT, 0)
        floats = self.tile_rows.bytes // 4 if self.by_rows else self.threads * self.parked * PER_LANE
        self.smem_floats = max(floats, 8 * self.threads)

    def arguments(self):
        B, Sq, Sk, Hq, Hk, D, Dv = [cute.sym_int() for _ in range(7)]
        operand = lambda *shape: fake_operand(self.dtype, B, *shape)
        smooth = Int64(0) if self.traits.smooth_k else None
        operands = QuantizeOperands(
            operand(Sq, Hq, D), operand(Sk, Hk, D), operand(Sk, Hk, Dv),
            *[Int64(0)] * 6, k_mean=smooth, logit_offset=smooth, workspace=Int64(0), counters=Int64(0),
        )  # fmt: skip
        return operands, make_fake_stream(use_tvm_ffi_env_stream=True)

    # ---------------------------------------------------------------------------------------------- host half
    @cute.jit
    def __call__(self, ops: QuantizeOperands, stream: cuda.CUstream):
        batch, seqlen_k, heads_kv, _ = ops.k.shape
        _, seqlen_q, heads, _ = ops.q.shape
        chunk = cute.ceil_div(cute.ceil_div(seqlen_k, MOST_CHUNKS), CHUNK) * CHUNK
        chunks, tiles = cute.ceil_div(seqlen_k, chunk), cute.ceil_div(seqlen_k, TILE)
        ahead = Int32(AHEAD) // (chunk * (2 * (self.headdim + self.headdim_v)))
        k, v = Int32(tiles), Int32(cute.ceil_div(tiles, self.tiles_of_v()))
        m_blocks, group = Int32(cute.ceil_div(seqlen_q, TILE)), Int32(heads // heads_kv)
        per_head = Int64(chunks + k + v + m_blocks * group)
        ratio = ((Int64(chunks) << 32) + per_head - 1) // per_head
        order = Order(
            Int32(1 + ahead // chunks), Int32(ahead % chunks), Int32(chunks), k, v, m_blocks, group,
            Int32(heads_kv * batch), ratio,
        )  # fmt: skip
        sums = ops.workspace + Int64(cute.ceil_div(order.heads * order.chunks, 4)) * 16
        dev = Device(*ops[:11], ops.workspace, ops.counters, sums, Int32(chunk), order)
        # Why a carveout: for several resident blocks the compiler would otherwise ask the driver, if there is one.
        self.kernel(dev).launch(
            grid=[order.blocks(), 1, 1], block=[self.threads, 1, 1], stream=stream,
            min_blocks_per_mp=self.resident, preferred_smem_carveout=SMEM_PERCENT,
        )  # fmt: skip

    def tiles_of_v(self):
        """Tiles of V of one block: 8 groups of 16 keys by headdim_v / 4 columns."""
        return 1 if self.by_rows else self.threads // (2 * self.headdim_v)

    # ------------------------------------------------------------------------------------------------ addresses
    def words(self, tensor, batch, row, head, column, n, cop):
        """2n neighbouring elements as words, one load; every stride but the last is a multiple of 16 bytes."""
        where = (Int64(batch), Int64(row), Int64(head), Int64(column))
        pointer = tensor.iterator + cute.crd2idx(where, tensor.layout)
        return load(Int32, pointer.toint(), n, cop)

    # --------------------------------------------------------------------------------------------------- order
    @cute.kernel
    def kernel(self, dev: Device):
        @cute.struct
        class Smem:
            floats: cute.struct.Align[cute.struct.MemRange[Float32, self.smem_floats], 16]
            peaks: cute.struct.MemRange[Int32, 32]

        st = SmemAllocator().allocate(Smem)
        peaks = st.peaks.get_tensor(cute.make_layout(32))
        order = dev.order
        is_sums, chunk, head_batch, index = order.place(cute.arch.block_idx()[0])
        heads_kv = dev.mK.shape[2]
        batch = head_batch // heads_kv
        head = head_batch - batch * heads_kv
        if is_sums:
            if head_batch < order.heads:
                self.sums(dev, batch, head, chunk, st.floats.data_ptr(), peaks)
        else:
            if index < order.k:
                if const_expr(self.by_rows):
                    self.tile_rows.keys(dev, batch, head, index, st.floats.data_ptr().toint(), peaks, self.wait)
                else:
                    self.keys(dev, batch, head, index, st.floats.data_ptr(), peaks)
            elif index < order.k + order.v:
                if const_expr(self.by_rows):
                    self.tile_rows.values(dev, batch, head, index - order.k, st.floats.data_ptr().toint(), self.wait)
                else:
                    self.values(dev, batch, head, index - order.k)
            else:
                linear = index - order.k - order.v
                inner = linear // order.m_blocks
                m_block, head_q = linear - inner * order.m_blocks, head * order.group + inner
                if const_expr(self.by_rows):
                    place = batch, head, head_q, m_block
                    self.tile_rows.queries(dev, *place, st.floats.data_ptr().toint(), peaks, self.wait)
                else:
                    self.queries(dev, batch, head, head_q, m_block)

    def counter(self, dev, head_batch):
        """Blocks of sums that are done; then one more: mean and scale are known; then blocks that have seen that."""
        return at(Int32, dev.counters + Int64(head_batch) * 4, 4)

    @cute.jit
    def wait(self, dev, batch, head):
        """Until mean and scale of the head are known. The last of the head's blocks leaves its counter at zero."""
        leader = cute.arch.thread_idx()[0] == 0
        counter = self.counter(dev, batch * dev.mK.shape[2] + head)
        before = Int32(0)
        if leader:
            seen = Int32(0)
            while seen <= dev.order.chunks:
                seen = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
            before = cute.arch.atomic_add(counter, Int32(1), sem="relaxed", scope="gpu")
        cute.arch.barrier()
        if leader and before == dev.order.chunks + dev.order.codes():
            cute.arch.store(counter, Int32(0))

    # ---------------------------------------------------------------------------------------------------- sums
    def rows_of_sums(self, tensor, width, batch, head, begin, end, i, part=slice(None)):
        """Some of this thread's rows of step i of a chunk, eight columns of each: their words, and each row. Those past
        the end repeat one before it."""
        tidx = cute.arch.thread_idx()[0]
        at_once, unroll = self.threads // width, self.unroll(width)
        rows = [begin + (i * unroll + u) * at_once + tidx // width for u in range(unroll)[part]]
        where = (Int64(batch), Int64(cutlass.min(rows[0], end - 1)), Int64(head), Int64(tidx % width * 8))
        address = (tensor.iterator + cute.crd2idx(where, tensor.layout)).toint()
        step, words = tensor.stride[1] * (2 * at_once), []
        for row in rows:
            if row is not rows[0]:
                address = address + cutlass.select_(row < end, step, Int64(0))
            words.append(load(Int32, address, 4, None))
        return words, rows

    def unroll(self, width):
        return min(UNROLL, -(-CHUNK * width // self.threads))

    def steps(self, width, begin, end):
        return cute.ceil_div(end - begin, self.threads // width * self.unroll(width))

    @cute.jit
    def sums(self, dev, batch, head, chunk, floats_smem, peaks):
        _, seqlen_k, heads_kv, _ = dev.mK.shape
        tidx = cute.arch.thread_idx()[0]
        head_batch = batch * heads_kv + head
        linear = Int64(head_batch) * dev.order.chunks + chunk
        begin = chunk * dev.chunk
        end = cutlass.min(begin + dev.chunk, seqlen_k)
        width, width_v = self.headdim // 8, self.headdim_v // 8
        total = cute.make_rmem_tensor(8, Float32)
        total.fill(0.0)
        top = Int32(0)
        steps = cutlass.max(self.steps(width, begin, end), self.steps(width_v, begin, end))
        for i in cutlass.range(steps, unroll=1):
            if const_expr(self.traits.smooth_k):
                loaded, rows = self.rows_of_sums(dev.mK, width, batch, head, begin, end, i)
            half = self.unroll(width_v) // 2
            loaded_v, _ = self.rows_of_sums(dev.mV, width_v, batch, head, begin, end, i, slice(half))
            if const_expr(self.traits.smooth_k):
                for u in cutlass.range_constexpr(self.unroll(width)):
                    for j in cutlass.range_constexpr(4):
                        word = cutlass.select_(rows[u] < end, loaded[u][j], Int32(0))
                        for side in cutlass.range_constexpr(2):
                            total[2 * j + side] = total[2 * j + side] + half_of(word, side, self.dtype)
            rest, _ = self.rows_of_sums(dev.mV, width_v, batch, head, begin, end, i, slice(half, None))
            # 16-bit magnitudes order as integers, two in a word, NaN above infinity above the rest.
            for words in loaded_v + rest:
                for j in cutlass.range_constexpr(4):
                    top = max_halves(top, words[j] & 0x7FFF7FFF)
        top = max_over(cutlass.max(top & 0xFFFF, top >> 16), 32)
        if tidx % 32 == 0:
            peaks[tidx // 32] = top
        at_once = self.threads // width
        parts = cute.make_tensor(floats_smem, cute.make_layout((8, width, at_once)))
        if const_expr(self.traits.smooth_k):
            if tidx < width * at_once:
                for j in cutlass.range_constexpr(8):
                    parts[j, tidx % width, tidx // width] = total[j]
        cute.arch.barrier()
        if const_expr(self.traits.smooth_k):
            if tidx < self.headdim:
                column_sum = Float32(0.0)
                for g in cutlass.range(at_once, unroll_full=True):
                    column_sum = column_sum + parts[tidx % 8, tidx // 8, g]
                put(dev.sums + (linear * self.headdim + tidx) * 4, column_sum)
        if tidx == 0:
            for w in cutlass.range_constexpr(1, self.threads // 32):
                top = cutlass.max(top, peaks[w])
            put(dev.peaks + linear * 4, half_of(top, 0, self.dtype))
        cute.arch.barrier()
        counter = self.counter(dev, head_batch)
        if tidx == 0:
            # Release: the barrier puts what the other threads wrote before it.
            peaks[0] = cute.arch.atomic_add(counter, Int32(1), sem="acq_rel", scope="gpu")
        cute.arch.barrier()
        if peaks[0] == dev.order.chunks - 1:
            self.means(dev, head_batch, floats_smem)
            cute.arch.barrier()
            if tidx == 0:
                cute.arch.store(counter, dev.order.chunks + 1, sem="release", scope="gpu")

    @cute.jit
    def means(self, dev, head_batch, floats_smem):
        """Of one head, from all of its chunks, in an order that is always the same."""
        tidx, chunks = cute.arch.thread_idx()[0], dev.order.chunks
        first = Int64(head_batch) * chunks
        if const_expr(self.traits.smooth_k):
            width = self.headdim // 4
            at_once = self.threads // width
            column, own = tidx % width * 4, tidx // width
            total = cute.make_rmem_tensor(4, Float32)
            total.fill(0.0)
            source = dev.sums + (first * self.headdim + column) * 4
            for i in cutlass.range(cute.ceil_div(chunks, at_once * UNROLL), unroll=1):
                places = [(i * UNROLL + u) * at_once + own for u in range(UNROLL)]
                loaded = [load(Float32, self.part(source, c, chunks), 4, "cg") for c in places]
                for u in cutlass.range_constexpr(UNROLL):
                    for j in cutlass.range_constexpr(4):
                        total[j] = total[j] + cutlass.select_(places[u] < chunks, loaded[u][j], Float32(0.0))
            parts = cute.make_tensor(floats_smem, cute.make_layout((self.headdim, at_once)))
            if own < at_once:
                for j in cutlass.range_constexpr(4):
                    parts[column + j, own] = total[j]
            cute.arch.barrier()
            if tidx < self.headdim:
                column_sum = Float32(0.0)
                for g in cutlass.range_constexpr(at_once):
                    column_sum = column_sum + parts[tidx, g]
                mean = divide(column_sum, Int32(dev.mK.shape[1]).to(Float32))
                put(dev.k_mean + (Int64(head_batch) * self.headdim + tidx) * 4, mean)
        if tidx < 32:
            top = Int32(0)
            for c in cutlass.range(tidx, chunks, 32, unroll=2):
                top = cutlass.max(top, magnitude(load_one(Float32, dev.peaks + (first + c) * 4, "cg")))
            top = max_over(top, 32)
            if tidx == 0:
                put(dev.v_descale + Int64(head_batch) * 4, scale_of(top, LARGEST["e4m3"]))

    def part(self, source, chunk, chunks):
        return source + Int64(cutlass.min(chunk, chunks - 1)) * (4 * self.headdim)

    # ------------------------------------------------------------------------------------------------- q and k
    def rotation(self, lane):
        return Rotation.of(self.headdim, lane) if self.traits.hadamard else NoRotation()

    def place(self):
        """(lane of the row, first row of the tile, whether the lane has columns, its octets' first) of this thread."""
        tidx = cute.arch.thread_idx()[0]
        lane = tidx % self.lanes
        active = lane < self.headdim // PER_LANE
        return lane, tidx // self.lanes, active, columns_of(self.block, cutlass.select_(active, lane, Int32(0)))

    def load(self, tensor, batch, first, head, columns):
        """This thread's raw values of the tile: for each of its rows, PER_LANE columns. Rows past the end repeat the
        last one, which changes no maximum of the tile."""
        last = tensor.shape[1] - 1
        rows = [cutlass.min(first + i * self.rows, last) for i in range(self.per_thread)]
        return [[self.words(tensor, batch, row, head, column, 4, "cs") for column in columns] for row in rows]

    def unpack(self, raw, active):
        """Float32 of one row; zeros in a lane without columns, which takes part in exchanges and maxima."""
        x = cute.make_rmem_tensor(PER_LANE, Float32)
        for e in range(PER_LANE):
            value = half_of(raw[e // 8][e % 8 // 2], e % 2, self.dtype)
            if const_expr(self.lanes * PER_LANE != self.headdim):
                value = cutlass.select_(active, value, Float32(0.0))
            x[e] = value
        return x

    def mean_of(self, dev, head_batch, columns):
        mean = cute.make_rmem_tensor(PER_LANE, Float32)
        source = dev.k_mean + Int64(head_batch) * (self.headdim * 4)
        for e in range(0, PER_LANE, 4):
            four = load(Float32, source + 4 * (columns[e // OCTET] + e % OCTET), 4, None)
            for j in range(4):
                mean[e + j] = four[j]
        return mean

    def scales(self, top, factor):
        """(scale, the same for values that lack `factor`, its reciprocal)"""
        scale = scale_of(top, LARGEST[self.code], factor)
        rest = scale * (1.0 / factor)
        return scale, rest, reciprocal(rest)

    def encode(self, x, scale, inverse):
        words = cute.make_rmem_tensor(PER_LANE // 4, Int32)
        for w in range(PER_LANE // 4):
            words[w] = PACK4[self.code](*[quotient(x[4 * w + e], scale, inverse) for e in range(4)])
        return words

    def store_row(self, address, columns, words):
        """Codes of one row. Neighbouring octets go in one store."""
        if const_expr(self.block == PER_LANE):
            store(address + columns[0], words)
        else:
            for half in range(2):
                two = cute.make_rmem_tensor(2, Int32)
                two[0], two[1] = words[2 * half], words[2 * half + 1]
                store(address + columns[half], two)

    @cute.jit
    def keys(self, dev, batch, head, n_block, floats_smem, peaks):
        _, seqlen_k, heads_kv, _ = dev.mK.shape
        tidx = cute.arch.thread_idx()[0]
        lane, own, active, columns = self.place()
        first = n_block * TILE + own
        raw = self.load(dev.mK, batch, first, head, columns)
        rotation = self.rotation(lane)
        head_batch = batch * heads_kv + head
        self.wait(dev, batch, head)
        layout = cute.make_layout((4, self.threads, PER_LANE // 4, max(self.parked, 1)))
        parking = cute.make_tensor(floats_smem, layout)
        kept, top = [], Int32(0)
        for i in cutlass.range_constexpr(self.per_thread):
            x = self.unpack(raw[i], active)
            if const_expr(self.traits.smooth_k):
                mean = self.mean_of(dev, head_batch, columns)
                for e in cutlass.range_constexpr(PER_LANE):
                    x[e] = x[e] - mean[e]
                    if const_expr(self.lanes * PER_LANE != self.headdim):
                        x[e] = cutlass.select_(active, x[e], Float32(0.0))
            top = cutlass.max(top, rotation.apply(x))
            if const_expr(i < self.parked):
                for w in cutlass.range_constexpr(PER_LANE // 4):
                    four = cute.make_rmem_tensor(4, Float32)
                    for j in cutlass.range_constexpr(4):
                        four[j] = x[4 * w + j]
                    parking[None, tidx, w, i].store(four.load())
            else:
                kept.append(x)
        top = max_over(top, 32)
        if cute.arch.lane_idx() == 0:
            peaks[tidx // 32] = top
        cute.arch.barrier()
        for w in cutlass.range_constexpr(self.threads // 32):
            top = cutlass.max(top, peaks[w])
        scale, rest, inverse = self.scales(top, rotation.factor)
        if tidx == 0:
            put(dev.k_descale + (Int64(head_batch) * dev.order.k + n_block) * 4, scale)
        for i in cutlass.range_constexpr(self.per_thread - 1, -1, -1):
            row = first + i * self.rows
            if const_expr(i < self.parked):
                x = cute.make_rmem_tensor(PER_LANE, Float32)
                for w in cutlass.range_constexpr(PER_LANE // 4):
                    four = parking[None, tidx, w, i].load()
                    for j in cutlass.range_constexpr(4):
                        x[4 * w + j] = four[j]
            else:
                x = kept[i - self.parked]
            words = self.encode(x, rest, inverse)
            if active and row < seqlen_k:
                place = (Int64(batch) * seqlen_k + row) * heads_kv + head
                self.store_row(dev.k8 + place * self.headdim, columns, words)

    @cute.jit
    def queries(self, dev, batch, head_kv, head, m_block):
        _, seqlen_q, heads, _ = dev.mQ.shape
        heads_kv = dev.mK.shape[2]
        lane, own, active, columns = self.place()
        first = m_block * TILE + own
        raw = self.load(dev.mQ, batch, first, head, columns)
        rotation = self.rotation(lane)
        head_row = (Int64(batch) * heads + head) * seqlen_q
        self.wait(dev, batch, head_kv)
        if const_expr(self.traits.smooth_k):
            mean = self.mean_of(dev, batch * heads_kv + head_kv, columns)
        for i in cutlass.range_constexpr(self.per_thread):
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
            scale, rest, inverse = self.scales(max_over(rotation.apply(x), self.lanes), rotation.factor)
            words = self.encode(x, rest, inverse)
            if row < seqlen_q:
                if active:
                    place = (Int64(batch) * seqlen_q + row) * heads + head
                    self.store_row(dev.q8 + place * self.headdim, columns, words)
                if lane == 0:
                    put(dev.q_descale + (head_row + row) * 4, scale)
                    if const_expr(self.traits.smooth_k):
                        put(dev.logit_offset + (head_row + row) * 4, offset)

    # ------------------------------------------------------------------------------------------------------- v
    @cute.jit
    def values(self, dev, batch, head, block):
        """A thread takes four columns of 16 keys and stores 16 codes of each column."""
        _, seqlen_k, heads_kv, _ = dev.mV.shape
        tiles = cute.ceil_div(seqlen_k, TILE)
        tidx = cute.arch.thread_idx()[0]
        group, rest = tidx % 8, tidx // 8
        column, which = rest % (self.headdim_v // 4) * 4, rest // (self.headdim_v // 4)
        n_block = block * self.tiles_of_v() + which
        key = n_block * TILE + group * 16
        rows = [cutlass.min(key + j, seqlen_k - 1) for j in range(16)]
        loaded = [self.words(dev.mV, batch, row, head, column, 2, "cs") for row in rows]
        self.wait(dev, batch, head)
        if which < self.tiles_of_v() and n_block < tiles:
            head_batch = Int64(batch) * heads_kv + head
            scale = load_one(Float32, dev.v_descale + head_batch * 4, "ca")
            inverse = reciprocal(scale)
            target = dev.v8 + (head_batch * self.headdim_v + column) * (tiles * TILE) + key
            # Keys of a word. Behind the last one are zeros, whatever the scale.
            keys = [[2 * w + e for e in (0, 1, 8, 9)] for w in range(4)]
            inside = [self.bytes_inside([key + j < seqlen_k for j in four]) for four in keys]
            for c in cutlass.range_constexpr(4):
                words = cute.make_rmem_tensor(4, Int32)
                for w in cutlass.range_constexpr(4):
                    halves = [half_of(loaded[j][c // 2], c % 2, self.dtype) for j in keys[w]]
                    words[w] = PACK4["e4m3"](*[quotient(x, scale, inverse) for x in halves]) & inside[w]
                store(target + Int64(c) * (tiles * TILE), words)

    def bytes_inside(self, wanted):
        """A mask of those bytes of a word that are wanted."""
        mask = Int32(0)
        for i, one in enumerate(wanted):
            byte = 0xFF << 8 * i
            mask = mask | cutlass.select_(one, Int32(byte - (1 << 32) if i == 3 else byte), Int32(0))
        return mask
