"""sm80.backward: dQ, dK and dV from matrix instructions of one warp, FP16 and BF16, for archs since Ampere.

Ends.prepare                lse in log2 units and delta of every query row; zeroes the float32 dQ
KeyGradient                 dK, dV, and the sums of dQ in memory
Ends.finish                 dQ in the operands' dtype; or, where the tile has a query_n,
QueryGradient               dQ in a kernel of its own, which needs no sums in memory and repeats bit by bit
"""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.runtime import make_fake_stream

from flashattn_hopper.spec.tile import ROW_PAD as PAD

from ..common.convert import ELEMENT
from ..common.operands import BwdOperands
from ..common.tensors import fake_operand
from .backward_ends import THREADS, Ends
from .device import Device
from .key_gradient import KeyGradient
from .query_gradient import QueryGradient


class Backward:
    def __init__(self, traits, tile):
        self.traits, self.tile = traits, tile
        self.dtype = ELEMENT[traits.dtype]
        self.ends = Ends(traits, tile)
        self.keys = KeyGradient(traits, tile)
        self.queries = None if tile.summed else QueryGradient(traits, tile)

    def arguments(self):
        B, Sq, Sk, Hq, Hk, D, Dv = [cute.sym_int() for _ in range(7)]
        operand = lambda *shape: fake_operand(self.dtype, B, *shape)
        window = self.traits.mask == "window"
        addresses = dict.fromkeys(("o", "lse", "dlse", "dq", "dk", "dv", "workspace"), Int64(0))
        operands = BwdOperands(
            q=operand(Sq, Hq, D),
            k=operand(Sk, Hk, D),
            v=operand(Sk, Hk, Dv),
            do=operand(Sq, Hq, Dv),
            **addresses,
            softmax_scale=Float32(1.0),
            window_left=Int32(0) if window else None,
            window_right=Int32(0) if window else None,
        )
        return operands, make_fake_stream(use_tvm_ffi_env_stream=True)

    @cute.jit
    def __call__(self, ops: BwdOperands, stream: cuda.CUstream):
        t = self.tile
        batch, seqlen_q, heads, _ = ops.q.shape
        _, seqlen_k, kv_heads, _ = ops.k.shape
        scalars = ops.softmax_scale, ops.window_left, ops.window_right
        dev = Device(ops.q, ops.k, ops.v, ops.do, ops.workspace, *scalars)
        blocks = cute.ceil_div(seqlen_q, PAD)
        sums = ops.workspace + Int64(blocks) * (8 * PAD) * heads * batch
        ends = {"grid": [blocks * heads * batch, 1, 1], "block": [THREADS, 1, 1], "stream": stream}
        self.ends.prepare(ops.do, ops.o, ops.lse, ops.dlse, ops.workspace, sums).launch(**ends)
        main = {"min_blocks_per_mp": 1, "stream": stream}
        if const_expr(t.wanted != "dq"):
            grid = [cute.ceil_div(seqlen_k, t.tile_n) * kv_heads * batch, 1, 1]
            self.keys.keys(dev, sums, ops.dk, ops.dv).launch(grid=grid, block=[t.num_threads, 1, 1], **main)
        if const_expr(t.summed):
            self.ends.finish(ops.q, sums, ops.dq, ops.softmax_scale).launch(**ends)
        elif const_expr(t.wanted != "dkdv"):
            grid = [cute.ceil_div(seqlen_q, t.query_m) * heads * batch, 1, 1]
            self.queries.queries(dev, ops.dq).launch(grid=grid, block=[t.query_threads, 1, 1], **main)
