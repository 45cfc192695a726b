"""The host side of the FP8 kernels, with launches recorded or computed by PyTorch: operands, layouts, saving."""

import contextlib

import pytest
import torch

from flashattn_hopper import api, hopper_attention, jit, ops, planner, quantize_fp8, reference_fp8, runner, runner_fp8
from flashattn_hopper.kernels.common.operands import QuantizeOperands, ScaledOperands
from flashattn_hopper.quantize import restore_lse
from flashattn_hopper.spec.mask import Band

pytest.importorskip("cutlass")


@pytest.fixture
def launched(monkeypatch):
    """Calls of compiled kernels, by name; CPU tensors stand in for those of a GPU."""
    calls = []

    def compiled(spec, traits, tile, arch):
        kind = QuantizeOperands if spec.name == "sm90.quantize" else ScaledOperands
        return lambda operands: calls.append((spec.name, traits, kind(*operands)))

    monkeypatch.setattr(jit, "compiled", compiled)
    monkeypatch.setattr(planner, "capability_of", lambda device: (9, 0))
    monkeypatch.setattr(planner, "num_sms", lambda device: 132)
    monkeypatch.setattr(runner, "tickets", lambda device: torch.zeros(2, dtype=torch.int32))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(api, "_calls", runner.Memo())
    monkeypatch.setattr(ops, "_prepared", runner.Memo())
    return calls


def qkv(dtype=torch.bfloat16):
    return [torch.randn(2, n, h, 64).to(dtype) for n, h in ((40, 4), (150, 2), (150, 2))]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tensors_are_quantized_then_attended(launched, dtype):
    q, k, v = qkv(dtype)
    out, lse = hopper_attention(
        q, k, v, precision="fp8", window_size=(3, 5), return_lse=True, backend="sm90", softmax_scale=0.5
    )
    (first, recipe, given), (second, traits, sent) = launched
    assert (first, second) == ("sm90.quantize", "sm90.forward_fp8")
    assert (recipe.hadamard, recipe.smooth_k, recipe.int8_qk) == (True, True, False)
    assert traits.mask == "window" and traits.fp16_out == (dtype == torch.float16) and not traits.int8_qk
    assert given.q is q and given.k is k and given.v is v
    for name in ("q_descale", "k_descale", "v_descale", "logit_offset"):
        assert getattr(given, name) == getattr(sent, name) != 0
    assert [x.data_ptr() for x in (sent.q, sent.k, sent.v)] == [given.q8, given.k8, given.v8]
    assert (sent.q.shape, sent.k.shape, sent.v.shape) == (q.shape, k.shape, (2, 2, 64, 256))
    assert sent.restored_lse == lse.data_ptr() != sent.lse != 0 and sent.o == out.data_ptr()
    assert (sent.softmax_scale, sent.window_left, sent.window_right, sent.num_ctas) == (0.5, 3, 5, 132)
    assert out.dtype == dtype and out.shape == q.shape and lse.shape == (2, 4, 40)


@pytest.mark.parametrize("qk_dtype", ["fp8", "int8"])
def test_codes_are_turned_and_their_scales_spread(launched, qk_dtype):
    codes = quantize_fp8(*qkv(), qk_dtype=qk_dtype)
    hopper_attention(*codes, causal=True, backend="sm90")
    ((_, traits, sent),) = launched
    assert traits.int8_qk == (qk_dtype == "int8") and sent.q.dtype == codes[0].data.dtype
    assert torch.equal(runner_fp8.unpack_values(sent.v, 150).view(torch.uint8), codes[2].data.view(torch.uint8))
    assert sent.window_left is None and sent.logit_offset == sent.restored_lse == 0


def test_gradients_use_what_the_quantizer_made(launched, monkeypatch):
    """With the launches computed by PyTorch, forward and backward are those of the emulation."""
    q, k, v = qkv()
    scaled = quantize_fp8(q, k, v)
    monkeypatch.setattr(
        runner_fp8,
        "quantize",
        lambda *tensors: runner_fp8.from_scaled(*scaled)._replace(
            k_mean=scaled[1].mean, logit_offset=scaled[0].logit_offset
        ),
    )

    def attend(*_):
        out, core = reference_fp8.forward(*scaled, Band(right=0), 0.125)
        return lambda codes, want_lse=True: (out, core, restore_lse(core, scaled[0], 0.125))

    monkeypatch.setattr(runner_fp8, "bind", attend)
    dout = torch.randn_like(q)
    grads = []
    for backend in ("sm90", "reference"):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out, lse = hopper_attention(*leaves, precision="fp8", causal=True, return_lse=True, backend=backend)
        torch.autograd.backward([out, lse], [dout, torch.ones_like(lse)])
        grads.append([out.detach(), lse.detach(), *(x.grad for x in leaves)])
    for ours, theirs in zip(*grads):
        torch.testing.assert_close(ours, theirs)


def test_other_dtypes_and_headdims_are_refused_with_the_reason(launched):
    q, k, v = qkv(torch.float32)
    with pytest.raises(NotImplementedError, match=r"sm90\.forward_fp8: no fp32_out"):
        hopper_attention(q, k, v, precision="fp8", backend="sm90")
    q, k, v = (x[..., :40].contiguous() for x in qkv())
    with pytest.raises(NotImplementedError, match="both must be multiples of 16"):
        hopper_attention(q, k, v, precision="fp8", backend="sm90")
    assert not launched
