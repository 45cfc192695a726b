"""Which keys a query sees, as arithmetic. One definition for the host, the reference and the device.

Only plain operators are used, so a method runs the same on Python integers (planner, tests), on broadcast
tensors (reference) and on device integers (kernels). `arith` lends `min` and `max` where they differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


class Seqlens(NamedTuple):
    q: Any
    k: Any


class Segments(NamedTuple):
    """Tiles `[begin, end)` that one tile of the other operand visits; `[full_begin, full_end)` of them need no mask."""

    begin: Any
    full_begin: Any
    full_end: Any
    end: Any


class PythonArith:
    min = staticmethod(min)
    max = staticmethod(max)


@dataclass(frozen=True)
class Band:
    """Keys from `left` before to `right` behind the diagonal, both inclusive; None leaves that side open.

    The diagonal is bottom-right aligned: query i of `seqlens.q` sits on key i + seqlens.k - seqlens.q.
    Causal is `right=0`. Edges may be negative, which cuts the diagonal itself away.
    """

    left: Any = None
    right: Any = None

    @property
    def kind(self) -> str:
        """The compile-time class: `full`, `causal` or `window` (edges known at run time only)."""
        if self.left is not None:
            return "window"
        if self.right is None:
            return "full"
        return "causal" if isinstance(self.right, int) and self.right == 0 else "window"

    def keep(self, q_idx, kv_idx, seqlens):
        """Elementwise: whether query `q_idx` sees key `kv_idx`."""
        diagonal = q_idx + (seqlens.k - seqlens.q)
        visible = (q_idx < seqlens.q) & (kv_idx < seqlens.k)
        if self.right is not None:
            visible = visible & (kv_idx <= diagonal + self.right)
        if self.left is not None:
            visible = visible & (kv_idx >= diagonal - self.left)
        return visible

    def kv_tiles(self, m_block, tile, seqlens, arith=PythonArith) -> Segments:
        """KV tiles of query tile `m_block`, for a loop that runs from the last tile down, or, without a left edge, up.

        Invariant: at least one tile is visited, so that a query tile without keys has no code path of its own.
        Invariant: every row that sees a full tile also sees a key to the right of it or the tile is the last one;
        a softmax that takes its first estimate of the maximum from a masked tile, the last one, relies on it. This is
        why `full_end` stays one key below the textbook bound. Upwards the first tile gives it, which hides no row's
        first key.
        """
        lo, hi = arith.min, arith.max
        shift = seqlens.k - seqlens.q
        first = m_block * tile.tile_m + shift
        last = first + (tile.tile_m - 1)
        begin = full_begin = seqlens.k * 0
        end = (seqlens.k + (tile.tile_n - 1)) // tile.tile_n
        full_end = seqlens.k // tile.tile_n
        if self.right is not None:
            end = lo(end, (last + self.right + tile.tile_n) // tile.tile_n)
            full_end = lo(full_end, (first + self.right) // tile.tile_n)
        if self.left is not None:
            begin = hi(begin, (first - self.left) // tile.tile_n)
            full_begin = hi(begin, (last - self.left + (tile.tile_n - 1)) // tile.tile_n)
        begin = hi(lo(begin, end - 1), 0)
        end = hi(end, begin + 1)
        full_end = hi(lo(full_end, end), begin)
        full_begin = lo(hi(full_begin, begin), full_end)
        return Segments(begin, full_begin, full_end, end)

    def q_tiles(self, n_block, tile, seqlens, arith=PythonArith) -> Segments:
        """Query tiles that see key tile `n_block`: the transposed question, for the backward pass."""
        lo, hi = arith.min, arith.max
        shift = seqlens.k - seqlens.q
        first = n_block * tile.tile_n - shift
        last = first + (tile.tile_n - 1)
        begin = full_begin = seqlens.q * 0
        end = (seqlens.q + (tile.tile_m - 1)) // tile.tile_m
        full_end = seqlens.q // tile.tile_m
        if self.right is not None:
            begin = hi(begin, (first - self.right) // tile.tile_m)
            full_begin = hi(begin, (last - self.right + (tile.tile_m - 1)) // tile.tile_m)
        if self.left is not None:
            end = lo(end, (last + self.left + tile.tile_m) // tile.tile_m)
            full_end = lo(full_end, (first + self.left + 1) // tile.tile_m)
        # A key tile that overhangs seqlen_k has masked keys in every query tile.
        overhang = (n_block + 1) * tile.tile_n - seqlens.k
        begin = hi(lo(begin, end), 0)
        end = hi(end, begin)
        full_end = hi(lo(full_end, end), begin)
        full_begin = lo(hi(full_begin, begin), full_end)
        # Without a branch, for device integers: an overhang of one key already empties the full range.
        full_end = hi(full_begin, full_end - hi(overhang, 0) * full_end)
        return Segments(begin, full_begin, full_end, end)

    def q_tile_turn(self, n_block, m_block, tile, seqlens, arith=PythonArith):
        """How many key tiles before `n_block` visit query tile `m_block`, which `n_block` visits: a right edge hides
        keys behind a query, so only those that the left edge hides do not."""
        if self.left is None:
            return n_block
        first = m_block * tile.tile_m + (seqlens.k - seqlens.q) - self.left
        return n_block - arith.max(first // tile.tile_n, seqlens.k * 0)
