"""What a KernelSpec accepts, refuses, pads and compiles: no torch, no GPU."""

from dataclasses import replace

import pytest

from flashattn_hopper.catalog import CATALOG
from flashattn_hopper.spec.arch import SM80, SM90, device_word
from flashattn_hopper.spec.kernel import KernelSpec
from flashattn_hopper.spec.problem import BWD, DTYPES, FEATURES, FP8_FEATURES, FWD, HALF, MASKS, Traits
from flashattn_hopper.spec.tile import FwdTile, Row, TileTable

GPU = KernelSpec(
    name="sm90.forward",
    phase=FWD,
    dtypes=HALF,
    features=frozenset({"gqa"}),
    masks=("full", "causal"),
    arch=SM90,
    tiles=TileTable(
        Row(64, FwdTile(128, 128)), Row((192, 128), FwdTile(128, 64, output="v")), Row(192, FwdTile(128, 64))
    ),
    multiple=8,
    invariant_to=frozenset({"gqa"}),
)
CPU = KernelSpec(
    name="reference.forward", phase=FWD, dtypes=frozenset({"fp32"}), features=frozenset(), serves=frozenset({"cpu"})
)
ASKED = replace(GPU, on_request="it is not tested enough")
TRAITS = Traits(FWD, "bf16", 64, 64)
HOPPER, AMPERE = SM90.capability, SM80.capability


def test_accepts_what_it_declares():
    assert GPU.refuses(TRAITS, HOPPER) is None
    assert GPU.refuses(replace(TRAITS, gqa=True, mask="causal", dtype="fp16"), HOPPER, "sm90") is None
    assert CPU.refuses(replace(TRAITS, dtype="fp32", headdim=7, headdim_v=1001), None) is None


@pytest.mark.parametrize(
    "traits,capability,backend,reason",
    (
        (replace(TRAITS, phase=BWD), HOPPER, "auto", "it computes fwd, not bwd"),
        (TRAITS, HOPPER, "reference", "backend='reference' was asked for"),
        (TRAITS, None, "auto", "needs sm_90, the tensors are on cpu"),
        (TRAITS, AMPERE, "auto", "needs sm_90, the tensors are on sm_80"),
        (TRAITS, (10, 0), "sm90", "needs sm_90, the tensors are on sm_100"),
        (replace(TRAITS, dtype="fp32"), HOPPER, "auto", "no fp32 (it takes bf16, fp16)"),
        (replace(TRAITS, mask="window"), HOPPER, "auto", "no window mask"),
        (replace(TRAITS, deterministic=True, gqa=True), HOPPER, "auto", "no deterministic"),
        (replace(TRAITS, headdim=60), HOPPER, "auto", "headdim 60, headdim_v 64: both must be multiples of 8"),
        (replace(TRAITS, headdim_v=4), HOPPER, "auto", "headdim 64, headdim_v 4: both must be multiples of 8"),
        (replace(TRAITS, headdim=200), HOPPER, "auto", "headdim 200, headdim_v 64: at most 192 and 192"),
        (replace(TRAITS, headdim_v=200), HOPPER, "auto", "headdim 64, headdim_v 200: at most 192 and 192"),
    ),
)
def test_refusals_carry_the_reason(traits, capability, backend, reason):
    assert GPU.refuses(traits, capability, backend) == reason


def test_pytorch_kernels_serve_by_device_and_on_others_by_name():
    traits = replace(TRAITS, dtype="fp32")
    assert CPU.refuses(traits, None) is None
    assert CPU.refuses(traits, HOPPER) == "runs on sm_90 only with backend='reference'"
    assert CPU.refuses(traits, HOPPER, "reference") is None
    assert CPU.refuses(traits, HOPPER, "sm90") == "backend='sm90' was asked for"
    anywhere = replace(CPU, serves=frozenset({"cpu", "cuda"}))
    assert anywhere.refuses(traits, HOPPER) is None and anywhere.refuses(traits, None) is None


def test_a_kernel_on_request_runs_only_by_name():
    assert ASKED.refuses(TRAITS, HOPPER) == "only with backend='sm90': it is not tested enough"
    assert ASKED.refuses(TRAITS, HOPPER, "sm90") is None
    # What it could not run anyway is said first, and by name it refuses what it does not declare.
    assert ASKED.refuses(TRAITS, AMPERE) == GPU.refuses(TRAITS, AMPERE)
    deterministic = replace(TRAITS, deterministic=True)
    assert ASKED.refuses(deterministic, HOPPER, "sm90") == "no deterministic"
    assert ASKED.compiled(replace(TRAITS, headdim=48, gqa=True)) == TRAITS


@pytest.mark.parametrize(
    "dims,expected",
    (
        ((8, 8), (64, 64)),
        ((64, 64), (64, 64)),
        ((72, 64), (192, 128)),
        ((64, 128), (192, 128)),
        ((192, 128), (192, 128)),
        ((192, 136), (192, 192)),
        ((72, 192), (192, 192)),
        ((200, 64), None),
        ((64, 200), None),
    ),
)
def test_padded_takes_the_cheapest_pair_that_holds_both(dims, expected):
    traits = replace(TRAITS, headdim=dims[0], headdim_v=dims[1], mask="causal", gqa=True)
    padded = GPU.padded(traits)
    assert padded == (expected and replace(traits, headdim=expected[0], headdim_v=expected[1]))
    if expected is None:
        with pytest.raises(LookupError, match=r"sm90\.forward has no headdim"):
            GPU.compiled(traits)


def test_any_headdim_is_left_alone_without_tiles():
    traits = replace(TRAITS, headdim=7, headdim_v=1001)
    assert CPU.headdims is None and CPU.padded(traits) == traits and CPU.compiled(traits) == traits


def test_compiled_drops_what_changes_nothing():
    plain, grouped = replace(TRAITS, headdim=48), replace(TRAITS, gqa=True)
    assert GPU.compiled(plain) == GPU.compiled(grouped) == TRAITS
    assert replace(GPU, invariant_to=frozenset()).compiled(grouped) == grouped
    # Determinism is compiled in where it chooses a tile of its own.
    repeating = replace(TRAITS, deterministic=True)
    assert GPU.compiled(repeating) == TRAITS
    rows = Row(64, FwdTile(128, 128), deterministic=(False,)), Row(64, FwdTile(64, 64), deterministic=(True,))
    own = replace(GPU, tiles=TileTable(*rows))
    assert own.compiled(repeating) == repeating and own.compiled(TRAITS) == TRAITS
    assert own.tiles.find(own.compiled(repeating), 1).tile_m == 64
    assert CPU.compiled(repeating) == repeating  # without tiles the code asks by itself


def test_device_words():
    assert [device_word(c) for c in (None, (9, 0), (10, 3))] == ["cpu", "sm_90", "sm_103"]


@pytest.mark.parametrize("spec", CATALOG, ids=lambda spec: spec.name)
def test_catalog_rows_are_well_formed(spec):
    word = {FWD: "forward", BWD: "backward"}[spec.phase] + ("_fp8" if spec.dtypes == {"fp8"} else "")
    assert spec.name.split(".") == [spec.backend, word]
    assert spec.dtypes <= set(DTYPES) and set(spec.masks) <= set(MASKS)
    words = FEATURES if spec.dtypes == {"fp8"} else set(FEATURES) - set(FP8_FEATURES)
    assert spec.features <= set(words) and spec.invariant_to <= spec.features
    # A kernel of an architecture is chosen by it; one without is chosen by device, or never.
    assert bool(spec.arch) != bool(spec.serves) and (spec.arch is None) == (spec.tiles is None)
    module, _, name = spec.entry.partition(":")
    assert module.startswith("flashattn_hopper.") and name.isidentifier()


def test_catalog_names_are_distinct():
    assert len({spec.name for spec in CATALOG}) == len(CATALOG)


@pytest.mark.parametrize("spec", CATALOG, ids=lambda spec: spec.name)
def test_catalog_rows_compile_to_headdims_they_take(spec):
    """Compiling is idempotent, and what is compiled is not refused."""
    capability = spec.arch.capability if spec.arch else None
    for dims in spec.headdims or ((7, 9),):
        traits = Traits(spec.phase, "bf16" if "bf16" in spec.dtypes else "fp8", *dims, gqa=True)
        compiled = spec.compiled(traits)
        assert spec.compiled(compiled) == compiled and (compiled.headdim, compiled.headdim_v) == dims
        assert spec.refuses(compiled, capability, spec.backend) is None
        chosen_by_itself = spec.refuses(compiled, capability) is None
        assert chosen_by_itself != bool(spec.on_request)
