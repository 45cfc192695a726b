"""The compiled quantizer without a GPU: its PTX, run by ptx_machine, against quantize.py, bit by bit."""

import functools
import struct
import tempfile

import pytest
import torch

from flashattn_hopper import buffers, jit, quantize, runner_fp8
from flashattn_hopper.kernels.sm90.specs import QUANTIZER
from flashattn_hopper.quantize import E4M3, TILE, _quantized, rotate
from flashattn_hopper.spec.problem import QuantizeTraits

from .ptx_machine import Machine

pytest.importorskip("cutlass")
from flashattn_hopper.kernels.sm90.quantize import AHEAD, Quantize

pytestmark = pytest.mark.compile

INF, NAN = float("inf"), float("nan")
WORDS = {torch.float16: "fp16", torch.bfloat16: "bf16"}
PLAIN = (1, 130, 150, 2, 1)  # batch, seqlen_q, seqlen_k, heads, kv heads


@functools.cache
def ptx(traits: QuantizeTraits) -> str:
    with tempfile.TemporaryDirectory() as folder:
        return jit._compile(QUANTIZER, traits, None, QUANTIZER.arch, f"--keep-ptx --dump-dir {folder}").__ptx__


def qkv(shape=PLAIN, dims=(64, 64), dtype=torch.bfloat16):
    batch, seqlen_q, seqlen_k, heads, heads_kv = shape
    sizes = (seqlen_q, heads, dims[0]), (seqlen_k, heads_kv, dims[0]), (seqlen_k, heads_kv, dims[1])
    q, k, v = [torch.randn(batch, *size).to(dtype) for size in sizes]
    return q, k + 4 * torch.randn(batch, 1, heads_kv, dims[0]).to(dtype), v


def run(q, k, v, *, hadamard=True, smooth_k=True, int8_qk=False) -> runner_fp8.Codes:
    """The launch as the host half of the kernel makes it; outputs lie between gaps and start poisoned."""
    (batch, seqlen_q, heads, headdim), (_, seqlen_k, heads_kv, headdim_v) = q.shape, v.shape
    traits = QuantizeTraits(WORDS[q.dtype], headdim, headdim_v, hadamard, smooth_k, int8_qk)
    machine = Machine(ptx(traits))
    memory, blocks = machine.memory, lambda n, unit: -(-n // unit)
    chunk = blocks(blocks(seqlen_k, buffers.MOST_CHUNKS), buffers.CHUNK) * buffers.CHUNK
    chunks, tiles, per_head = blocks(seqlen_k, chunk), blocks(seqlen_k, TILE), batch * heads_kv
    qk = torch.int8 if int8_qk else E4M3
    outputs = [
        (qk, batch, seqlen_q, heads, headdim),
        (qk, batch, seqlen_k, heads_kv, headdim),
        (E4M3, batch, heads_kv, headdim_v, tiles * TILE),
        (torch.float32, batch, heads, seqlen_q),
        (torch.float32, batch, heads_kv, tiles),
        (torch.float32, batch, heads_kv, 1),
    ]
    if smooth_k:
        outputs += [(torch.float32, batch, heads_kv, headdim), (torch.float32, batch, heads, seqlen_q)]
    sizes = [torch.Size(shape).numel() * dtype.itemsize for dtype, *shape in outputs]
    addresses = [memory.empty(size) for size in sizes]
    workspace = memory.empty(4 * buffers.workspace_floats(per_head, chunks, headdim))
    counters = memory.add(torch.zeros(per_head, dtype=torch.int32))
    tensor = lambda x: struct.pack("<Q4i3q", memory.add(x), *x.shape, *x.stride()[:3])
    sums = workspace + 16 * blocks(per_head * chunks, 4)
    kernel = Quantize(traits)
    ahead = AHEAD // (chunk * 2 * (headdim + headdim_v))
    codes = tiles, blocks(tiles, kernel.tiles_of_v()), blocks(seqlen_q, TILE), heads // heads_kv
    length = chunks + codes[0] + codes[1] + codes[2] * codes[3]
    order = 1 + ahead // chunks, ahead % chunks, chunks, *codes, per_head
    parameters = [
        *map(tensor, (q, k, v)),
        *(struct.pack("<Q", address) for address in (*addresses, workspace, counters, sums)),
        *(struct.pack("<i", number) for number in (chunk, *order)),
        struct.pack("<q", blocks(chunks << 32, length)),
    ]
    machine.launch("kernel", chunks + ahead + per_head * length, kernel.threads, parameters)
    assert not memory.read(counters, 4 * per_head).any(), "a counter is not left at zero"
    found = [memory.read(a, n).view(dtype).view(shape) for a, n, (dtype, *shape) in zip(addresses, sizes, outputs)]
    return runner_fp8.Codes(*found)


def same(a, b):
    """Bit by bit, but for the sign of a NaN."""
    nan = (a.float().isnan(), b.float().isnan())
    raw = lambda x: x.view(torch.uint8 if x.element_size() == 1 else torch.int32)
    return torch.equal(*nan) and torch.equal(raw(a).masked_fill(nan[0], 0), raw(b).masked_fill(nan[0], 0))


def check(q, k, v, *, hadamard=True, smooth_k=True, int8_qk=False):
    """Against quantize.py with the kernel's own mean of k, whose order of additions is its own."""
    found = run(q, k, v, hadamard=hadamard, smooth_k=smooth_k, int8_qk=int8_qk)
    query, key, code = q.float(), k.float(), torch.int8 if int8_qk else E4M3
    if smooth_k:
        wanted, _, _ = quantize.quantize_fp8(q, k, v)
        mean = key.sum(1) / k.shape[1]
        close = lambda x, y, unit: torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6 * unit, equal_nan=True)
        top = lambda x: x.float().nan_to_num(0.0, 0.0, 0.0).abs().max().item()
        close(found.k_mean, mean, top(k))
        close(found.logit_offset, wanted.logit_offset, 10 * top(q) * top(k))
        key = key - found.k_mean[:, None]
    if hadamard:
        query, key = rotate(query), rotate(key)
    expected = _quantized(query, 1, code), _quantized(key, TILE, code), _quantized(v.float(), None, E4M3)
    packed = found._replace(v=runner_fp8.unpack_values(found.v, k.shape[1]))
    for name, (data, descale) in zip("qkv", expected):
        assert same(getattr(packed, f"{name}_descale"), descale), f"scales of {name}"
        assert same(getattr(packed, name), data), f"codes of {name}"
    behind = runner_fp8.unpack_values(found.v, found.v.shape[-1])[:, k.shape[1] :]
    assert not behind.view(torch.uint8).any(), "what pads V is not 0"


@pytest.mark.parametrize(
    "dims, dtype, recipe",
    [
        ((64, 64), torch.float16, {"int8_qk": True}),
        ((80, 80), torch.bfloat16, {}),
        ((96, 96), torch.bfloat16, {}),
        ((128, 128), torch.bfloat16, {}),
        ((128, 128), torch.float16, {"hadamard": False}),
        ((192, 128), torch.bfloat16, {"int8_qk": True}),
        ((192, 192), torch.float16, {"smooth_k": False}),
        ((256, 256), torch.bfloat16, {}),
        ((64, 256), torch.bfloat16, {"hadamard": False, "smooth_k": False}),
        ((16, 16), torch.bfloat16, {}),
        ((160, 96), torch.bfloat16, {"smooth_k": False, "int8_qk": True}),
    ],
    ids=str,
)
def test_codes_and_scales(dims, dtype, recipe):
    check(*qkv(dims=dims, dtype=dtype), **recipe)


@pytest.mark.parametrize("shape", [(2, 5, 129, 4, 2), (1, 1, 1, 3, 3), (1, 2, 700, 6, 2), (1, 2, 20000, 1, 1)], ids=str)
def test_shapes(shape):
    check(*qkv(shape))


def test_strides():
    q, k, v = qkv((2, 40, 140, 4, 2))
    heads_first = lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)
    padded = torch.zeros(2, 140, 2, 72, dtype=v.dtype)[..., :64]
    packed = torch.randn(2, 140, 3, 2, 64).to(k.dtype)[:, :, 1]
    check(heads_first(q), packed, padded.copy_(v))


@pytest.mark.parametrize("smooth_k", [True, False])
@pytest.mark.parametrize("int8_qk", [True, False])
def test_zeros_tiny_and_huge(int8_qk, smooth_k):
    q, k, v = qkv((2, 150, 300, 2, 2))
    for x in (q, k, v):
        x[:, 128:256] = 0
        x[:, :, 1] = 0
        x[..., 3] = -0.0
        x[:, 7] = 0
    check(q, k, v, int8_qk=int8_qk, smooth_k=smooth_k)
    for factor in (0.0, 1e-34, 1e-25, 1e15):
        check(*(x * factor for x in qkv((1, 20, 130, 1, 1))), int8_qk=int8_qk, smooth_k=smooth_k)


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("smooth_k", [True, False])
@pytest.mark.parametrize("int8_qk", [True, False])
def test_inf_and_nan(bad, smooth_k, int8_qk):
    q, k, v = qkv((2, 220, 300, 2, 2))
    for x in (q, k, v):
        x[1, 200, 1, 5] = bad
    check(q, k, v, smooth_k=smooth_k, int8_qk=int8_qk)
