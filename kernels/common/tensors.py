"""Operands as kernels of every arch take them: what the compiler is told of them, their band, addresses."""

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.cute.typing import AddressSpace

from flashattn_hopper.spec.mask import Band

from .operands import FwdOperands
from .work import again


def band_of(mask, left, right):
    """The band of a compile-time mask kind; `left` and `right` are the run-time edges of a window."""
    return {"full": Band(), "causal": Band(None, 0)}.get(mask) or Band(left, right)


def fake_operand(dtype, batch, seqlen, heads, headdim):
    """(B, S, H, D) for the compiler: any extents, a contiguous last dimension, other strides multiples of 16 bytes."""
    strides = (*(cute.sym_int64(divisibility=128 // dtype.width) for _ in range(3)), 1)
    return make_fake_tensor(dtype, (batch, seqlen, heads, headdim), strides, assumed_align=16)


def forward_arguments(dtype, mask, dynamic):
    """Fake operands of a forward, and its stream. One compile serves every batch, length, head count and 16-byte
    stride."""
    B, Sq, Sk, Hq, Hk, D, Dv = [cute.sym_int() for _ in range(7)]
    window = mask == "window"
    operands = FwdOperands(
        q=fake_operand(dtype, B, Sq, Hq, D),
        k=fake_operand(dtype, B, Sk, Hk, D),
        v=fake_operand(dtype, B, Sk, Hk, Dv),
        o=Int64(0),
        lse=Int64(0),
        softmax_scale=Float32(1.0),
        window_left=Int32(0) if window else None,
        window_right=Int32(0) if window else None,
        num_ctas=Int32(1) if dynamic else None,
        tickets=Int64(0) if dynamic else None,
    )
    return operands, make_fake_stream(use_tvm_ffi_env_stream=True)


def at(dtype, address, align):
    """A pointer into global memory from an address among the operands."""
    return cute.make_ptr(dtype, address, AddressSpace.gmem, assumed_align=align)


def operand_again(tensor):
    """The same tensor with extents and strides that the compiler does not know: see `again`."""
    strides = (*map(again, tensor.stride[:-1]), 1)
    return cute.make_tensor(tensor.iterator, cute.make_layout((*map(again, tensor.shape),), stride=strides))
