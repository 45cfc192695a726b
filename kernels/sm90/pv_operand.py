"""How P and V reach the matrix instruction of O += PV, and where the product is summed.

    InPlace    16-bit: V as it lies in memory, P one packed register for two of S; sums stay in the accumulator of O
    Promoted   8-bit: V transposed beforehand, its keys in the order in which P leaves the accumulator of S; every tile
               is summed in an accumulator of its own and added to O in float32
    Late       the same, added in the next step

Promoted, because an 8-bit product keeps 13 fraction bits of its running sum: over many keys small terms would be lost.
Its order of keys: docs/kernels/sm90_fp8.md.
"""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from ..common.convert import to_half
from ..common.softmax import rescale
from ..common.work import kept
from .pipeline import Ring
from .tensors import SLAB, slices


def gemm(tiled_mma, acc, a, b, zero):
    """Issue and commit one group of matrix products; the caller waits."""
    warpgroup.fence()
    atom = cute.make_mma_atom(tiled_mma.op)  # a fresh atom: its accumulate flag must not outlive this scope
    atom.set(warpgroup.Field.ACCUMULATE, not zero)
    for k in range(cute.size(a, mode=[2])):
        cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


@dataclass(frozen=True)
class InPlace:
    mma: cute.TiledMma
    ring: Ring
    rV: cute.Tensor
    P: cute.Tensor
    O: cute.Tensor

    @staticmethod
    def columns(tile, headdim_v):
        """Of V, that one product takes."""
        return headdim_v

    b_major = OperandMajorMode.MN
    modes = (1, 3, 2, 0)  # (B, Sk, Hk, Dv) -> (Sk, Dv, Hk, B)
    width_mode = 1  # the mode of that which is Dv

    @staticmethod
    def block(tile, headdim_v):
        """(rows, columns) of a tile of V as it lies in memory."""
        return tile.tile_n, headdim_v

    @staticmethod
    def slices(atom, shared, tensor, block, head, batch):
        return slices(atom, shared, tensor, block, head, batch)

    @classmethod
    def of(cls, mma, ring, sV, tile, headdim_v):
        thr = mma.get_slice(0)
        sVt = cute.make_tensor(sV.iterator, cute.select(sV.layout, mode=[1, 0, 2]))
        return cls(
            mma,
            ring,
            rV=mma.make_fragment_B(thr.partition_B(sVt)),
            P=mma.make_fragment_A(thr.partition_shape_A((SLAB, tile.tile_n))),
            O=cute.make_rmem_tensor(thr.partition_shape_C((SLAB, headdim_v)), Float32),
        )

    def start(self, S):
        """P of the first tile."""
        to_half(S, self.P)
        self.O.fill(0.0)

    def issue(self, slot):
        gemm(self.mma, self.O, self.P, self.rV[None, None, None, slot.index], False)

    def hold(self, slot): ...

    def collect(self, slot):
        """After the products that were issued are done: V of the slot has been read."""
        self.ring.release(slot)

    end = collect  # after the last product

    def take(self, S, alpha):
        """P of the next tile; `alpha`, if any, is what its softmax asks O to be multiplied by."""
        to_half(S, self.P)
        if alpha is not None:
            rescale(self.O, alpha)


@dataclass(frozen=True)
class Promoted:
    mma: cute.TiledMma
    ring: Ring
    rV: tuple  # for each block of columns
    P: cute.Tensor
    O: cute.Tensor
    T: cute.Tensor  # the product of one tile and one block of columns
    zero: Int32  # see put
    lag: cute.Tensor  # what O must still be multiplied by: it is done together with adding T

    @staticmethod
    def columns(tile, headdim_v):
        return tile.value_columns or headdim_v

    b_major = OperandMajorMode.K
    modes = (2, 3, 1, 0)  # (B, Hk, Dv, Sk) -> (Dv, Sk, Hk, B)
    width_mode = 0

    @staticmethod
    def block(tile, headdim_v):
        return headdim_v, tile.tile_n

    @staticmethod
    def slices(atom, shared, tensor, block, head, batch):
        return slices(atom, shared, tensor, block, head, batch, row=0, column=None)

    @classmethod
    def of(cls, mma, ring, sV, tile, headdim_v):
        thr, columns = mma.get_slice(0), cls.columns(tile, headdim_v)
        part = lambda i: cute.local_tile(sV, (columns, tile.tile_n, tile.num_stages), (i, 0, 0))
        return cls(
            mma,
            ring,
            rV=tuple(mma.make_fragment_B(thr.partition_B(part(i))) for i in range(headdim_v // columns)),
            P=mma.make_fragment_A(thr.partition_shape_A((SLAB, tile.tile_n))),
            O=cute.make_rmem_tensor(((2, 2, headdim_v // 8), 1, 1), Float32),  # as one product would have it
            T=cute.make_rmem_tensor(thr.partition_shape_C((SLAB, columns)), Float32),
            zero=kept(Int32(0), 0),
            lag=cute.make_rmem_tensor(2, Float32),
        )

    def start(self, P):
        self.put(P)
        self.O.fill(0.0)
        self.lag.fill(1.0)

    def issue(self, slot, i=0):
        gemm(self.mma, self.T, self.P, self.rV[i][None, None, None, slot.index], True)

    def hold(self, slot):
        """Between exponentials and the wait for the product that runs under them, both without a branch.

        Why: ptxas moves that wait up over arithmetic, to where the product was issued, but not over a branch. This one
        is in a wait for what has come already: the V that the product reads. 16-bit tiles have the branch of `settle`.
        """
        self.ring.wait(slot)

    def collect(self, slot):
        self.add(0)
        for i in range(1, len(self.rV)):
            self.issue(slot, i)
            warpgroup.wait_group(0)
            if i == len(self.rV) - 1:
                self.ring.release(slot)
            self.add(i)
        if len(self.rV) == 1:
            self.ring.release(slot)

    end = collect

    def add(self, block):
        first = block * cute.size(self.T)
        for i in range(cute.size(self.T)):
            self.O[first + i] = self.O[first + i] * self.lag[(i // 2) % 2] + self.T[i]

    def take(self, P, alpha):
        self.put(P)
        for r in range(2):
            self.lag[r] = alpha[r]

    def put(self, P):
        """Words of P to where products read them, once none does.

        Why an addition: the words are there before the last product is done. If they were the operand of the next one,
        ptxas would serialise every product. It is a move in the machine code.
        """
        words = cute.recast_tensor(self.P, Int32)
        for w in range(cute.size(words)):
            words[w] = P[w] + self.zero


@dataclass(frozen=True)
class Late(Promoted):
    """Promoted, and added to O before the next product is issued: under QK, which by then is on its way."""

    alpha: cute.Tensor  # the lag of the product that comes next

    @classmethod
    def of(cls, *args):
        return cls(**vars(Promoted.of(*args)), alpha=cute.make_rmem_tensor(2, Float32))

    def start(self, P):
        Promoted.start(self, P)
        self.T.fill(0.0)
        self.alpha.fill(1.0)

    def issue(self, slot):
        self.add(0)
        for r in range(2):
            self.lag[r] = self.alpha[r]
        Promoted.issue(self, slot)

    def collect(self, slot):
        self.ring.release(slot)

    def end(self, slot):
        self.ring.release(slot)
        self.add(0)

    def take(self, P, alpha):
        self.put(P)
        for r in range(2):
            self.alpha[r] = alpha[r]
