"""The compiled sm80.backward without a GPU: the PTX of its kernels, run by ampere_machine, against the error budget."""

import functools
import struct
import tempfile

import pytest
import torch

from flashattn_hopper import jit, runner
from flashattn_hopper.kernels.sm80.specs import BACKWARD
from flashattn_hopper.oracle import attention
from flashattn_hopper.spec.arch import SM80, SM86, SM90
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
THREADS = 256  # of prepare and finish


@functools.cache
def ptx(traits, arch):
    spec = BACKWARD.on(arch.capability)
    tile = spec.tiles.find(traits, 4096)
    with tempfile.TemporaryDirectory() as folder:
        # Why sm_90: this process compiles for one target. The tile is the other arch's.
        return jit._compile(spec, traits, tile, SM90, f"--keep-ptx --dump-dir {folder}").__ptx__, tile


def gradients(q, k, v, dout, out, lse, band, arch, deterministic):
    """(dq, dk, dv), handed over as the host half of the kernel does."""
    (batch, seqlen_q, heads, d), (_, seqlen_k, heads_kv, _) = q.shape, k.shape
    asked = Traits(BWD, "bf16", d, v.shape[3], band.kind, deterministic=deterministic)
    traits = BACKWARD.on(arch.capability).compiled(asked)
    text, tile = ptx(traits, arch)
    memory = Memory(1 << 24)
    address, scale = lambda a: struct.pack("<Q", a), struct.pack("<f", d**-0.5)
    tensor = lambda x: address(memory.add(x)) + struct.pack("<4i", *x.shape) + struct.pack("<3q", *x.stride()[:3])
    blocks = -(-seqlen_q // ROW_PAD) * heads * batch
    workspace = memory.empty(4 * tile.workspace_floats(blocks * ROW_PAD, traits.headdim))
    stats, sums = address(workspace), address(workspace + 8 * ROW_PAD * blocks)
    edges = runner.window_edges(band, Seqlens(seqlen_q, seqlen_k)) if traits.mask == "window" else ()
    device = [*map(tensor, (q, k, v, dout)), stats, scale, *(struct.pack("<i", edge) for edge in edges)]
    places = [memory.add(torch.full_like(x, float("nan"))) for x in (q, k, v)]
    ends = [tensor(dout), *(address(memory.add(x)) for x in (out, lse)), address(0), stats, sums]
    run(text, ends, THREADS, blocks, memory, "prepare")
    tiles = lambda seqlen, rows: -(-seqlen // rows) * batch
    keys = [*device, sums, *map(address, places[1:])]
    run(text, keys, tile.num_threads, tiles(seqlen_k, tile.tile_n) * heads_kv, memory, "keys")
    if tile.summed:
        run(text, [tensor(q), sums, address(places[0]), scale], THREADS, blocks, memory, "finish")
    else:
        queries = tiles(seqlen_q, tile.query_m) * heads
        run(text, [*device, address(places[0])], tile.query_threads, queries, memory, "queries")
    return [memory.read(at, 2 * x.numel()).view(x.dtype).view(x.shape) for at, x in zip(places, (q, k, v))]


# Arch, mask, deterministic, headdim: every kind of tile, with each mask and one headdim that is padded.
CASES = [
    (SM90, "full", False, 64),
    (SM90, "causal", False, 64),
    (SM90, "causal", False, 128),
    (SM90, "window", False, 128),
    (SM90, "causal", False, 72),
    (SM90, "causal", False, 256),
    (SM80, "window", False, 64),
    (SM80, "causal", False, 128),
    (SM90, "window", True, 64),
    (SM86, "causal", False, 192),
    (SM86, "window", True, 256),
]


@pytest.mark.parametrize("arch, mask, deterministic, headdim", CASES, ids=lambda x: getattr(x, "name", None) or str(x))
def test_gradients(arch, mask, deterministic, headdim):
    """Ragged lengths, two query heads of one head of K and V."""
    torch.manual_seed(0)
    band, words = MASKS[mask]
    make = lambda seqlen, heads: torch.randn(1, seqlen, heads, headdim).bfloat16()
    q, k, v, dout = make(150, 2), make(200, 1), make(200, 1), make(150, 2)
    exact = attention(q, k, v, **words)
    out, lse = exact.out.to(q.dtype).contiguous(), exact.lse.float().contiguous()
    check_grads(gradients(q, k, v, dout, out, lse, band, arch, deterministic), q, k, v, dout, **words)
