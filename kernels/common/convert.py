"""Element types of the operands, and packed conversions of accumulator fragments to the 16-bit ones."""

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float16, Float32, Int8, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T

ELEMENT = {"fp16": Float16, "bf16": BFloat16}


class Elements(NamedTuple):
    """Types of Q and K, of V and P, of out, and of the accumulator of Q K^T."""

    qk: Any
    v: Any
    o: Any
    score: Any


def elements_of(traits):
    if traits.dtype in ELEMENT:
        same = ELEMENT[traits.dtype]
        return Elements(same, same, same, Float32)
    qk, score = (Int8, Int32) if traits.int8_qk else (Float8E4M3FN, Float32)
    return Elements(qk, Float8E4M3FN, Float16 if traits.fp16_out else BFloat16, score)


_PACK = {Float16: "cvt.rn.f16x2.f32", BFloat16: "cvt.rn.bf16x2.f32"}


def pack2(lo, hi, dtype):
    """Two floats as one 32-bit word of two `dtype` values, `lo` in the low half."""
    return Int32(
        llvm.inline_asm(
            T.i32(),
            [Float32(hi).ir_value(), Float32(lo).ir_value()],
            _PACK[dtype] + " $0, $1, $2;",
            "=r,f,f",
            has_side_effects=False,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
        )
    )


def to_half(src, dst):
    """Float fragment `src` into the 16-bit fragment `dst` of the same element order.

    Why by hand: element-wise conversion of a fragment does not always become the packed instruction.
    """
    words = cute.recast_tensor(dst, Int32)
    for i in range(cute.size(words)):
        words[i] = pack2(src[2 * i], src[2 * i + 1], dst.element_type)
