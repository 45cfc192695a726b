"""The public call on a CPU: cases from bug reports of attention kernels (by number), explain(), the memo of calls."""

import subprocess
import sys

import pytest
import torch

import flashattn_hopper
from flashattn_hopper import api, explain, hopper_attention, jit, ops, planner, runner

BF = torch.bfloat16


def qkv(seqlen_q=5, seqlen_k=9, headdim=64, headdim_v=None, batch=2, heads=4, heads_kv=2, dtype=BF, grad=False):
    generator = torch.Generator().manual_seed(1 + seqlen_q + seqlen_k + headdim)
    shapes = (seqlen_q, heads, headdim), (seqlen_k, heads_kv, headdim), (seqlen_k, heads_kv, headdim_v or headdim)
    return [torch.randn(batch, *s, generator=generator).to(dtype).requires_grad_(grad) for s in shapes]


def dense(q, k, v, keep=None):
    """float64 attention with every score in memory; `keep` (Sq, Sk) says what is visible."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if keep is not None:
        scores = scores.masked_fill(~keep, -float("inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2)


def close(out, expected, bound=2e-2):
    return (out.double() - expected).abs().max().item() < bound


def keys_seen(seqlen_q, seqlen_k, **keywords):
    """How many keys each query sees: with K = 0 and one-hot V, an output row has one entry for each."""
    q = torch.zeros(1, seqlen_q, 1, 8, dtype=BF)
    k = torch.zeros(1, seqlen_k, 1, 8, dtype=BF)
    v = torch.eye(seqlen_k, dtype=BF).view(1, seqlen_k, 1, seqlen_k)
    return (hopper_attention(q, k, v, **keywords)[0, :, 0] != 0).sum(-1).tolist()


def test_importing_loads_nothing():
    code = (
        "import sys, flashattn_hopper as f; assert 'torch' not in sys.modules; assert 'explain' in dir(f)\n"
        "f.hopper_attention; f.SAC_SAVE_OPS; assert 'torch' in sys.modules\n"
        "assert not [m for m in sys.modules if m.split('.')[0] in ('cutlass', 'tvm_ffi', 'triton')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_name():
    with pytest.raises(AttributeError, match="no attribute 'attention'"):
        _ = flashattn_hopper.attention


def test_c02_masks_are_bottom_right_aligned():
    assert keys_seen(2, 5, causal=True) == [4, 5]
    assert keys_seen(5, 2, causal=True) == [0, 0, 0, 1, 2]


@pytest.mark.parametrize("window", [(0, 0), (3, 0), (3, 2), (15, 0)])
def test_c03_a_window_counts_keys_beside_the_diagonal(window):
    left, right = window
    expected = [min(i, left) + 1 + min(15 - i, right) for i in range(16)]
    assert keys_seen(16, 16, window_size=window) == expected
    if right == 0:
        assert keys_seen(16, 16, window_size=(left, None), causal=True) == expected


@pytest.mark.parametrize(
    "sizes", [{"batch": 0}, {"seqlen_q": 0}, {"seqlen_k": 0}, {"heads": 0, "heads_kv": 0}], ids=lambda s: str(list(s))
)
def test_c23_empty(sizes):
    q, k, v = qkv(**({"seqlen_q": 40, "seqlen_k": 16} | sizes), grad=True)
    out, lse = hopper_attention(q, k, v, causal=True, return_lse=True)
    assert out.shape == q.shape and not out.any()
    assert lse.shape == (q.shape[0], q.shape[2], q.shape[1]) and bool((lse == -float("inf")).all())
    (out.sum() + lse.clamp(min=0).sum()).backward()
    for t in (q, k, v):
        assert t.grad.shape == t.shape and not t.grad.any()


@pytest.mark.parametrize("headdim", [1, 7, 20, 72, 160, 257, 512])
def test_c27_c28_any_headdim_is_right_here(headdim):
    q, k, v = qkv(64, 64, headdim, grad=True)
    out = hopper_attention(q, k, v)
    assert close(out, dense(q, k, v))
    out.sum().backward()
    assert q.grad.isfinite().all()


def test_c28_headdim_512_on_a_hopper_gpu_names_the_way_out(monkeypatch):
    monkeypatch.setattr(planner, "capability_of", lambda device: (9, 0))
    monkeypatch.setattr(api, "_calls", runner.Memo())
    monkeypatch.setattr(ops, "_prepared", runner.Memo())
    q, k, v = qkv(64, 64, 512)
    with pytest.raises(NotImplementedError, match=r'(?s)sm90.forward: headdim 512.*at most 256.*backend="reference"'):
        hopper_attention(q, k, v)
    assert close(hopper_attention(q, k, v, backend="reference"), dense(q, k, v))


@pytest.mark.parametrize("heads", [(7, 1), (12, 4), (96, 8)])
def test_c29_uneven_but_legal_heads(heads):
    q, k, v = qkv(heads=heads[0], heads_kv=heads[1])
    assert close(hopper_attention(q, k, v), dense(q, k, v))


def test_c34_stride_zero_first():
    q, k, v = qkv(batch=1)
    flat = [t.as_strided(t.shape, (0, *t.stride()[1:])) for t in (q, k, v)]
    assert close(hopper_attention(*flat), dense(q, k, v))
    q, k, v = qkv(batch=4)
    assert close(hopper_attention(q, k, v), dense(q, k, v))


@pytest.mark.parametrize("axis", ["heads", "batch"])
def test_c35_expanded_keys_get_the_gradient_of_what_was_expanded(axis):
    q, k, v = qkv(70, 70, heads=8, heads_kv=1)
    if axis == "batch":
        k, v = k[:1], v[:1]
    shape = (-1, -1, 8, -1) if axis == "heads" else (2, -1, -1, -1)
    grads = []
    for widen in (lambda t: t.expand(shape), lambda t: t if axis == "heads" else t.repeat(2, 1, 1, 1)):
        leaves = [t.float().requires_grad_() for t in (k, v)]
        hopper_attention(q.float(), *map(widen, leaves), causal=True, precision="fp32").square().sum().backward()
        grads.append([leaf.grad for leaf in leaves])
    for a, b in zip(*grads):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("keywords", [{"softmax_scale": torch.tensor(0.1)}, {"window_size": (torch.tensor(3), 0)}])
def test_c39_a_0d_tensor_is_a_type_error_and_leaves_no_record(keywords):
    q, k, v = qkv()
    hopper_attention(q, k, v)
    before = len(api._calls), jit.stats()
    for _ in range(6):
        with pytest.raises(TypeError, match=r"0-d tensor on cpu; pass a Python number.*\.item\(\)"):
            hopper_attention(q, k, v, **keywords)
    assert (len(api._calls), jit.stats()) == before


def test_c43_autocast_casts_all_three():
    q, k, v = qkv(dtype=torch.float32)
    v = v.to(BF)
    for t in (q, k, v):
        t.requires_grad_()
    with pytest.raises(TypeError, match="q float32, k float32, v bfloat16"):
        hopper_attention(q, k, v)
    with torch.autocast("cpu", BF):
        out, lse = hopper_attention(q, k, v, return_lse=True)
        assert out.dtype == BF and lse.dtype == torch.float32
        assert torch.equal(out, hopper_attention(q.to(BF), k.to(BF), v))
    out.sum().backward()
    assert [t.grad.dtype for t in (q, k, v)] == [torch.float32, torch.float32, BF]
    with pytest.raises(TypeError):  # the record of the call above must not answer
        hopper_attention(q, k, v)


@pytest.mark.parametrize(
    "precision, lse_dtype", [("bf16", torch.float32), ("fp32", torch.float32), ("fp64", torch.float64)]
)
@pytest.mark.parametrize("dtype", [BF, torch.float32, torch.float64])
def test_precision(dtype, precision, lse_dtype):
    q, k, v = qkv(dtype=dtype, grad=True)
    out, lse = hopper_attention(q, k, v, precision=precision, return_lse=True)
    assert (out.dtype, lse.dtype) == (dtype, lse_dtype)
    assert close(out, dense(q, k, v), 2e-2 if BF in (dtype,) or precision == "bf16" else 1e-5)
    out.sum().backward()
    assert q.grad.dtype == k.grad.dtype == v.grad.dtype == dtype


def test_explicit_precision_under_autocast_computes_in_it():
    q, k, v = qkv(dtype=torch.float32)
    with torch.autocast("cpu", BF):
        out = hopper_attention(q, k, v, precision="fp64")
    assert out.dtype == BF
    assert torch.equal(out, hopper_attention(q, k, v, precision="fp64").to(BF))


def test_noncontiguous_inputs():
    q, k, v = qkv()
    packed = torch.cat([torch.cat([t, t], -1) for t in (k, v)], 2)
    k2, v2 = packed[:, :, :2, ::2], packed[:, :, 2:, 1::2]
    assert close(hopper_attention(q, k2, v2), dense(q, k2, v2))


# explain


def test_c30_explain_says_which_path_and_why():
    q, k, v = qkv(headdim=72)
    said = explain(q, k, v, causal=True)
    assert (said.kernel, said.backend, said.backward) == ("reference.forward", "reference", "reference.backward")
    assert said.slug == said.compiled == "fwd.bf16.d72.causal.gqa" and said.tile is None
    assert said.refused[0] == ("sm90.forward", "needs sm_90, the tensors are on cpu")
    assert {name for name, _ in said.refused} == {"sm90.forward", "sm80.forward"}
    for words in (said.slug, "reference.forward", "backward: tiled PyTorch recomputation", "needs sm_90"):
        assert words in str(said)


def test_explain_on_a_hopper_gpu_launches_nothing(monkeypatch):
    monkeypatch.setattr(planner, "capability_of", lambda device: (9, 0))
    monkeypatch.setattr(jit, "compiled", None)
    monkeypatch.setattr(runner, "prepare", None)
    q, k, v = qkv(headdim=72)
    said = explain(q, torch.cat([k, k], -1)[..., ::2], v, window_size=(3, 0))
    assert (said.kernel, said.compiled) == ("sm90.forward", "fwd.bf16.d96.window")
    assert said.tile == planner.tile_for(*planner.plan(_traits(said), (9, 0), "auto", _shape(q, k))[:2], _shape(q, k))
    assert "headdim 72 runs as 96" in said.notes
    assert "k: last dimension is not contiguous: copied once" in said.notes
    assert said.backward == "sm90.backward"
    assert not [note for note in said.notes if note.startswith(("q:", "v:"))]
    assert "compiled as fwd.bf16.d96.window" in str(said) and str(said.tile) in str(said)
    assert "q: cast from fp32 to bf16" in explain(q.float(), k.float(), v.float(), precision="bf16").notes


def _traits(said):
    from flashattn_hopper.spec.problem import Traits

    return Traits.parse(said.slug)


def _shape(q, k):
    from flashattn_hopper.spec.problem import Shape

    return Shape(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2])


@pytest.mark.parametrize(
    "keywords, reasons",
    [
        (
            {"precision": "fp8", "backend": "sm80"},
            {"sm90.forward_fp8": "backend='sm80' was asked for", "sm80.forward": "no fp8"},
        ),
        ({"precision": "fp32"}, {"sm90.forward": "no fp32", "reference.forward": "only with backend='reference'"}),
        ({"precision": "fp32", "backend": "sm90"}, {"reference.forward": "backend='sm90' was asked for"}),
    ],
)
def test_explain_answers_where_nothing_runs(monkeypatch, keywords, reasons):
    monkeypatch.setattr(planner, "capability_of", lambda device: (9, 0))
    said = explain(*qkv(), **keywords)
    assert said.kernel is said.backend is said.tile is said.backward is None
    for name, reason in reasons.items():
        assert reason in dict(said.refused)[name] and reason in str(said)
    assert "no kernel runs this" in str(said)


# The memo of validated calls


def test_a_warm_call_is_not_validated_again(monkeypatch):
    q, k, v = qkv(grad=True)
    first = hopper_attention(q, k, v, window_size=[3, 0])
    monkeypatch.setattr(api, "check", None)
    assert torch.equal(first, hopper_attention(q, k, v, window_size=[3, 0]))
    assert torch.equal(first, hopper_attention(q, k, v, window_size=(3, 0)))


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, v: ((q[:, :4], k, v), {}),
        lambda q, k, v: ((q, k[:, :8], v[:, :8]), {}),
        lambda q, k, v: ((q.transpose(1, 2).contiguous().transpose(1, 2), k, v), {}),
        lambda q, k, v: ((q.half(), k.half(), v.half()), {}),
        lambda q, k, v: ((q, k, v), {"causal": True}),
        lambda q, k, v: ((q, k, v), {"window_size": (2, None)}),
        lambda q, k, v: ((q, k, v), {"softmax_scale": 0.5}),
        lambda q, k, v: ((q, k, v), {"precision": "fp32"}),
        lambda q, k, v: ((q, k, v), {"deterministic": True}),
        lambda q, k, v: ((q, k, v), {"backend": "reference"}),
    ],
)
def test_what_changes_a_call_makes_a_new_record(monkeypatch, change):
    monkeypatch.setattr(api, "_calls", runner.Memo())
    q, k, v = qkv()
    hopper_attention(q, k, v)
    operands, keywords = change(q, k, v)
    out = hopper_attention(*operands, **keywords)
    assert len(api._calls) == 2
    api._calls.clear()
    assert torch.equal(out, hopper_attention(*operands, **keywords))


def test_settings_of_torch_make_a_new_record(monkeypatch):
    monkeypatch.setattr(api, "_calls", runner.Memo())
    q, k, v = qkv()
    hopper_attention(q, k, v)
    torch.use_deterministic_algorithms(True)
    try:
        hopper_attention(q, k, v)
    finally:
        torch.use_deterministic_algorithms(False)
    assert [decided.problem.traits.deterministic for decided, *_ in api._calls.values()] == [False, True]
    with torch.autocast("cpu", torch.float16):
        assert hopper_attention(q, k, v).dtype == torch.float16
    assert hopper_attention(q, k, v).dtype == BF


def test_records_hold_no_tensors():
    import gc
    import weakref

    q, k, v = qkv(seqlen_q=3)
    hopper_attention(q, k, v, window_size=(1, 1))
    alive = [weakref.ref(t) for t in (q, k, v)]
    del q, k, v
    gc.collect()
    assert [ref() for ref in alive] == [None] * 3
