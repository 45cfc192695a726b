"""What sm90.forward_fp8 has for exponentials: in some blocks of 16 keys a polynomial in halves."""

import torch

from flashattn_hopper import reference_fp8
from flashattn_hopper.kernels.sm90.specs import FORWARD_FP8
from flashattn_hopper.spec.problem import FWD, Traits

KEYS = 16  # of a block


def traits_of(q, k, v, band):
    """What is compiled for BlockScaled operands."""
    words = {"int8_qk": q.data.dtype == torch.int8, "fp16_out": q.dtype == torch.float16}
    return FORWARD_FP8.compiled(Traits(FWD, "fp8", q.shape[3], v.shape[3], band.kind, **words))


def emulate(q, k, v, band, scale):
    """reference_fp8.forward with the exponentials of the kernel that the table has for these operands."""
    tile = FORWARD_FP8.tiles.find(traits_of(q, k, v, band), k.shape[1])
    return reference_fp8.forward(q, k, v, band, scale, exp2=exp2_of(tile))


def exp2_of(tile):
    """`exp2` of reference_fp8.forward, as a kernel of that FwdTile computes it."""

    def exp2(x):
        block = torch.arange(x.shape[-1], device=x.device) // KEYS
        by_polynomial = block * tile.polynomial % 8 < tile.polynomial
        return torch.where(by_polynomial, exp2_halves(x), x.exp2())

    return exp2


def exp2_halves(x):
    """kernels/common/eight_bit.py: 2^n p(1 + f), x = n + f in steps of 2^-10, clamped to -15 ... 16; NaN becomes 0."""
    fixed = ((x + 15) / 31).nan_to_num(0.0, 1.0, 0.0).clamp(0, 1).mul(31 * 1024).round().int()
    g = (fixed & 1023).double() / 1024 + 1
    half = lambda bits: torch.tensor(bits, dtype=torch.int16).view(torch.float16).double().item()
    rounded = lambda y: y.to(torch.float16)  # of a double, which holds a product of halves and a sum
    p = rounded(rounded(half(0x3546) * g + half(0x1E19)).double() * g + half(0x3952))
    bits = fixed - rounded(g).view(torch.int16).int() + p.view(torch.int16).int()
    return bits.short().view(torch.float16).float()
