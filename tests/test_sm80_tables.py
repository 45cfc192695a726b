"""The tiles of sm80 kernels that are for GPUs of other sizes, run on the one that is here.

A GPU with 99 or 163 KiB of shared memory has rows of its own in the tile tables. Compiled for this GPU they compute the
same, so what is wrong in a tile shows without that GPU; what only its machine code has, does not.
"""

import pytest
import torch

from flashattn_hopper import jit, planner
from flashattn_hopper.kernels.sm80 import specs as sm80

from . import cases
from .oracle import check_forward, check_grads
from .test_backward import ALLOCATIONS, inputs
from .test_backward_sm80 import BACKEND, HERE, gradients, only_the_kernel  # noqa: F401
from .test_forward_sm80 import attend

pytestmark = pytest.mark.gpu(since=(8, 0))


def elsewhere(spec):
    """(this GPU's spec, traits, tile, arch) of every bf16 tile in the tables of other archs that its own has not."""
    here = spec.on(HERE) or spec
    ports = [spec, *(spec.on(arch.capability) for arch, _ in spec.ports)]
    its = lambda port: ((traits, tile) for _, traits, tile, _ in cases.variants(port) if traits.dtype == "bf16")
    own = set(its(here))
    found = dict.fromkeys(pair for port in ports for pair in its(port) if pair not in own)
    return [(here, *pair, here.arch) for pair in found if pair[1].smem_bytes(pair[0]) <= here.arch.smem_bytes]


FORWARD, BACKWARD = map(elsewhere, (sm80.FORWARD, sm80.BACKWARD))


@pytest.fixture(scope="module")
def kernels():
    """These tiles, and the forwards that come before the backwards."""
    own = [variant for variant in cases.variants(sm80.FORWARD.on(HERE) or sm80.FORWARD) if variant[1].dtype == "bf16"]
    return jit.warmup([*own, *FORWARD, *BACKWARD])


@pytest.fixture
def choose(monkeypatch, poison):
    """choose(variant): calls of its phase take its tile. Calls prepared before are kept apart, as `poison` does it."""

    def choose(variant):
        _, traits, tile, _ = variant
        table = planner.tile_for
        monkeypatch.setattr(
            planner, "tile_for", lambda spec, t, shape: tile if t.phase == traits.phase else table(spec, t, shape)
        )
        planner._plan.cache_clear()

    yield choose
    planner._plan.cache_clear()


def operands(variant, heads):
    _, traits, tile, _ = variant
    dims = traits.headdim, traits.headdim_v
    seqlens = 3 * tile.tile_m + 17, 5 * tile.tile_n + 13
    mask = cases.mask_arguments(traits.mask, (tile.tile_n + 7, tile.tile_n // 2))
    return *inputs(2, seqlens, heads, dims), mask


each_heads = pytest.mark.parametrize("heads", [(4, 2), (3, 3)], ids=["gqa", "mha"])


@pytest.mark.parametrize("variant", FORWARD, ids=cases.variant_id)
@each_heads
def test_forward(variant, heads, choose, poison):
    choose(variant)
    q, k, v, _, _, mask = operands(variant, heads)
    check_forward(*attend(q, k, v, **mask), q, k, v, **mask)


@pytest.mark.parametrize("variant", BACKWARD, ids=cases.variant_id)
@each_heads
def test_backward(variant, heads, choose, poison):
    """Every element of gradients and workspace starts as NaN; a deterministic tile repeats bit by bit."""
    choose(variant)
    deterministic = variant[1].deterministic
    q, k, v, dout, dlse, mask = operands(variant, heads)
    grads = gradients(q, k, v, dout, dlse, deterministic=deterministic, **mask)
    poison.check(ALLOCATIONS)
    check_grads(grads, q, k, v, dout, dlse, **mask)
    if deterministic:
        again = gradients(q, k, v, dout, dlse, deterministic=True, **mask)
        assert all(torch.equal(a, b) for a, b in zip(grads, again))
