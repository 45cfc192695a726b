"""sm90.backward: dQ, dK, dV for Hopper, FP16 and BF16, in up to three launches of one call.

    Ends.prepare                delta, lse in log2 units; zeroes the float32 dQ
    KeyGradient                 dK, dV, and the sums of dQ in memory
    Ends.finish                 dQ in the operands' dtype; or, where it is not summed,
    QueryGradient               dQ in a kernel of its own, which needs no sums in memory and repeats bit by bit

Sums in memory repeat bit by bit where they are done in turn (sum_order.py).

A launch begins while the one before it ends (programmatic dependent launch) and waits where it needs its results.
"""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.runtime import make_fake_stream

from flashattn_hopper.spec.tile import ROW_PAD as PAD

from ..common.convert import ELEMENT
from ..common.operands import BwdOperands
from ..common.tensors import at, fake_operand
from .backward_ends import THREADS, Ends
from .key_gradient import KeyGradient
from .key_gradient_wide import WideKeyGradient
from .query_gradient import QueryGradient
from .tensors import SLAB


class Backward:
    def __init__(self, traits, tile):
        self.traits, self.tile = traits, tile
        self.dtype = ELEMENT[traits.dtype]
        self.ends = Ends(traits, tile)
        self.keys = (WideKeyGradient if tile.tile_n == SLAB else KeyGradient)(traits, tile)
        self.queries = None if tile.summed else QueryGradient(traits, tile)

    def arguments(self):
        B, Sq, Sk, Hq, Hk, D, Dv = [cute.sym_int() for _ in range(7)]
        operand = lambda *shape: fake_operand(self.dtype, B, *shape)
        window = self.traits.mask == "window"
        operands = BwdOperands(
            q=operand(Sq, Hq, D),
            k=operand(Sk, Hk, D),
            v=operand(Sk, Hk, Dv),
            do=operand(Sq, Hq, Dv),
            o=Int64(0),
            lse=Int64(0),
            dlse=Int64(0),
            dq=Int64(0),
            dk=Int64(0),
            dv=Int64(0),
            workspace=Int64(0),
            softmax_scale=Float32(1.0),
            window_left=Int32(0) if window else None,
            window_right=Int32(0) if window else None,
            num_ctas=Int32(1) if self.tile.kv_stages == 2 else None,
        )
        return operands, make_fake_stream(use_tvm_ffi_env_stream=True)

    @cute.jit
    def __call__(self, ops: BwdOperands, stream: cuda.CUstream):
        q, k, v, do = [
            cute.make_tensor(x.iterator, cute.select(x.layout, mode=[1, 3, 2, 0]))
            for x in (ops.q, ops.k, ops.v, ops.do)
        ]
        seqlen_q, _, heads, batch = q.shape
        seqlen_k, _, kv_heads, _ = k.shape
        d, d_v = [cute.assume(x.shape[1], divby=8) for x in (k, v)]

        def contiguous(address, rows, heads, width):
            row = Int64(heads) * width
            layout = cute.make_layout((rows, width, heads, batch), stride=(row, 1, Int64(width), rows * row))
            return cute.make_tensor(at(self.dtype, address, 16), layout)

        o, dq = contiguous(ops.o, seqlen_q, heads, d_v), contiguous(ops.dq, seqlen_q, heads, d)
        dk, dv = contiguous(ops.dk, seqlen_k, kv_heads, d), contiguous(ops.dv, seqlen_k, kv_heads, d_v)
        rows = Int64(batch) * heads * (cute.ceil_div(seqlen_q, PAD) * PAD)
        dq_sum = ops.workspace
        stats = dq_sum + rows * (4 * self.traits.headdim if const_expr(self.queries is None) else 0)
        counters = stats + rows * 8
        ticket = counters + rows * (4 if const_expr(self.tile.in_turn) else 0)

        scalars = ops.softmax_scale, ops.window_left, ops.window_right
        ends = {"grid": self.ends.grid(seqlen_q, heads, batch), "block": [THREADS, 1, 1], "stream": stream}
        self.ends.prepare(o, do, ops.lse, ops.dlse, stats, dq_sum, ticket, counters).launch(**ends)
        if const_expr(self.tile.wanted != "dq"):
            self.keys.launch(q, k, v, do, dk, dv, (stats, dq_sum, ticket, counters), scalars, ops.num_ctas, stream)
        if const_expr(self.queries is None):
            self.ends.finish(dq, ops.softmax_scale, dq_sum).launch(**ends, use_pdl=True)
        elif const_expr(self.tile.wanted != "dkdv"):
            self.queries.launch(q, k, v, do, dq, stats, *scalars, stream)
