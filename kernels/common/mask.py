"""Applies a Band to the scores that one thread holds: the fast form of Band.keep for 64-row accumulators."""

import math
from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, const_expr

from flashattn_hopper.spec.mask import Band, Seqlens


@dataclass(frozen=True)
class BandMask:
    """Rows and columns as the m64 accumulator lays them out: rows `row` and `row + 8`, pairs of columns 8 apart.

    A limit for each row replaces the two comparisons of Band.keep for each element.
    """

    band: Band
    tile_n: int
    seqlens: Seqlens
    row: Int32  # this thread's first row in the sequence
    col: Int32  # its first column in a tile

    def apply(self, S, n_block):
        base = n_block * self.tile_n + self.col
        for r in range(2):
            diagonal = self.row + 8 * r + self.seqlens.k - self.seqlens.q
            limit = self.seqlens.k
            if const_expr(self.band.right is not None):
                limit = cutlass.min(limit, diagonal + self.band.right + 1)
            limit = limit - base
            for column, i in self.columns(r):
                S[i] = cutlass.select_(column < limit, S[i], Float32(-math.inf))
            if const_expr(self.band.left is not None):
                floor = diagonal - self.band.left - base
                for column, i in self.columns(r):
                    S[i] = cutlass.select_(column >= floor, S[i], Float32(-math.inf))

    def columns(self, r):
        """(column relative to this thread's first, index in the fragment) of row r's elements."""
        for c in range(self.tile_n // 4):
            yield (c // 2) * 8 + c % 2, (c // 2) * 4 + r * 2 + c % 2


@dataclass(frozen=True)
class ColumnMask:
    """BandMask for transposed scores: keys are rows, `row` and `row + 8`, queries the columns of tile m_block."""

    band: Band
    tile_m: int
    seqlens: Seqlens
    row: Int32  # this thread's first key in the sequence
    col: Int32  # its first query in a tile

    def apply(self, S, m_block):
        base = m_block * self.tile_m + self.col
        for r in range(2):
            key = self.row + 8 * r
            diagonal = key - (self.seqlens.k - self.seqlens.q) - base  # the query whose diagonal this key is
            inside = key < self.seqlens.k
            first = Int32(0)
            if const_expr(self.band.right is not None):
                first = diagonal - self.band.right
            first = Int32(cutlass.select_(inside, first, Int32(self.tile_m)))
            for c in range(self.tile_m // 4):
                column, i = (c // 2) * 8 + c % 2, (c // 2) * 4 + r * 2 + c % 2
                S[i] = cutlass.select_(column >= first, S[i], Float32(-math.inf))
                if const_expr(self.band.left is not None):
                    S[i] = cutlass.select_(column <= diagonal + self.band.left, S[i], Float32(-math.inf))
