"""dK and dV, and the sums of dQ in memory: keys stay, Q and dO of every head of their group stream by.

All copy and all multiply; the products of a warp are in key_products.py. A tile is copied under the one before, or,
with one stage, after it.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from flashattn_hopper.spec.mask import Seqlens
from flashattn_hopper.spec.tile import ROW_PAD as PAD

from ..common.convert import ELEMENT
from ..common.mask import ColumnMask
from ..common.softmax import LOG2_E
from ..common.tensors import operand_again
from ..common.work import DeviceArith, Extent, InOrder, again, thread_again
from .copies import copy_chunk, rows_of
from .device import Device
from .epilogue import Outlet
from .key_products import Warp, products_of
from .pipeline import landed
from .products import scale
from .shared import Swizzled


class KeyGradient:
    def __init__(self, traits, tile):
        self.traits, self.tile = traits, tile
        self.headdim, self.headdim_v = traits.headdim, traits.headdim_v
        self.dtype = ELEMENT[traits.dtype]

    def memory(self):
        """(K, V, rings of Q and dO, P, dS; address of the ring of lse and delta); None for what the tile has not."""
        t, widths = self.tile, (self.headdim, self.headdim_v)
        shapes = [(t.tile_n, width, 1) for width in widths] + [(t.tile_m, width, t.num_stages) for width in widths]
        shapes += [(t.tile_n, t.tile_m, stages) for stages in t.score_stages]
        halves = [rows * width * stages for rows, width, stages in shapes]
        place = lambda i: cute.struct.Align[cute.struct.MemRange[self.dtype, halves[i]], 1024]

        @cute.struct
        class Smem:
            k: place(0)
            v: place(1)
            q: place(2)
            do: place(3)
            rest: cute.struct.Align[
                cute.struct.MemRange[self.dtype, sum(halves[4:]) + t.num_stages * 4 * t.tile_m], 1024
            ]

        # Too much shared memory is not a compile error: the launch fails.
        assert Smem.size_in_bytes() <= t.smem_bytes(self.traits), Smem.size_in_bytes()
        st = SmemAllocator().allocate(Smem)
        bases = [Int32(m.data_ptr().toint()) for m in (st.k, st.v, st.q, st.do, st.rest)]
        bases += [bases[4] + 2 * halves[4], bases[4] + 2 * sum(halves[4:])]
        tiles = [Swizzled(base, *shape[:2]) if shape[2] else None for base, shape in zip(bases, shapes)]
        return tiles, bases[6]

    def copier(self, tensor, head, batch, tile, tidx):
        return rows_of(tensor, head, batch, tile, tidx, self.tile.num_threads)

    def where(self, tidx):
        """Warps that share keys are neighbours."""
        index = cute.arch.make_warp_uniform(tidx // 32)
        return Warp(tidx % 32, index, index // self.tile.split, index % self.tile.split)

    def work(self, k, linear):
        """(key tile, head, batch) of a thread block."""
        batches, seqlen_k, kv_heads, _ = k.shape
        return InOrder(Extent(cute.ceil_div(seqlen_k, self.tile.tile_n), kv_heads, batches, seqlen_k)).work(linear)

    @cute.jit
    def copy_tile(self, dev, rings, stats, batch, head, m, stage):
        """Start copying Q, dO, lse and delta of a tile of queries.

        Why the thread is read anew: what derives from it would be kept in registers.
        """
        t, tidx, heads = self.tile, thread_again(), dev.q.shape[2]
        for tensor, ring in zip((dev.q, dev.do), rings):
            self.copier(tensor, head, batch, ring, tidx).copy(m, stage, ragged=True)
        if tidx < t.tile_m // 2:
            row = Int64(batch * heads + head) * (cute.ceil_div(dev.q.shape[1], PAD) * PAD) + m * t.tile_m
            copy_chunk(stats + stage * (8 * t.tile_m) + tidx * 16, dev.stats + row * 8 + tidx * 16, 16)

    @cute.jit
    def copy_next(self, dev, rings, stats, batch, head, begin, i, count, total, slot):
        """Start copying the tile behind the i-th, which is in `slot`: `count` for each head from `head` on."""
        if i + 1 < total:
            member = (i + 1) // count
            following = begin + i + 1 - member * count
            self.copy_tile(dev, rings, stats, batch, head + member, following, slot ^ (self.tile.num_stages - 1))
        cute.arch.cp_async_commit_group()

    @cute.kernel
    def keys(self, dev: Device, sums: Int64, dk: Int64, dv: Int64):
        t, band = self.tile, dev.band(self.traits.mask)
        tiles, stats = self.memory()
        sK, sV, *rings = tiles[:4]
        tidx = cute.arch.thread_idx()[0]
        _, seqlen_q, heads, _ = dev.q.shape
        _, seqlen_k, kv_heads, _ = dev.k.shape
        seqlens = Seqlens(seqlen_q, seqlen_k)
        n_block, kv_head, batch = self.work(dev.k, cute.arch.block_idx()[0])
        segments = band.q_tiles(n_block, t, seqlens, DeviceArith)
        group, count = heads // kv_heads, segments.end - segments.begin
        total, head = group * count, kv_head * group
        self.copier(dev.k, kv_head, batch, sK, tidx).copy(n_block, 0, ragged=True)
        self.copier(dev.v, kv_head, batch, sV, tidx).copy(n_block, 0, ragged=True)
        if total > 0:
            self.copy_tile(dev, rings, stats, batch, head, segments.begin, Int32(0))
        cute.arch.cp_async_commit_group()
        warp = self.where(tidx)
        hooks = products_of(
            t, self.dtype, (self.headdim, self.headdim_v), tiles, warp,
            lambda key, query: ColumnMask(band, t.at_once, seqlens, n_block * t.tile_n + key, query),
            lambda row: sums + Int64(row) * (4 * self.headdim),
        )  # fmt: skip
        lse = stats + (t.queries * warp.member + 2 * (warp.lane % 4)) * 8
        slot, before = Int32(0), Int32(0)
        for i in cutlass.range(total, unroll=1):
            landed(0)
            if const_expr(t.num_stages == 2):
                self.copy_next(dev, rings, stats, batch, head, segments.begin, i, count, total, slot)
            member = i // count
            m = segments.begin + i - member * count
            place = (batch * heads + head + member) * (cute.ceil_div(seqlen_q, PAD) * PAD) + m * t.tile_m
            edge = (m < segments.full_begin) | (m >= segments.full_end)
            at_slot = lse + slot * (8 * t.tile_m)
            hooks.step(at_slot, dev.scale * LOG2_E, edge, m, slot, place, before, i > 0)
            before = place
            if const_expr(t.num_stages == 2):
                slot = slot ^ 1
            else:
                cute.arch.sync_threads()  # every warp has read the tile, in whose place the next one comes
                self.copy_next(dev, rings, stats, batch, head, segments.begin, i, count, total, slot)
        landed(0)  # K and V too, where no query sees these keys
        if const_expr(t.late):
            if total > 0:
                hooks.query(before, slot ^ 1)
            cute.arch.sync_threads()
        for part in hooks.dK:
            scale(part, dev.scale)
        k, v = operand_again(dev.k), operand_again(dev.v)
        n_block, kv_head, batch = self.work(k, again(cute.arch.block_idx()[0]))
        for parts, tile, address, x in ((hooks.dK, sK, dk, k), (hooks.dV, sV, dv, v)):
            self.store(parts, tile, address, x, n_block, kv_head, batch)

    def store(self, parts, tile, address, x, n_block, head, batch):
        """A warp's keys and columns, by way of its own part of the memory of `tile`, which nobody reads any more."""
        t, warp = self.tile, self.where(thread_again())
        _, seqlen, heads, width = x.shape
        columns = tile.width // t.split
        outlet = Outlet(
            Swizzled(tile.base + warp.index * (2 * t.keys * columns), t.keys, columns), warp.lane, self.dtype
        )
        for i, part in enumerate(parts):
            outlet.stage(part, 16 * i)
        row_bytes = Int64(heads) * width * 2
        row, column = n_block * t.tile_n + warp.team * t.keys, warp.member * columns
        origin = address + (Int64(batch) * seqlen + row) * row_bytes + (Int64(head) * width + column) * 2
        outlet.store(0, t.keys, origin, row_bytes, seqlen - row, width - column)
