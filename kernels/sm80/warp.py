"""Instructions of one warp: ldmatrix, mma.sync, and a vote of the whole thread block.

Fragments are plain registers. Of a 16 x 8n accumulator a thread holds rows `lane // 4` and 8 below, and of every 8
columns the pair `2 * (lane % 4)`: in fours (row, row, row + 8, row + 8), the order of kernels/common/mask.py. Rounded
and packed, four words of two such fours are the A operand of the next product.
"""

import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T

_PTX = {Float16: "f16", BFloat16: "bf16"}


def _asm(kinds, operands, text, constraints, side_effects):
    """Inline PTX with several results: one for each MLIR type in `kinds`."""
    result = llvm.inline_asm(
        llvm.StructType.get_literal(kinds),
        [x.ir_value() for x in operands],
        text,
        constraints,
        has_side_effects=side_effects,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    return [llvm.extractvalue(kind, result, [i]) for i, kind in enumerate(kinds)]


def ldmatrix(address, transpose=False):
    """Four 8 x 8 matrices of 16-bit elements; lane i lends the shared address of row i % 8 of matrix i // 8.

    Why side effects: without them the compiler may move the load across a barrier.
    """
    form = ".trans" if transpose else ""
    words = _asm(
        [T.i32()] * 4,
        [Int32(address)],
        f"ldmatrix.sync.aligned.m8n8.x4{form}.shared.b16 {{$0, $1, $2, $3}}, [$4];",
        "=r,=r,=r,=r,r",
        True,
    )
    return [Int32(word) for word in words]


def mma(dtype, acc, a, b):
    """acc + a b for a (16, 16), b (16, 8): four float32, four and two words of `dtype` pairs."""
    kind = _PTX[dtype]
    out = _asm(
        [T.f32()] * 4,
        [*map(Int32, a), *map(Int32, b), *map(Float32, acc)],
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
        "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
        False,
    )
    return [Float32(x) for x in out]


def accumulate(dtype, acc, column8, a, b):
    """mma into the fragment `acc`, at its columns `8 * column8`."""
    at = range(4 * column8, 4 * column8 + 4)
    for i, value in zip(at, mma(dtype, [acc[i] for i in at], a, b)):
        acc[i] = value


def add_to_memory(address, values, vector):
    """Add four floats to global memory, without waiting for it: neighbours where `vector` (archs since Hopper),
    otherwise 128 bytes apart, so that the lanes of a warp are neighbours."""
    add = "red.relaxed.gpu.global.add"
    scalar = "".join(f"{add}.f32 [$0 + {128 * i}], ${i + 1}; " for i in range(4))
    llvm.inline_asm(
        None,
        [Int64(address).ir_value(), *[Float32(v).ir_value() for v in values]],
        f"{add}.v4.f32 [$0], {{$1, $2, $3, $4}};" if vector else scalar,
        "l,f,f,f,f",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


def any_of(flag):
    """All threads of the block agree whether `flag` is set in any of them: a barrier that ORs."""
    vote = Int32(
        llvm.inline_asm(
            T.i32(),
            [Int32(flag).ir_value()],
            "{ .reg .pred p, q; setp.ne.b32 p, $1, 0; barrier.cta.red.or.pred q, 0, p; selp.b32 $0, 1, 0, q; }",
            "=r,r",
            has_side_effects=True,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
        )
    )
    return cute.arch.make_warp_uniform(vote)
