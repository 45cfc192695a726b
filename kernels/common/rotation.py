"""The rotation of Q and K before they become codes: random signs, then Walsh-Hadamard, on rows spread over lanes.

A row of `headdim` values lies in neighbouring lanes, PER_LANE of them in each. The order of additions is that of
flashattn_hopper/quantize.py, so the results agree bit by bit.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

PER_LANE = 16


def sign_bit(i: int) -> int:
    """1 where coordinate i turns its sign: the lowest bit of MurmurHash3's 32-bit finalizer of i + 1."""
    h = i + 1
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = ((h ^ (h >> shift)) * factor) & 0xFFFFFFFF
    return (h ^ (h >> 16)) & 1


@dataclass(frozen=True)
class NoRotation:
    def apply(self, x): ...


@dataclass(frozen=True)
class Rotation:
    """In blocks of the largest power of two that divides headdim."""

    headdim: int
    signs: cute.Tensor  # +1 or -1 of this lane's coordinates
    turns: tuple  # for each exchange between lanes, +1 in the lane of the upper half and -1 in that of the lower

    @classmethod
    def of(cls, headdim, lane):
        block = headdim & -headdim
        words = [
            sum(sign_bit(first + e) << e for e in range(PER_LANE)) for first in range(0, headdim, PER_LANE)
        ]  # one for each lane
        word = Int32(words[0])
        for i, bits in enumerate(words[1:], 1):
            word = Int32(cutlass.select_(lane == i, Int32(bits), word))
        signs = cute.make_rmem_tensor(PER_LANE, Float32)
        for e in range(PER_LANE):
            signs[e] = 1.0 - (((word >> e) & 1) * 2).to(Float32)
        exchanges = max(block // PER_LANE, 1).bit_length() - 1
        turns = tuple(1.0 - (((lane >> i) & 1) * 2).to(Float32) for i in range(exchanges))
        return cls(headdim, signs, turns)

    def apply(self, x):
        """In place. All lanes of a warp."""
        block = self.headdim & -self.headdim
        for e in range(PER_LANE):
            x[e] = x[e] * self.signs[e]
        width = 1
        while width < min(block, PER_LANE):
            for e in range(PER_LANE):
                if not e & width:
                    upper, lower = x[e], x[e + width]
                    x[e], x[e + width] = upper + lower, upper - lower
            width *= 2
        for i, turn in enumerate(self.turns):
            for e in range(PER_LANE):
                x[e] = cute.arch.shuffle_sync_bfly(x[e], offset=1 << i) + x[e] * turn
        for e in range(PER_LANE):
            x[e] = x[e] * (block**-0.5)
