"""When tiles of K and V are copied, and what a warp waits for before it reads them.

A part for each kind of pipeline, with the same methods: `start` for the first tile of a walk, then for each tile
`before_scores` and `before_values`. Each of these is a barrier of the block, where one is needed: what was read before
it may be overwritten after it.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .copies import Rows


def landed(pending):
    """All but the last `pending` groups of copies have arrived, for every thread of the block."""
    cute.arch.cp_async_wait_group(pending)
    cute.arch.sync_threads()


@dataclass(frozen=True)
class Single:
    """One tile of K and one of V: V is copied under QK of its tile, the next K under the softmax and PV."""

    q: Rows
    k: Rows
    v: Rows
    m_block: Int32
    last: Int32  # the tile that the walk ends with

    def start(self, n):
        self.q.copy(self.m_block, 0, ragged=True)
        self.k.copy(n, 0, ragged=True)
        cute.arch.cp_async_commit_group()

    def before_scores(self, n, slot, first):
        landed(0)
        self.v.copy(n, 0, ragged=first)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def before_values(self, n):
        landed(0)
        if n > self.last:
            self.k.copy(n - 1, 0, ragged=False)
        cute.arch.cp_async_commit_group()

    def next(self, slot):
        return slot


@dataclass(frozen=True)
class Staged:
    """K and V of a tile arrive together, `stages - 1` tiles ahead of the products."""

    q: Rows
    k: Rows
    v: Rows
    m_block: Int32
    last: Int32
    stages: int

    @cute.jit
    def start(self, n):
        self.q.copy(self.m_block, 0, ragged=True)
        self.tile(n, 0, ragged=True)
        cute.arch.cp_async_commit_group()
        for ahead in cutlass.range_constexpr(1, self.stages - 1):
            if n - ahead >= self.last:
                self.tile(n - ahead, ahead, ragged=False)
            cute.arch.cp_async_commit_group()

    @cute.jit
    def before_scores(self, n, slot, first):
        landed(self.stages - 2)
        ahead = n - (self.stages - 1)
        if ahead >= self.last:
            # The stage of the tile before this one, which every warp has left behind.
            free = cutlass.select_(slot == 0, Int32(self.stages - 1), slot - 1)
            self.tile(ahead, free, ragged=False)
        cute.arch.cp_async_commit_group()

    def before_values(self, n): ...

    def tile(self, n, stage, ragged):
        self.k.copy(n, stage, ragged)
        self.v.copy(n, stage, ragged)

    def next(self, slot):
        return Int32(cutlass.select_(slot == self.stages - 1, Int32(0), slot + 1))
