"""Codes of head dimensions up to 128: a tile of 128 rows in shared memory, a row of q or k for each thread.

    raw     cp.async, 16 bytes at a time; rows lie an odd number of 16 bytes apart: no bank conflicts by rows
    q, k    a thread has up to 64 columns of its row in registers, those before them wait in its row of the tile
    v       a thread takes two columns, 16 keys at a time
    codes   go back into the tile, then out in whole lines

Why a thread for each row: all levels of the rotation are additions of one thread, its signs are known to the compiler,
and columns are the same in all lanes, so a mean is read by broadcast. Spread over lanes, exchanges alone cost 6
instructions for each element at headdim 128.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass._mlir.dialects import llvm
from cutlass.cute.typing import AddressSpace

from ..common.eight_bit import (
    LARGEST,
    PACK4,
    bits_of,
    float_of,
    half_of,
    magnitude,
    max_over,
    quotient,
    reciprocal,
    scale_of,
    sum_of_magnitudes,
)
from ..common.rotation import sign_bit
from ..common.tensors import at
from ..common.work import thread_again

TILE = 128  # rows of a tile, threads of a block
PIECE = 64  # columns of a thread at once
WIDE = 16  # bytes of one access


def shared(kind, address, n):
    """n neighbouring 32-bit words of shared memory."""
    return cute.make_tensor(cute.make_ptr(kind, address, AddressSpace.smem, assumed_align=4 * n), cute.make_layout(n))


def put_shared(address, value):
    shared(Float32, address, 1)[0] = value


def copy_async(target, source):
    """16 bytes from global to shared memory, past L1."""
    _asm("cp.async.cg.shared.global [$0], [$1], 16;", "r,l,~{memory}", Int32(target), Int64(source))


def wait_async():
    _asm("cp.async.wait_all;", "~{memory}")


def _asm(text, constraints, *args):
    llvm.inline_asm(
        None, [arg.ir_value() for arg in args], text, constraints,
        has_side_effects=True, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT,
    )  # fmt: skip


def split(x, n):
    """(x // n, x % n) of an Int32 that is not negative, which the compiler does not know."""
    return (x >> n.bit_length() - 1, x & n - 1) if n & n - 1 == 0 else (x // n, x % n)


def odd(n):
    """The next odd multiple of 16."""
    return -(-n // WIDE) * WIDE | WIDE


def butterflies(x, width, end):
    while width < end:
        for e in range(len(x)):
            if not e & width:
                upper, lower = x[e], x[e + width]
                x[e], x[e + width] = upper + lower, upper - lower
        width *= 2


class Rows:
    """The layout of a tile, and what is done with its rows. `store` writes words to global memory; all threads of a
    block call `wait`, which returns when mean and scale of a head are known."""

    def __init__(self, traits, dtype, code, store):
        self.headdim, self.headdim_v = traits.headdim, traits.headdim_v
        self.hadamard, self.smooth_k = traits.hadamard, traits.smooth_k
        self.dtype, self.code, self.store = dtype, code, store

    @staticmethod
    def fits(headdim, headdim_v):
        return max(headdim, headdim_v) <= 2 * PIECE

    # Layout

    @property
    def block(self):
        return self.headdim & -self.headdim if self.hadamard else 1

    @property
    def last(self):
        """Columns of the piece that stays in registers, behind the PIECE ones that are parked if there are as many."""
        return self.headdim - PIECE if self.headdim > PIECE else self.headdim

    @property
    def parked(self):
        return self.headdim - self.last

    @property
    def early(self):
        """Columns of the last piece that are read before floats are parked over them."""
        return min(24, self.last) if self.parked else 0

    @property
    def pitch(self):
        """Bytes from row to row of q or k: floats of the parked piece, over the raw row at the end."""
        return odd(max(2 * self.headdim, 4 * self.parked + 2 * (self.last - self.early)))

    @property
    def pitch_v(self):
        return odd(2 * self.headdim_v)

    @property
    def bytes(self):
        """Of the tile, and of the mean behind it."""
        return TILE * max(self.pitch, self.pitch_v, self.headdim_v + WIDE) + 4 * self.headdim

    def mean_at(self, tile):
        return tile + (self.bytes - 4 * self.headdim)

    # Copies

    @cute.jit
    def fetch(self, tensor, batch, head, first, headdim, target, pitch):
        """Rows of a tile, which begins with row `first`; those past the end repeat the last one."""
        tidx = cute.arch.thread_idx()[0]
        chunks, end = headdim * 2 // WIDE, tensor.shape[1] - 1
        origin = tensor.iterator + cute.crd2idx((Int64(batch), Int64(0), Int64(head), Int64(0)), tensor.layout)
        stride = tensor.stride[1] * 2
        if const_expr(TILE % chunks == 0):
            # A thread has the same columns of every (TILE / chunks)-th row.
            row, chunk = split(tidx, chunks)
            offset = chunk * WIDE
            source = origin.toint() + Int64(first + row) * stride + offset
            target = target + row * pitch + offset
            step = TILE // chunks
            if first + TILE <= end + 1:
                for i in cutlass.range_constexpr(chunks):
                    copy_async(target + i * step * pitch, source)
                    source = source + stride * step
            else:
                for i in cutlass.range_constexpr(chunks):
                    source = origin.toint() + Int64(cutlass.min(first + row + i * step, end)) * stride + offset
                    copy_async(target + i * step * pitch, source)
        else:
            for i in cutlass.range_constexpr(chunks):
                place = tidx + i * TILE
                row, chunk = split(place, chunks)
                source = origin.toint() + Int64(cutlass.min(first + row, end)) * stride + chunk * WIDE
                copy_async(target + row * pitch + chunk * WIDE, source)

    @cute.jit
    def copy_mean(self, dev, head_batch, tile):
        if const_expr(self.smooth_k):
            tidx = cute.arch.thread_idx()[0]
            if tidx < self.headdim:
                source = dev.k_mean + (Int64(head_batch) * self.headdim + tidx) * 4
                mean = cute.arch.load(at(Float32, source, 4), Float32, cop="cg")
                put_shared(self.mean_at(tile) + tidx * 4, mean)

    def put_codes(self, tile, words, target, pitch, rows):
        """Words of this thread's row into the tile, and of the warp's rows to `target` + row * pitch."""
        tidx = thread_again()
        for w in range(0, len(words), 4):
            four = cute.make_rmem_tensor(4, Int32)
            for i in range(4):
                four[i] = words[w + i]
            shared(Int32, tile + tidx * self.pitch + 4 * w, 4).store(four.load())
        cute.arch.sync_warp()
        chunks, lane = self.headdim // WIDE, tidx & 31
        for i in range(chunks):
            row, chunk = split(lane + i * 32, chunks)
            row = row + (tidx - lane)
            four = cute.make_rmem_tensor(4, Int32)
            four.store(shared(Int32, tile + row * self.pitch + chunk * WIDE, 4).load())
            self.put_if(row < rows, target + Int64(row) * pitch + chunk * WIDE, four)

    @cute.jit
    def put_if(self, wanted, address, words):
        if wanted:
            self.store(address, words)

    # Rows of q and k

    def raw(self, address, first, count):
        return [shared(Int32, address + 2 * e, 4).load() for e in range(first, first + count, 8)]

    def piece(self, address, first, count, early, mean, centred, offset):
        """Columns of this thread's row, rotated but for the last level of a block. `early`: words read before.

        Eight columns at a time, so that few words wait in registers.
        """
        x = []
        for e in range(first, first + count, 8):
            words = early[(e - first) // 8] if e - first < 8 * len(early) else self.raw(address, e, 8)[0]
            eight = [half_of(words[i // 2], i % 2, self.dtype) for i in range(8)]
            if self.smooth_k:
                self.subtract(eight, mean + 4 * e, centred, offset)
            if self.hadamard:
                for i in range(0, 8, 2):
                    a, b = (-eight[i + j] if sign_bit(e + i + j) else eight[i + j] for j in range(2))
                    eight[i], eight[i + 1] = a + b, a - b
                butterflies(eight, 2, 8)
            x += eight
        if self.hadamard:
            butterflies(x, 8, min(self.block // 2, PIECE))
        return x

    def subtract(self, x, mean, centred, offset):
        """In place, where centred; else the products are added to two sums."""
        for e in range(0, len(x), 4):
            four = shared(Float32, mean + 4 * e, 4).load()
            for i in range(4):
                if centred:
                    x[e + i] = x[e + i] - four[i]
                else:
                    offset[i % 2] = offset[i % 2] + x[e + i] * four[i]

    def finish(self, x):
        """The last level of a piece that holds whole blocks; the largest magnitude."""
        top, half = Int32(0), self.block // 2
        for e in range(len(x)):
            if half and e & half == 0:
                top = cutlass.max(top, bits_of(sum_of_magnitudes(x[e], x[e + half])))
            elif not half:
                top = cutlass.max(top, magnitude(x[e]))
        if half:
            butterflies(x, half, 2 * half)
        return top

    @property
    def factor(self):
        """What values in registers lack."""
        return self.block**-0.5

    @property
    def left(self):
        """The same if a power of two, which the scale takes over exactly; else 1, and every value is multiplied."""
        return self.factor if self.block.bit_length() % 2 else 1.0

    def scales(self, top):
        """(scale, the same for values as `encode` divides them, its reciprocal)"""
        if const_expr(self.left != self.factor):
            top = bits_of(float_of(top) * self.factor)
        scale = scale_of(top, LARGEST[self.code], self.left)
        rest = scale * (1.0 / self.left)
        return scale, rest, reciprocal(rest)

    def encode(self, x, scale, inverse):
        """Four values as a word of codes."""
        if const_expr(self.left != self.factor):
            x = [y * self.factor for y in x]
        return PACK4[self.code](*[quotient(y, scale, inverse) for y in x])

    def row(self, tile, centred, offset):
        """(the last piece of this thread's row, largest magnitude of the row), the piece before it parked. `centred`:
        minus the mean; `offset`: two sums of products with the mean, or None."""
        tidx = cute.arch.thread_idx()[0]
        start = tile + tidx * self.pitch
        address, mean = start + (self.pitch - 2 * self.headdim), self.mean_at(tile)
        top, parked = Int32(0), self.parked
        early = []
        if parked:
            x = self.piece(address, 0, parked, [], mean, centred, offset)
            early = self.raw(address, parked, self.early)
            if self.block <= PIECE:
                top = self.finish(x)
            for e in range(0, parked, 4):
                four = cute.make_rmem_tensor(4, Float32)
                for i in range(4):
                    four[i] = x[e + i]
                shared(Float32, start + 4 * e, 4).store(four.load())
        x = self.piece(address, parked, self.last, early, mean, centred, offset)
        if self.block <= PIECE:
            top = cutlass.max(top, self.finish(x))
        else:
            start = tile + thread_again() * self.pitch
            for e in range(0, PIECE, 4):
                four = shared(Float32, start + 4 * e, 4).load()
                for i in range(4):
                    top = cutlass.max(top, bits_of(sum_of_magnitudes(four[i], x[e + i])))
        return x, top

    def codes(self, tile, x, scale, inverse):
        """Words of the whole row."""
        # Why anew: parked floats are read from where they are parked, and not kept in registers.
        start = tile + thread_again() * self.pitch
        before, behind = [], []
        for e in range(0, len(x), 4):
            mine = x[e : e + 4]
            if e < self.parked:
                four = shared(Float32, start + 4 * e, 4).load()
                other = [four[i] for i in range(4)]
                if self.block > PIECE:
                    other, mine = [a + b for a, b in zip(other, mine)], [a - b for a, b in zip(other, mine)]
                before.append(self.encode(other, scale, inverse))
            behind.append(self.encode(mine, scale, inverse))
        for e in range(len(x), self.parked, 4):
            four = shared(Float32, start + 4 * e, 4).load()
            before.append(self.encode([four[i] for i in range(4)], scale, inverse))
        return before + behind

    @cute.jit
    def keys(self, dev, batch, head, n_block, tile, peaks, wait):
        _, seqlen_k, heads_kv, _ = dev.mK.shape
        tidx = cute.arch.thread_idx()[0]
        first, head_batch = n_block * TILE, batch * heads_kv + head
        self.fetch(dev.mK, batch, head, first, self.headdim, tile + (self.pitch - 2 * self.headdim), self.pitch)
        wait(dev, batch, head)
        self.copy_mean(dev, head_batch, tile)
        wait_async()
        cute.arch.barrier()
        x, top = self.row(tile, True, None)
        top = max_over(top, 32)
        if tidx % 32 == 0:
            peaks[tidx // 32] = top
        cute.arch.barrier()
        for w in cutlass.range_constexpr(TILE // 32):
            top = cutlass.max(top, peaks[w])
        scale, rest, inverse = self.scales(top)
        if tidx == 0:
            place = dev.k_descale + (Int64(head_batch) * dev.order.k + n_block) * 4
            cute.arch.store(at(Float32, place, 4), scale)
        words = self.codes(tile, x, rest, inverse)
        pitch = heads_kv * self.headdim
        target = dev.k8 + (Int64(batch) * seqlen_k + first) * pitch + head * self.headdim
        self.put_codes(tile, words, target, pitch, seqlen_k - first)

    @cute.jit
    def queries(self, dev, batch, head_kv, head, m_block, tile, peaks, wait):
        _, seqlen_q, heads, _ = dev.mQ.shape
        heads_kv = dev.mK.shape[2]
        tidx = cute.arch.thread_idx()[0]
        # Why in memory: registers are scarce until the row is done.
        if tidx == 0:
            peaks[0], peaks[1], peaks[2] = batch, head, m_block
        first = m_block * TILE
        self.fetch(dev.mQ, batch, head, first, self.headdim, tile + (self.pitch - 2 * self.headdim), self.pitch)
        wait(dev, batch, head_kv)
        self.copy_mean(dev, batch * heads_kv + head_kv, tile)
        wait_async()
        cute.arch.barrier()
        offset = cute.make_rmem_tensor(2, Float32)
        offset.fill(0.0)
        x, top = self.row(tile, False, offset)
        scale, rest, inverse = self.scales(top)
        tidx, batch, head, m_block = thread_again(), peaks[0], peaks[1], peaks[2]
        first = m_block * TILE
        if first + tidx < seqlen_q:
            place = ((Int64(batch) * heads + head) * seqlen_q + first + tidx) * 4
            cute.arch.store(at(Float32, dev.q_descale + place, 4), scale)
            if const_expr(self.smooth_k):
                cute.arch.store(at(Float32, dev.logit_offset + place, 4), offset[0] + offset[1])
        words = self.codes(tile, x, rest, inverse)
        pitch = heads * self.headdim
        target = dev.q8 + (Int64(batch) * seqlen_q + first) * pitch + head * self.headdim
        self.put_codes(tile, words, target, pitch, seqlen_q - first)

    # Columns of v

    @property
    def pairs(self):
        return self.headdim_v // 2

    @property
    def parts(self):
        """Threads that share a pair of columns, each with some groups of 16 keys."""
        return min(1 << (TILE // self.pairs).bit_length() - 1, TILE // 16)

    @cute.jit
    def values(self, dev, batch, head, n_block, tile, wait):
        _, seqlen_k, heads_kv, _ = dev.mV.shape
        tidx = cute.arch.thread_idx()[0]
        first, head_batch = n_block * TILE, Int64(batch) * heads_kv + head
        self.fetch(dev.mV, batch, head, first, self.headdim_v, tile, self.pitch_v)
        wait(dev, batch, head)
        scale = cute.arch.load(at(Float32, dev.v_descale + head_batch * 4, 4), Float32, cop="cg")
        inverse = reciprocal(scale)
        wait_async()
        cute.arch.barrier()
        part, pair = split(tidx, self.pairs)
        part = cutlass.min(part, self.parts - 1)
        words = self.columns(tile, pair, part, scale, inverse)
        cute.arch.barrier()
        groups, pitch = TILE // 16 // self.parts, TILE + WIDE
        if tidx < self.pairs * self.parts:
            for c in cutlass.range_constexpr(2):
                for g in cutlass.range_constexpr(groups):
                    four = cute.make_rmem_tensor(4, Int32)
                    for w in cutlass.range_constexpr(4):
                        four[w] = words[(c * groups + g) * 4 + w]
                    place = (2 * pair + c) * pitch + (part * groups + g) * 16
                    shared(Int32, tile + place, 4).store(four.load())
        cute.arch.barrier()
        # What lies behind the last key is zeros, whatever the scale.
        chunk, column = tidx % 8, tidx // 8
        masks = cute.make_rmem_tensor(4, Int32)
        masks.fill(-1)
        if first + TILE > seqlen_k:
            for w in cutlass.range_constexpr(4):
                masks[w] = self.mask(first + chunk * 16 + 2 * w, seqlen_k)
        length = dev.order.k * TILE
        target = dev.v8 + (head_batch * self.headdim_v + column) * length + first + chunk * 16
        for i in cutlass.range_constexpr(self.headdim_v // 16):
            four = cute.make_rmem_tensor(4, Int32)
            loaded = shared(Int32, tile + (column + 16 * i) * pitch + chunk * 16, 4).load()
            for w in cutlass.range_constexpr(4):
                four[w] = loaded[w] & masks[w]
            self.store(target + Int64(length) * (16 * i), four)

    def columns(self, tile, pair, part, scale, inverse):
        """Words of the thread's two columns; each of keys 2w, 2w + 1, 2w + 8, 2w + 9 of 16."""
        groups = TILE // 16 // self.parts
        words = [None] * (8 * groups)
        for g in range(groups):
            start = tile + (part * groups + g) * (16 * self.pitch_v) + pair * 4
            raw = [shared(Int32, start + j * self.pitch_v, 1)[0] for j in range(16)]
            for c in range(2):
                x = [quotient(half_of(word, c, self.dtype), scale, inverse) for word in raw]
                for w in range(4):
                    words[(c * groups + g) * 4 + w] = PACK4["e4m3"](*[x[2 * w + e] for e in (0, 1, 8, 9)])
        return words

    def mask(self, key, end):
        """The bytes of a word whose keys `key` + 0, 1, 8, 9 are before the end."""
        mask = Int32(0)
        for i, step in enumerate((0, 1, 8, 9)):
            byte = (0xFF << 8 * i) - (1 << 32 if i == 3 else 0)
            mask = mask | cutlass.select_(key + step < end, Int32(byte), Int32(0))
        return mask
