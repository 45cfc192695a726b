"""The sm80 kernels compile without a GPU for every arch that they name, and their machine code is what it should be.

All variants for sm_80; for the others two: few and many registers, one stage and two.
"""

import pytest

from flashattn_hopper import jit
from flashattn_hopper.kernels.sm80 import specs as sm80
from flashattn_hopper.spec.arch import SM90
from flashattn_hopper.spec.problem import Traits

from . import cases
from .inspect_cubin import inspect, inspect_all

SPEC, BACKWARD = sm80.FORWARD, sm80.BACKWARD
# Copies of the code of a tile: the first one and each segment of the walk; then the same of the second attempt.
COPIES = {"full": 2 + 2, "causal": 3 + 2, "window": 4 + 2}
SLUGS = ("fwd.bf16.d128.causal", "fwd.fp16.d256.window")


def some(arch):
    """Two variants of another arch."""
    spec = SPEC.on(arch.capability)
    return [variant for variant in cases.variants(spec) if variant[1].slug in SLUGS]


def variant_id(variant):
    return f"{variant[3].name}.{cases.variant_id(variant)}"


VARIANTS = [*cases.variants(SPEC), *(variant for arch, _ in SPEC.ports for variant in some(arch))]


@pytest.mark.compile
@pytest.mark.parametrize("variant", VARIANTS, ids=variant_id)
def test_machine_code(variant, monkeypatch):
    _, traits, tile, arch = variant
    shared = smem_of(monkeypatch)
    used = inspect(jit.compile_cubin(*variant))
    assert used.block == (tile.num_threads, 1, 1) and used.registers <= tile.registers[0]
    # What a warp multiplies for a tile, in instructions of 16 x 8 x 16. The compiler may add copies by peeling a loop.
    products = tile.atoms * tile.tile_n * (traits.headdim + traits.headdim_v) // (8 * 16)
    copies = COPIES[traits.mask]
    kinds = {name for name in used.opcodes if name.startswith("HMMA")}
    assert kinds == {"HMMA.16816.F32" + ".BF16" * (traits.dtype == "bf16")}
    assert used.count("HMMA") >= products * copies and used.count("HMMA") % products == 0
    assert any(name.startswith("LDSM.16.MT88.4") for name in used.opcodes), "V is not transposed on its way"
    assert any(name.startswith("LDSM.16.M88.4") for name in used.opcodes)
    assert {name.split(".")[-1] for name in used.opcodes if name.startswith("LDGSTS")} == {"128"}
    assert not used.count("ATOM") + used.count("RED") + used.count("HGMMA")
    if max(traits.headdim, traits.headdim_v) <= 128:
        assert not used.local_memory and used.stack == 0, f"spilled: {used.local_memory}, stack {used.stack} B"
    else:
        # Measured nowhere yet; a spill in the main loop would show as more than this.
        assert used.stack <= 64, f"spilled: {used.local_memory}, stack {used.stack} B"
    assert shared == [tile.smem_bytes(traits)] and shared[0] <= arch.smem_bytes


OTHER_SLUGS = ("bwd.bf16.d128.causal", "bwd.bf16.d64.window")
HOPPER = BACKWARD.on(SM90.capability)
BACKWARDS = [
    *(v for v in cases.variants(BACKWARD) if v[1].dtype == "bf16"),
    *(v for v in cases.variants(HOPPER) if v[1].dtype == "fp16"),
    *(
        v
        for arch, _ in BACKWARD.ports
        for v in cases.variants(BACKWARD.on(arch.capability))
        if v[1].slug in OTHER_SLUGS
    ),
]


def products_of_keys(traits, tile):
    """Matrix instructions in the code of keys: its loop once; a dQ that comes late once more behind it, and where
    halves of the warps differ twice in it."""
    d, e, atoms = traits.headdim, traits.headdim_v, tile.keys // 16
    count = (tile.at_once * (d + e) + tile.at_once * (d + e) // tile.split) * atoms // 128
    count += (tile.split - 1) * tile.queries * (d + e) // tile.split * atoms // 128
    if tile.summed:
        rows, columns = tile.dq_part(d)
        count += (1 + tile.late + tile.staggered) * rows * columns * tile.tile_n // 2048
    return count


@pytest.mark.compile
@pytest.mark.parametrize("variant", BACKWARDS, ids=variant_id)
def test_machine_code_of_the_backward(variant, monkeypatch):
    _, traits, tile, arch = variant
    shared = smem_of(monkeypatch)
    kernels = inspect_all(jit.compile_cubin(*variant))
    assert kernels.keys() == {"prepare", "keys", "finish" if tile.summed else "queries"}
    for name, used in kernels.items():
        spilled = f"{name} spilled: {used.local_memory}, stack {used.stack} B"
        if traits.headdim <= 128:
            assert not used.local_memory and used.stack == 0, spilled
        else:
            assert used.stack <= 64, spilled
        assert not used.count("ATOM") + used.count("ATOMG")
    keys = kernels["keys"]
    sums = {name: used.count("RED") + used.count("REDG") for name, used in kernels.items()}
    assert not sum(sums.values()) - sums["keys"]
    assert keys.count("HMMA") == products_of_keys(traits, tile), "one loop"
    if tile.summed:
        rows, columns = tile.dq_part(traits.headdim)
        copies = 1 + tile.late + tile.staggered
        assert sums["keys"] == copies * rows * columns // (128 if tile.vector else 32), "dQ of a tile"
        assert kernels["finish"].registers <= 64 and not kernels["finish"].count("HMMA")
    else:
        assert not sums["keys"]
        queries = tile.query_n * (2 * traits.headdim + traits.headdim_v) // (8 * 16)
        copies = COPIES[traits.mask] - 2  # there is no second attempt
        found = kernels["queries"].count("HMMA")
        assert found >= queries * copies and found % queries == 0
    for name, threads in (("keys", tile.num_threads), ("queries", tile.query_threads)):
        if name in kernels:
            used = kernels[name]
            assert used.block == (threads, 1, 1) and used.registers <= tile.registers[0]
            assert used.count("LDGSTS") and any(opcode.startswith("LDSM.16.MT88.4") for opcode in used.opcodes)
    prepare = kernels["prepare"]
    assert prepare.registers <= 64 and prepare.count("LDG") and not prepare.count("HMMA")
    assert max(shared) <= tile.smem_bytes(traits) <= arch.smem_bytes


def smem_of(monkeypatch):
    """A list that gets the bytes of dynamic shared memory of each kernel that is traced from now on."""
    cases.device_code()
    from cutlass.memory import SmemAllocator

    sizes, allocate = [], SmemAllocator.allocate

    def recording(self, what, *args, **kwargs):
        sizes.append(what.size_in_bytes())
        return allocate(self, what, *args, **kwargs)

    monkeypatch.setattr(SmemAllocator, "allocate", recording)
    return sizes


def test_the_compiled_variants_cover_every_arch_and_every_problem():
    assert {variant[3] for variant in VARIANTS} == {SPEC.arch, *(arch for arch, _ in SPEC.ports)}
    assert {variant[1] for variant in VARIANTS if variant[3] is SPEC.arch} == {
        Traits("fwd", dtype, *dims, mask) for dtype in SPEC.dtypes for dims in SPEC.headdims for mask in SPEC.masks
    }
    assert all(len(some(arch)) == len(SLUGS) for arch, _ in SPEC.ports)
