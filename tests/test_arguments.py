"""Bad calls: which exception, and which words its message must have. Good ones: what they are read as."""

import numpy as np
import pytest
import torch

from flashattn_hopper import explain, hopper_attention
from flashattn_hopper.arguments import DtypeError, check, problem_of
from flashattn_hopper.spec.mask import Band

NAN, INF = float("nan"), float("inf")


def qkv(q=(2, 5, 4, 64), k=(2, 9, 2, 64), v=None, dtype=torch.bfloat16):
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,) * 3
    return [torch.ones(shape, dtype=d) for shape, d in zip((q, k, v or k), dtypes)]


def request(*tensors, **changes):
    keywords = {
        "causal": False,
        "window_size": None,
        "softmax_scale": None,
        "precision": "auto",
        "return_lse": False,
        "deterministic": False,
        "backend": "auto",
    }
    return check(*(tensors or qkv()), **(keywords | changes))


BF, F16, F32 = torch.bfloat16, torch.float16, torch.float32
ZERO_D = torch.tensor(3)

# what is passed for q, k, v (shapes and dtypes), keyword arguments, exception, words of the message
BAD = {
    # shapes
    "rank 3": ({"q": (5, 4, 64), "k": (9, 2, 64)}, {}, ValueError, ["4 dimensions", "(5, 4, 64)", "unsqueeze(0)"]),
    "rank 2": ({"q": (5, 4), "k": (9, 2)}, {}, ValueError, ["(batch, seqlen, heads, headdim)", "(9, 2)"]),
    "ranks differ": ({"q": (5, 4, 64)}, {}, ValueError, ["4 dimensions", "(5, 4, 64)", "(2, 9, 2, 64)"]),
    "batch": ({"q": (3, 5, 4, 64)}, {}, ValueError, ["batch differs", "(3, 5, 4, 64)", "(2, 9, 2, 64)"]),
    "kv seqlen": ({"v": (2, 8, 2, 64)}, {}, ValueError, ["k, v: seqlen", "(2, 9, 2, 64)", "(2, 8, 2, 64)"]),
    "kv heads": ({"v": (2, 9, 4, 64)}, {}, ValueError, ["k, v: number of heads", "(2, 9, 4, 64)"]),
    "headdim": ({"k": (2, 9, 2, 32)}, {}, ValueError, ["q, k: headdim", "(2, 9, 2, 32)"]),
    "headdim 0": ({"q": (2, 5, 4, 0), "k": (2, 9, 2, 0)}, {}, ValueError, ["headdim must be at least 1"]),
    "heads 3:2": ({"q": (2, 5, 3, 64)}, {}, ValueError, ["3 query heads", "multiple of 2"]),
    "heads 33:2": ({"q": (2, 5, 33, 64)}, {}, ValueError, ["33 query heads", "multiple of 2"]),
    "heads 2:4": ({"q": (2, 5, 2, 64), "k": (2, 9, 4, 64)}, {}, ValueError, ["2 query heads", "multiple of 4"]),
    "heads 4:0": ({"k": (2, 9, 0, 64)}, {}, ValueError, ["4 query heads", "multiple of 0"]),
    "SDPA layout": ({"q": (2, 4, 5, 64), "k": (2, 2, 9, 64)}, {}, ValueError, ["SDPA", "transpose(1, 2)"]),
    # dtypes
    "mixed": ({"dtype": (F32, F32, BF)}, {}, TypeError, ["q float32", "k float32", "v bfloat16", "autocast"]),
    "mixed, explicit": ({"dtype": (F16, BF, BF)}, {"precision": "bf16"}, TypeError, ["q float16", "k bfloat16"]),
    "float32": ({"dtype": F32}, {}, ValueError, ["float32", 'precision="bf16"', "autocast", "'fp32'"]),
    "float64": ({"dtype": torch.float64}, {}, TypeError, ["float64", "'fp64'"]),
    "int32": ({"dtype": torch.int32}, {}, TypeError, ["q: is int32", "bfloat16"]),
    "bool": ({"dtype": torch.bool}, {}, ValueError, ["q: is bool", "float16"]),
    "complex": ({"dtype": torch.complex64}, {}, TypeError, ["complex64"]),
    "v int": ({"dtype": (BF, BF, torch.int64)}, {}, TypeError, ["v: is int64"]),
    "float8": ({"dtype": torch.float8_e4m3fn}, {}, NotImplementedError, ["float8_e4m3fn", "bfloat16"]),
    "precision fp8": ({}, {"precision": "fp8", "backend": "sm90"}, NotImplementedError, ["sm90.forward", "reference"]),
    # words
    "precision": ({}, {"precision": "half"}, ValueError, ["precision", "'half'", "'bf16'", "'auto'"]),
    "precision dtype": ({}, {"precision": BF}, TypeError, ["precision", "'bf16'", "dtype"]),
    "precision list": ({}, {"precision": ["bf16"]}, TypeError, ["precision", "list"]),
    "backend": ({}, {"backend": "cuda"}, ValueError, ["backend", "'cuda'", "'sm90'", "'reference'", "'auto'"]),
    "backend None": ({}, {"backend": None}, TypeError, ["backend", "NoneType"]),
    "backend elsewhere": ({}, {"backend": "sm90"}, NotImplementedError, ["sm90.forward", "sm_90", "reference"]),
    # flags
    "causal 1": ({}, {"causal": 1}, TypeError, ["causal", "int 1", "True or False"]),
    "causal 0-d": ({}, {"causal": torch.tensor(True)}, TypeError, ["causal", "0-d tensor on cpu", ".item()"]),
    "deterministic": ({}, {"deterministic": "yes"}, TypeError, ["deterministic", "'yes'"]),
    "return_lse": ({}, {"return_lse": None}, TypeError, ["return_lse", "NoneType"]),
    # window
    "window int": ({}, {"window_size": 4}, TypeError, ["window_size", "int 4", "(w - 1, 0)"]),
    "window str": ({}, {"window_size": "40"}, TypeError, ["window_size", "'40'"]),
    "window triple": ({}, {"window_size": (1, 2, 3)}, ValueError, ["window_size", "pair", "3 entries"]),
    "window float": ({}, {"window_size": (4.0, 0)}, TypeError, ["left", "int", "float 4.0"]),
    "window bool": ({}, {"window_size": (4, True)}, TypeError, ["right", "bool True"]),
    "window -2": ({}, {"window_size": (-2, 0)}, ValueError, ["left", "-2", "-1"]),
    "window right -7": ({}, {"window_size": (None, -7)}, ValueError, ["right", "-7"]),
    "window 0-d": ({}, {"window_size": (ZERO_D, 0)}, TypeError, ["left", "0-d tensor", ".item()"]),
    "window tensor": ({}, {"window_size": torch.tensor([3, 0])}, TypeError, ["window_size", "1-d tensor", ".item()"]),
    "causal ahead": ({}, {"causal": True, "window_size": (3, 2)}, ValueError, ["(3, 2)", "2 keys ahead", "causal"]),
    # scale
    "scale 0": ({}, {"softmax_scale": 0.0}, ValueError, ["softmax_scale", "above 0"]),
    "scale negative": ({}, {"softmax_scale": -0.5}, ValueError, ["softmax_scale", "-0.5"]),
    "scale nan": ({}, {"softmax_scale": NAN}, ValueError, ["softmax_scale", "nan"]),
    "scale inf": ({}, {"softmax_scale": INF}, ValueError, ["softmax_scale", "inf", "finite"]),
    "scale 1e-50": ({}, {"softmax_scale": 1e-50}, ValueError, ["softmax_scale", "float32"]),
    "scale True": ({}, {"softmax_scale": True}, TypeError, ["softmax_scale", "bool True"]),
    "scale str": ({}, {"softmax_scale": "0.1"}, TypeError, ["softmax_scale", "'0.1'"]),
    "scale 0-d": ({}, {"softmax_scale": torch.tensor(0.1)}, TypeError, ["softmax_scale", "0-d tensor", ".item()"]),
}


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("name", BAD)
def test_bad_call(name, warm):
    tensors, keywords, exception, words = BAD[name]
    if warm:  # what an earlier, right call left behind must not let a wrong one through
        equal = {"causal 1": {"causal": True}, "window bool": {"window_size": (4, 1)}, "scale True": {}}
        hopper_attention(*qkv(), **equal.get(name, {}))
        hopper_attention(*qkv(), softmax_scale=1.0)
    with pytest.raises(exception) as info:
        hopper_attention(*qkv(**tensors), **keywords)
    for word in words:
        assert word in str(info.value), f"{word!r} is missing in: {info.value}"
    assert info.value.__context__ is None


@pytest.mark.parametrize("name", [n for n, row in BAD.items() if row[2] is not NotImplementedError])
def test_explain_refuses_the_same_bad_arguments(name):
    tensors, keywords, exception, words = BAD[name]
    with pytest.raises(exception) as info:
        explain(*qkv(**tensors), **keywords)
    assert all(word in str(info.value) for word in words)


@pytest.mark.parametrize("other", [[[1.0]], np.ones((2, 5, 4, 64), np.float16), None], ids=["list", "numpy", "None"])
def test_not_a_tensor(other):
    q, k, v = qkv()
    for place, name in enumerate("qkv"):
        operands = [q, k, v]
        operands[place] = other
        with pytest.raises(TypeError, match=rf"^{name}: expected a torch.Tensor \(batch, seqlen, heads, headdim\)"):
            hopper_attention(*operands)


def test_devices_differ():
    q, k, v = qkv()
    with pytest.raises(ValueError, match="q cpu, k meta, v cpu"):
        hopper_attention(q, k.to("meta"), v)


@pytest.mark.filterwarnings("ignore")
def test_layouts_that_are_not_strided():
    q, k, v = qkv()
    with pytest.raises(NotImplementedError, match=r"k: layout torch.sparse_coo.*to_dense"):
        hopper_attention(q, k.float().to_sparse(), v)
    nested = torch.nested.nested_tensor([torch.ones(5, 4, 64), torch.ones(3, 4, 64)], layout=torch.jagged)
    with pytest.raises(NotImplementedError, match=r"q: nested tensors.*pad"):
        hopper_attention(nested, k, v)
    quantized = torch.quantize_per_tensor(torch.ones(2, 5, 4, 64), 0.1, 0, torch.qint8)
    with pytest.raises(DtypeError, match="q: is qint8"):
        hopper_attention(quantized, k, v)


@pytest.mark.parametrize(
    "causal, window_size, band",
    [
        (False, None, Band(None, None)),
        (True, None, Band(None, 0)),
        (False, (-1, -1), Band(None, None)),
        (False, (None, 0), Band(None, 0)),
        (False, [3, 2], Band(3, 2)),
        (True, (3, 0), Band(3, 0)),
        (True, (3, -1), Band(3, 0)),
        (True, (3, None), Band(3, 0)),
        (False, (0, 0), Band(0, 0)),
        (False, (np.int64(3), None), Band(3, None)),
    ],
)
def test_window(causal, window_size, band):
    read = request(causal=causal, window_size=window_size)
    assert Band(read.window_left, read.window_right) == band


@pytest.mark.parametrize("scale", [0.25, 1, np.float32(0.25), 1e-30])
def test_scale(scale):
    read = request(softmax_scale=scale).softmax_scale
    assert type(read) is float and read == scale
    assert request().softmax_scale == 64**-0.5


@pytest.mark.parametrize(
    "dtype, precision, computed, returned",
    [
        (BF, "auto", "bf16", BF),
        (F16, "auto", "fp16", F16),
        (F32, "bf16", "bf16", F32),
        (BF, "fp32", "fp32", BF),
        (torch.float64, "fp64", "fp64", torch.float64),
        (BF, "fp8", "fp8", BF),
    ],
)
def test_precision(dtype, precision, computed, returned):
    read = request(*qkv(dtype=dtype), precision=precision)
    assert (read.dtype, read.out_dtype) == (computed, returned)


def test_autocast_casts_all_three():
    mixed = qkv(dtype=(F32, F32, BF))
    with torch.autocast("cpu", BF):
        assert request(*mixed)[:2] == ("bf16", BF)
        assert request(*mixed, precision="fp32")[:2] == ("fp32", BF)
        with torch.autocast("cpu", enabled=False), pytest.raises(DtypeError):
            request(*mixed)
    with torch.autocast("cpu", F16):
        assert request(*mixed)[:2] == ("fp16", F16)


def test_deterministic_follows_torch():
    assert not request().deterministic
    torch.use_deterministic_algorithms(True)
    try:
        assert request().deterministic
    finally:
        torch.use_deterministic_algorithms(False)


def test_problem_of():
    q, k, v = (2, 5, 7, 64), (2, 9, 1, 64), (2, 9, 1, 32)
    problem = problem_of(q, k, v, "bf16", 0.5, 3, 0, True)
    assert problem.traits.slug == "fwd.bf16.d64x32.window.deterministic.gqa"
    assert (problem.shape.batch, *problem.shape.seqlens, problem.shape.num_heads_q) == (2, 5, 9, 7)
