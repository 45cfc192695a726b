"""Swizzled tiles in shared memory: where an element lies, and how warps read them as matrix fragments."""

from dataclasses import dataclass

from cutlass import Int32

from flashattn_hopper.spec.tile import copy_unit

from .warp import ldmatrix

CHUNK = 8  # elements in 16 bytes


@dataclass(frozen=True)
class Swizzled:
    """(rows, width) 16-bit elements, several times. Columns are cut in units of 64 (or 32) that lie one after the
    other; in a unit the 16-byte chunks of a row are XORed with its number, so that 8 rows of a chunk meet 32 banks.

    `base`: shared address, a multiple of 128. Everything but it and the stage is known while compiling.
    """

    base: Int32
    rows: int
    width: int

    @property
    def unit(self):
        return copy_unit(self.width)

    @property
    def units(self):
        return self.width // self.unit

    @property
    def row_bytes(self):
        return 2 * self.unit

    @property
    def unit_bytes(self):
        return self.rows * self.row_bytes

    @property
    def stage_bytes(self):
        return self.units * self.unit_bytes

    def chunk(self, row, chunk):
        """Bytes from the base to a chunk of the first unit. Any `row` 8 further lies 8 * row_bytes further."""
        key = row % 8 if self.unit == 64 else row // 2 % 4
        return row * self.row_bytes + (chunk ^ key) * 16

    def place(self, row, column):
        """The same to the chunk that begins at `column`, in any unit."""
        return self.chunk(row, column % self.unit // CHUNK) + column // self.unit * self.unit_bytes

    def stage(self, index):
        return self.base + index * self.stage_bytes


@dataclass(frozen=True)
class Reader:
    """How a lane addresses blocks of 16 rows by 16 columns.

    `lane`: bytes from a block to the row and half that this lane lends to ldmatrix. A block's column is one XOR of it
    within a unit, everything else an immediate.
    """

    tile: Swizzled
    lane: Int32
    transpose: bool = False

    def block(self, start, row, column):
        """The four words of the block at (row, column), multiples of 16, in the stage that begins at `start`."""
        t = self.tile
        unit, within = divmod(column, t.unit)
        return ldmatrix((start ^ (2 * within)) + (row * t.row_bytes + unit * t.unit_bytes), self.transpose)

    def start(self, index):
        return self.tile.stage(index) + self.lane


@dataclass(frozen=True)
class WarpReader(Reader):
    """The same, with what a warp's lanes have in common apart from the lane: it is added in the load itself.

    That takes fewer registers where a warp has many Readers.
    """

    warp: Int32 = 0  # bytes to where the warp begins, a multiple of row_bytes

    def block(self, start, row, column):
        t = self.tile
        unit, within = divmod(column, t.unit)
        start = start + (row * t.row_bytes + unit * t.unit_bytes)
        return ldmatrix((self.lane ^ (2 * within)) + start, self.transpose)

    def start(self, index):
        return self.tile.stage(index) + self.warp


def rows_first(tile, lane, row=0, column=0):
    """Words in the order (row, column) (0, 0), (8, 0), (0, 8), (8, 8): an A operand as it is stored, or two B operands
    from rows that are their k (transposed). `column`: 0, or a multiple of the width that is read, which divides a unit
    or is a multiple of it."""
    return tile.place(row + lane % 16, column + lane // 16 * CHUNK)


def columns_first(tile, lane, row=0, column=0):
    """Words in the order (0, 0), (0, 8), (8, 0), (8, 8): two B operands from rows that are their n, or an A operand
    from rows that are its k (transposed)."""
    return tile.place(row + lane % 8 + lane // 16 * 8, column + lane // 8 % 2 * CHUNK)
