"""Cases from bug reports of attention kernels (by number) on CUDA tensors.

Gradients come from the Hopper backward where the backend is named and it takes the call, else from the reference.
The numbers are those of test_api_cases.py and test_reference.py, which hold what a CPU can show.
"""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck

from flashattn_hopper import explain, hopper_attention, jit, ops

from . import cases, fuzz, oracle
from .oracle import check_forward, check_grads

pytestmark = pytest.mark.gpu

BF, HALF = torch.bfloat16, torch.float16
INF = float("inf")


def qkv(batch=2, seqlens=(70, 70), heads=(4, 2), headdim=64, headdim_v=None, dtype=BF, grad=False, seed=0):
    generator = torch.Generator(cases.DEVICE).manual_seed(seed)
    shapes = (
        (seqlens[0], heads[0], headdim),
        (seqlens[1], heads[1], headdim),
        (seqlens[1], heads[1], headdim_v or headdim),
    )
    make = lambda shape: torch.randn(batch, *shape, generator=generator, device=cases.DEVICE).to(dtype)
    return [make(shape).requires_grad_(grad) for shape in shapes]


def full(shape, value, dtype=BF):
    return torch.full(shape, value, dtype=dtype, device=cases.DEVICE)


def attend(q, k, v, **keywords):
    """(out, lse)"""
    return hopper_attention(q, k, v, return_lse=True, backend=cases.BACKEND, **keywords)


def check(q, k, v, dout=None, **mask):
    """Forward and gradients of `out` against float64. Returns out, lse and the gradients."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out, lse = attend(q, k, v, **mask)
    check_forward(out, lse, q, k, v, **mask)
    dout = torch.randn_like(out) if dout is None else dout
    grads = torch.autograd.grad(out, (q, k, v), dout)
    check_grads(grads, q, k, v, dout, **mask)
    return out, lse, grads


# Masks and alignment


@pytest.mark.parametrize("batch, seqlens, heads, headdim", [(1, (5, 2), (1, 1), 64), (2, (300, 130), (4, 4), 128)])
def test_c01_more_queries_than_keys(batch, seqlens, heads, headdim):
    q, k, v = qkv(batch, seqlens, heads, headdim)
    out, lse, (dq, dk, dv) = check(q, k, v, causal=True)
    blind = seqlens[0] - seqlens[1]
    assert not out[:, :blind].any() and not dq[:, :blind].any()
    assert bool(lse[..., :blind].isneginf().all()) and bool(lse[..., blind:].isfinite().all())
    assert torch.equal(out[:, blind], v[:, 0])
    assert bool(dk.isfinite().all()) and bool(dv.isfinite().all())


def keys_seen(seqlen_q, seqlen_k, **mask):
    """Keys that each query mixes: K = 0 and V one-hot by key."""
    width = -(-seqlen_k // 8) * 8
    q, k = full((1, seqlen_q, 1, 8), 1.0), full((1, seqlen_k, 1, 8), 0.0)
    v = torch.eye(seqlen_k, width, dtype=BF, device=cases.DEVICE).view(1, seqlen_k, 1, width)
    return (attend(q, k, v, **mask)[0][0, :, 0] != 0).sum(-1).tolist()


def test_c02_causal_is_bottom_right_aligned():
    assert keys_seen(2, 5, causal=True) == [4, 5]
    assert keys_seen(5, 2, causal=True) == [0, 0, 0, 1, 2]


@pytest.mark.parametrize("left, right", [(0, 0), (3, 0), (3, 2), (15, 0)])
def test_c03_a_window_counts_the_current_token_extra(left, right):
    expected = [min(15, i + right) - max(0, i - left) + 1 for i in range(16)]
    assert keys_seen(16, 16, window_size=(left, right)) == expected
    assert keys_seen(16, 16, window_size=(left, None), causal=True) == [min(i, left) + 1 for i in range(16)]


# NaN, inf, extreme values


@pytest.mark.parametrize("dtype", [BF, HALF], ids=str)
@pytest.mark.parametrize("headdim", [32, 64, 128])
def test_c07_strongly_negative_logits_at_every_length(headdim, dtype):
    """q = 4 and k = -4 everywhere: all logits are -16 sqrt(headdim), the output is the mean of v."""
    logit = -16 * headdim**0.5
    v = qkv(1, (1, 704), (1, 1), headdim, dtype=dtype)[2]
    worst = []
    for length in (*range(1, 301), 704):
        q, k = full((1, length, 1, headdim), 4.0, dtype), full((1, length, 1, headdim), -4.0, dtype)
        out, lse = attend(q, k, v[:, :length])
        mean = v[:, :length].double().mean(1, keepdim=True)
        lse_error = (lse.double() - logit - torch.tensor(float(length)).log().item()).abs().amax() / abs(logit)
        worst.append(torch.stack(((out.double() - mean).abs().amax() / torch.finfo(dtype).eps, lse_error * 2**22)))
    worst = torch.stack(worst)  # NaN stays NaN, so the comparison below catches it
    assert bool((worst < 4).all()), f"lengths {1 + (~(worst < 4)).any(1).nonzero().flatten()}: {worst.amax(0).tolist()}"


@pytest.mark.parametrize("length", [64, 704])
def test_c07_gradients(length):
    q, k = full((1, length, 1, 64), 4.0), full((1, length, 1, 64), -4.0)
    _, _, (dq, dk, dv) = check(q, k, qkv(1, (1, length), (1, 1))[2])
    assert all(bool(g.isfinite().all()) for g in (dq, dk, dv)) and dq.abs().max() < 1e-2


@pytest.mark.parametrize("dtype", [BF, HALF], ids=str)
def test_c08_logits_far_below_zero(dtype):
    q, k, v = qkv(1, (200, 200), (1, 1), 128, dtype=dtype)
    q, k = torch.zeros_like(q), torch.zeros_like(k)
    q[..., 0], k[..., 0] = 448, -512
    out, lse, _ = check(q, k, v)
    expected = -448 * 512 / 128**0.5 + torch.tensor(200.0).log().item()
    torch.testing.assert_close(lse, torch.full_like(lse, expected), rtol=1e-6, atol=0)
    torch.testing.assert_close(out.double(), v.double().mean(1, keepdim=True).expand_as(out), rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("dtype, value", [(BF, 133120.0), (HALF, 59968.0)], ids=["bf16", "fp16"])
@pytest.mark.parametrize("length", [1, 2, 300])
def test_c09_huge_equal_inputs(dtype, value, length):
    q = full((1, length, 1, 64), value, dtype).requires_grad_()
    k, v = (q.detach().clone().requires_grad_() for _ in range(2))
    out, lse = attend(q, k, v)
    assert torch.equal(out, q)
    torch.testing.assert_close(lse, torch.full_like(lse, value**2 * 8), rtol=1e-6, atol=0)
    if dtype == BF:  # the gradients of float16 overflow: dP sums 64 values of 60000
        out.sum().backward()
        assert all(bool(x.grad.isfinite().all()) for x in (q, k, v))
        # Not dv: one unit of such an lse is more than exp can take, so P may come out as 0.
        assert length > 1 or not (q.grad.any() or k.grad.any())


def test_c10_most_rows_see_nothing():
    for seed, length in enumerate((76, 34, 146)):
        q, k, v = (3 * x for x in qkv(1, (length, 1), (1, 1), 32, dtype=HALF, seed=seed))
        out, _, (dq, dk, dv) = check(q, k, v, dout=torch.ones_like(q), causal=True)
        assert not out[:, :-1].any() and torch.equal(out[:, -1], v[:, 0])
        assert not dq[:, :-1].any() and torch.equal(dv, torch.ones_like(dv))
        # One key means dS = dP - delta = 0, both the same sum of 32 terms to float32 rounding.
        assert dq.abs().max() < 1e-4 and dk.abs().max() < 1e-4


def test_c15_one_query_many_keys():
    q, k, v = qkv(1, (1, 4096), (16, 16), grad=True)
    out, _ = attend(q, k, v)
    out.transpose(1, 2).reshape(1, 16 * 64).sum().backward()
    assert all(bool(x.grad.isfinite().all()) for x in (q, k, v))
    check_grads((q.grad, k.grad, v.grad), q, k, v, torch.ones_like(out))
    q, k, v = qkv(1, (1, 65536), (16, 16))
    check_forward(*attend(q, k, v), q, k, v)


# Shapes


def test_c22_gradients_of_a_batch_beyond_a_grid_dimension():
    q, k, v = qkv(65536, (4, 4), (8, 8), dtype=HALF, grad=True)
    out, lse = attend(q, k, v)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    for b in (0, 32768, 57344):
        part = slice(b, b + 8192)
        check_forward(out[part], lse[part], q[part], k[part], v[part])
        check_grads([g[part] for g in grads], q[part], k[part], v[part], dout[part])


@pytest.mark.parametrize("batch, seqlens", [(0, (3952, 16)), (2, (0, 16)), (2, (40, 0)), (0, (0, 0))], ids=str)
def test_c23_empty(batch, seqlens):
    q, k, v = qkv(batch, seqlens, (10, 10), grad=True)
    out, lse = attend(q, k, v, causal=True)
    assert out.shape == (batch, seqlens[0], 10, 64) and not out.any()
    assert lse.shape == (batch, 10, seqlens[0]) and bool((lse == -INF).all())
    (out.sum() + lse.clamp(min=0).sum()).backward()
    for x in (q, k, v):
        assert x.grad.shape == x.shape and not x.grad.any()


def test_c23_no_heads():
    q, k, v = qkv(heads=(0, 0))
    assert attend(q, k, v)[0].shape == q.shape


@pytest.mark.parametrize("headdim", [72, 80, 104, 136, 144, 152, 160, 168, 176])
@pytest.mark.parametrize("mask", [{}, {"causal": True}], ids=str)
def test_c25_odd_multiples_of_8(headdim, mask, poison):
    for length in (60, 70, 300):
        q, k, v = qkv(1, (length, length), (2, 2), headdim)
        out, lse = attend(q, k, v, **mask)
        poison.check(allocations=2)
        check_forward(out, lse, q, k, v, **mask)


@pytest.mark.parametrize("heads", [(4, 4), (4, 1)], ids=str)
@pytest.mark.parametrize("mask", [{}, {"causal": True}], ids=str)
def test_c26_narrower_values(heads, mask):
    q, k, v = qkv(1, (160, 160), heads, 192, 128)
    out, _, _ = check(q, k, v, **mask)
    assert out.shape == (1, 160, 4, 128)


@pytest.mark.parametrize("headdim", [1, 7, 20, 257, 512])
def test_c27_c28_other_headdims_are_refused_by_name(headdim):
    q, k, v = qkv(1, (64, 64), (1, 1), headdim)
    before = jit.stats()
    reason = "at most 256 and 256" if headdim == 512 else "multiples of 8"
    with pytest.raises(NotImplementedError, match=rf"(?s)sm90.forward: headdim {headdim}.*{reason}"):
        hopper_attention(q, k, v)
    assert jit.stats() == before
    out, lse = hopper_attention(q, k, v, return_lse=True, backend="reference")
    check_forward(out, lse, q, k, v)


@pytest.mark.parametrize("headdim", [72, 160])
def test_c27_padded_headdims(headdim):
    check(*qkv(2, (64, 64), (2, 2), headdim))


@pytest.mark.parametrize("heads", [(3, 2), (33, 2), (2, 3)], ids=str)
def test_c29_heads_that_do_not_divide(heads):
    with pytest.raises(ValueError, match="not a multiple"):
        attend(*qkv(heads=heads))


@pytest.mark.parametrize("heads", [(7, 1), (12, 4), (96, 8)], ids=str)
def test_c29_uneven_but_legal_heads(heads):
    check(*qkv(heads=heads), causal=True)


def test_c30_explain_says_which_path_runs():
    q, k, v = qkv(headdim=72)
    said = explain(q, k, v, causal=True)
    assert (said.kernel, said.backend, said.backward) == ("sm90.forward", "sm90", "sm90.backward")
    assert said.compiled == "fwd.bf16.d96.causal" and said.tile is not None
    assert "headdim 72 runs as 96" in said.notes
    assert "k: last dimension is not contiguous: copied once" in explain(q, cases.LAYOUTS["every_other"](k), v).notes
    assert explain(q, k, v, backend="reference").kernel == "reference.forward"
    fp8 = explain(q, k, v, precision="fp8", backend="sm90")
    assert fp8.kernel is None and "headdim 72" in dict(fp8.refused)["sm90.forward_fp8"]
    assert explain(*qkv(headdim=80), precision="fp8", backend="sm90").kernel == "sm90.forward_fp8"
    assert explain(q, k, v, precision="fp8", backend="reference").kernel == "reference.forward_fp8"
    with pytest.raises(NotImplementedError, match="fp8"):
        attend(q, k, v, precision="fp8")
    with pytest.raises(NotImplementedError, match="no fp32"):
        hopper_attention(q, k, v, precision="fp32")


# Memory layout


@pytest.mark.parametrize(
    "loss",
    [
        lambda out: out.sum(),
        lambda out: out.mean(),
        lambda out: out[:, :1].sum(),
        lambda out: out.transpose(1, 2).sum(),
        lambda out: out.transpose(1, 2).contiguous().square().sum(),
    ],
)
def test_c33_gradients_with_odd_strides(loss):
    q, k, v = qkv(1, (5, 5), (2, 2), 8, grad=True)
    out, _ = attend(q, k, v, causal=True)
    leaf = out.detach().requires_grad_()
    dout = torch.autograd.grad(loss(leaf), leaf)[0].contiguous()
    check_grads(torch.autograd.grad(loss(out), (q, k, v)), q, k, v, dout, causal=True)


def test_c32_transposed_incoming_gradient():
    q, k, v = qkv(2, (32, 32), (4, 1), 128, dtype=HALF)
    dout = torch.randn(2, 4, 32, 128, device=cases.DEVICE).to(HALF).transpose(1, 2)
    check(q, k, v, dout=dout)


@pytest.mark.parametrize("order", [(1, 4), (4, 1), (1, 4, 1)], ids=str)
def test_c34_stride_zero_of_one_sequence(order):
    for batch in order:
        q, k, v = qkv(batch)
        if batch == 1:
            q, k, v = (x.as_strided(x.shape, (0, *x.stride()[1:])) for x in (q, k, v))
        check(q, k, v, causal=True)


@pytest.mark.parametrize("axis", ["heads", "batch"])
def test_c35_expanded_keys(axis):
    q, k, v = qkv(2, (70, 70), (8, 1))
    if axis == "batch":
        k, v = k[:1], v[:1]
    widen = (lambda x: x.expand(-1, -1, 8, -1)) if axis == "heads" else (lambda x: x.expand(2, -1, -1, -1))
    dout, grads = torch.randn_like(q), []
    for spread in (widen, lambda x: x if axis == "heads" else x.repeat(2, 1, 1, 1)):
        leaves = [x.detach().requires_grad_() for x in (k, v)]
        out, _ = attend(q, *map(spread, leaves), causal=True)
        check_forward(out, None, q, *map(spread, leaves), causal=True)
        grads.append(torch.autograd.grad(out, leaves, dout))
    for wide, narrow in zip(*grads):
        torch.testing.assert_close(wide, narrow, rtol=2e-2, atol=5e-2)


@pytest.mark.parametrize("headdim", [64, 128, 256])
def test_c36_storage_orders(headdim):
    q, k, v = qkv(2, (512, 512), (4, 4), headdim)
    expected = attend(q, k, v, causal=True)[0]
    layouts = cases.LAYOUTS
    for names in (("heads_first",) * 3, ("heads_first", "sequence_first", "contiguous"), ("packed",) * 3):
        operands = [layouts[name](x) for name, x in zip(names, (q, k, v))]
        assert torch.equal(attend(*operands, causal=True)[0], expected), names
    check(*(layouts["heads_first"](x) for x in (q, k, v)), causal=True)


# torch.compile, autograd, training loop


def model(q, k, v):
    """Something for the compiler on both sides of the operator."""
    return hopper_attention(q * 1.5, k, v, causal=True).float().square()


def gradients(function, q, k, v):
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = function(q, k, v)
    (out.mean() * out.numel()).backward()
    return out.detach(), q.grad, k.grad, v.grad


def assert_alike(actual, expected):
    for a, b in zip(actual, expected):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("length", [1, 128, 196, 257])
def test_c37_compiled_at_any_length(length, fresh_compiler):
    q, k, v = qkv(2, (length, length), (8, 4))
    compiled = torch.compile(model, fullgraph=True, dynamic=False)
    assert_alike(gradients(compiled, q, k, v), gradients(model, q, k, v))


@pytest.mark.parametrize("length", [1, 196])
def test_c37_opcheck(length):
    q, k, v = qkv(1, (length, length), (2, 1), grad=True)
    opcheck(ops.FWD, (q, k, v, 0.125, None, 0, False, "auto"))
    opcheck(ops.FWD, (cases.LAYOUTS["heads_first"](q.detach()), k, v.detach(), 0.125, 20, 5, True, "sm90"))


def test_c38_compiled_with_a_dynamic_length(fresh_compiler):
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    for length in (64, 65, 100, 300):
        q, k, v = qkv(2, (length, length), (8, 4))
        assert_alike(gradients(compiled, q, k, v), gradients(model, q, k, v))
    assert counter.frame_count <= 2


def test_c38_kernels_are_compiled_once_for_all_lengths():
    for mask in ({}, {"causal": True}, {"window_size": (30, 0)}):
        attend(*qkv(1, (64, 64)), **mask)
        before = jit.stats()
        for length in range(64, 301):
            attend(*qkv(1, (length, length + length % 7)), **mask)
        after = jit.stats()
        assert (after.compiles, after.disk_hits) == (before.compiles, before.disk_hits)


@pytest.mark.parametrize("name", ["softmax_scale", "window_size"])
def test_c39_a_0d_tensor_is_a_type_error(name):
    q, k, v = qkv()
    attend(q, k, v)
    before = jit.stats()
    for _ in range(6):
        value = torch.tensor(3, device=cases.DEVICE)
        with pytest.raises(TypeError, match=r"0-d tensor on cuda:0; pass a Python number"):
            attend(q, k, v, **{name: (value, 0) if name == "window_size" else value})
    assert jit.stats() == before


def test_c41_only_what_needs_a_gradient_gets_one():
    q, k, v = qkv()
    dout = torch.randn_like(q)
    _, _, every = check(q, k, v, dout=dout, causal=True)
    for bits in range(8):
        needs = [bool(bits >> i & 1) for i in range(3)]
        leaves = [x.detach().requires_grad_(need) for x, need in zip((q, k, v), needs)]
        out = attend(*leaves, causal=True)[0]
        assert out.requires_grad == any(needs)
        if any(needs):
            out.backward(dout)
        for leaf, need, expected in zip(leaves, needs, every):
            assert (leaf.grad is not None) == need
            if need:
                torch.testing.assert_close(leaf.grad, expected, rtol=2e-2, atol=2e-2)


def test_c43_autocast_casts_all_three():
    q, k, v = qkv(dtype=torch.float32)
    v = v.to(BF)
    for x in (q, k, v):
        x.requires_grad_()
    with pytest.raises(TypeError, match="q float32, k float32, v bfloat16"):
        attend(q, k, v)
    with torch.autocast(cases.DEVICE, BF):
        out, lse = attend(q, k, v)
    assert out.dtype == BF and lse.dtype == torch.float32
    check_forward(out, lse, q.to(BF), k.to(BF), v)
    out.sum().backward()
    assert [x.grad.dtype for x in (q, k, v)] == [torch.float32, torch.float32, BF]
    with pytest.raises(TypeError):
        attend(q, k, v)
    half = attend(q, k, v.float(), precision="fp16")[0]
    assert half.dtype == torch.float32
    oracle.assert_close_to_oracle(
        half, *(f(q.half(), k.half(), v.half()).out for f in (oracle.attention, oracle.plain)), HALF, "out"
    )


# Everything at once


@pytest.mark.parametrize("first_seed", fuzz.SHARES)
def test_fuzz(first_seed):
    fuzz.check(first_seed)
