"""FP8 operands: scales, codes and rotation, and what becomes of zeros, tiny and huge values, inf and NaN."""

import math

import pytest
import torch

from flashattn_hopper import BlockScaled, dequantize, quantize_fp8
from flashattn_hopper.quantize import E4M3, TILE, _signs, decode, rotate, unrotate

INF, NAN = float("inf"), float("nan")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Why: small tensors and several test processes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def qkv(seqlen_q=300, seqlen_k=300, headdim=64, headdim_v=64, batch=2, heads=4, heads_kv=2, dtype=torch.bfloat16):
    shapes = (seqlen_q, heads, headdim), (seqlen_k, heads_kv, headdim), (seqlen_k, heads_kv, headdim_v)
    return [torch.randn(batch, *shape).to(dtype) for shape in shapes]


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


# ---------------------------------------------------------------------------------------------------------- rotation
@pytest.mark.parametrize("headdim, block", [(64, 64), (128, 128), (256, 256), (96, 32), (192, 64), (20, 4), (7, 1)])
def test_rotation_is_orthonormal_in_blocks(headdim, block):
    matrix = rotate(torch.eye(headdim, dtype=torch.float64))
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(headdim, dtype=torch.float64))
    inside = torch.block_diag(*[torch.ones(block, block)] * (headdim // block)).bool()
    magnitude = torch.full((), block**-0.5, dtype=torch.float64)
    torch.testing.assert_close(matrix.abs(), torch.where(inside, magnitude, 0.0))
    x = torch.randn(3, headdim, dtype=torch.float64)
    torch.testing.assert_close(unrotate(rotate(x)), x)
    torch.testing.assert_close(unrotate(x), x @ matrix.T)  # the transpose turns gradients back


def test_signs_are_fixed_and_no_pattern_of_the_transform():
    """A sign row that is itself a row of the transform would send a constant channel to a single coordinate."""

    def mixed(h):
        h = ((h ^ h >> 16) * 0x85EBCA6B) % 2**32
        h = ((h ^ h >> 13) * 0xC2B2AE35) % 2**32
        return h ^ h >> 16

    assert _signs(torch.empty(256)).tolist() == [(-1) ** mixed(i) for i in range(1, 257)]
    for headdim in (32, 64, 128, 256):
        assert rotate(torch.ones(headdim)).abs().max() < 0.51 * headdim**0.5


def test_rotation_spreads_an_outlier():
    x = torch.zeros(128)
    x[5] = 128.0
    assert torch.equal(rotate(x).abs(), torch.full((128,), 128 / 128**0.5))


# ------------------------------------------------------------------------------------------------------------- codes
@pytest.mark.parametrize("hadamard", [True, False])
@pytest.mark.parametrize("smooth_k", [True, False])
@pytest.mark.parametrize("qk_dtype, code", [("fp8", E4M3), ("int8", torch.int8)])
@pytest.mark.parametrize("headdim", [64, 96])
def test_round_trip(hadamard, smooth_k, qk_dtype, code, headdim):
    q, k, v = qkv(headdim=headdim)
    k += 4 * torch.randn(2, 1, 2, headdim).bfloat16()
    codes = quantize_fp8(q, k, v, hadamard=hadamard, smooth_k=smooth_k, qk_dtype=qk_dtype)
    assert [x.data.dtype for x in codes] == [code, code, E4M3]
    assert [x.rows for x in codes] == [1, TILE, None] and [x.rotated for x in codes] == [hadamard, hadamard, False]
    assert [tuple(x.descale.shape) for x in codes] == [(2, 4, 300), (2, 2, 3), (2, 2, 1)]
    assert all(x.descale.is_contiguous() and x.data.is_contiguous() for x in codes)
    for x, original in zip(codes, (q, k, v)):
        assert x.shape == original.shape and dequantize(x).dtype == original.dtype
        assert relative(dequantize(x), original) < 0.03
    assert (codes[1].mean is not None) == (codes[0].logit_offset is not None) == smooth_k


def test_scales_are_the_largest_magnitudes_of_their_blocks():
    q, k, v = qkv()
    a, b, c = quantize_fp8(q, k, v, hadamard=False, smooth_k=False, qk_dtype="fp8")
    q, k, v = (x.float() for x in (q, k, v))
    torch.testing.assert_close(a.descale, q.abs().amax(-1).mT / 448, rtol=0, atol=0)
    torch.testing.assert_close(b.descale[..., 2], k[:, 256:].abs().amax((1, 3)) / 448, rtol=0, atol=0)
    torch.testing.assert_close(c.descale[..., 0], v.abs().amax((1, 3)) / 448, rtol=0, atol=0)
    for x in (a, b, c):
        assert x.data.float().abs().max() == 448


def test_the_mean_of_k_and_what_the_logits_lose():
    q, k, v = qkv(heads=6, heads_kv=2)
    a, b, _ = quantize_fp8(q, k, v)
    torch.testing.assert_close(b.mean, k.float().mean(1))
    of_head = b.mean.repeat_interleave(3, 1)
    torch.testing.assert_close(a.logit_offset, torch.einsum("bshd,bhd->bhs", q.float(), of_head))


def test_rotation_and_smoothing_do_not_move_softmax():
    q, k, v = qkv(dtype=torch.float32)
    a, b, _ = (decode(x).double() for x in quantize_fp8(q, k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", a, b.repeat_interleave(2, 2)).softmax(-1)
    exact = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double().repeat_interleave(2, 2)).softmax(-1)
    assert relative(scores, exact) < 0.5 and (scores - exact).abs().max() < 0.4  # unscaled logits: up to 40


def test_same_codes_every_time():
    q, k, v = qkv()
    first, again = quantize_fp8(q, k, v), quantize_fp8(q, k, v)
    for x, y in zip(first, again):
        assert torch.equal(x.data.view(torch.uint8), y.data.view(torch.uint8)) and torch.equal(x.descale, y.descale)


def test_codes_carry_no_gradient_and_leave_the_inputs_alone():
    q, k, v = (x.requires_grad_() for x in qkv())
    before = [x.detach().clone() for x in (q, k, v)]
    codes = quantize_fp8(q, k, v)
    assert not any(t.requires_grad for x in codes for t in (x.descale, x.mean, x.logit_offset) if t is not None)
    assert all(torch.equal(x, y) for x, y in zip(before, (q, k, v)))


def test_autocast_does_not_round_the_scales():
    q, k, v = qkv(dtype=torch.float32)
    plain = quantize_fp8(q, k, v)
    with torch.autocast("cpu", torch.bfloat16):
        cast = quantize_fp8(q, k, v)
    assert all(torch.equal(x.descale, y.descale) for x, y in zip(plain, cast))
    assert torch.equal(plain[0].logit_offset, cast[0].logit_offset)


@pytest.mark.parametrize(
    "sizes", [{"batch": 0}, {"seqlen_q": 0}, {"seqlen_k": 0}, {"heads": 0, "heads_kv": 0}], ids=str
)
def test_empty(sizes):
    codes = quantize_fp8(*qkv(**sizes))
    for x, original in zip(codes, qkv(**sizes)):
        assert dequantize(x).shape == original.shape
    assert not any(t.isnan().any() for x in codes for t in (x.descale, x.mean) if t is not None)


# ------------------------------------------------------------------------------------- zeros, tiny, huge, inf and NaN
@pytest.mark.parametrize("smooth_k", [True, False])
@pytest.mark.parametrize("qk_dtype", ["fp8", "int8"])
def test_zeros_are_zeros(qk_dtype, smooth_k):
    q, k, v = qkv()
    for x in (q, k, v):
        x[:, 128:256] = 0  # a block
        x[:, :, 1] = 0  # a head
        x[..., 3] = 0  # a channel
        x[:, 7] = 0  # a token
    for x, original in zip(quantize_fp8(q, k, v, qk_dtype=qk_dtype, smooth_k=smooth_k), (q, k, v)):
        assert x.descale.isfinite().all() and (x.descale > 0).all()
        assert not x.data[:, :, 1].float().any() and not dequantize(x)[:, :, 1].any()
        assert relative(dequantize(x), original) < 0.03
    for x in quantize_fp8(*(torch.zeros_like(t) for t in (q, k, v)), qk_dtype=qk_dtype, smooth_k=smooth_k):
        assert not x.data.float().any() and (x.descale == 1).all()


def test_tiny_values_are_zeros_and_small_ones_are_kept():
    q, k, v = qkv(dtype=torch.float32)
    for x in quantize_fp8(q * 1e-34, k * 1e-34, v * 1e-34):
        assert not x.data.float().any() and (x.descale == 1).all()
    for x, original in zip(quantize_fp8(q * 1e-25, k * 1e-25, v * 1e-25), (q, k, v)):
        assert relative(dequantize(x) * 1e25, original) < 0.03


def test_huge_values_are_kept():
    q, k, v = qkv(dtype=torch.float32)
    for x, original in zip(quantize_fp8(q * 1e33, k * 1e33, v * 1e37), (q * 1e33, k * 1e33, v * 1e37)):
        assert relative(dequantize(x) / original.abs().max(), original / original.abs().max()) < 0.03


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("qk_dtype", ["fp8", "int8"])
def test_inf_and_nan_spoil_their_block_and_no_other(bad, qk_dtype):
    q, k, v = qkv()
    for x in (q, k, v):
        x[1, 200, 1, 5] = bad
    for smooth_k, spoiled_k in ((True, [0, 1, 2]), (False, [1])):
        a, b, c = quantize_fp8(q, k, v, smooth_k=smooth_k, qk_dtype=qk_dtype)
        assert a.descale.isnan().nonzero().tolist() == [[1, 1, 200]]
        assert b.descale.isnan().nonzero().tolist() == [[1, 1, tile] for tile in spoiled_k]
        assert c.descale.isnan().nonzero().tolist() == [[1, 1, 0]]
        assert dequantize(a)[1, 200, 1].isnan().all() and dequantize(c)[1, :, 1].isnan().all()


def test_codes_saturate():
    """A scale from somebody else may be too small; the largest code is then what is kept, never NaN."""
    from flashattn_hopper.quantize import LARGEST

    for dtype, largest in LARGEST.items():
        x = torch.tensor([1e9, -1e9, largest * 1.04]).clamp(-largest, largest).to(dtype)
        assert x.float().tolist() == [largest, -largest, largest]


# -------------------------------------------------------------------------------------------------------- bad operands
@pytest.mark.parametrize(
    "change, exception, words",
    [
        (lambda q, k, v: (q.int(), k, v), TypeError, ["q:", "int32"]),
        (lambda q, k, v: (q, None, v), TypeError, ["k:", "NoneType"]),
        (lambda q, k, v: (q[0], k, v), ValueError, ["(300, 4, 64)"]),
        (lambda q, k, v: (q[:, :, :3], k, v), ValueError, ["(2, 300, 3, 64)", "multiple"]),
        (lambda q, k, v: (q, k, v[:, :9]), ValueError, ["(2, 9, 2, 64)"]),
        (lambda q, k, v: (q[..., :32], k, v), ValueError, ["one headdim"]),
        (lambda q, k, v: (q[:1], k, v), ValueError, ["one batch"]),
    ],
)
def test_bad_operands_are_named(change, exception, words):
    with pytest.raises(exception) as info:
        quantize_fp8(*change(*qkv()))
    assert all(word in str(info.value) for word in words)


def test_unknown_qk_dtype():
    with pytest.raises(ValueError, match=r"qk_dtype: allowed are 'fp8', 'int8' and None, got 'e5m2'"):
        quantize_fp8(*qkv(), qk_dtype="e5m2")


def test_block_scaled_stands_for_its_product():
    data = torch.tensor([[2.0, -4.0]]).view(1, 1, 1, 2).to(E4M3)
    x = BlockScaled(data, torch.full((1, 1, 1), 0.5))
    assert dequantize(x).tolist() == [[[[1.0, -2.0]]]] and dequantize(x).dtype == torch.bfloat16
    assert math.prod(x.shape) == 2 and x.device.type == "cpu"
