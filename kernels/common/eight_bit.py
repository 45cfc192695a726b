"""8-bit codes: exact quotients, packed conversions, and magnitudes that keep NaN."""

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T

LARGEST = {"e4m3": 448.0, "int8": 127.0}

# Of exp2_halves: x + LOWEST is taken from 0 to SPAN.
LOWEST, SPAN = 15.0, 31.0
HIGH, ONES = 0x4B40, 0x3C003C00
TINY = 2.0**-100  # a smaller scale counts as 1, so that the product of two stays a normal float


def _asm(kind, text, constraints, *args):
    return llvm.inline_asm(
        kind,
        [arg.ir_value() for arg in args],
        text,
        constraints,
        has_side_effects=False,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


def divide(a, b):
    """a / b as IEEE rounds it. The compiler's own may be approximate."""
    return Float32(_asm(T.f32(), "div.rn.f32 $0, $1, $2;", "=f,f,f", Float32(a), Float32(b)))


def reciprocal(x):
    """1 / x as IEEE rounds it, where neither is below 2^-126 or infinite: one Newton step from the approximate one."""
    text = (
        "{ .reg .f32 r, e, n; rcp.approx.ftz.f32 r, $1; neg.f32 n, $1; fma.rn.f32 e, n, r, 0f3F800000; "
        "fma.rn.f32 $0, e, r, r; }"
    )
    return Float32(_asm(T.f32(), text, "=f,f", Float32(x)))


def sum_of_magnitudes(a, b):
    """|a| + |b|, which is the larger of |a + b| and |a - b|, all of them rounded."""
    text = "{ .reg .f32 a, b; abs.f32 a, $1; abs.f32 b, $2; add.rn.f32 $0, a, b; }"
    return Float32(_asm(T.f32(), text, "=f,f,f", Float32(a), Float32(b)))


def multiply(a, b):
    """a * b, rounded before anything is added to it."""
    return Float32(_asm(T.f32(), "mul.rn.f32 $0, $1, $2;", "=f,f,f", Float32(a), Float32(b)))


def quotient(x, d, r):
    """x / d as IEEE rounds it, from r = reciprocal(d): three operations for each of many x.

    A product with the rounded reciprocal, corrected once by its remainder, is the rounded quotient (Markstein 1990) as
    long as the remainder does not underflow: here for codes that are not 0, from d = 2^-92 on. The remainder is taken
    with its sign turned, which keeps the sign of a zero.
    """
    text = (
        "{ .reg .f32 y, e, n; mul.rn.f32 y, $1, $3; neg.f32 n, $1; fma.rn.f32 e, y, $2, n; neg.f32 e, e; "
        "fma.rn.f32 $0, e, $3, y; }"
    )
    return Float32(_asm(T.f32(), text, "=f,f,f,f", Float32(x), Float32(d), Float32(r)))


def pack4_e4m3(a, b, c, d):
    """Four floats as e4m3 codes in one word, `a` in the lowest byte. Saturates; NaN stays NaN."""
    text = (
        "{ .reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1; cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3; "
        "mov.b32 $0, {lo, hi}; }"
    )
    return Int32(_asm(T.i32(), text, "=r,f,f,f,f", *map(Float32, (a, b, c, d))))


def pack4_int8(a, b, c, d):
    """Four floats as int8 codes in one word, ties to even. Saturates; NaN becomes 0."""
    text = (
        "{ .reg .s32 a, b, c, d, h; cvt.rni.s32.f32 a, $1; cvt.rni.s32.f32 b, $2; cvt.rni.s32.f32 c, $3; "
        "cvt.rni.s32.f32 d, $4; cvt.pack.sat.s8.s32.b32 h, d, c, 0; cvt.pack.sat.s8.s32.b32 $0, b, a, h; }"
    )
    return Int32(_asm(T.i32(), text, "=r,f,f,f,f", *map(Float32, (a, b, c, d))))


def pack4_halves(low, high):
    """Two words of two halves as four e4m3 codes in one word, in that order. Saturates."""
    text = (
        "{ .reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f16x2 lo, $1; cvt.rn.satfinite.e4m3x2.f16x2 hi, $2; "
        "mov.b32 $0, {lo, hi}; }"
    )
    return Int32(_asm(T.i32(), text, "=r,r,r", Int32(low), Int32(high)))


def add_halves(a, b):
    """Of two words of two halves."""
    return Int32(_asm(T.i32(), "add.rn.f16x2 $0, $1, $2;", "=r,r,r", Int32(a), Int32(b)))


def fixed_point(x, slope, offset, high):
    """An operand of exp2_halves, `high` the second one, from slope * x + offset: what is 2^ of, plus LOWEST, by SPAN.

    A saturating addition is the clamp. NaN becomes 0, as 2^-inf is.
    """
    text = "fma.rn.sat.f32 $0, $1, $2, $3;"
    part = Float32(_asm(T.f32(), text, "=f,f,f,f", *map(Float32, (x, slope, offset))))
    return part * (1024 * SPAN) + (1.5 * 2.0**23 - HIGH * high)


def exp2_halves(low, high, one):
    """2^x of two x from -15 to 16 as two halves in a word, without the pipe of exponentials: relative error 2.9e-3.

    `low` is the float 1.5 * 2^23 + 1024 (x + LOWEST), `high` the same less HIGH: the integer (high << 16) + low has
    two halves in it, worth 2^n (1 + f), x = n + f. In their place: 2^n p(1 + f) with p of degree two and
    p(1) = 1 exactly, put together by one integer addition. `one` is ONES in a register, where it costs nothing.
    """
    text = (
        "{ .reg .b32 w, g, p, c; mad.lo.u32 w, $2, 65536, $1; lop3.b32 g, w, 0x03FF03FF, $3, 0xEA; "
        "mov.b32 p, 0x35463546; mov.b32 c, 0x1E191E19; fma.rn.f16x2 p, p, g, c; "
        "mov.b32 c, 0x39523952; fma.rn.f16x2 p, p, g, c; sub.u32 w, w, g; add.u32 $0, w, p; }"
    )
    return Int32(_asm(T.i32(), text, "=r,r,r,r", bits_of(low), bits_of(high), Int32(one)))


PACK4 = {"e4m3": pack4_e4m3, "int8": pack4_int8}


def bits_of(x):
    return Int32(llvm.bitcast(T.i32(), Float32(x).ir_value()))


def float_of(bits):
    return Float32(llvm.bitcast(T.f32(), Int32(bits).ir_value()))


def half_of(word, i, dtype):
    """Float32 of the low (0) or high (1) one of the two `dtype` values in a word.

    Why by hand: 16-bit values on their own take a register each.
    """
    if dtype is Float16:
        text = "{ .reg .b16 h[2]; mov.b32 {h0, h1}, $1; cvt.f32.f16 $0, h" + f"{i}; }}"
        return Float32(_asm(T.f32(), text.replace("h[2]", "h<2>"), "=f,r", Int32(word)))
    return float_of(word << 16 if i == 0 else word & -65536)


def magnitude(x):
    """|x| as an integer that orders as |x| does, with infinity above every number and NaN above that.

    Why: a maximum of floats drops NaN, and a saturating conversion hides an infinity.
    """
    return bits_of(x) & 0x7FFFFFFF


def max_halves(a, b):
    """The larger of each half of two words of two 16-bit magnitudes."""
    return Int32(_asm(T.i32(), "max.u16x2 $0, $1, $2;", "=r,r,r", Int32(a), Int32(b)))


def scale_of(top, largest, factor=1.0):
    """The scale of a block from its largest magnitude over `factor`, as `magnitude` gives it. NaN where that is not
    finite."""
    # Why not a division: an exact quotient of what is not tiny is all that counts, by a number known to the compiler.
    scale = quotient(float_of(top) * factor, Float32(largest), Float32(1.0 / largest))
    scale = cutlass.select_(scale < TINY, Float32(1.0), scale)
    return Float32(cutlass.select_(top < 0x7F800000, scale, float_of(Int32(0x7FC00000))))


def max_over(x, lanes):
    """Maximum of an integer over a group of neighbouring lanes, a power of two of them."""
    for bit in range(lanes.bit_length() - 1):
        x = cutlass.max(x, cute.arch.shuffle_sync_bfly(x, offset=1 << bit))
    return x
