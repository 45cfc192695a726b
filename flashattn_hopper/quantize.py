"""FP8 operands: 8-bit codes with their scales, and the recipe that makes them from 16-bit tensors.

    k <- k - mean(k)                       smooth K: the offset that all keys share moves no softmax weight
    q, k <- H (signs * q), H (signs * k)   the same rotation of both: q k^T stays, an outlier spreads over the head
    codes = round(x / descale)             descale = amax / 448: per token of q, per 128 keys of k, per head of v

e4m3 is a float, so its error is relative and a finer scale alone gains nothing on values in range. What hurts is one
large coordinate, whose rounding no scale makes small, and an offset common to all keys; the two steps before the cast
remove both.

Plain PyTorch on any device, in float32 and in a fixed order: sums of the rotation are butterflies, not a matrix product
whose order would be the library's. Nothing loops over tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .buffers import TILE
from .spec.problem import int8_by_default

E4M3 = torch.float8_e4m3fn
QK_DTYPES = {"fp8": E4M3, "int8": torch.int8}
LARGEST = {E4M3: 448.0, torch.int8: 127.0}
_TINY = 2.0**-100  # Why: the product of two scales must stay a normal float32


def default_qk_dtype(headdim: int) -> str:
    """Codes of q and k that precision="fp8" takes."""
    return "int8" if int8_by_default(headdim) else "fp8"


@dataclass(frozen=True, eq=False)
class BlockScaled:
    """A tensor as 8-bit codes and scales: x = codes * descale, then the rotation undone, then `mean` added.

    Shapes: data (B, S, H, D); descale (B, H, ceil(S / rows)), or (B, H, 1) where `rows` is None; mean (B, H, D);
    logit_offset (B, Hq, Sq). B batch, S sequence length, H heads, D head dimension.

    Args:
        data: codes, torch.float8_e4m3fn or (q and k) torch.int8.
        descale: float32, what codes are multiplied by. NaN marks a block that held inf or NaN.
        rows: consecutive tokens that share a scale; None is all of a head. `hopper_attention` takes any for q,
            multiples of 128 or None for k, None for v.
        dtype: what it was made from: dtype of `dequantize` and of attention's output.
        rotated: `data` is in the frame of `rotate`. q and k must agree.
        mean: float32, of k: the mean over the sequence that was subtracted before the rotation.
        logit_offset: float32, of q: q . mean(k) from the unrounded q, which the scores lack; lse gets it back.

    Codes carry no gradient. To train, pass 16-bit tensors with precision="fp8".
    """

    data: torch.Tensor
    descale: torch.Tensor
    rows: int | None = None
    dtype: torch.dtype = torch.bfloat16
    rotated: bool = False
    mean: torch.Tensor | None = None
    logit_offset: torch.Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    @property
    def device(self) -> torch.device:
        return self.data.device


@torch.no_grad()
def quantize_fp8(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    hadamard: bool = True,
    smooth_k: bool = True,
    qk_dtype: str | None = None,
) -> tuple[BlockScaled, BlockScaled, BlockScaled]:
    """q, k, v as FP8 operands of one `hopper_attention` call; the defaults are what precision="fp8" does inside.

    Shapes: q (B, Sq, Hq, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv), Hq a multiple of Hk, any floating dtypes; the results
    have the same shapes. Scales: one per token and head of q, one per 128 keys and head of k, one per head of v.

    Args:
        hadamard: rotate q and k (`rotate`).
        smooth_k: subtract the mean of k over the sequence, per batch entry and head. Exact but for rounding; lse gets
            it back. False where the result for a query must not depend on later keys in any bit: mean, scale of a
            128-key tile and scale of v see the whole sequence, and through rounding alone move what a causal query
            gets.
        qk_dtype: codes of q and k. "int8" has an absolute error, which after the rotation is the smaller one, and its
            products are exact; "fp8" (e4m3) has a relative one, which without the rotation outliers want. Default:
            "fp8" up to headdim 192 (the kernel is 2 to 13 % faster at 64 and 128), and "int8" beyond.

    A block of zeros gets scale 1 and codes 0, and so does one whose scale would be below 2^-100. A block with inf or
    NaN (after the rotation: a row of q; with smooth_k a whole head of k, else a tile; a head of v) gets the scale NaN:
    its outputs are NaN, where a saturating cast would hide an inf in a plausible number.

    Raises:
        TypeError: a dtype that is not floating point. ValueError: shapes that do not fit, or an unknown qk_dtype.

    Example:
        >>> import torch
        >>> from flashattn_hopper import hopper_attention, quantize_fp8
        >>> q, k, v = torch.randn(3, 1, 200, 2, 64, dtype=torch.bfloat16)
        >>> codes = quantize_fp8(q, k, v)
        >>> [tuple(x.descale.shape) for x in codes]
        [(1, 2, 200), (1, 2, 2), (1, 2, 1)]
        >>> torch.equal(hopper_attention(*codes), hopper_attention(q, k, v, precision="fp8"))
        True

    Source: Shah et al., FlashAttention-3 (arXiv 2407.08608), incoherent processing; Zhang et al., SageAttention
    (arXiv 2410.02367), smoothing of K.
    """
    _check(q, k, v, qk_dtype)
    code_dtype = QK_DTYPES[qk_dtype or default_qk_dtype(q.shape[3])]
    with torch.autocast(q.device.type if q.device.type != "meta" else "cpu", enabled=False):
        query, key = q.float(), k.float()
        mean = offset = None
        if smooth_k:
            # Trap: torch's mean of no keys is NaN.
            mean = key.sum(1) / max(k.shape[1], 1)
            key = key - mean[:, None]
            offset = _logit_offset(query, mean)
        if hadamard:
            query, key = rotate(query), rotate(key)
        return (
            BlockScaled(*_quantized(query, 1, code_dtype), 1, q.dtype, hadamard, logit_offset=offset),
            BlockScaled(*_quantized(key, TILE, code_dtype), TILE, k.dtype, hadamard, mean=mean),
            BlockScaled(*_quantized(v.float(), None, E4M3), None, v.dtype),
        )


@torch.no_grad()
def dequantize(x: BlockScaled) -> torch.Tensor:
    """The tensor that `x` stands for, (B, S, H, D) in `x.dtype`: rotation undone, mean added."""
    values = decode(x)
    if x.rotated:
        values = unrotate(values)
    if x.mean is not None:
        values = values + x.mean[:, None]
    return values.to(x.dtype)


def decode(x: BlockScaled) -> torch.Tensor:
    """codes * descale in float32, contiguous, in the frame that attention computes in: rotated, without the mean."""
    return x.data.float().contiguous() * _per_token(x.descale, x.rows, x.shape[1])


def decode_as(x: BlockScaled, dtype: torch.dtype) -> torch.Tensor:
    """`decode`, rounded to a 16-bit dtype, without a tensor of float32 in between: every code is exact in 16 bits.

    Trap: float16 ends at 65504, and the rotation may put values beyond it that were not.
    """
    return x.data.to(dtype).contiguous().mul_(_per_token(x.descale, x.rows, x.shape[1]))


def row_scales(q: BlockScaled) -> torch.Tensor:
    """A scale for each token of q, (B, Hq, Sq), however many tokens share one."""
    return _spread(q.descale, q.rows, q.shape[1])


def tile_scales(k: BlockScaled) -> torch.Tensor:
    """A scale for each 128 keys of k, (B, Hk, tiles), however many keys share one."""
    return _spread(k.descale, k.rows and k.rows // TILE, -(-k.shape[1] // TILE))


def _spread(descale, rows, count):
    if rows is None:
        return descale.expand(-1, -1, count)
    return descale if rows == 1 else descale.repeat_interleave(rows, -1)[..., :count]


def restore_lse(lse: torch.Tensor, q: BlockScaled, softmax_scale: float) -> torch.Tensor:
    """lse (B, Hq, Sq) of the scores that codes give -> lse of the scores with the mean of k.

    Rows without keys keep -inf, whatever the offset is.
    """
    if q.logit_offset is None:
        return lse
    return torch.where(lse == -math.inf, lse, lse + q.logit_offset * softmax_scale)


# The rotation


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Random signs, then the orthonormal Walsh-Hadamard transform along the last dimension.

    Where headdim is no power of two, the transform works in blocks of the largest one that divides it: 96 is three
    blocks of 32, 192 three of 64. The same map for q and k, so that q . k stays what it was.
    """
    return _hadamard(x * _signs(x))


def unrotate(x: torch.Tensor) -> torch.Tensor:
    """The inverse of `rotate`, which is also its transpose: what turns gradients back."""
    return _hadamard(x) * _signs(x)


def rotation_matrix(headdim: int, dtype: torch.dtype, device) -> tuple[torch.Tensor, float]:
    """(M, c) with `unrotate(x) == x @ M * c`. M holds 1, -1 and 0, exact in every dtype.

    Why: one product by a library is one pass over memory, where the butterflies are one for each level. Its order of
    additions is the library's, so codes are not made with it.
    """
    turns = unrotate(torch.eye(headdim, device=device))
    scale = (headdim & -headdim) ** -0.5
    return (turns / scale).round().to(dtype), scale


def _hadamard(x):
    headdim = x.shape[-1]
    block = headdim & -headdim
    width = 1
    while width < block:
        upper, lower = x.unflatten(-1, (-1, 2, width)).unbind(-2)
        x = torch.stack((upper + lower, upper - lower), -2).flatten(-3)
        width *= 2
    return x * block**-0.5


def _signs(x):
    """+1 or -1 for each of headdim coordinates: the lowest bit of MurmurHash3's 32-bit finalizer of 1, 2, 3, ...

    Why a formula: no generator, no table and no copy to the device; a kernel computes the same signs.
    """
    mixed = torch.arange(1, x.shape[-1] + 1, device=x.device)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        mixed = ((mixed ^ (mixed >> shift)) * factor) & 0xFFFFFFFF
    mixed = mixed ^ (mixed >> 16)
    return 1 - 2 * (mixed & 1).to(x.dtype)


# Codes and scales


def _quantized(x, rows, code_dtype):
    """(codes, descale) of float32 x (B, S, H, D)."""
    largest = LARGEST[code_dtype]
    descale = _descale(_peaks(x, rows), largest)
    # Trap: a division and not a product with 1 / descale, which rounds differently and may be inf.
    scaled = x / _per_token(descale, rows, x.shape[1])
    if code_dtype == torch.int8:
        scaled = scaled.nan_to_num(0.0).round()  # NaN has no code; the scale carries it
    return scaled.clamp(-largest, largest).to(code_dtype).contiguous(), descale


def _peaks(x, rows):
    """Largest magnitudes (B, H, n) of blocks of `rows` tokens. amax hands NaN on."""
    seqlen = x.shape[1]
    rows, blocks = (max(seqlen, 1), 1) if rows is None else (rows, -(-seqlen // rows))
    peaks = x.abs().amax(-1).transpose(1, 2)
    return F.pad(peaks, (0, blocks * rows - seqlen)).unflatten(-1, (blocks, rows)).amax(-1)


def _descale(peaks, largest):
    descale = peaks / largest
    descale = torch.where(descale < _TINY, 1.0, descale)
    return torch.where(descale.isfinite(), descale, math.nan)


def _per_token(descale, rows, seqlen):
    """descale (B, H, n) as a factor of (B, S, H, D)."""
    if rows is not None and rows > 1:
        descale = descale.repeat_interleave(rows, -1)[..., :seqlen]
    return descale.transpose(1, 2).unsqueeze(-1)


def _logit_offset(query, mean):
    """q . mean(k) of the kv head of each query head: (B, Hq, Sq)."""
    heads_kv = mean.shape[1]
    group = query.shape[2] // max(heads_kv, 1)
    # Why not a matrix product: float32 all through, whatever torch.set_float32_matmul_precision says.
    products = query * mean.repeat_interleave(group, 1)[:, None]
    return products.sum(-1).transpose(1, 2).contiguous()


def _check(q, k, v, qk_dtype):
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor) or not x.is_floating_point():
            found = str(x.dtype).removeprefix("torch.") if isinstance(x, torch.Tensor) else f"a {type(x).__name__}"
            raise TypeError(f"{name}: expected a floating-point tensor (batch, seqlen, heads, headdim), got {found}")
    if qk_dtype is not None and qk_dtype not in QK_DTYPES:
        raise ValueError(f"qk_dtype: allowed are {', '.join(map(repr, QK_DTYPES))} and None, got {qk_dtype!r}")
    shapes = [tuple(x.shape) for x in (q, k, v)]
    fits = all(len(shape) == 4 for shape in shapes)
    if fits:
        (b, _, hq, d), (bk, sk, hk, dk), (bv, sv, hv, _) = shapes
        fits = (b, sk, hk, d) == (bk, sv, hv, dk) and b == bv and (hq % hk == 0 if hk else hq == 0)
    if not fits:
        raise ValueError(
            "q, k, v: expected (batch, seqlen, heads, headdim) of one batch, k and v of one seqlen and number of "
            f"heads, q and k of one headdim, q heads a multiple of k's; got q {shapes[0]}, k {shapes[1]}, v {shapes[2]}"
        )
