"""dQ in a kernel of its own: queries stay, keys stream by, nothing is summed in memory.

    S = Q K^T | dP = dO V^T | P = exp2(S c - lse) | dS = P (dP - delta) | dQ += dS K

A warp for each 16 queries; dS goes from the accumulators to the next product in registers.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from flashattn_hopper.spec.mask import Seqlens

from ..common.convert import ELEMENT
from ..common.mask import BandMask
from ..common.softmax import LOG2_E
from ..common.walk import Walk
from ..common.work import DeviceArith, Extent, HeadMap, order_of
from .backward_ends import statistics
from .copies import Both, rows_of
from .device import Device
from .epilogue import Outlet
from .pipeline import Staged
from .products import Products, differentiate, fragment, packed, scale
from .shared import Reader, Swizzled, columns_first, rows_first

STAGES = 2  # of K and V


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


class Cut(NamedTuple):
    """A tile as Band.kv_tiles wants it."""

    tile_m: int
    tile_n: int


class QueryGradient:
    def __init__(self, traits, tile):
        self.traits, self.tile = traits, tile
        self.headdim, self.headdim_v = traits.headdim, traits.headdim_v
        self.dtype = ELEMENT[traits.dtype]
        self.products = Products(self.dtype, tile.query_n)

    def memory(self):
        """(Q, dO, rings of K and V)"""
        t = self.tile
        halves = [rows * width for rows in (t.query_m, STAGES * t.query_n) for width in (self.headdim, self.headdim_v)]

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
            swizzled(st.one, t.query_m, self.headdim),
            swizzled(st.two, t.query_m, self.headdim_v),
            swizzled(st.ring, t.query_n, self.headdim),
            swizzled(st.ring_two, t.query_n, self.headdim_v),
        )

    def place(self, tidx):
        """(thread, lane, the first row of its warp)"""
        return tidx, tidx % 32, cute.arch.make_warp_uniform(tidx // 32) * 16

    def copier(self, tensor, head, batch, tile, tidx):
        return rows_of(tensor, head, batch, tile, tidx, self.tile.query_threads)

    @cute.kernel
    def queries(self, dev: Device, dq: Int64):
        t, band = self.tile, dev.band(self.traits.mask)
        sQ, sdO, sK, sV = self.memory()
        tidx, lane, first = self.place(cute.arch.thread_idx()[0])
        batches, seqlen_q, heads, d = dev.q.shape
        seqlens = Seqlens(seqlen_q, dev.k.shape[1])
        extent = Extent(cute.ceil_div(seqlen_q, t.query_m), heads, batches, seqlens.k)
        m_block, head, batch = order_of(self.traits.mask, extent, 2 * (self.headdim + self.headdim_v)).work(
            cute.arch.block_idx()[0]
        )
        segments = band.kv_tiles(m_block, Cut(t.query_m, t.query_n), seqlens, DeviceArith)
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
        row = m_block * t.query_m + first + lane // 4
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
            BandMask(band, t.query_n, seqlens, row, 2 * (lane % 4)),
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
