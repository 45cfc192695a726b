"""The rotation of Q and K before they become codes: random signs, then Walsh-Hadamard, on rows spread over lanes.

A row of `headdim` values lies in neighbouring lanes, PER_LANE of them in each: an octet of the lower half of a block of
the transform and its counterpart in the upper half. The order of additions is that of flashattn_hopper/quantize.py, so
the results agree bit by bit.

Why halves: the last level then adds and subtracts values of one thread, and the larger of |a + b| and |a - b| is
|a| + |b|. The product with block^-0.5, where that is a power of two, is left to the scale.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from .eight_bit import bits_of, float_of, magnitude, sum_of_magnitudes

PER_LANE, OCTET = 16, 8


def sign_bit(i: int) -> int:
    """1 where coordinate i turns its sign: the lowest bit of MurmurHash3's 32-bit finalizer of i + 1."""
    h = i + 1
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = ((h ^ (h >> shift)) * factor) & 0xFFFFFFFF
    return (h ^ (h >> 16)) & 1


def columns_of(block, lane):
    """First columns of the two octets of a lane, where a row is transformed in blocks of `block` columns."""
    inner = lane % (block // PER_LANE)
    lower = (lane - inner) * PER_LANE + inner * OCTET
    return lower, lower + block // 2


@dataclass(frozen=True)
class NoRotation:
    block: int = PER_LANE  # neighbouring octets
    factor: float = 1.0

    def apply(self, x):
        top = magnitude(x[0])
        for e in range(1, PER_LANE):
            top = cutlass.max(top, magnitude(x[e]))
        return top


@dataclass(frozen=True)
class Rotation:
    """In blocks of the largest power of two that divides headdim."""

    block: int
    factor: float  # what `apply` leaves to the scale: a power of two
    signs: cute.Tensor  # +1 or -1 of this lane's coordinates
    turns: tuple  # for each exchange between lanes, +1 in the lane of the upper half and -1 in that of the lower

    @classmethod
    def of(cls, headdim, lane):
        block = headdim & -headdim
        words = []  # one for each lane
        for i in range(headdim // PER_LANE):
            octets = enumerate(columns_of(block, i))
            words.append(sum(sign_bit(first + e) << OCTET * o + e for o, first in octets for e in range(OCTET)))
        word = Int32(words[0])
        for i, bits in enumerate(words[1:], 1):
            word = Int32(cutlass.select_(lane == i, Int32(bits), word))
        signs = cute.make_rmem_tensor(PER_LANE, Float32)
        for e in range(PER_LANE):
            signs[e] = float_of((word << 31 - e) & -0x80000000 | 0x3F800000)
        exchanges = (block // PER_LANE).bit_length() - 1
        turns = tuple(1.0 - (((lane >> i) & 1) * 2).to(Float32) for i in range(exchanges))
        return cls(block, block**-0.5 if exchanges % 2 == 0 else 1.0, signs, turns)

    def apply(self, x):
        """In place, all lanes of a warp. The largest magnitude of this lane, as `magnitude` gives it."""
        for e in range(0, PER_LANE, 2):
            # Products with signs are exact: fused or not, the sums are the same.
            first = x[e] * self.signs[e]
            x[e], x[e + 1] = first + x[e + 1] * self.signs[e + 1], first - x[e + 1] * self.signs[e + 1]
        for width in (2, 4):
            for e in range(PER_LANE):
                if not e & width:
                    upper, lower = x[e], x[e + width]
                    x[e], x[e + width] = upper + lower, upper - lower
        for i, turn in enumerate(self.turns):
            for e in range(PER_LANE):
                x[e] = cute.arch.shuffle_sync_bfly(x[e], offset=1 << i) + x[e] * turn
        rest = 1.0 if self.factor != 1.0 else self.block**-0.5
        top = Int32(0)
        for e in range(OCTET):
            upper, lower = x[e], x[e + OCTET]
            top = cutlass.max(top, bits_of(sum_of_magnitudes(upper, lower)))
            x[e], x[e + OCTET] = upper + lower, upper - lower
            if rest != 1.0:
                x[e], x[e + OCTET] = x[e] * rest, x[e + OCTET] * rest
        # Rounding keeps order: the largest product is that of the largest.
        return bits_of(float_of(top) * rest) if rest != 1.0 else top
