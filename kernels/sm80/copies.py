"""cp.async: tiles of one head from global to swizzled shared memory, by every thread of the block."""

from dataclasses import dataclass

import cutlass
from cutlass import Int32, Int64
from cutlass._mlir.dialects import llvm

from .shared import CHUNK, Swizzled


def copy_chunk(target, source, num_bytes):
    """Start copying 16 bytes to shared memory; of them the last 16 - num_bytes are zeros, and not read."""
    llvm.inline_asm(
        None,
        [Int32(target).ir_value(), Int64(source).ir_value(), Int32(num_bytes).ir_value()],
        "cp.async.cg.shared.global [$0], [$1], 16, $2;",
        "r,l,r",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


@dataclass(frozen=True)
class Rows:
    """A thread's part of the tiles of one head: the same chunk of every unit, in rows `row`, `row + round`, ...

    `sizes` has, for each unit, 16 where the chunk is inside the caller's headdim and 0 where zeros stand for it.
    """

    tile: Swizzled
    round: int
    source: Int64  # address of the first chunk in the first tile
    target: Int32  # the same in shared memory
    stride: Int64  # bytes from a row to the next
    seqlen: Int32
    row: Int32
    sizes: tuple

    def copy(self, block, stage, ragged, offset=0):
        """Start copying tile `block` into a stage. `ragged`: rows beyond seqlen may be in it; they become zeros.

        `offset`: bytes to the same tile of another head.
        """
        t = self.tile
        target = self.target + stage * t.stage_bytes
        source = self.source + Int64(block * t.rows) * self.stride + offset
        left = self.seqlen - block * t.rows - self.row
        # Why a sum: multiples of the stride would be kept in registers through the main loop.
        step = self.round * self.stride
        for first in range(0, t.rows, self.round):
            for unit, size in enumerate(self.sizes):
                if ragged:
                    size = Int32(cutlass.select_(first < left, size, Int32(0)))
                place = target + (first * t.row_bytes + unit * t.unit_bytes)
                copy_chunk(place, source + unit * t.row_bytes, size)
            source = source + step


@dataclass(frozen=True)
class Both:
    """Two tensors whose tiles travel together."""

    one: Rows
    other: Rows

    def copy(self, block, stage, ragged):
        self.one.copy(block, stage, ragged)
        self.other.copy(block, stage, ragged)


def rows_of(tensor, head, batch, tile, tidx, num_threads):
    """Rows of one head of a (B, S, H, D) tensor, for thread `tidx`."""
    lanes = tile.unit // CHUNK
    row, chunk = tidx // lanes, tidx % lanes
    per_batch, per_row, per_head, _ = [2 * step for step in tensor.stride]
    offset = Int64(batch) * per_batch + Int64(head) * per_head + Int64(row) * per_row + Int64(16 * chunk)
    inside = lambda unit: unit * tile.unit + chunk * CHUNK < tensor.shape[3]
    return Rows(
        tile,
        num_threads // lanes,
        tensor.iterator.toint() + offset,
        tile.base + tile.chunk(row, chunk),
        Int64(per_row),
        tensor.shape[1],
        row,
        tuple(Int32(cutlass.select_(inside(unit), Int32(16), Int32(0))) for unit in range(tile.units)),
    )
