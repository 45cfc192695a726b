"""The compiled sm80.backward without a GPU: the PTX of its kernels, run by ampere_machine, against the error budget."""

import functools
import struct
import tempfile

import pytest
import torch

from flashattn_hopper import jit, runner
from flashattn_hopper.kernels.sm80.specs import BACKWARD
from flashattn_hopper.oracle import attention
from flashattn_hopper.spec.arch import SM90
from flashattn_hopper.spec.mask import Band, Seqlens
from flashattn_hopper.spec.problem import BWD, Traits
from flashattn_hopper.spec.tile import ROW_PAD

from .ampere_machine import run
from .oracle import check_grads
from .ptx_machine import Memory

pytestmark = pytest.mark.compile

MASKS = {
    "full": (Band(), {}),
    "causal": (Band(right=0), {"causal": True}),
    "window": (Band(90, 3), {"window_size": (90, 3)}),
}
PREPARE_THREADS = 256


@functools.cache
def ptx(traits):
    tile = BACKWARD.tiles.find(traits, 4096)
    with tempfile.TemporaryDirectory() as folder:
        return jit._compile(BACKWARD, traits, tile, SM90, f"--keep-ptx --dump-dir {folder}").__ptx__, tile


def gradients(q, k, v, dout, out, lse, band):
    """(dq, dk, dv), handed over as the host half of the kernel does."""
    (batch, seqlen_q, heads, d), (_, seqlen_k, heads_kv, _) = q.shape, k.shape
    traits = BACKWARD.compiled(Traits(BWD, "bf16", d, v.shape[3], band.kind))
    text, tile = ptx(traits)
    memory = Memory(1 << 24)
    address, scale = lambda a: struct.pack("<Q", a), struct.pack("<f", d**-0.5)
    tensor = lambda x: address(memory.add(x)) + struct.pack("<4i", *x.shape) + struct.pack("<3q", *x.stride()[:3])
    blocks = -(-seqlen_q // ROW_PAD) * heads * batch
    stats = address(memory.empty(4 * tile.workspace_floats(blocks * ROW_PAD, traits.headdim)))
    edges = runner.window_edges(band, Seqlens(seqlen_q, seqlen_k)) if traits.mask == "window" else ()
    device = [*map(tensor, (q, k, v, dout)), stats, scale, *(struct.pack("<i", edge) for edge in edges)]
    places = [memory.add(torch.full_like(x, float("nan"))) for x in (q, k, v)]
    ends = [tensor(dout), *(address(memory.add(x)) for x in (out, lse)), address(0), stats]
    run(text, ends, PREPARE_THREADS, blocks, memory, "prepare")
    tiles = lambda seqlen: -(-seqlen // tile.tile_n) * batch
    run(text, [*device, *map(address, places[1:])], tile.num_threads, tiles(seqlen_k) * heads_kv, memory, "keys")
    run(text, [*device, address(places[0])], tile.num_threads, tiles(seqlen_q) * heads, memory, "queries")
    return [memory.read(at, 2 * x.numel()).view(x.dtype).view(x.shape) for at, x in zip(places, (q, k, v))]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("headdim", [64, 72, 128])
def test_gradients(mask, headdim):
    """Ragged lengths, two query heads of one head of K and V, padded headdims."""
    torch.manual_seed(0)
    band, words = MASKS[mask]
    make = lambda seqlen, heads: torch.randn(1, seqlen, heads, headdim).bfloat16()
    q, k, v, dout = make(150, 2), make(200, 1), make(200, 1), make(150, 2)
    exact = attention(q, k, v, **words)
    out, lse = exact.out.to(q.dtype).contiguous(), exact.lse.float().contiguous()
    check_grads(gradients(q, k, v, dout, out, lse, band), q, k, v, dout, **words)
