"""Accumulators of a warp to global memory: by way of shared rows of its own, 16 bytes of a row at a time."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ..common.convert import pack2
from ..common.tensors import at
from .shared import CHUNK, Swizzled


def shared_words(address, count):
    """`count` 32-bit words at a shared address."""
    pointer = cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=4 * count)
    return cute.make_tensor(pointer, cute.make_layout(count))


@dataclass(frozen=True)
class Outlet:
    """`stage` every 16 rows of the warp, then `store` them all."""

    tile: Swizzled
    lane: Int32
    dtype: Any

    def stage(self, fragment, row):
        """16 rows from `row` on, rounded to 16 bits."""
        t, pair, quad_row = self.tile, self.lane % 4, self.lane // 4
        for column in range(0, t.width, CHUNK):
            unit, within = divmod(column, t.unit)
            for r in range(2):
                first = column // 2 + 2 * r
                place = t.chunk(row + quad_row + 8 * r, within // CHUNK) + unit * t.unit_bytes + 4 * pair
                shared_words(t.base + place, 1)[0] = pack2(fragment[first], fragment[first + 1], self.dtype)

    @cute.jit
    def store(self, row, rows, address, row_bytes, limit, width):
        """`rows` rows from `row` on, those below `limit`, their first `width` columns. `address`: of row 0."""
        t = self.tile
        cute.arch.sync_warp()
        lanes = t.unit // CHUNK
        own, chunk = self.lane // lanes, self.lane % lanes
        for first in cutlass.range_constexpr(0, rows, 32 // lanes):
            here = row + first + own
            if here < limit:
                target = address + Int64(here) * row_bytes
                for unit in cutlass.range_constexpr(t.units):
                    column = unit * t.unit + chunk * CHUNK
                    if column < width:
                        words = shared_words(t.base + t.chunk(here, chunk) + unit * t.unit_bytes, 4)
                        cute.make_tensor(at(Int32, target + column * 2, 16), cute.make_layout(4)).store(words.load())
