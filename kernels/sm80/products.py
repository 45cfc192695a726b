"""Products and dS of the backward, for 16 rows of a warp that stay while tiles of the other operand stream by."""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32

from ..common.convert import to_half
from ..common.softmax import probability
from .shared import Reader
from .warp import accumulate


def fragment(width):
    """An accumulator of 16 rows by `width` columns, zero."""
    acc = cute.make_rmem_tensor(width // 2, Float32)
    acc.fill(0.0)
    return acc


def scale(acc, factor):
    for i in range(cute.size(acc)):
        acc[i] = acc[i] * factor


def packed(s, dtype):
    """A fragment as words: the A operand of the next product."""
    p = cute.make_rmem_tensor(cute.size(s), dtype)
    to_half(s, p)
    return cute.recast_tensor(p, Int32)


@dataclass(frozen=True)
class Products:
    """`stay` are rows of this warp, `come` tiles of `rows` rows in the stages of a ring."""

    dtype: Any
    rows: int

    def scores(self, stay: Reader, come: Reader, width, slot):
        """stay come^T, 16 by `rows`, over `width` columns of both."""
        acc = fragment(self.rows)
        mine, theirs = stay.start(0), come.start(slot)
        for column in range(0, width, 16):
            a = stay.block(mine, 0, column)
            for row in range(0, self.rows, 16):
                b = come.block(theirs, row, column)
                for half in range(2):
                    accumulate(self.dtype, acc, row // 8 + half, a, b[2 * half : 2 * half + 2])
        return acc

    def add(self, acc, words, come: Reader, width, slot):
        """acc += X come, for X as words, 16 by `rows`."""
        theirs = come.start(slot)
        for row in range(0, self.rows, 16):
            a = [words[row // 4 + j] for j in range(4)]
            for column in range(0, width, 16):
                b = come.block(theirs, row, column)
                for half in range(2):
                    accumulate(self.dtype, acc, column // 8 + half, a, b[2 * half : 2 * half + 2])


def differentiate(S, dP, i, scale_log2, lse, delta):
    """Element i: S becomes P, dP becomes dS / softmax_scale. `lse` in log2 units."""
    S[i] = probability(S[i] * scale_log2 - lse)
    dP[i] = S[i] * (dP[i] - delta)
