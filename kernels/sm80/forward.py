"""sm80.forward: attention forward from matrix instructions of one warp, FP16 and BF16, for archs since Ampere.

One thread block for each tile of queries. Q stays in shared memory (or registers), K and V come by cp.async in one
stage each or in several, and every warp multiplies 16 or 32 query rows of its own:

    num_stages = 1   K3 Q | V3 under QK3 | K2 under softmax 3, PV3 | V2 under QK2 | K1 ...   KV tiles, last one first
    num_stages = 2   K3 V3 Q | K2 V2 under tile 3 | K1 V1 under tile 2 | ...

    a warp           QK3 | mask, softmax 3 | PV3 | QK2 | softmax 2 | PV2 | ... | out by way of Q's place

Products overlap with the softmax of other warps and of another block on the multiprocessor. Unmasked tiles are
optimistic (common/softmax.py); where a block's optimism failed, it walks a second time with every tile in the careful
loop.
docs/kernels/sm80_forward.md has the roofline and the tiles.
"""

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from flashattn_hopper.spec.mask import Seqlens

from ..common.convert import ELEMENT
from ..common.mask import BandMask
from ..common.operands import FwdOperands
from ..common.softmax import CEILING, LOG2_E, Softmax
from ..common.tensors import at, band_of, forward_arguments, operand_again
from ..common.walk import Walk
from ..common.work import DeviceArith, Extent, HeadMap, again, order_of, thread_again
from .copies import rows_of
from .epilogue import Outlet
from .mainloop import Atom, InOrder
from .pipeline import Single, Staged
from .shared import Reader, Swizzled, columns_first, rows_first
from .warp import any_of


class Device(NamedTuple):
    """What the host half hands to the device half."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    o: Int64
    lse: Int64
    scale_log2: Float32
    window_left: Any
    window_right: Any


class Shared(NamedTuple):
    Q: Swizzled
    K: Swizzled
    V: Swizzled


class Place(NamedTuple):
    """Where a thread is, and the first of its warp's rows in the tile."""

    tidx: Int32
    lane: Int32
    row: Int32


class Forward:
    def __init__(self, traits, tile):
        self.traits, self.tile = traits, tile
        self.headdim, self.headdim_v = traits.headdim, traits.headdim_v
        self.dtype = ELEMENT[traits.dtype]

    def arguments(self):
        return forward_arguments(self.dtype, self.traits.mask, dynamic=False)

    # ---------------------------------------------------------------------------------------------- host half
    @cute.jit
    def __call__(self, ops: FwdOperands, stream: cuda.CUstream):
        t = self.tile
        dev = Device(
            ops.q, ops.k, ops.v, ops.o, ops.lse, ops.softmax_scale * LOG2_E, ops.window_left, ops.window_right
        )  # fmt: skip
        batch, seqlen_q, heads, _ = ops.q.shape
        grid = cute.ceil_div(seqlen_q, t.tile_m) * heads * batch
        self.kernel(dev).launch(grid=[grid, 1, 1], block=[t.num_threads, 1, 1], min_blocks_per_mp=1, stream=stream)

    # ------------------------------------------------------------------------------------------ parts and facts
    def band(self, dev):
        return band_of(self.traits.mask, dev.window_left, dev.window_right)

    def seqlens(self, dev):
        return Seqlens(dev.q.shape[1], dev.k.shape[1])

    def order(self, dev):
        batch, seqlen_q, heads, _ = dev.q.shape
        extent = Extent(cute.ceil_div(seqlen_q, self.tile.tile_m), heads, batch, dev.k.shape[1])
        return order_of(self.traits.mask, extent, 2 * (self.headdim + self.headdim_v))

    # --------------------------------------------------------------------------------------------- device half
    @cute.kernel
    def kernel(self, dev: Device):
        t = self.tile
        sizes = (t.tile_m * self.headdim, *(t.num_stages * t.tile_n * d for d in (self.headdim, self.headdim_v)))

        @cute.struct
        class Smem:
            Q: cute.struct.Align[cute.struct.MemRange[self.dtype, sizes[0]], 1024]
            K: cute.struct.Align[cute.struct.MemRange[self.dtype, sizes[1]], 1024]
            V: cute.struct.Align[cute.struct.MemRange[self.dtype, sizes[2]], 1024]

        # Too much shared memory is not a compile error: the launch fails.
        assert Smem.size_in_bytes() <= t.smem_bytes(self.traits), Smem.size_in_bytes()
        st = SmemAllocator().allocate(Smem)
        swizzled = lambda m, rows, width: Swizzled(Int32(m.data_ptr().toint()), rows, width)
        smem = Shared(
            swizzled(st.Q, t.tile_m, self.headdim),
            swizzled(st.K, t.tile_n, self.headdim),
            swizzled(st.V, t.tile_n, self.headdim_v),
        )
        fragments = lambda width: tuple(cute.make_rmem_tensor(width // 2, Float32) for _ in range(t.atoms))
        pair = lambda: cute.make_rmem_tensor(2, Float32)
        atoms = tuple(
            Atom(Softmax(pair(), pair(), dev.scale_log2, CEILING[self.traits.dtype]), O)
            for O in fragments(self.headdim_v)
        )
        bad = self.attempt(dev, smem, atoms, False)
        if any_of(bad) != 0:
            self.attempt(dev, smem, atoms, True)
            for atom in atoms:
                # From units of the scores to log2, as the first attempt leaves it.
                for r in cutlass.range_constexpr(2):
                    atom.softmax.bias[r] = atom.softmax.bias[r] * dev.scale_log2
        self.store(dev, smem, atoms)

    def anew(self, dev):
        """(dev, work, place) for an attempt or the epilogue: what these have in common need not survive a main loop."""
        tidx = thread_again()
        row = cute.arch.make_warp_uniform(tidx // 32) * (16 * self.tile.atoms)
        dev = Device(*map(operand_again, dev[:3]), *dev[3:])
        work = self.order(dev).work(again(cute.arch.block_idx()[0]))
        return dev, work, Place(tidx, tidx % 32, row)

    @cute.jit
    def attempt(self, dev, smem, atoms, exact):
        """Walk the KV tiles of this block: sums and out of every row, not normalised. 1 if it cannot stand."""
        dev, work, place = self.anew(dev)
        t, band, seqlens = self.tile, self.band(dev), self.seqlens(dev)
        segments = band.kv_tiles(work.m_block, t, seqlens, DeviceArith)
        kv_head = HeadMap(dev.q.shape[2] // dev.k.shape[2]).kv(work.head)
        rows = lambda tensor, head, tile: rows_of(tensor, head, work.batch, tile, place.tidx, t.num_threads)
        sources = (
            rows(dev.q, work.head, smem.Q),
            rows(dev.k, kv_head, smem.K),
            rows(dev.v, kv_head, smem.V),
            work.m_block,
            segments.begin,
        )
        partial = (segments.end > segments.full_end) | (segments.full_begin >= segments.end)
        first_row = work.m_block * t.tile_m + place.row + place.lane // 4
        masks = [BandMask(band, t.tile_n, seqlens, first_row + 16 * i, 2 * (place.lane % 4)) for i in range(t.atoms)]
        hooks = InOrder(
            self.dtype,
            t.tile_n,
            self.headdim,
            self.headdim_v,
            Single(*sources) if t.num_stages == 1 else Staged(*sources, t.num_stages),
            Reader(smem.Q, rows_first(smem.Q, place.lane, place.row)),
            Reader(smem.K, columns_first(smem.K, place.lane)),
            Reader(smem.V, rows_first(smem.V, place.lane), transpose=True),
            tuple(Atom(atom.softmax, atom.O, mask) for atom, mask in zip(atoms, masks)),
            Int32(1) if const_expr(exact) else Int32(cutlass.select_(partial, Int32(1), Int32(0))),
            exact,
            cute.make_rmem_tensor(t.atoms * self.headdim // 4, Int32) if const_expr(t.q_in_registers) else None,
        )
        Walk(band, exact).kv(segments, hooks, Int32(0))
        bad = Int32(0)
        for atom in atoms:
            bad = bad | atom.softmax.overflowed()
        return bad

    @cute.jit
    def store(self, dev, smem, atoms):
        """Each warp its own rows: lse directly, out by way of the place of its rows of Q, 16 bytes at a time."""
        t = self.tile
        dev, work, place = self.anew(dev)
        _, seqlen_q, heads, _ = dev.q.shape
        width = dev.v.shape[3]
        outlet = Outlet(Swizzled(smem.Q.base, t.tile_m, self.headdim_v), place.lane, self.dtype)
        head_row = (Int64(work.batch) * heads + work.head) * seqlen_q
        first_query = work.m_block * t.tile_m
        for i in cutlass.range_constexpr(t.atoms):
            atom, row = atoms[i], place.row + 16 * i
            inverse, lse = atom.softmax.finish(exact=False)
            atom.softmax.rescale(atom.O, inverse)
            if dev.lse != 0:
                mLSE = cute.make_tensor(at(Float32, dev.lse, 4) + head_row, cute.make_layout(seqlen_q))
                if place.lane % 4 == 0:
                    for r in cutlass.range_constexpr(2):
                        query = first_query + row + place.lane // 4 + 8 * r
                        if query < seqlen_q:
                            mLSE[query] = lse[r]
            outlet.stage(atom.O, row)
        row_bytes = Int64(heads) * width * 2
        first_row = Int64(work.batch) * seqlen_q + first_query
        address = dev.o + first_row * row_bytes + Int64(work.head) * (2 * width)
        outlet.store(place.row, 16 * t.atoms, address, row_bytes, seqlen_q - first_query, width)
