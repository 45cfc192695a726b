"""S = QK^T, P = softmax(S), O += PV as hooks of a walk over KV tiles. All warps copy, each multiplies its own rows."""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ..common.convert import to_half
from ..common.mask import BandMask
from ..common.softmax import Softmax
from .shared import Reader
from .warp import accumulate


@dataclass(frozen=True)
class Atom:
    """16 query rows of a warp: what their thread keeps from tile to tile."""

    softmax: Softmax
    O: cute.Tensor
    mask: BandMask | None = None


@dataclass(frozen=True)
class InOrder:
    """Products of a tile one after the other; they overlap those of other warps."""

    dtype: Any
    tile_n: int
    headdim: int
    headdim_v: int
    loads: Any  # Single or Staged
    q: Reader
    k: Reader
    v: Reader
    atoms: tuple
    mask_first: Int32  # whether the first tile of the walk needs the mask at all
    exact: bool
    Q: Any = None  # Q in registers: for each atom and 16 columns four words

    @cute.jit
    def begin(self, n, slot):
        self.loads.start(n)
        self.loads.before_scores(n, slot, True)
        if const_expr(self.Q is not None):
            self.keep_q()
        S = self.scores(slot)
        self.loads.before_values(n)
        P = []
        for atom, s in zip(self.atoms, S):
            atom.O.fill(0.0)
            atom.softmax.reset()
            self.first_update(atom, s, n)
            P.append(self.packed(s))
        self.values(P, slot)
        return self.loads.next(slot)

    @cute.jit
    def first_update(self, atom, s, n):
        if self.mask_first != 0:
            atom.mask.apply(s, n)
        atom.softmax.update(s, self.exact)

    def step(self, n, slot, masked):
        self.loads.before_scores(n, slot, False)
        S = self.scores(slot)
        self.loads.before_values(n)
        P = []
        for atom, s in zip(self.atoms, S):
            if masked:
                atom.mask.apply(s, n)
                atom.softmax.rescale(atom.O, atom.softmax.update(s, self.exact))
            else:
                atom.softmax.update_optimistic(s)
                atom.softmax.settle(s, atom.O)
            P.append(self.packed(s))
        self.values(P, slot)
        return self.loads.next(slot)

    def drain(self, n, slot):
        return slot

    # ---- products
    def keep_q(self):
        start = self.q.start(0)
        for i in range(len(self.atoms)):
            for column in range(0, self.headdim, 16):
                words = self.q.block(start, 16 * i, column)
                for j, word in enumerate(words):
                    self.Q[(i * self.headdim + column) // 4 + j] = word

    def queries(self, start, i, column):
        if self.Q is None:
            return self.q.block(start, 16 * i, column)
        first = (i * self.headdim + column) // 4
        return [self.Q[first + j] for j in range(4)]

    def scores(self, slot):
        """A fragment of S for each atom."""
        S = [cute.make_rmem_tensor(self.tile_n // 2, Float32) for _ in self.atoms]
        for s in S:
            s.fill(0.0)
        keys, start = self.k.start(slot), self.q.start(0)
        for column in range(0, self.headdim, 16):
            a = [self.queries(start, i, column) for i in range(len(self.atoms))]
            for row in range(0, self.tile_n, 16):
                b = self.k.block(keys, row, column)
                for half in range(2):
                    for s, words in zip(S, a):
                        accumulate(self.dtype, s, row // 8 + half, words, b[2 * half : 2 * half + 2])
        return S

    def packed(self, s):
        """P of an atom as words: the A operand of the next product."""
        p = cute.make_rmem_tensor(self.tile_n // 2, self.dtype)
        to_half(s, p)
        return cute.recast_tensor(p, Int32)

    def values(self, P, slot):
        values = self.v.start(slot)
        for row in range(0, self.tile_n, 16):
            for column in range(0, self.headdim_v, 16):
                b = self.v.block(values, row, column)
                for half in range(2):
                    for atom, p in zip(self.atoms, P):
                        a = [p[row // 4 + j] for j in range(4)]
                        accumulate(self.dtype, atom.O, column // 8 + half, a, b[2 * half : 2 * half + 2])
