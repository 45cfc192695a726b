"""The operators: registration, shapes for tracing, both doors, autograd, compile."""

import functools
from dataclasses import replace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from flashattn_hopper import SAC_SAVE_OPS, api, hopper_attention, ops, runner
from flashattn_hopper.kernels.common.operands import FwdOperands
from flashattn_hopper.spec.mask import Band, Seqlens

SCALARS = (0.25, None, 0, False, "auto")


def qkv(seqlen_q=5, seqlen_k=7, headdim=16, headdim_v=8, heads=4, heads_kv=2, batch=2, dtype=torch.float32, grad=False):
    generator = torch.Generator().manual_seed(seqlen_q * 1000 + seqlen_k)
    shapes = (seqlen_q, heads, headdim), (seqlen_k, heads_kv, headdim), (seqlen_k, heads_kv, headdim_v)
    return [torch.randn(batch, *s, generator=generator).to(dtype).requires_grad_(grad) for s in shapes]


def swapped(t):
    return t.detach().transpose(1, 2).contiguous().transpose(1, 2)


def test_schema_speaks_the_operands_words():
    names = [a.name for a in ops.FWD._schema.arguments]
    assert set(names) - {"deterministic", "backend"} <= set(FwdOperands._fields)
    assert [a.name for a in ops.BWD._schema.arguments] == [
        *("dout", "dlse", "q", "k", "v", "out", "lse"),
        *names[3:],
        "needs",
    ]


def test_opcheck_forward():
    q, k, v = qkv(grad=True)
    opcheck(ops.FWD, (q, k, v, *SCALARS))
    opcheck(ops.FWD, (swapped(q), swapped(k), v.detach(), 0.25, 3, 1, True, "reference"))


@pytest.mark.parametrize("which", ["out", "lse", "both"])
def test_opcheck_backward(which):
    q, k, v = qkv()
    out, lse = ops.FWD(q, k, v, *SCALARS)
    dout = None if which == "lse" else torch.ones(()).expand_as(out)
    dlse = None if which == "out" else torch.randn_like(lse)
    needs = {"out": [False, True, False], "lse": [True, True, True], "both": [True, False, True]}[which]
    opcheck(ops.BWD, (dout, dlse, swapped(q), k, v, out, lse, *SCALARS, needs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("sizes", [{}, {"batch": 0}, {"seqlen_k": 0}, {"seqlen_q": 1, "batch": 1}], ids=str)
def test_fakes_are_like_the_real_ones(dtype, sizes):
    q, k, v = map(swapped, qkv(dtype=dtype, **sizes))
    needs = (True, False, True)
    real = ops.FWD(q, k, v, *SCALARS)
    dout, dlse = map(torch.ones_like, real)
    real += ops.BWD(dout, dlse, q, k, v, *real, *SCALARS, needs)
    with FakeTensorMode() as mode:
        q, k, v, dout, dlse = map(mode.from_tensor, (q, k, v, dout, dlse))
        fake = ops.FWD(q, k, v, *SCALARS)
        fake += ops.BWD(dout, dlse, q, k, v, *fake, *SCALARS, needs)
    for a, b in zip(real, fake):
        assert (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)


def test_fake_cuda_and_meta_tensors_ask_for_no_device():
    with FakeTensorMode():
        q, k = (torch.empty(2, s, 8, 64, dtype=torch.bfloat16, device="cuda") for s in (5, 7))
        out, lse = hopper_attention(q, k, k, return_lse=True)
        assert (out.shape, out.device.type, lse.shape, lse.dtype) == (q.shape, "cuda", (2, 8, 5), torch.float32)
    q = torch.empty(2, 5, 8, 512, dtype=torch.bfloat16, device="meta", requires_grad=True)
    out = hopper_attention(q, q, q)
    out.sum().backward()
    assert out.is_meta and q.grad.shape == q.shape


# Two doors


def through_dispatcher(*args, **kwargs):
    """A dispatch mode is somebody who wants to see operators."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen = []
    with Watch():
        result = hopper_attention(*args, **kwargs)
    assert ops.FWD in seen
    return result


KEYWORDS = {"causal": True, "window_size": (3, None), "return_lse": True}


@pytest.mark.parametrize("loss", ["out", "lse", "both"])
def test_both_doors_agree(loss):
    weights = {"out": (1, 0), "lse": (0, 1), "both": (1, 1)}[loss]
    results = []
    for door in (hopper_attention, through_dispatcher):
        q, k, v = qkv(dtype=torch.bfloat16, grad=True)
        out, lse = door(q, k, v, **KEYWORDS)
        total = sum(w * t.float().square().sum() for w, t in zip(weights, (out, lse.clamp(min=-50))) if w)
        total.backward()
        results.append((out, lse, q.grad, k.grad, v.grad))
    for eager, dispatched in zip(*results):
        assert torch.equal(eager, dispatched)
    assert results[0][2].any() and (loss == "lse" or results[0][4].any())


def test_eager_calls_skip_the_dispatcher(monkeypatch):
    monkeypatch.setattr(ops, "_fwd", None)
    monkeypatch.setattr("flashattn_hopper.api.FWD", None)
    q, k, v = qkv(dtype=torch.bfloat16, grad=True)
    hopper_attention(q, k, v).sum().backward()
    hopper_attention(torch.nn.Parameter(q.detach()), k.detach(), v.detach())


@pytest.mark.parametrize("door", [hopper_attention, through_dispatcher])
def test_gradients(door):
    q, k, v = (t.double().requires_grad_() for t in qkv(seqlen_q=4, seqlen_k=5, headdim=3, headdim_v=2, batch=1))
    call = functools.partial(door, precision="fp64", causal=True, return_lse=True)
    assert torch.autograd.gradcheck(call, (q, k, v))


@pytest.mark.parametrize("door", [hopper_attention, through_dispatcher])
def test_a_second_derivative_is_refused(door):
    q, k, v = qkv(dtype=torch.bfloat16, grad=True)
    (grad,) = torch.autograd.grad(door(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="not differentiable itself"):
        (grad.sum() + q.sum()).backward()


@pytest.mark.parametrize("needs", [(a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1)], ids=str)
@pytest.mark.parametrize("door", [hopper_attention, through_dispatcher])
def test_only_what_is_needed_is_computed(door, needs, monkeypatch):
    """C41."""
    asked, real = [], runner.prepare_backward
    monkeypatch.setattr(runner, "prepare_backward", lambda *args: asked.append(tuple(args[-1])) or real(*args))
    monkeypatch.setattr(api, "_calls", runner.Memo())
    monkeypatch.setattr(ops, "_prepared", runner.Memo())
    whole = qkv(70, 70, dtype=torch.bfloat16, grad=True)
    door(*whole, causal=True).sum().backward()
    some = [t.detach().requires_grad_(bool(need)) for t, need in zip(whole, needs)]
    out = door(*some, causal=True)
    if not any(needs):
        assert out.grad_fn is None
        return
    out.sum().backward()
    # Decided once for each kind of call.
    assert asked == list(dict.fromkeys([(True, True, True), tuple(map(bool, needs))]))
    for a, b, need in zip(some, whole, needs):
        assert torch.equal(a.grad, b.grad) if need else a.grad is None


def test_the_operator_of_the_backward_prepares_no_forward(monkeypatch):
    """It may run where no forward did: nothing is to be compiled for one."""
    q, k, v = qkv(dtype=torch.bfloat16)
    out, lse = ops.FWD(q, k, v, 0.125, None, None, False, "auto")
    monkeypatch.setattr(ops, "_prepared", runner.Memo())
    monkeypatch.setattr(runner, "prepare", None)
    grads = ops.BWD(torch.ones_like(out), None, q, k, v, out, lse, 0.125, None, None, False, "auto", (True,) * 3)
    assert all(grad.shape == x.shape for grad, x in zip(grads, (q, k, v)))


def test_no_grad_and_inference_mode():
    q, k, v = qkv(dtype=torch.bfloat16, grad=True)
    with torch.no_grad():
        assert not hopper_attention(q, k, v).requires_grad
    with torch.inference_mode():
        assert hopper_attention(q, k, v).is_inference()


def test_gradients_of_every_stride():
    """C33: gradients of stride zero, of a slice, of a transposed view."""
    losses = {
        "sum": lambda out: out.sum(),
        "mean": lambda out: out.mean(),
        "slice": lambda out: out[:, :1].sum(),
        "transposed": lambda out: out.transpose(1, 2).sum(),
    }
    for name, loss in losses.items():
        q, k, v = qkv(5, 5, 8, 8, 2, 2, batch=1, dtype=torch.bfloat16, grad=True)
        out = hopper_attention(q, k, v, causal=True)
        loss(out).backward()
        leaf = out.detach().requires_grad_()
        loss(leaf).backward()
        q2, k2, v2 = (t.detach().requires_grad_() for t in (q, k, v))
        hopper_attention(q2, k2, v2, causal=True).backward(leaf.grad.contiguous())
        for a, b in zip((q, k, v), (q2, k2, v2)):
            assert torch.equal(a.grad, b.grad), name


# Transforms, counters, checkpointing


@pytest.mark.filterwarnings("ignore:.*performance drop")
def test_vmap_loops():
    q, k, v = (torch.stack([t, -t]) for t in qkv(dtype=torch.bfloat16))
    mapped = torch.func.vmap(lambda q, k, v: hopper_attention(q, k, v, causal=True))(q, k, v)
    for i in range(2):
        assert torch.equal(mapped[i], hopper_attention(q[i], k[i], v[i], causal=True))


def test_functorch_grad_is_a_clear_error():
    q, k, v = qkv(dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda q: hopper_attention(q, k, v).sum())(q)


BANDS = [Band(), Band(None, 0), Band(3, 0), Band(0, 2), Band(40, 40), Band(2, None), Band(-2, 5), Band(5, -3)]


@pytest.mark.parametrize("seqlens", [(1, 1), (5, 9), (9, 5), (16, 16), (3, 0), (0, 3)], ids=str)
@pytest.mark.parametrize("band", BANDS, ids=str)
def test_visible_pairs(band, seqlens):
    counted = sum(bool(band.keep(i, j, Seqlens(*seqlens))) for i in range(seqlens[0]) for j in range(seqlens[1]))
    assert ops.visible_pairs(*seqlens, band.left, band.right) == counted


def test_flops():
    q, k, v = qkv(64, 64, dtype=torch.bfloat16, grad=True)
    with FlopCounterMode(display=False) as counter:
        out = hopper_attention(q, k, v, causal=True)
        forward = counter.get_total_flops()
        out.sum().backward()
    pairs = 64 * 65 // 2
    assert forward == 2 * 2 * 4 * pairs * (16 + 8)
    assert counter.get_total_flops() - forward == 2 * 2 * 4 * pairs * (3 * 16 + 2 * 8)


def count_forwards(monkeypatch):
    calls, real = [], ops.prepared

    def counting(*args, **keywords):
        decided = real(*args, **keywords)
        return replace(decided, forward=lambda *t: calls.append(1) or decided.forward(*t))

    monkeypatch.setattr(ops, "prepared", counting)
    monkeypatch.setattr("flashattn_hopper.api.prepared", counting)
    monkeypatch.setattr("flashattn_hopper.api._calls", runner.Memo())
    return calls


def test_checkpointing(monkeypatch):
    calls = count_forwards(monkeypatch)
    layer = lambda q, k, v: hopper_attention(q * 1, k, v, causal=True)
    plain = qkv(dtype=torch.bfloat16, grad=True)
    layer(*plain).sum().backward()
    selective = functools.partial(create_selective_checkpoint_contexts, SAC_SAVE_OPS)
    for extra, forwards in (({}, 2), ({"context_fn": selective}, 1)):
        calls.clear()
        inputs = [t.detach().requires_grad_() for t in plain]
        checkpoint(layer, *inputs, use_reentrant=False, **extra).sum().backward()
        assert len(calls) == forwards
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(inputs, plain))


# torch.compile


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def causal(q, k, v):
    return hopper_attention(q, k, v, causal=True)


def same_as_eager(compiled, eager, inputs):
    results = []
    for call in (compiled, eager):
        tensors = [t.detach().requires_grad_() for t in inputs]
        out = call(*tensors)
        out.float().mean().backward()
        results.append((out, *(t.grad for t in tensors)))
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("seqlen", [1, 128, 196, 257])
def test_compile_static(seqlen):
    """C37."""
    same_as_eager(
        torch.compile(causal, fullgraph=True, backend="aot_eager"),
        causal,
        qkv(seqlen, seqlen, 64, 64, 8, 8, 1, torch.bfloat16),
    )


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_dynamic(backend):
    """C38: one graph for all lengths. headdim is none of them, or torch would take the two for one symbol."""
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(causal, fullgraph=True, dynamic=True, backend=counter)
    for seqlen in (64, 65, 100, 300):
        same_as_eager(compiled, causal, qkv(seqlen, seqlen, 32, 32, 4, 2, dtype=torch.bfloat16))
    assert counter.frame_count == 1


def test_compile_everything_else():
    """Arguments from outside the graph, autocast, a cast precision, lse in the loss."""

    def call(q, k, v, window, scale):
        out, lse = hopper_attention(q, k, v, window_size=(window, 0), softmax_scale=scale, return_lse=True)
        return out + lse.clamp(min=-5).mT[..., None].to(out.dtype)

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    inputs = qkv(dtype=torch.bfloat16)
    for window, scale in ((3, 0.5), (2, 0.25)):
        same_as_eager(*(functools.partial(f, window=window, scale=scale) for f in (compiled, call)), inputs)
    precise = functools.partial(hopper_attention, precision="fp32")
    same_as_eager(torch.compile(precise, fullgraph=True, backend="aot_eager"), precise, inputs)

    def autocast(q, k, v):
        with torch.autocast("cpu", torch.bfloat16):
            return hopper_attention(q, k, v)

    same_as_eager(torch.compile(autocast, fullgraph=True, backend="aot_eager"), autocast, qkv())


def test_compile_refuses_like_eager():
    q, k, v = qkv(dtype=torch.bfloat16)
    with pytest.raises(Exception, match="query heads are not a multiple"):
        torch.compile(causal, fullgraph=True, backend="aot_eager")(q[:, :, :3], k, v)


# DTensor


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    """One process that is a mesh of one device: placements are propagated as on many."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path_factory.mktemp('dist')}/store", rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("dim, kept", [(0, 0), (2, 2), (1, None)], ids=["batch", "heads", "seqlen is gathered"])
def test_c45_dtensor(mesh, dim, kept):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    inputs = qkv(seqlen_k=5, dtype=torch.bfloat16)
    plain = [t.detach().requires_grad_() for t in inputs]
    expected, expected_lse = hopper_attention(*plain, causal=True, return_lse=True)
    (expected.sum() + expected_lse.sum()).backward()
    sharded = [distribute_tensor(t, mesh, [Shard(dim)]).requires_grad_() for t in inputs]
    sharded[1] = sharded[1].detach()
    out, lse = hopper_attention(*sharded, causal=True, return_lse=True)
    assert out.placements == (Replicate() if kept is None else Shard(kept),)
    assert lse.placements == ({0: Shard(0), 2: Shard(1), None: Replicate()}[kept],)
    (out.sum() + lse.sum()).backward()
    assert torch.equal(out.full_tensor(), expected) and torch.equal(lse.full_tensor(), expected_lse)
    for a, b in ((sharded[0], plain[0]), (sharded[2], plain[2])):
        assert torch.equal(a.grad.full_tensor(), b.grad)
    assert sharded[1].grad is None
