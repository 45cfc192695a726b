"""FP8 without a GPU: machine code of every variant of forward and quantizer, and the operands they accept."""

import itertools
import subprocess

import pytest
import torch

from flashattn_hopper import buffers, jit, quantize, runner_fp8
from flashattn_hopper.kernels.common.operands import QuantizeOperands, ScaledOperands
from flashattn_hopper.kernels.sm90 import specs as sm90
from flashattn_hopper.spec.problem import FWD, QuantizeTraits, Traits

from . import cases
from .fake_cuda import accepts
from .inspect_cubin import find_nvdisasm, inspect
from .test_compile import check_main_kernel, check_no_spills, smem_of

VARIANTS = cases.variants(sm90.FORWARD_FP8)
# Out in FP16 is another conversion in the epilogue: compiled for one mask.
INSPECTED = [variant for variant in VARIANTS if not variant[1].fp16_out or variant[1].mask == "causal"]
# Exact head dimensions: the compiled ones, V narrower and wider, and what only the quantizer has as such.
WIDTHS = (*sm90.FORWARD_FP8.headdims, (64, 256), (16, 16), (80, 80), (160, 96))
RECIPES = ({"int8_qk": True}, {}, {"hadamard": False}, {"smooth_k": False}, {"hadamard": False, "smooth_k": False})
# Every recipe for one width of each way to hold a row, the default one for the others.
QUANTIZERS = [
    QuantizeTraits(dtype, *dims, **recipe)
    for (dims, recipe), dtype in zip(itertools.product(WIDTHS, RECIPES), itertools.cycle(("bf16", "fp16", "bf16")))
    if dims in ((64, 64), (128, 128), (256, 256)) or recipe == RECIPES[0]
]


# The forward


@pytest.mark.compile
@pytest.mark.parametrize("variant", INSPECTED, ids=cases.variant_id)
def test_machine_code(variant, monkeypatch):
    _, traits, tile, arch = variant
    shared = smem_of(monkeypatch)
    used = inspect(jit.compile_cubin(*variant))
    # What test_compile.py asks of a main kernel; its matrix instructions have another name here.
    loops = loops_of(traits)
    scores, sums = products(traits, tile)
    scores *= loops + tile.ahead  # those of the next query tile are computed in a place of their own
    assert used.count("QGMMA") == (0 if traits.int8_qk else scores) + loops * sums
    assert used.count("IGMMA") == (scores if traits.int8_qk else 0)
    check_main_kernel(used._replace(opcodes=used.opcodes + type(used.opcodes)(HGMMA=1)), tile, arch)
    # Ten instructions of a group (arrive, commit, wait) at most for each place in the code where products are issued.
    blocks = traits.headdim_v // (tile.value_columns or traits.headdim_v)
    assert used.count("WARPGROUP") <= 4 * (loops * (1 + blocks) + tile.ahead)
    # P leaves the scores in registers: shuffles are those of row maxima and sums, bytes are packed by the conversion.
    assert used.count("SHFL") <= 4 * loops + 16
    codes = sum(n for name, n in used.opcodes.items() if name.startswith("F2FP.SATFINITE.E4M3"))
    assert codes >= (loops - 2) * tile.tile_n // 4
    assert used.count("PRMT") < 32
    assert len(shared) == 1 and shared[0] <= tile.smem_bytes(traits) <= arch.smem_bytes


@pytest.mark.compile
@pytest.mark.parametrize("int8_qk", (False, True))
@pytest.mark.parametrize("mask", ("full", "causal"))
def test_exponentials_run_under_a_product(mask, int8_qk, tmp_path):
    """Between the wait for a tile's scores and the wait for the product before: two for each row, and its scores'."""
    traits = sm90.FORWARD_FP8.compiled(Traits(FWD, "fp8", 128, 128, mask, int8_qk=int8_qk))
    tile = sm90.FORWARD_FP8.tiles.find(traits, 4096)
    path = tmp_path / "kernel.cubin"
    path.write_bytes(jit.compile_cubin(sm90.FORWARD_FP8, traits, tile, sm90.FORWARD_FP8.arch))
    text = subprocess.run([find_nvdisasm(), "-c", path], check=True, capture_output=True, text=True).stdout
    under = [part.split("WARPGROUP.DEPBAR.LE gsb0, 0x0")[0] for part in text.split("WARPGROUP.DEPBAR.LE gsb0, 0x1")[1:]]
    # The epilogue waits for the last product in the same way, where the scores of the next query tile go on.
    under = [part for part in under if "MUFU.EX2" in part]
    assert len(under) == loops_of(traits) - 2
    by_unit = tile.tile_n // 2 * (8 - tile.polynomial) // 8
    assert all(part.count("MUFU.EX2") >= by_unit and part.count("HFMA2") >= tile.polynomial * 8 for part in under)


def loops_of(traits):
    """Places in the code where a tile's scores are computed: the first tile, loops of partial and full ones, twice."""
    return {"full": 4, "causal": 5, "window": 6}[traits.mask]


def products(traits, tile):
    """Matrix instructions of one tile: k steps of 32 over headdim, and over the keys for each block of columns."""
    return traits.headdim // 32, tile.tile_n // 32 * (traits.headdim_v // (tile.value_columns or traits.headdim_v))


def test_every_problem_has_a_compiled_variant():
    spec, compiled, reached = sm90.FORWARD_FP8, set(VARIANTS), set()
    words = ("gqa", "deterministic", "int8_qk", "fp16_out")
    for mask, on in itertools.product(spec.masks, itertools.product((False, True), repeat=4)):
        for headdim, headdim_v in itertools.product(range(16, 257, 16), (None, 16, 128, 256)):
            traits = Traits(FWD, "fp8", headdim, headdim_v or headdim, mask, **dict(zip(words, on)))
            assert spec.refuses(traits, (9, 0), "sm90") is None and spec.refuses(traits, (9, 0)) is None
            padded = spec.compiled(traits)
            for seqlen in (1, 1024, 1025, 65536):
                variant = spec, padded, spec.tiles.find(padded, seqlen), spec.arch
                assert variant in compiled
                reached.add(variant)
    assert reached == compiled
    for traits in (
        Traits(FWD, "fp8", 64, 64, fp32_out=True),
        Traits(FWD, "fp8", 72, 72),
        Traits(FWD, "fp8", 272, 64),
        Traits(FWD, "bf16", 64, 64),
    ):
        assert spec.refuses(traits, (9, 0), "sm90")


@pytest.mark.parametrize("row", sm90.FP8_TILES, ids=lambda row: f"{row.dims}-{row.masks[0]}-{row.min_seqlen}")
def test_tiles_fit_and_have_one_scale(row):
    traits = Traits(FWD, "fp8", *row.dims)
    row.tile.check(sm90.FORWARD_FP8.arch, traits)
    assert quantize.TILE % row.tile.tile_n == 0


# The quantizer


@pytest.mark.compile
@pytest.mark.parametrize("traits", QUANTIZERS, ids=lambda traits: traits.slug)
def test_machine_code_of_the_quantizer(traits):
    pytest.importorskip("cutlass")
    from flashattn_hopper.kernels.sm90.quantize import Quantize
    from flashattn_hopper.kernels.sm90.quantize_rows import Rows

    used = inspect(jit.compile_cubin(sm90.QUANTIZER, traits, None, sm90.QUANTIZER.arch))
    check_no_spills(used)
    assert used.registers * used.threads * Quantize(traits).resident <= 65536
    # Blocks of a head are counted; sums in memory would not repeat bit by bit.
    atomics = {name for name in used.opcodes if name.startswith(("ATOM", "RED"))}
    assert atomics == {"ATOMG.E.ADD.STRONG.GPU"}
    # Inputs are read and codes written 16 or 8 bytes at a time; single words are scales, offsets, counters and means.
    by_rows = Rows.fits(traits.headdim, traits.headdim_v)
    assert bool(used.count("LDGSTS")) == by_rows
    assert used.opcodes["LDG.E.128"] >= 2 and used.opcodes["STG.E.EF.128"] >= 2
    for family, most in (("LDG", 9), ("STG", 20)):
        words = [
            name for name in used.opcodes if name.split(".")[0] == family and not {"64", "128"} & {*name.split(".")}
        ]
        assert sum(used.opcodes[name] for name in words) <= most, used.opcodes
    assert bool(used.count("F2IP")) == traits.int8_qk
    assert any(name.startswith("F2FP.SATFINITE.E4M3") for name in used.opcodes)


def test_quantizers_refuse_other_inputs():
    for change in ({"dtype": "fp32"}, {"headdim": 40}, {"headdim_v": 8}, {"headdim": 272}):
        with pytest.raises(ValueError, match=next(iter(change))):
            QuantizeTraits(**({"dtype": "bf16", "headdim": 64, "headdim_v": 64} | change))


def test_the_same_signs():
    pytest.importorskip("cutlass")
    from flashattn_hopper.kernels.common.rotation import sign_bit

    assert quantize._signs(torch.empty(256)).tolist() == [1.0 - 2 * sign_bit(i) for i in range(256)]


def test_the_same_limits():
    pytest.importorskip("cutlass")
    from flashattn_hopper.kernels.common import eight_bit
    from flashattn_hopper.kernels.sm90 import quantize as kernel

    assert kernel.TILE == quantize.TILE and eight_bit.TINY == quantize._TINY
    assert set(eight_bit.LARGEST.values()) == set(quantize.LARGEST.values())
    assert (kernel.CHUNK, kernel.MOST_CHUNKS) == (buffers.CHUNK, buffers.MOST_CHUNKS)


# Operands


def test_the_order_of_keys():
    """The slot of a key inside sixteen, as docs/kernels/sm90_fp8.md has it, and zeros behind the last key."""
    keys = torch.arange(1, 37, dtype=torch.uint8).view(1, 36, 1, 1).view(quantize.E4M3)
    packed = runner_fp8.pack_values(keys).view(torch.uint8)
    assert packed.shape == (1, 1, 1, 128) and not packed[..., 36 + 12 :].any()
    order = (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)
    assert (packed[0, 0, 0, :32] - 1).tolist() == [16 * g + key for g in (0, 1) for key in order]
    for slot, key in enumerate(order):
        assert slot == (key & 6) << 1 | (key & 8) >> 2 | key & 1
    assert torch.equal(runner_fp8.unpack_values(packed, 36), keys.view(torch.uint8))


@pytest.mark.parametrize("seqlen", [1, 127, 128, 300])
def test_packing_is_undone(seqlen):
    v = torch.randn(2, seqlen, 3, 48).to(quantize.E4M3)
    packed = runner_fp8.pack_values(v)
    assert packed.shape == (2, 3, 48, -(-seqlen // 128) * 128) and packed.is_contiguous()
    assert torch.equal(runner_fp8.unpack_values(packed, seqlen).view(torch.uint8), v.view(torch.uint8))


@pytest.mark.parametrize("rows, k_rows", [(1, 128), (5, 256), (None, None)])
def test_scales_are_spread(rows, k_rows):
    q, k, v = quantize.quantize_fp8(*torch.randn(3, 2, 300, 2, 32))
    blocks = lambda n: -(-300 // n) if n else 1
    q = quantize.BlockScaled(q.data, torch.rand(2, 2, blocks(rows)), rows)
    k = quantize.BlockScaled(k.data, torch.rand(2, 2, blocks(k_rows)), k_rows)
    codes = runner_fp8.from_scaled(q, k, v)
    assert codes.q_descale.shape == (2, 2, 300) and codes.k_descale.shape == (2, 2, 3)
    per_token = lambda x: quantize._per_token(x.descale, x.rows, 300).expand(2, 300, 2, 1)
    assert torch.equal(codes.q_descale, per_token(q)[..., 0].mT)
    assert torch.equal(codes.k_descale, per_token(k)[:, ::128, :, 0].mT)


@pytest.fixture(scope="module")
def forward(tmp_path_factory):
    yield from _compiled(tmp_path_factory, sm90.FORWARD_FP8, Traits(FWD, "fp8", 64, 64, "window"))


@pytest.fixture(scope="module")
def quantizer(tmp_path_factory):
    yield from _compiled(tmp_path_factory, sm90.QUANTIZER, QuantizeTraits("bf16", 64, 64))


def _compiled(tmp_path_factory, spec, traits):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHATTN_HOPPER_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        tile = spec.tiles and spec.tiles.find(traits, 512)
        yield jit.compiled(spec, traits, tile, spec.arch)


def codes(*shape, dtype=quantize.E4M3):
    return torch.zeros(shape, dtype=torch.uint8).view(dtype)


FORWARD_OPERANDS = ScaledOperands(
    codes(2, 40, 4, 64), codes(2, 60, 2, 64), codes(2, 2, 64, 128), 4096, 4096, 0.125, 3, 5, 132, 4096,
    *[4096] * 3, 0, 0,
)  # fmt: skip
HALVES = lambda seqlen, heads: torch.zeros(2, seqlen, heads, 64, dtype=torch.bfloat16)
QUANTIZE_OPERANDS = QuantizeOperands(HALVES(40, 4), HALVES(60, 2), HALVES(60, 2), *[4096] * 10)


@pytest.mark.compile
@pytest.mark.skipif(torch.cuda.is_available(), reason="a fake CUDA tensor must not reach a real device")
@pytest.mark.parametrize(
    "changes, wanted",
    [
        ({}, True),
        ({"q": codes(2, 40, 4, 32), "k": codes(2, 60, 2, 32)}, True),
        ({"v": codes(2, 2, 48, 256)}, True),
        ({"logit_offset": 4096, "restored_lse": 4096}, True),
        ({"v": codes(2, 2, 64, 96)}, False),  # not whole tiles
        ({"v": codes(2, 4, 64, 128)}, False),  # heads of k and v differ
        ({"q": codes(2, 40, 4, 64, dtype=torch.uint8)}, False),
        ({"q": HALVES(40, 4)}, False),
        ({"q": codes(2, 40, 4, 72)[..., :64]}, False),  # rows off 16 bytes
        ({"q_descale": None}, False),
    ],
)
def test_operands_of_the_forward(forward, changes, wanted):
    answer = accepts(forward, tuple(FORWARD_OPERANDS._replace(**changes)))
    assert (answer == "accepted") is wanted, answer


@pytest.mark.compile
@pytest.mark.skipif(torch.cuda.is_available(), reason="a fake CUDA tensor must not reach a real device")
@pytest.mark.parametrize(
    "changes, wanted",
    [
        ({}, True),
        ({"q": torch.zeros(2, 4, 40, 64, dtype=torch.bfloat16).transpose(1, 2)}, True),
        ({"v": HALVES(60, 1).expand(-1, -1, 2, -1)}, True),
        ({"q": HALVES(40, 4).half()}, False),
        ({"v": HALVES(61, 2)}, False),
        ({"k_mean": None}, False),
    ],
)
def test_operands_of_the_quantizer(quantizer, changes, wanted):
    answer = accepts(quantizer, tuple(QUANTIZE_OPERANDS._replace(**changes)))
    assert (answer == "accepted") is wanted, answer
