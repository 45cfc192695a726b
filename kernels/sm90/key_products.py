"""The matrix products of a consumer that owns 64 keys: S, dP, dV, dK, and its half of dQ."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import warpgroup

from flashattn_hopper.spec.tile import WARPGROUP

from ..common.convert import to_half
from ..common.softmax import probability
from .mainloop import gemm
from .pipeline import MEET_BARRIER
from .tensors import SLAB


def reduce4(address, values, wanted):
    """Where `wanted`: add four neighbouring floats to global memory in one instruction, without waiting for it."""
    llvm.inline_asm(
        None,
        [Int64(address).ir_value(), *[Float32(v).ir_value() for v in values], Int32(wanted).ir_value()],
        "{ .reg .pred p; setp.ne.b32 p, $5, 0; @p red.relaxed.gpu.global.add.v4.f32 [$0], {$1, $2, $3, $4}; }",
        "l,f,f,f,f,r",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


class Ahead(NamedTuple):
    """What is moved away from its natural place so that nothing waits for the sums of dQ to leave, see Products."""

    lse: int  # values that a thread reads a tile ahead
    delta: int  # values that it reads before it waits for dP
    late: int  # vectors of four sums of dQ that it adds under the next tile's scores


# By tile_m. More does not fit the registers.
AHEAD = {64: Ahead(16, 8, 2), 128: Ahead(16, 0, 1)}


@dataclass(frozen=True)
class Products:
    """A consumer of 64 keys.

    Sums of dQ leave the registers slowly. Loads of lse and delta queue behind them, and what is written to their
    registers waits for them, the next products too. So a part of them is put off until S and dP of the next tile are
    under way and its lse is read.
    """

    mma_s: cute.TiledMma
    mma_dp: cute.TiledMma
    mma_dv: cute.TiledMma
    mma_dk: cute.TiledMma
    mma_dq: Any  # None where dQ has a kernel of its own; so are rdS, rKt and put
    rings: Any  # of K and V, Q, dO
    rK: cute.Tensor
    rV: cute.Tensor
    rQ: cute.Tensor
    rdO: cute.Tensor
    rQt: cute.Tensor
    rdOt: cute.Tensor
    rdS: Any
    rKt: Any
    put: Any  # (copy atom, this thread's part of the copy, this warpgroup's rows of dS in shared memory)
    exchange: Any  # of dS, where dQ of a tile is computed in the next step; otherwise consumers meet
    S: cute.Tensor
    P: cute.Tensor
    dS: cute.Tensor
    dK: cute.Tensor
    dV: cute.Tensor
    lse: cute.Tensor  # of the next tile's first columns
    late: Any  # the sums of dQ that are put off
    stats: cute.Tensor
    scale_log2: Float32
    col: Int32  # this thread's first query in a tile
    early: bool  # dV is issued before dP is waited for: P in 16 bits beside P and dP in 32 must fit
    dq_n: int
    num_consumers: int
    ahead: Ahead
    turns: Any = None  # where the sums of dQ are done in turn

    def stat(self, which, column, slot):
        """lse (0) or delta (1) of one of this thread's columns."""
        return self.stats[self.col + column // 2 * 8 + column % 2, which, slot.index]

    def columns(self, which, slot, read):
        """lse or delta for each element of a score fragment, where the first columns are `read` already."""
        columns = [i // 4 * 2 + i % 2 for i in range(cute.size(self.S))]
        return lambda i: read[columns[i]] if columns[i] < len(read) else self.stat(which, columns[i], slot)

    def read_ahead(self, slot):
        """Read as much of a tile's lse as fits the registers."""
        for j in range(cute.size(self.lse)):
            self.lse[j] = self.stat(0, j, slot)

    def scores(self, slot, kv):
        """Issue S."""
        gemm(self.mma_s, self.S, self.rK[None, None, None, kv.index], self.rQ[None, None, None, slot.index], True)

    def add_late(self, slot, target, wanted):
        """Where `wanted`: add the sums that `products` put off in the step before `slot`, with the same `target`."""
        if self.put is not None:
            self.add(target, self.late, self.dq_n // 8 - self.ahead.late, wanted)
            if self.turns is not None:
                self.turns.pass_on(slot.index ^ (self.exchange is None), wanted)

    def add(self, target, sums, first, wanted):
        """Sums of dQ, from vector `first` of this thread on."""
        for j in range(cute.size(sums) // 4):
            reduce4(target + (first + j) * (WARPGROUP * 16), [sums[4 * j + i] for i in range(4)], wanted)

    def score_gradients(self, slot, kv, target, wanted):
        """Issue dP, and add the sums that the tile before has put off where they are wanted. S is done afterwards."""
        lse = self.columns(0, slot, [self.lse[j] for j in range(cute.size(self.lse))])
        self.rings.do.wait(slot)
        dP = cute.make_rmem_tensor_like(self.S)
        gemm(self.mma_dp, dP, self.rV[None, None, None, kv.index], self.rdO[None, None, None, slot.index], True)
        self.add_late(slot, target, wanted)
        warpgroup.wait_group(1)
        for i in range(cute.size(self.S)):
            self.S[i] = self.S[i] * self.scale_log2 - lse(i)
        return dP

    def values(self, slot):
        """Issue dV."""
        to_half(self.S, self.P)
        gemm(self.mma_dv, self.dV, self.P, self.rdOt[None, None, None, slot.index], False)

    def gradients(self, dP, slot):
        """P and dS, this one also to shared memory; dV is on its way afterwards."""
        for i in range(cute.size(self.S)):
            self.S[i] = probability(self.S[i])
        if self.early:
            self.values(slot)
        delta = self.columns(1, slot, [self.stat(1, j, slot) for j in range(self.ahead.delta)])
        warpgroup.wait_group(1 if self.early else 0)
        for i in range(cute.size(dP)):
            dP[i] = self.S[i] * (dP[i] - delta(i))
        to_half(dP, self.dS)
        if not self.early:
            self.values(slot)
        if self.put is not None:
            store, thr, slab = self.put
            packed = cute.make_tensor(self.dS.iterator, dP.layout)
            if self.exchange is not None:
                self.exchange.to_write(slot)
            cute.copy(store, thr.retile(packed), thr.partition_D(slab[None, None, slot.index]))
            if self.exchange is None:
                cute.arch.fence_proxy("async.shared", space="cta")
            else:
                self.exchange.wrote(slot)

    def meet(self):
        """All of dS is in shared memory afterwards."""
        if self.put is not None and self.exchange is None:
            cute.arch.barrier(barrier_id=MEET_BARRIER, number_of_threads=WARPGROUP * self.num_consumers)

    def query_sums(self, slot, kv):
        """Issue dQ of a tile."""
        if self.exchange is not None:
            self.exchange.to_read(slot)
        dQ = cute.make_rmem_tensor(self.mma_dq.get_slice(0).partition_shape_C((SLAB, self.dq_n)), Float32)
        gemm(self.mma_dq, dQ, self.rdS[None, None, None, slot.index], self.rKt[None, None, None, kv.index], True)
        return dQ

    def products(self, slot, kv, target, wanted):
        """dK, and dQ of this step, or with an exchange of the one before. Where `wanted`, dQ is added to memory
        from `target` on, but for what is put off. Q and dO are given back."""
        if self.put is not None:
            if not self.early:
                warpgroup.wait_group(1)  # dV: its P would be in the way of dQ
            of = slot if self.exchange is None else slot.before()
            dQ = self.query_sums(of, kv)
        gemm(self.mma_dk, self.dK, self.dS, self.rQt[None, None, None, slot.index], False)
        warpgroup.wait_group(1)
        self.rings.do.release(slot)
        if self.put is not None:
            if self.exchange is not None:
                self.exchange.did_read(of)
            now = cute.size(dQ) - cute.size(self.late)
            for i in range(cute.size(self.late)):
                self.late[i] = dQ[now + i]
            if self.turns is not None:
                self.turns.wait_if(wanted, of)
            self.add(target, cute.make_tensor(dQ.iterator, cute.make_layout(now)), 0, wanted)
        warpgroup.wait_group(0)
        cute.arch.sync_warp()  # all lanes have read lse and delta
        self.rings.q.release(slot)

    def last_sums(self, slot, kv, target, wanted):
        """With an exchange: dQ of a head's last tile, which was at `slot`, where `wanted` added from `target` on."""
        dQ = self.query_sums(slot, kv)
        warpgroup.wait_group(0)
        if self.turns is not None:
            self.turns.wait_if(wanted, slot)
        self.add(target, dQ, 0, wanted)
        if self.turns is not None:
            self.turns.pass_on(slot.index, wanted)
