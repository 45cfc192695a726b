"""FP8 attention in emulation: its definition, its accuracy against float64, the hardware's accumulator, gradients."""

import functools
import math
from dataclasses import replace

import pytest
import torch

from flashattn_hopper import dequantize, hopper_attention, quantize_fp8, reference_fp8
from flashattn_hopper.quantize import E4M3, _quantized, decode, restore_lse, unrotate
from flashattn_hopper.spec.mask import Band

from . import oracle

INF, NAN = float("inf"), float("nan")
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (150, 3)},
    "narrow": {"window_size": (2, 0)},
}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def qkv(seqlen_q=130, seqlen_k=200, headdim=32, headdim_v=24, batch=2, heads=4, heads_kv=2, dtype=torch.float32):
    shapes = (seqlen_q, heads, headdim), (seqlen_k, heads_kv, headdim), (seqlen_k, heads_kv, headdim_v)
    return [torch.randn(batch, *shape).to(dtype) for shape in shapes]


def band_of(causal=False, window_size=(None, None)):
    return Band(window_size[0], 0 if causal else window_size[1])


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


fp8 = functools.partial(hopper_attention, precision="fp8")


# ------------------------------------------------------------------------------------------------------- definition
def by_definition(q, k, v, seen, scale):
    """The recipe written down again: float64, dense masks, one head at a time."""
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64)
    group = q.shape[2] // k.shape[2]
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            codes_q, codes_k, codes_v = (x.data[b, :, h // n].double() for x, n in ((q, 1), (k, group), (v, group)))
            top = torch.full((q.shape[1],), -INF, dtype=torch.float64)
            total, acc = torch.zeros_like(top), out[b, :, h]
            for tile in reversed(range(-(-k.shape[1] // 128))):
                keys = slice(128 * tile, 128 * (tile + 1))
                factor = q.descale[b, h].double() * k.descale[b, h // group, tile].double() * scale / math.log(2)
                s = (codes_q @ codes_k[keys].T * factor[:, None]).masked_fill(~seen[:, keys], -INF)
                before, top = top, torch.maximum(top, s.amax(-1))
                base = top.masked_fill(top == -INF, 0)
                p = torch.exp2(s - base[:, None] + 8)
                shrink = torch.exp2(before - base)
                total = total * shrink + p.sum(-1)
                acc *= shrink[:, None]
                acc += p.float().to(E4M3).double() @ codes_v[keys]
            acc *= v.descale[b, h // group].double() / total.masked_fill(total == 0, 1)[:, None]
    return out


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("sizes", [{}, {"seqlen_q": 300, "seqlen_k": 129}, {"seqlen_q": 1, "seqlen_k": 385}], ids=str)
@pytest.mark.parametrize("qk_dtype", ["fp8", "int8"])
def test_definition(mask, sizes, qk_dtype):
    q, k, v = qkv(**sizes)
    codes = quantize_fp8(q, k, v, qk_dtype=qk_dtype)
    out, lse = reference_fp8.forward(*codes, band_of(**MASKS[mask]), 0.2)
    seen = oracle.visible(q.shape[1], k.shape[1], **MASKS[mask])
    # A P that lies on the border of two codes may fall to either side; a different recipe is off by 1e-2.
    assert relative(out, by_definition(*codes, seen, 0.2)) < 1e-3
    exact = oracle.attention(*map(decode, codes), softmax_scale=0.2, **MASKS[mask])
    torch.testing.assert_close(lse.double(), exact.lse, rtol=1e-6, atol=2e-6)
    assert relative(out, exact.out) < 0.04
    blind = ~seen.any(-1)
    assert not out[:, blind].any() and lse[..., blind].isneginf().all() and lse[..., ~blind].isfinite().all()


@pytest.mark.parametrize("headdim, headdim_v", [(7, 5), (96, 96), (192, 128), (64, 256)])
def test_any_headdim(headdim, headdim_v):
    q, k, v = qkv(headdim=headdim, headdim_v=headdim_v, heads=2)
    out, lse = fp8(q, k, v, causal=True, return_lse=True)
    exact = oracle.attention(q, k, v, causal=True)
    assert relative(out, exact.out) < 0.07 and (lse - exact.lse).square().mean().sqrt() < 0.03


def test_lse_is_that_of_the_codes_plus_the_offset():
    """Exact: what the mean of k takes from every logit of a row, lse gets back."""
    q, k, v = qkv()
    k += 30 * torch.randn(2, 1, 2, 32)
    _, lse = fp8(q, k, v, softmax_scale=0.5, return_lse=True)
    a, b, _ = quantize_fp8(q, k, v)
    scores = torch.einsum("bqhd,bkhd->bhqk", decode(a).double(), decode(b).double().repeat_interleave(2, 2))
    offset = torch.einsum("bqhd,bhd->bhq", q.double(), b.mean.double().repeat_interleave(2, 1))
    torch.testing.assert_close(lse.double(), (0.5 * scores).logsumexp(-1) + 0.5 * offset, rtol=2e-6, atol=1e-5)
    same = torch.full_like(k, 1.5)  # nothing is left but the mean
    out, lse = fp8(q, same, v, softmax_scale=0.5, return_lse=True)
    torch.testing.assert_close(lse.mT, 0.75 * q.sum(-1) + math.log(200), rtol=1e-5, atol=1e-5)
    assert relative(out, v.mean(1, keepdim=True).repeat_interleave(2, 2).expand_as(out)) < 0.1


def test_lse_joins_parts_of_the_keys():
    """Each part subtracts a mean of its own; lse has it back, so the parts weigh what they should."""
    q, k, v = qkv()
    k[:, :120] += 3 * torch.randn(2, 1, 2, 32)
    parts = [fp8(q, k[:, keys], v[:, keys], return_lse=True) for keys in (slice(0, 120), slice(120, 200))]
    lse = torch.stack([part[1] for part in parts])
    weights = (lse - lse.logsumexp(0)).exp().transpose(2, 3).unsqueeze(-1)
    out = sum(w * part[0] for w, part in zip(weights, parts))
    exact = oracle.attention(q, k, v)
    assert relative(out, exact.out) < 0.08 and relative(lse.logsumexp(0), exact.lse) < 0.01


def test_results_are_the_recipe_s_whoever_quantizes():
    q, k, v = qkv(dtype=torch.float16)
    codes = quantize_fp8(q, k, v)
    for mask in MASKS.values():
        ours, theirs = fp8(q, k, v, return_lse=True, **mask), hopper_attention(*codes, return_lse=True, **mask)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs)) and ours[0].dtype == torch.float16


@pytest.mark.parametrize("rows_q, rows_k", [(1, 128), (16, 256), (None, None)])
def test_coarser_scales(rows_q, rows_k):
    q, k, v = qkv(seqlen_k=400)
    a, b, c = quantize_fp8(q, k, v, hadamard=False, smooth_k=False)
    a = replace(a, data=(x := _quantized(q, rows_q, E4M3))[0], descale=x[1], rows=rows_q)
    b = replace(b, data=(x := _quantized(k, rows_k, E4M3))[0], descale=x[1], rows=rows_k)
    out, lse = hopper_attention(a, b, c, causal=True, return_lse=True)
    exact = oracle.attention(*map(decode, (a, b, c)), causal=True)
    assert relative(out, exact.out) < 0.04
    torch.testing.assert_close(lse.double(), exact.lse, rtol=1e-6, atol=2e-6)


def test_repeats_bit_by_bit_whatever_the_cut(monkeypatch):
    q, k, v = qkv(dtype=torch.bfloat16)
    codes, band = quantize_fp8(q, k, v), Band(right=0)
    first, again = (reference_fp8.forward(*codes, band, 0.2) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    monkeypatch.setitem(reference_fp8.reference.LIMITS, "cpu", reference_fp8.reference.Limits(32, 64, 1))
    for a, b in zip(first, reference_fp8.forward(*codes, band, 0.2)):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("sizes", [{"batch": 0}, {"seqlen_q": 0}, {"seqlen_k": 0}], ids=str)
def test_empty(sizes):
    q, k, v = (x.requires_grad_() for x in qkv(**sizes))
    out, lse = fp8(q, k, v, return_lse=True)
    assert out.shape == (*q.shape[:3], 24) and not out.any() and lse.isneginf().all()
    (out.sum() + lse.nan_to_num(0, 0, 0).sum()).backward()
    assert not any(x.grad.any() for x in (q, k, v))


# ---------------------------------------------------------------------------------------------------------- accuracy
# Trap: for these seeds. A few rows make the error of heavy tails: other draws, or other signs of the rotation, move lse
# of outlier and everything of student by a third (bench/results/cpu/fp8_accuracy.json has the worst seeds).
BOUNDS = {  # largest relative error of out, least cosine, largest rms error of lse; for fp8 and for int8 q and k
    "normal": ((0.065, 0.9980, 0.009), (0.046, 0.9989, 0.002)),
    "outlier": ((0.072, 0.9975, 0.040), (0.037, 0.9993, 0.009)),
    "llm": ((0.077, 0.9972, 0.16), (0.033, 0.9994, 0.030)),
    "student": ((0.090, 0.9962, 0.45), (0.041, 0.9992, 0.080)),
}
GRADS = {"normal": (0.060, 0.060, 0.040), "outlier": (0.075, 0.070, 0.045), "llm": (0.09, 0.09, 0.035)}
GRADS_INT8 = (0.040, 0.040, 0.015)


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("name", BOUNDS)
def test_error_against_float64(accuracy, name, mask):
    """c49. Two recipes, causal gradients where logits are ordinary; int8 for q and k errs less on every set."""
    q, k, v = accuracy.inputs(name, seed=0)
    dout = torch.randn(v.shape).bfloat16()
    band = accuracy.MASKS[mask]
    exact = accuracy.attend(None, *(x.double() for x in (q, k, v, dout)), band)
    found = []
    for bounds, grads, recipe in zip(BOUNDS[name], (GRADS.get(name), GRADS_INT8), ("fp8", "fp8, int8 q and k")):
        error = accuracy.errors(accuracy.attend(accuracy.RECIPES[recipe], q, k, v, dout, band), exact)
        assert error["out"] <= bounds[0] and error["out_cos"] >= bounds[1] and error["lse_rms"] <= bounds[2], error
        if name in GRADS and mask == "causal":
            assert all(error[x] <= bound for x, bound in zip(("dq", "dk", "dv"), grads)), error
        found.append(error)
    assert found[1]["out"] < 0.8 * found[0]["out"] and found[1]["lse_rms"] < 0.5 * found[0]["lse_rms"]


@pytest.mark.parametrize("headdim", [64, 256])
@pytest.mark.parametrize("name", BOUNDS)
def test_error_at_other_headdims(accuracy, name, headdim):
    q, k, v = accuracy.inputs(name, seed=1, headdim=headdim, seqlen=512)
    exact = oracle.attention(q, k, v)
    for bounds, qk_dtype in zip(BOUNDS[name], ("fp8", "int8")):
        out = hopper_attention(*quantize_fp8(q, k, v, qk_dtype=qk_dtype))
        assert relative(out, exact.out) <= bounds[0]


def test_rotation_is_worth_half_of_the_error(accuracy):
    q, k, v = accuracy.inputs("outlier", seed=0, headdim=64)
    exact = oracle.attention(q, k, v).out
    a, b, c = quantize_fp8(q, k, v, hadamard=False, smooth_k=False)
    whole = [
        replace(x, data=(found := _quantized(t.float(), None, E4M3))[0], descale=found[1], rows=None)
        for x, t in ((a, q), (b, k))
    ]
    assert relative(hopper_attention(*whole, c), exact) > 1.5 * relative(fp8(q, k, v), exact)


def test_the_script_writes_every_set_and_recipe(accuracy, tmp_path, monkeypatch):
    monkeypatch.setattr(accuracy, "SEEDS", (0,))
    monkeypatch.setattr(accuracy.inputs, "__defaults__", (64, 32, *accuracy.inputs.__defaults__[2:]))
    assert accuracy.main(["--out", str(tmp_path), "--revision", "abc"]) == 0
    found = accuracy.record.load(tmp_path / "cpu" / "fp8_accuracy.json")
    cells = {(row["set"], row["mask"], row["recipe"]) for row in found["rows"]}
    assert len(cells) == len(accuracy.SETS) * len(accuracy.MASKS) * len(accuracy.RECIPES) == len(found["rows"])
    error = {row["recipe"]: row["out"] for row in found["rows"] if (row["set"], row["mask"]) == ("normal", "full")}
    assert error["bf16"] < 0.01 < error["fp8, int8 q and k"] < error["fp8"] < 0.07


def test_outliers_of_the_flash_attention_3_paper(accuracy):
    """Root mean square error on unrounded inputs, N(0, 1) + N(0, 100) Bernoulli(0.001), headdim 128, 4096 keys."""
    q, k, v = accuracy.inputs("outlier", seed=0, seqlen=4096, dtype=torch.float32)
    q = q[:, :1024]  # a scale per query: the others change nothing
    exact = oracle.attention(q, k, v)
    rmse = lambda out: (out.double() - exact.out).square().mean().sqrt().item()
    assert rmse(fp8(*(x.half() for x in (q, k, v)))) <= 9.1e-3
    assert relative(hopper_attention(*quantize_fp8(q, k, v, hadamard=False)), exact.out) > 1.2 * relative(
        fp8(q, k, v), exact.out
    )


def test_a_sink_leaves_the_other_keys_their_bits(monkeypatch):
    """4096 flat keys and one 8 nats above them with a tiny value: P of the others needs the scale 2^8."""
    headdim, strength = 128, 2 * 128**0.25
    axis = torch.nn.functional.normalize(torch.randn(1, 1, 1, headdim), dim=-1)
    flat = lambda n: (x := torch.randn(1, n, 1, headdim)) - (x * axis).sum(-1, keepdim=True) * axis
    q, k, v = flat(128) + strength * axis, flat(4096), torch.randn(1, 4096, 1, headdim)
    k[:, 0], v[:, 0] = axis[:, 0] * 8 * headdim**0.5 / strength, v[:, 0] * 0.02
    q, k, v = (x.bfloat16() for x in (q, k, v))
    exact = oracle.attention(q, k, v).out
    assert relative(fp8(q, k, v), exact) < 0.075
    monkeypatch.setattr(reference_fp8, "P_SHIFT", 0.0)
    assert relative(fp8(q, k, v), exact) > 0.09


def test_the_maximum_of_a_row_is_256():
    q, k, v = qkv(seqlen_q=8, seqlen_k=512, heads=1, heads_kv=1)
    k[:, 0] = 40 * q[:, :1, 0].mean(1, keepdim=True)
    codes = quantize_fp8(q, k, v)
    p_largest = []

    def product(p, values):
        p_largest.append(p.amax().item())
        return torch.bmm(p, values)

    reference_fp8.forward(*codes, Band(), 0.2, product)
    assert max(p_largest) == 256 and len(p_largest) == 4


# --------------------------------------------------------------------------------- the accumulator of the hardware
def truncated(x):
    """float32 with 13 fraction bits, toward zero."""
    return (x.contiguous().view(torch.int32) & -1024).view(torch.float32)


def exponent(x):
    return torch.frexp(x)[1].float().masked_fill(x == 0, -999.0) - 1


def wgmma(p, values):
    """p @ values as Hopper's FP8 units sum it: 32 products and the sum so far are aligned to the largest exponent and
    cut off after 13 fraction bits, every 32 keys."""
    acc = p.new_zeros(*p.shape[:2], values.shape[2])
    for i in range(0, p.shape[2], 32):
        a, b = p[:, :, i : i + 32, None], values[:, None, i : i + 32]
        unit = torch.maximum((exponent(a) + exponent(b)).amax(2), exponent(acc)).clamp_min(-100).sub(13).exp2()
        acc = truncated(unit * (torch.trunc(a * b / unit[:, :, None]).sum(2) + torch.trunc(acc / unit)))
    return acc


def long_sequence(keys, mean, headdim=64):
    """8 queries; values whose channels have a mean: rounding toward zero is then a bias, which grows with the keys."""
    generator = torch.Generator().manual_seed(0)
    draw = functools.partial(torch.randn, generator=generator)
    q, k = draw(1, 8, 1, headdim), draw(1, keys, 1, headdim)
    return q, k, draw(1, keys, 1, headdim) + mean * draw(1, 1, 1, headdim)


def hardware_error(keys, mean):
    q, k, v = long_sequence(keys, mean)
    out, _ = reference_fp8.forward(*quantize_fp8(q, k, v, smooth_k=False), Band(), 64**-0.5, wgmma)
    return relative(out, oracle.attention(q, k, v).out)


@pytest.mark.parametrize("mean, bound", [(1.0, 0.004), (0.3, 0.005)])
def test_c48_error_does_not_grow_with_the_keys(mean, bound):
    short, long = hardware_error(1024, mean), hardware_error(8192, mean)
    assert long <= bound and long <= short


def test_c48_a_sum_without_promotion_would_lose_the_values(monkeypatch):
    """The model of the hardware shows what the emulation's sum per tile is for: one tile of 8192 keys fails."""
    q, k, v = long_sequence(8192, 1.0)
    a, b, c = quantize_fp8(q, k, v, hadamard=False, smooth_k=False)
    data, descale = _quantized(k, None, E4M3)
    monkeypatch.setattr(reference_fp8, "TILE", 8192)
    codes = a, replace(b, data=data, descale=descale, rows=None), c
    out, _ = reference_fp8.forward(*codes, Band(), 64**-0.5, wgmma)
    assert relative(out, oracle.attention(q, k, v).out) > 0.05


@pytest.mark.parametrize("keys", [1024, 16384])
def test_c48_flat_keys_and_a_needle(keys):
    q, k, v = torch.zeros(1, 1, 1, 64), torch.zeros(1, keys, 1, 64), torch.ones(1, keys, 1, 64)
    assert torch.equal(fp8(q.bfloat16(), k.bfloat16(), v.bfloat16()), torch.ones(1, 1, 1, 64, dtype=torch.bfloat16))
    q[..., 0] = k[:, keys // 3, :, 0] = 8.0  # one key 8 nats above the others
    v = torch.randn(1, keys, 1, 64)
    q, k, v = (x.bfloat16() for x in (q, k, v))
    out = fp8(q, k, v, softmax_scale=0.125)
    assert relative(out, oracle.attention(q, k, v, softmax_scale=0.125).out) < 0.04


# --------------------------------------------------------------------------------------------------------- gradients
def grads_of(call, q, k, v, dout=None, dlse=None, **mask):
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out, lse = call(*leaves, return_lse=True, **mask)
    pairs = [(y, g) for y, g in ((out, dout), (lse, dlse)) if g is not None]
    torch.autograd.backward([y for y, _ in pairs], [g for _, g in pairs])
    return [x.grad for x in leaves]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name, bound", [("normal", 0.012), ("outlier", 0.012), ("llm", 0.03), ("student", 0.03)])
def test_gradient_is_that_of_the_dequantized_problem(accuracy, name, bound, mask):
    q, k, v = accuracy.inputs(name, seed=0, seqlen=300, headdim=64, batch=2, heads=2)
    k, v = k[:, :, :1], v[:, :, :1]
    dout = torch.randn_like(q)
    a, b, c = quantize_fp8(q, k, v)
    exact = oracle.attention(*map(decode, (a, b, c)), dout=dout, **MASKS[mask])
    expected = unrotate(exact.dq), unrotate(exact.dk), exact.dv
    # A window of three keys: out is a few terms, so P's rounding weighs more in delta.
    bound *= 3 if mask == "narrow" else 1
    for grad, wanted in zip(grads_of(fp8, q, k, v, dout, **MASKS[mask]), expected):
        assert grad.dtype == torch.bfloat16 and relative(grad, wanted) <= bound


@pytest.mark.parametrize("mask", MASKS)
def test_gradient_of_lse(mask):
    """The mean of k comes back in dq; dk needs none. No P is rounded on this way, so it is exact."""
    q, k, v = qkv(seqlen_q=250)
    k += 3 * torch.randn(2, 1, 2, 32)
    dlse = torch.randn(2, 4, 250)
    dq, dk, dv = grads_of(fp8, q, k, v, dlse=dlse, **MASKS[mask])
    a, b, c = (dequantize(x) for x in quantize_fp8(q, k, v))
    exact = oracle.attention(a, b, c, dlse=dlse, **MASKS[mask])
    assert relative(dq, exact.dq) < 1e-5 and relative(dk, exact.dk) < 1e-5 and not dv.any()
    blind = ~oracle.visible(250, 200, **MASKS[mask]).any(-1)
    assert blind.any() == (mask != "full") and not dq[:, blind].any()


def test_c47_gradients_of_fractional_data_point_the_right_way():
    q, k, v = qkv(256, 256, 128, 128, dtype=torch.bfloat16)
    dout = torch.randn_like(q)
    ours, half = grads_of(fp8, q, k, v, dout), grads_of(hopper_attention, q, k, v, dout)
    for a, b in zip(ours, half):
        assert a.isfinite().all()
        assert torch.nn.functional.cosine_similarity(a.double().flatten(), b.double().flatten(), 0) > 0.99


def test_only_what_is_asked_is_differentiated():
    q, k, v = qkv()
    k.requires_grad_()
    fp8(q, k, v).sum().backward()
    assert k.grad.any() and q.grad is None and v.grad is None


def test_saved_for_backward_is_a_byte_an_element():
    q, k, v = (x.requires_grad_() for x in qkv(256, 256, 64, 64, dtype=torch.bfloat16))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        fp8(q, k, v)
    size = sum(x.numel() * x.element_size() for x in saved)
    elements = q.numel() + k.numel() + v.numel()
    assert size < 1.1 * (elements + 2 * q.numel() + 8 * 2 * 4 * 256)  # codes, out, lse and a scale for each query


# ------------------------------------------------------------------------------------------------------------- zeros
def test_c46_zeros():
    q, k, v = qkv(seqlen_k=300)
    assert not fp8(q, k, v * 0).any()
    mean = v.mean(1, keepdim=True).repeat_interleave(2, 2)
    for zeros in ((q, k * 0, v), (q * 0, k, v), (q * 0, k * 0, v)):
        assert (fp8(*zeros) - mean).abs().max() < 0.02
    assert not fp8(q * 0, k * 0, v * 0).any()
    places = (slice(None), slice(128, 256)), (..., slice(1), slice(None)), (..., 5), (slice(None), 7)
    for place in places:  # a block, a head, a channel, a token
        operands = [x.clone() for x in (q, k, v)]
        for x in operands:
            x[place] = 0
        for mask in MASKS.values():
            out, lse = fp8(*operands, return_lse=True, **mask)
            exact = oracle.attention(*operands, **mask)
            assert relative(out, exact.out) < 0.08 and torch.equal(lse.isneginf(), exact.lse.isneginf())
    for grad in grads_of(fp8, q, k, v, torch.zeros(2, 130, 4, 24)):
        assert not grad.any()


# ------------------------------------------------------------------------------------------------------- inf and NaN
@pytest.mark.parametrize("bad", [INF, NAN])
def test_inf_and_nan_are_seen(bad):
    """Never a plausible number: the row of q, the head of k (its 128-key tile without smoothing), the head of v."""
    clean = [x.bfloat16() for x in qkv(300, 300)]
    for place in range(3):
        operands = [x.clone() for x in clean]
        operands[place][1, 200, 1, 5] = bad
        out, lse = fp8(*operands, causal=True, return_lse=True)
        heads = slice(1, 2) if place == 0 else slice(2, 4)  # kv head 1 serves two query heads
        rows = slice(200, 201) if place == 0 else slice(None)
        expected = torch.zeros(2, 300, 4, dtype=torch.bool)
        expected[1, rows, heads] = True
        assert torch.equal(out.isnan().all(-1), expected) and torch.equal(out.isnan().any(-1), expected)
        assert torch.equal(lse.isnan(), expected.transpose(1, 2) if place < 2 else torch.zeros(2, 4, 300).bool())
    operands = [x.clone() for x in clean]
    operands[1][1, 200, 1, 5] = bad
    out, lse = hopper_attention(*quantize_fp8(*operands, smooth_k=False), causal=True, return_lse=True)
    expected = torch.zeros(2, 300, 4, dtype=torch.bool)
    expected[1, 128:, 2:] = True
    assert torch.equal(out.isnan().all(-1), expected) and torch.equal(lse.isnan().mT, expected)


def test_strict_prefixes_need_no_smoothing():
    """Loud later keys: only their mean and scales reach earlier queries, and less of it without the mean."""
    q, k, v = qkv(256, 256, 64, 64)
    loud = k.clone()
    loud[:, 128:] *= 4
    moved = {}
    for smooth_k in (True, False):
        before, after = (
            hopper_attention(*quantize_fp8(q, x, v, smooth_k=smooth_k), causal=True)[:, :128] for x in (k, loud)
        )
        moved[smooth_k] = (before - after).abs().max().item()
    assert moved[False] == 0 < moved[True] < 0.5


def test_restored_lse_keeps_rows_without_keys():
    a, _, _ = quantize_fp8(*qkv())
    lse = torch.full((2, 4, 130), -INF)
    lse[..., 1] = 1.0
    for bad in (1.0, NAN, INF):
        found = restore_lse(lse, replace(a, logit_offset=torch.full_like(lse, bad)), 0.5)
        assert found[..., 0].isneginf().all() and not found[..., 1].isneginf().any()
