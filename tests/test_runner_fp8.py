"""The host side of the FP8 kernels, with launches recorded or computed by PyTorch: operands, layouts, saving."""

import contextlib
import ctypes
import importlib
import math
import pathlib
import sys

import pytest
import torch

from flashattn_hopper import (
    api,
    explain,
    hopper_attention,
    jit,
    ops,
    oracle,
    planner,
    quantize_fp8,
    reference,
    reference_fp8,
    runner,
    runner_fp8,
)
from flashattn_hopper.kernels.common.operands import BwdOperands, QuantizeOperands, ScaledOperands
from flashattn_hopper.quantize import decode, decode_as, dequantize, restore_lse, rotate, rotation_matrix, unrotate
from flashattn_hopper.spec.mask import Band

pytest.importorskip("cutlass")


@pytest.fixture
def launched(monkeypatch):
    """Calls of compiled kernels, by name; CPU tensors stand in for those of a GPU."""
    calls = []
    kinds = {"sm90.quantize": QuantizeOperands, "sm90.forward_fp8": ScaledOperands, "sm90.backward": BwdOperands}

    def compiled(spec, traits, tile, arch):
        def launch(operands):
            calls.append((spec.name, traits, kinds[spec.name](*operands)))
            if spec.name == "sm90.backward":
                compute_gradients(traits, calls[-1][-1])

        return launch

    monkeypatch.setattr(jit, "compiled", compiled)
    monkeypatch.setattr(planner, "capability_of", lambda device: (9, 0))
    monkeypatch.setattr(planner, "num_sms", lambda device: 132)
    monkeypatch.setattr(runner, "tickets", lambda device, count=2: torch.zeros(count, dtype=torch.int32))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(api, "_calls", runner.Memo())
    monkeypatch.setattr(ops, "_prepared", runner.Memo())
    monkeypatch.setattr(runner_fp8, "_prepared", runner.Memo())
    return calls


def memory(address, like, dtype=None):
    """The contiguous tensor of the shape of `like` that lies at an address."""
    dtype = dtype or like.dtype
    count = math.prod(like.shape)
    buffer = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=dtype, count=count).view(like.shape)


def compute_gradients(traits, ops):
    """What sm90.backward would leave in memory."""
    band = Band(ops.window_left, 0 if traits.mask == "causal" else ops.window_right)
    out = memory(ops.o, ops.do)
    rows = ops.do[..., 0].transpose(1, 2)
    lse, dlse = (memory(address, rows, torch.float32) if address else None for address in (ops.lse, ops.dlse))
    found = reference.backward(ops.do, dlse, ops.q, ops.k, ops.v, out, lse, band, ops.softmax_scale)
    for address, grad in zip((ops.dq, ops.dk, ops.dv), found):
        if address:
            memory(address, grad).copy_(grad)


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


@pytest.fixture
def emulated(launched, monkeypatch):
    """A function of q, k, v, mask and scale: from then on quantizer and forward are computed by PyTorch."""

    def emulate(q, k, v, band, scale):
        scaled = quantize_fp8(q, k, v)
        codes = runner_fp8.from_scaled(*scaled)
        codes = codes._replace(k_mean=scaled[1].mean, logit_offset=scaled[0].logit_offset)
        out, core = reference_fp8.forward(*scaled, band, scale)
        attend = lambda codes, want_lse=True: (out, core, restore_lse(core, scaled[0], scale))
        monkeypatch.setattr(runner_fp8, "quantize", lambda *tensors: codes)
        monkeypatch.setattr(runner_fp8, "bind", lambda *_: attend)
        return scaled, core

    return emulate


MASKS = {
    "full": ({}, Band()),
    "causal": ({"causal": True}, Band(right=0)),  # 40 queries, 150 keys
    "window": ({"window_size": (3, 5)}, Band(3, 5)),
}


@pytest.mark.parametrize("door", ["eager", "operator"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("flows", ["out", "lse", "both"])
def test_gradients_by_the_16_bit_kernel_are_those_of_the_emulation(launched, emulated, flows, dtype, mask, door):
    """Forward and backward of what the quantizer made: dequantized codes and the lse of their scores go to the kernel,
    what comes back is turned, and dq gets the share of the mean of k."""
    (arguments, band), scale = MASKS[mask], 0.125
    q, k, v = qkv(dtype)
    k += 3 * torch.randn(2, 1, 2, 64).to(dtype)
    scaled, core = emulated(q, k, v, band, scale)
    push = {"out": torch.randn_like(q), "lse": torch.randn(2, 4, 40)}
    push = {name: x for name, x in push.items() if flows in (name, "both")}
    grads = []
    for backend in ("sm90", "reference"):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        if door == "eager":
            out, lse = hopper_attention(*leaves, precision="fp8", return_lse=True, backend=backend, **arguments)
        else:
            out, lse, *_ = ops.FWD_FP8(*leaves, scale, band.left, band.right, False, backend)
        results = {"out": out, "lse": lse}
        torch.autograd.backward([results[name] for name in push], list(push.values()))
        grads.append([out.detach(), lse.detach(), *(x.grad for x in leaves)])
    ((name, traits, sent),) = launched
    assert name == "sm90.backward" and traits.dtype == {torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
    assert traits.mask == mask and sent.softmax_scale == scale
    for x, codes in zip((sent.q, sent.k, sent.v), scaled):
        assert x.dtype == dtype and torch.equal(x, decode(codes).to(dtype))
    assert torch.equal(memory(sent.lse, core), core) and bool(sent.dlse) == ("lse" in push)
    for ours, theirs in zip(*grads):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape and ours.is_contiguous()
        error = (ours.double() - theirs.double()).norm() / theirs.double().norm().clamp_min(1e-6)
        # Two roundings of each result and one of each operand.
        assert error <= (4e-3 if dtype == torch.float16 else 3e-2)


def test_gradients_of_the_kernel_path_are_near_float64(emulated, launched):
    """Against attention of the dequantized tensors: rotation undone and mean of k added, both in float64's inputs."""
    q, k, v = qkv()
    scaled, _ = emulated(q, k, v, Band(right=0), 0.125)
    dout = torch.randn_like(q)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    hopper_attention(*leaves, precision="fp8", causal=True, backend="sm90").backward(dout)
    exact = oracle.attention(*map(decode, scaled), dout=dout, causal=True)
    for leaf, wanted in zip(leaves, (unrotate(exact.dq), unrotate(exact.dk), exact.dv)):
        assert (leaf.grad.double() - wanted).norm() / wanted.norm() <= 0.012
    plain = oracle.attention(*map(dequantize, scaled), dout=dout, causal=True)
    assert (leaves[0].grad.double() - plain.dq).norm() / plain.dq.norm() <= 0.012


@pytest.mark.parametrize("needs", [(True, False, False), (False, True, False), (False, True, True)])
def test_only_wanted_gradients(emulated, launched, needs):
    q, k, v = qkv()
    emulated(q, k, v, Band(), 0.125)
    leaves = [x.requires_grad_(need) for x, need in zip((q, k, v), needs)]
    hopper_attention(*leaves, precision="fp8", backend="sm90").sum().backward()
    ((_, _, sent),) = launched
    assert (bool(sent.dq), bool(sent.dk), bool(sent.dv)) == (needs[0], any(needs[1:]), any(needs[1:]))
    assert [x.grad is not None for x in leaves] == list(needs)


@pytest.fixture
def scripts():
    """bench/fp8_accuracy.py and fp8_checks.py."""
    folder = str(pathlib.Path(__file__).resolve().parents[1] / "bench")
    sys.path.insert(0, folder)
    try:
        yield [importlib.import_module(name) for name in ("fp8_accuracy", "fp8_checks")]
    finally:
        sys.path.remove(folder)
        for name in ("fp8_accuracy", "fp8_checks", "record"):
            sys.modules.pop(name, None)


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("recipe", ["fp8", "fp8, int8 q and k", "fp8, no rotation", "fp8, neither"])
def test_the_scripts_measure_by_kernel_what_they_emulate(launched, scripts, monkeypatch, recipe, mask):
    """The calls they make on a GPU, with the kernels computed by PyTorch."""
    accuracy, checks = scripts
    recipe, band = accuracy.RECIPES[recipe], accuracy.MASKS[mask]

    def quantize(*tensors, int8_qk, **options):
        scaled = quantize_fp8(*tensors, qk_dtype="int8" if int8_qk else "fp8", **options)
        return runner_fp8.from_scaled(*scaled)._replace(k_mean=scaled[1].mean, logit_offset=scaled[0].logit_offset)

    def bind(chosen, problem, dtype, device):
        assert problem.traits.mask == mask and problem.traits.int8_qk == (recipe["qk_dtype"] == "int8")

        def attended(codes, want_lse=True):
            scaled = runner_fp8.to_scaled(codes, dtype)
            out, core = reference_fp8.forward(*scaled, problem.band, problem.softmax_scale)
            return out, core, restore_lse(core, scaled[0], problem.softmax_scale)

        return attended

    monkeypatch.setattr(runner_fp8, "quantize", quantize)
    monkeypatch.setattr(runner_fp8, "bind", bind)
    q, k, v = accuracy.inputs("normal", 0, seqlen=150, headdim=64)
    dout = torch.randn_like(q)
    wanted = accuracy.attend(recipe, q, k, v, dout, band)
    found = accuracy.by_kernels(recipe, q, k, v, dout, band, 0.125)
    assert [name for name, *_ in launched] == ["sm90.backward"]
    for ours, theirs in zip(found, wanted):
        assert checks.relative(ours, theirs) < 0.02
    _, _, out, _, lse = accuracy.forward_by_kernels(recipe, q, k, v, band, 0.125)
    assert torch.equal(out, found.out) and torch.equal(lse, found.lse)
    for ours, theirs in zip(accuracy.attend_forward(recipe, q, k, v, band), wanted):
        assert torch.equal(ours, theirs)


def test_the_scripts_compile_what_they_run(launched, scripts, monkeypatch):
    accuracy, checks = scripts
    compiled = []
    monkeypatch.setattr(jit, "warmup", lambda variants: compiled.extend(variants))
    accuracy.compile_kernels((64,), [checks.FLOAT8, checks.INT8, None])
    accuracy.compile_kernels((128,), [checks.FLOAT8], half="fp16", backward=False)
    slugs = {traits.slug for _, traits, *_ in compiled}
    assert {f"fwd.fp8.d64.{mask}{end}" for mask in accuracy.MASKS for end in ("", ".int8_qk")} <= slugs
    assert {f"{phase}.bf16.d64.{mask}" for phase in ("fwd", "bwd") for mask in accuracy.MASKS} <= slugs
    assert {"quantize.bf16.d64.hadamard.int8_qk.smooth_k", "fwd.fp8.d128.full.fp16_out"} <= slugs
    assert "quantize.fp16.d128.hadamard.smooth_k" in slugs and "bwd.fp16.d128.full" not in slugs


def test_checks_say_what_they_miss(scripts, monkeypatch, tmp_path, capsys):
    _, checks = scripts
    nan = float("nan")
    assert not checks.Check("a", nan, 1.0).ok and not checks.Check("a", nan, 1.0, least=True).ok
    assert checks.Check("a", 0.9, 1.0).ok and not checks.Check("a", 0.9, 1.0, least=True).ok
    bad = lambda device: iter([checks.Check("spoiled", nan, 0.1)])
    monkeypatch.setattr(checks, "CHECKS", (checks.sink, bad))
    assert checks.main(["--out", str(tmp_path), "--revision", "abc"]) == 1
    rows = checks.record.load(tmp_path / "cpu" / "fp8_checks.json")["rows"]
    assert [row["ok"] for row in rows] == [True, False] and rows[1]["value"] is None
    assert "2 bounds, 1 missed" in capsys.readouterr().out
    monkeypatch.setattr(checks, "CHECKS", (checks.sink,))
    assert checks.main(["--out", str(tmp_path), "--revision", "abc"]) == 0


def test_explain_names_the_kernel_of_the_gradients(launched):
    q, k, v = qkv()
    said = explain(q, k, v, precision="fp8", backend="sm90")
    assert (said.kernel, said.backward) == ("sm90.forward_fp8", "sm90.backward")
    assert "backward: bf16 products on the dequantized codes" in said.notes
    assert not any("PyTorch" in note for note in said.notes)
    said = explain(q, k, v, precision="fp8", backend="reference")
    assert said.backward == "reference.backward_fp8" and "PyTorch" in str(said)


@pytest.mark.parametrize("headdim", [16, 64, 96, 128, 192, 256, 80])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rotation_as_one_product(headdim, dtype):
    matrix, scale = rotation_matrix(headdim, dtype, "cpu")
    block = headdim & -headdim
    assert matrix.dtype == dtype and set(matrix.unique().tolist()) <= {-1.0, 0.0, 1.0}
    assert (matrix.float().abs().sum(1) == block).all()
    x = torch.randn(3, 7, 2, headdim)
    torch.testing.assert_close(x @ matrix.float() * scale, unrotate(x), rtol=1e-5, atol=1e-5)
    turned = runner_fp8._unrotated(rotate(x).to(dtype))
    assert turned.shape == x.shape and turned.dtype == dtype
    assert (turned.float() - x).norm() / x.norm() < 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("qk_dtype", ["fp8", "int8"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_codes_decoded_in_16_bits_are_rounded_once(qk_dtype, dtype):
    for x in quantize_fp8(*qkv(dtype), qk_dtype=qk_dtype):
        assert torch.equal(decode_as(x, dtype), decode(x).to(dtype))


def test_other_dtypes_and_headdims_are_refused_with_the_reason(launched):
    q, k, v = qkv(torch.float32)
    with pytest.raises(NotImplementedError, match=r"sm90\.forward_fp8: no fp32_out"):
        hopper_attention(q, k, v, precision="fp8", backend="sm90")
    q, k, v = (x[..., :40].contiguous() for x in qkv())
    with pytest.raises(NotImplementedError, match="both must be multiples of 16"):
        hopper_attention(q, k, v, precision="fp8", backend="sm90")
    assert not launched
