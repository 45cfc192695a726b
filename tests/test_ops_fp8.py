"""The FP8 operators and both doors to them; codes as operands; what is refused, and what explain() says."""

import functools
from dataclasses import replace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from flashattn_hopper import (
    SAC_SAVE_OPS,
    BlockScaled,
    explain,
    hopper_attention,
    ops_fp8,
    planner,
    quantize_fp8,
    runner,
)
from flashattn_hopper.quantize import E4M3

BF = torch.bfloat16
SCALARS = (0.25, None, 0, False, "auto")
fp8 = functools.partial(hopper_attention, precision="fp8")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def qkv(seqlen_q=5, seqlen_k=7, headdim=16, headdim_v=8, heads=4, heads_kv=2, batch=2, dtype=BF, grad=False):
    shapes = (seqlen_q, heads, headdim), (seqlen_k, heads_kv, headdim), (seqlen_k, heads_kv, headdim_v)
    return [torch.randn(batch, *s).to(dtype).requires_grad_(grad) for s in shapes]


def swapped(t):
    return t.detach().transpose(1, 2).contiguous().transpose(1, 2)


# --------------------------------------------------------------------------------------------------------- operators
def test_opcheck():
    q, k, v = qkv(grad=True)
    opcheck(ops_fp8.FWD_FP8, (q, k, v, *SCALARS))
    opcheck(ops_fp8.FWD_FP8, (swapped(q), swapped(k), v.detach(), 0.25, 3, 1, True, "reference"))
    out, lse, *saved = ops_fp8.FWD_FP8(q.detach(), k.detach(), v.detach(), *SCALARS)
    opcheck(ops_fp8.BWD_FP8, (out, None, out, *saved, *SCALARS, [True, False, True]))
    opcheck(ops_fp8.BWD_FP8, (None, lse, out, *saved, *SCALARS, [True, True, False]))


@pytest.mark.parametrize("qk_dtype", ["fp8", "int8"])
def test_opcheck_of_codes(qk_dtype):
    a, b, c = quantize_fp8(*qkv(), qk_dtype=qk_dtype)
    codes = [x.data.view(torch.uint8) for x in (a, b, c)]
    scales = a.descale, b.descale, c.descale
    opcheck(ops_fp8.FWD_SCALED, (*codes, *scales, a.logit_offset, qk_dtype == "int8", 1, 128, BF, *SCALARS))


@pytest.mark.parametrize("dtype", [BF, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("sizes", [{}, {"batch": 0}, {"seqlen_k": 0}, {"seqlen_q": 1, "seqlen_k": 300}], ids=str)
def test_fakes_are_like_the_real_ones(dtype, sizes):
    q, k, v = map(swapped, qkv(dtype=dtype, **sizes))

    def results(q, k, v):
        out, lse, *saved = ops_fp8.FWD_FP8(q, k, v, *SCALARS)
        return out, lse, *saved, *ops_fp8.BWD_FP8(out, lse, out, *saved, *SCALARS, (True, False, True))

    real = results(q, k, v)
    with FakeTensorMode() as mode:
        fake = results(*map(mode.from_tensor, (q, k, v)))
    for a, b in zip(real, fake):
        assert (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)


def test_fake_cuda_and_meta_tensors_ask_for_no_device():
    with FakeTensorMode():
        q, k = (torch.empty(2, s, 8, 64, dtype=BF, device="cuda") for s in (5, 7))
        out, lse = fp8(q, k, k, return_lse=True)
        assert (out.shape, out.dtype, out.device.type, lse.shape) == (q.shape, BF, "cuda", (2, 8, 5))
    q = torch.empty(2, 5, 8, 512, dtype=BF, device="meta", requires_grad=True)
    fp8(q, q, q).sum().backward()
    assert q.grad.is_meta and q.grad.shape == q.shape
    with torch.no_grad():
        assert hopper_attention(*quantize_fp8(q, q, q)).is_meta


# --------------------------------------------------------------------------------------------------------- two doors
class Watch(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def through_dispatcher(*args, **kwargs):
    with Watch() as watch:
        result = fp8(*args, **kwargs)
    assert ops_fp8.FWD_FP8 in watch.seen
    return result


@pytest.mark.parametrize("loss", [(1, 0), (0, 1), (1, 1)], ids=["out", "lse", "both"])
def test_both_doors_agree(loss):
    data, results = qkv(), []
    for door in (fp8, through_dispatcher):
        q, k, v = (x.detach().requires_grad_() for x in data)
        out, lse = door(q, k, v, causal=True, window_size=(3, None), return_lse=True)
        sum(w * t.float().square().sum() for w, t in zip(loss, (out, lse)) if w).backward()
        results.append((out, lse, q.grad, k.grad, v.grad))
    for eager, dispatched in zip(*results):
        assert torch.equal(eager, dispatched)
    assert results[0][2].any() and results[0][4].any() == bool(loss[0])


def test_eager_calls_skip_the_dispatcher(monkeypatch):
    monkeypatch.setattr(ops_fp8, "FWD_FP8", None)
    monkeypatch.setattr("flashattn_hopper.api.FWD_FP8", None)
    monkeypatch.setattr(ops_fp8, "FWD_SCALED", None)
    q, k, v = qkv(grad=True)
    fp8(q, k, v).sum().backward()
    hopper_attention(*quantize_fp8(q, k, v))


@pytest.mark.parametrize("door", [fp8, through_dispatcher])
def test_a_second_derivative_is_refused(door):
    q, k, v = qkv(grad=True)
    (grad,) = torch.autograd.grad(door(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="not differentiable itself"):
        (grad.sum() + q.sum()).backward()


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compile(backend):
    def call(q, k, v):
        out, lse = fp8(q, k, v, causal=True, return_lse=True)
        return out.float().square().sum() + lse.sum(), out

    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=counter)
    # Trap: up to 128 keys there is one scale for each head, and a dimension of 1 is a graph of its own.
    for seqlen in (130, 200, 389):
        data, results = qkv(seqlen, seqlen), []
        for f in (call, compiled):
            q, k, v = (x.detach().requires_grad_() for x in data)
            loss, out = f(q, k, v)
            loss.backward()
            results.append((out, q.grad, k.grad, v.grad))
        assert all(torch.equal(a, b) for a, b in zip(*results))
    assert counter.frame_count == 1


@pytest.mark.parametrize("qk_dtype", ["fp8", "int8"])
def test_compile_codes(qk_dtype):
    q, k, v = qkv(200, 200)
    call = lambda *codes: hopper_attention(*codes, causal=True, return_lse=True)
    both = lambda *tensors: call(*quantize_fp8(*tensors, qk_dtype=qk_dtype))
    codes = quantize_fp8(q, k, v, qk_dtype=qk_dtype)
    for f, operands in ((call, codes), (both, (q, k, v))):
        found = torch.compile(f, fullgraph=True, backend="aot_eager")(*operands)
        assert all(torch.equal(a, b) for a, b in zip(found, call(*codes)))


def test_selective_checkpointing_runs_the_forward_once():
    q, k, v = qkv(grad=True)
    keep = functools.partial(create_selective_checkpoint_contexts, SAC_SAVE_OPS)
    with Watch() as watch:
        checkpoint(lambda *x: fp8(*x).square(), q, k, v, use_reentrant=False, context_fn=keep).sum().backward()
    assert watch.seen.count(ops_fp8.FWD_FP8) == 1 and q.grad.any()


def test_flops_are_those_of_16_bit_attention():
    counts = []
    for precision in ("bf16", "fp8"):
        q, k, v = qkv(40, 50, grad=True)
        with FlopCounterMode(display=False) as counter:
            hopper_attention(q, k, v, causal=True, precision=precision).sum().backward()
        counts.append(counter.get_total_flops())
    with FlopCounterMode(display=False) as counter:
        hopper_attention(*quantize_fp8(*qkv(40, 50)), causal=True)
    assert counts[0] == counts[1] > counter.get_total_flops() > 0
    assert counter.get_total_flops() * 4 > counts[0]


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path_factory.mktemp('dist')}/store", rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("dim, kept", [(0, 0), (2, 2), (1, None)], ids=["batch", "heads", "seqlen is gathered"])
def test_dtensor(mesh, dim, kept):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    plain = qkv(grad=True)
    sharded = [distribute_tensor(t.detach(), mesh, [Shard(dim)]).requires_grad_() for t in plain]
    expected, out = fp8(*plain, causal=True), fp8(*sharded, causal=True)
    assert out.placements == (Replicate() if kept is None else Shard(kept),)
    expected.sum().backward()
    out.sum().backward()
    assert torch.equal(out.full_tensor(), expected)
    assert all(torch.equal(a.grad.full_tensor(), b.grad) for a, b in zip(sharded, plain))


# ------------------------------------------------------------------------------------------------------------ dtypes
@pytest.mark.parametrize("dtype", [BF, torch.float16, torch.float32, torch.float64])
def test_out_and_gradients_have_the_dtype_of_the_inputs(dtype):
    q, k, v = qkv(dtype=dtype, grad=True)
    for door in (fp8, through_dispatcher):
        out, lse = door(q, k, v, return_lse=True)
        assert (out.dtype, lse.dtype) == (dtype, torch.float32)
        assert {g.dtype for g in torch.autograd.grad(out.sum(), (q, k, v))} == {dtype}
    assert hopper_attention(*quantize_fp8(q, k, v)).dtype == dtype


def test_autocast():
    mixed = [x.to(t).requires_grad_() for x, t in zip(qkv(), (torch.float32, torch.float32, BF))]
    with torch.autocast("cpu", BF):
        out = fp8(*mixed)
    assert out.dtype == BF and torch.equal(out, fp8(*(x.to(BF) for x in mixed)))
    out.sum().backward()
    assert [x.grad.dtype for x in mixed] == [x.dtype for x in mixed]


# ---------------------------------------------------------------------------------------------------------- refusals
def changed(place, **fields):
    def change(*codes):
        return [replace(x, **fields) if i == place else x for i, x in enumerate(codes)]

    return change


BAD = {
    "only some": (lambda a, b, c: (a, b, torch.ones(2, 7, 2, 8)), {}, TypeError, ["v Tensor", "quantize_fp8"]),
    "data": (changed(0, data=None), {}, TypeError, ["q: expected a torch.Tensor"]),
    "v int8": (changed(2, data=torch.ones(2, 7, 2, 8).to(torch.int8)), {}, TypeError, ["v: codes are int8"]),
    "half codes": (changed(1, data=torch.ones(2, 7, 2, 16).half()), {}, ValueError, ["k: codes are float16", "int8"]),
    "mixed codes": (
        changed(1, data=torch.ones(2, 7, 2, 16).to(torch.int8)),
        {},
        TypeError,
        ["q float8_e4m3fn", "k int8"],
    ),
    "heads": (changed(0, data=torch.ones(2, 5, 3, 16).to(E4M3)), {}, ValueError, ["3 query heads"]),
    "descale shape": (changed(1, descale=torch.ones(2, 2)), {}, ValueError, ["k: descale", "(2, 2, 1)", "rows=128"]),
    "descale dtype": (changed(1, descale=torch.ones(2, 2, 1).half()), {}, TypeError, ["k: descale is float16"]),
    "descale number": (changed(1, descale=0.5), {}, TypeError, ["k: descale must be a tensor", "0.5"]),
    "descale device": (changed(1, descale=torch.ones(2, 2, 1, device="meta")), {}, ValueError, ["descale is on meta"]),
    "rows 0": (changed(0, rows=0), {}, ValueError, ["q: rows is int 0"]),
    "rows of k": (changed(1, rows=1, descale=torch.ones(2, 2, 7)), {}, ValueError, ["k: 1 tokens", "128"]),
    "rows of v": (changed(2, rows=128), {}, ValueError, ["v: 128 tokens", "None"]),
    "rotation": (changed(0, rotated=False), {}, ValueError, ["rotated", "hadamard"]),
    "mean": (changed(1, mean=None), {}, ValueError, ["logit_offset", "quantize_fp8"]),
    "mean shape": (changed(1, mean=torch.ones(2, 16)), {}, ValueError, ["k: mean", "(2, 2, 16)"]),
    "dtype": (changed(0, dtype=torch.float16), {}, TypeError, ["q float16", "k bfloat16"]),
    "dtype of nothing": (changed(0, dtype=torch.int64), {}, TypeError, ["q: is int64"]),
    "precision": (lambda *codes: codes, {"precision": "bf16"}, ValueError, ["'bf16'", '"fp8"']),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_codes(name):
    change, keywords, exception, words = BAD[name]
    operands = change(*quantize_fp8(*qkv()))
    for call in (hopper_attention, explain):
        with pytest.raises(exception) as info:
            call(*operands, **keywords)
        for word in words:
            assert word in str(info.value), f"{word!r} is missing in: {info.value}"


def test_explain():
    q, k, v = qkv()
    said = explain(q, k, v, precision="fp8")
    assert (said.kernel, said.backend, said.backward) == (
        "reference.forward_fp8",
        "reference",
        "reference.backward_fp8",
    )
    assert said.slug == "fwd.fp8.d16x8.full.gqa" and "q, k, v: quantized on every call" in said.notes
    said = explain(*quantize_fp8(q, k, v))
    assert (said.kernel, said.backward) == ("reference.forward_fp8", None) and "carry no gradient" in str(said)
    assert "cast" not in str(explain(q.float(), k.float(), v.float(), precision="fp8"))


def test_cuda_tensors_take_the_kernel_or_the_emulation_by_name(monkeypatch):
    """Tensors of a CPU stand in for those of a GPU: the planner sees only the capability."""
    monkeypatch.setattr("flashattn_hopper.api._calls", runner.Memo())
    q, k, v = qkv()
    for operands in ((q, k, v), quantize_fp8(q, k, v)):
        monkeypatch.setattr(planner, "capability_of", lambda device: (9, 0))
        said = explain(*(torch.zeros(1, 4, 2, 32) for _ in range(3)), precision="fp8")
        assert said.kernel is None and "fp32_out" in dict(said.refused)["sm90.forward_fp8"]
        with pytest.raises(NotImplementedError, match="multiples of 16"):  # headdim_v 8
            hopper_attention(*operands, precision="fp8")
        monkeypatch.setattr(planner, "capability_of", lambda device: (8, 0))
        with pytest.raises(NotImplementedError) as info:
            hopper_attention(*operands, precision="fp8")
        message = str(info.value)
        for part in (
            "no kernel runs fwd.fp8.d16x8.full.gqa on sm_80",
            "reference.forward_fp8: runs on sm_80 only with backend='reference'",
            'backend="reference" runs it',
        ):
            assert part in message
        said = explain(*operands, precision="fp8")
        refused = {"sm90.forward_fp8", "sm80.forward", "reference.forward_fp8"}
        assert said.kernel is None and set(dict(said.refused)) == refused
        assert explain(*operands, precision="fp8", backend="reference").kernel == "reference.forward_fp8"
        assert hopper_attention(*operands, backend="reference", precision="fp8").isfinite().all()


@pytest.mark.parametrize("headdim, codes", [(64, ""), (128, ""), (192, ""), (208, ".int8_qk"), (256, ".int8_qk")])
def test_explain_names_the_kernels_of_a_hopper_gpu(monkeypatch, headdim, codes):
    """int8 for q and k where it costs no speed."""
    monkeypatch.setattr(planner, "capability_of", lambda device: (9, 0))
    q, k, v = torch.zeros(3, 1, 4, 2, headdim, dtype=BF)
    said = explain(q, k, v, precision="fp8")
    assert (said.kernel, said.backward) == ("sm90.forward_fp8", "sm90.backward")
    compiled = headdim if headdim != 208 else 256
    assert said.compiled == f"fwd.fp8.d{compiled}.full{codes}"
    assert (quantize_fp8(q, k, v)[0].data.dtype == torch.int8) == bool(codes)


def test_block_scaled_is_public():
    import flashattn_hopper

    assert {"BlockScaled", "quantize_fp8", "dequantize"} <= set(flashattn_hopper.__all__)
    assert flashattn_hopper.BlockScaled is BlockScaled
