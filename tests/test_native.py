"""The native library on a machine without a GPU: its tables agree with the planner, and CMake builds and tests it."""

import inspect
import json
import os
import random
import re
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch

from flashattn_hopper import _toolchain, aot, buffers, jit, native, ops_fp8, planner, runner, runner_fp8
from flashattn_hopper.kernels.sm90.specs import FORWARD_FP8
from flashattn_hopper.spec.mask import Band
from flashattn_hopper.spec.problem import BWD, FWD, MASKS, PHASES, AttentionProblem, QuantizeTraits, Shape, Traits

ROOT = Path(__file__).resolve().parents[1]
needs_dsl = pytest.mark.skipif(_toolchain._folder_of("nvidia_cutlass_dsl") is None, reason="needs nvidia-cutlass-dsl")


def first_that_fits(spec, asked, seqlen_k, wanted="all"):
    """What the C++ side does with native.choices."""
    for words, min_seqlen, variant in native.choices(spec):
        if (
            asked.headdim <= words.headdim
            and asked.headdim_v <= words.headdim_v
            and (asked.dtype, asked.mask, asked.features - {"gqa"}) == (words.dtype, words.mask, words.features)
            and native.wanted_by(variant.tile) == wanted
            and seqlen_k >= min_seqlen
        ):
            return variant
    return None


def call_of(asked, capability, backend, seqlen_k, wanted="all", recipe=None):
    """For `asked` of 16 bits, or of FP8 the traits of its tensors and a recipe."""
    dims, shape = (asked.headdim, asked.headdim_v), Shape(1, 1, seqlen_k, 1, 1)
    decided = asked.phase, asked.dtype, dims, asked.mask, asked.deterministic
    return native.Call(capability, backend, *decided, wanted, recipe, shape)


@pytest.mark.parametrize("phase", PHASES)
def test_the_first_choice_that_fits_is_the_planners(phase):
    dims = [(8, 8), (64, 64), (72, 72), (96, 96), (128, 128), (192, 128), (128, 192), (200, 200), (256, 256)]
    grid = list(product(((8, 0), (8, 6), (8, 9), (9, 0), (12, 0)), ("sm80", "sm90"), dims, MASKS, (False, True)))
    planned = 0
    for capability, backend, (headdim, headdim_v), mask, deterministic in random.Random(0).sample(grid, 200):
        asked = Traits(phase, "bf16", headdim, headdim_v, mask, deterministic=deterministic)
        for seqlen_k in (1, 1024, 1025, 8192):
            spec = next((s for s in native.served() if s.refuses(asked, capability, backend) is None), None)
            if spec is None:
                continue
            here = next(s for s in native.on_each_arch(spec) if s.arch == spec.on(capability).arch)
            plan = planner.plan(asked, capability, backend, Shape(1, 1, seqlen_k, 1, 1))
            got = first_that_fits(here, asked, seqlen_k)
            assert (got.spec.name, got.traits, got.tile) == (plan.spec.name, plan.traits, plan.tile)
            assert native._answer(call_of(asked, capability, backend, seqlen_k))[:2] == (got.name, got.tile)
            planned += 1
    assert planned > 100


@pytest.mark.parametrize("wanted", ("dq", "dkdv"))
def test_gradients_that_are_wanted_alone_are_the_runners(wanted, monkeypatch):
    """The variant that runner.prepare_backward compiles."""
    compiled = []
    monkeypatch.setattr(jit, "compiled", lambda *variant: compiled.append(variant))
    monkeypatch.setattr(planner, "capability_of", lambda device: capability)
    monkeypatch.setattr(runner, "bind_backward", lambda *_: None)
    needs = (True, False, False) if wanted == "dq" else (False, True, True)
    for capability, headdim, mask, deterministic in product(((8, 0), (9, 0)), (64, 96, 192), MASKS, (False, True)):
        asked = Traits(BWD, "bf16", headdim, headdim, mask, deterministic=deterministic)
        band = Band(*{"full": (None, None), "causal": (None, 0), "window": (5, 5)}[mask])
        problem = AttentionProblem(asked, Shape(1, 1, 2048, 1, 1), band, 1.0)
        q = torch.empty(1, 1, 1, headdim)
        runner.prepare_backward(problem, "auto", q, q, q, q, needs)
        spec, traits, tile, arch = compiled[-1]
        kernel = next(one for one in native.served() if one.name == spec.name)
        here = next(one for one in native.on_each_arch(kernel) if one.arch == arch)
        got = first_that_fits(here, asked, 2048, wanted)
        assert (got.traits, got.tile) == (traits, tile) and got.name.endswith(f":{wanted}")
        assert native._answer(call_of(asked, capability, "auto", 2048, wanted))[0] == got.name


def test_fp8_is_planned_as_precision_fp8_is():
    """By traits that ops_fp8 asks for, and with the quantizer that runner_fp8 compiles, if a library can have it."""
    planned, dims = 0, (*FORWARD_FP8.headdims, (80, 80))
    for headdims, mask, dtype, codes in product(dims, MASKS, ("bf16", "fp16"), ((), ("int8_qk",), ("e4m3_qk",))):
        recipe = ("hadamard", "smooth_k", *codes)
        call = call_of(Traits(FWD, dtype, *headdims, mask), (9, 0), "auto", 2000, recipe=recipe)
        int8_qk = "int8_qk" in codes if codes else problem_fp8_of(headdims).traits.int8_qk
        asked = Traits(FWD, "fp8", *headdims, mask, int8_qk=int8_qk, fp16_out=dtype == "fp16")
        assert call.traits == asked
        plan = planner.plan(asked, (9, 0), "auto", call.shape)
        variant, tile, quantizer, _ = native._answer(call)
        if headdims not in FORWARD_FP8.headdims:
            assert variant == "-"
            continue
        traits = QuantizeTraits(dtype, *headdims, True, True, int8_qk)
        assert quantizer == f"sm_90a:sm90:{traits.slug}" and tile == plan.tile
        got = first_that_fits(plan.spec, asked, 2000)
        assert (got.name, got.traits, got.tile) == (variant, plan.traits, plan.tile)
        planned += 1
    assert planned == len(FORWARD_FP8.headdims) * 18


def problem_fp8_of(headdims):
    """Of precision="fp8" with no more said."""
    q, v = (torch.empty(1, 1, 1, width, dtype=torch.bfloat16) for width in headdims)
    return ops_fp8.problem_fp8(q, q, v, (1.0, None, 0, False, "auto"))


def test_the_defaults_of_fp8_are_those_of_c():
    """What fah_problem_init sets; codes that it leaves open are those of the table."""
    defaults = {name: one.default for name, one in inspect.signature(runner_fp8.quantize).parameters.items()}
    assert (defaults["hadamard"], defaults["smooth_k"], defaults["int8_qk"]) == (True, True, None)
    api = (ROOT / "native" / "src" / "api.cpp").read_text()
    assert "problem->qk_codes = FAH_DEFAULT_CODES;" in api and "problem->hadamard = problem->smooth_k = 1;" in api


def test_codes_by_default_are_those_of_python():
    """As catalog.cpp reads the table: the first row with room, and beyond all the last."""
    rows = native.default_codes()
    for headdim in (*range(1, 257), 264, 512):
        found = next((int8_qk for most, int8_qk in rows if headdim <= most), rows[-1][1])
        assert found == problem_fp8_of((headdim, headdim)).traits.int8_qk
    table = native.tables([]).partition("kDefaultCodes[] = {\n")[2].partition("};")[0]
    assert table == "".join(f"    {{{most}, {'true' if int8_qk else 'false'}}},\n" for most, int8_qk in rows)
    assert {int8_qk for _, int8_qk in rows} == {True, False}


def test_the_workspace_holds_what_the_runner_allocates():
    bytes_of = lambda *recipe: native._answer(
        call_of(Traits(FWD, "bf16", 128, 128), (9, 0), "auto", 300, recipe=recipe)
    )[3]
    q = torch.empty(1, 1, 1, 128, dtype=torch.bfloat16)
    k = torch.empty(1, 300, 1, 128, dtype=torch.bfloat16)
    runner_fp8._allocators.cache_clear()
    for smooth_k in (True, False):
        tensors = [new() for new in runner_fp8._allocators(q.shape, k.shape, smooth_k, True, q.device) if new]
        least = sum(x.numel() * x.element_size() for x in tensors) + 8 + 4
        found = bytes_of(*["smooth_k"] * smooth_k)
        assert least <= found < least + (len(tensors) + 2) * native.KEPT and found % native.KEPT == 0
        assert len(tensors) == len(buffers.NAMES) - 2 * (not smooth_k)


def test_every_choice_is_a_variant_that_can_be_listed():
    listed = set(aot.catalog_variants())
    assert {*native.quantizers()} <= listed and native.quantizers()
    for spec in native.served():
        for here in native.on_each_arch(spec):
            assert {variant for _, _, variant in native.choices(here)} <= listed


def test_workspace_is_linear_in_the_rows():
    """What the tables assume when they hold two numbers."""
    for spec in native.served():
        for here in native.on_each_arch(spec) if spec.phase == BWD else ():
            for _, _, (_, traits, tile, _) in native.choices(here):
                floats = [tile.workspace_floats(rows, traits.headdim) for rows in (0, 1, 1000)]
                assert floats[2] == floats[0] + 1000 * (floats[1] - floats[0])


def test_words_are_the_headers():
    header = " ".join((ROOT / "native" / "src" / "catalog.hpp").read_text().split())
    words = lambda name: header.partition(f"enum class {name} {{ ")[2].partition(" }")[0].split(", ")
    assert (words("Pass"), words("DType"), words("Mask")) == ([FWD, BWD], list(native.DTYPES), list(MASKS))
    assert (words("Feature"), words("Wanted")) == (list(native.FEATURES), list(native.WANTED))
    plan = (ROOT / "native" / "src" / "plan.cpp").read_text()
    assert f"kKeptAlignment = {native.KEPT};" in plan
    for name, wanted in (("kFeatures", native.FEATURES), ("kDTypes", native.DTYPES), ("kMasks", MASKS)):
        assert f"{name}[] = {{{', '.join(map(json.dumps, wanted))}}};" in plan
    operands = words("Operand : uint8_t")
    assert operands == ["none", *(f"{name}_" for name in native.OPERANDS), "count"]


@needs_dsl
def test_an_operand_that_the_library_cannot_pass_is_refused(monkeypatch):
    (variant,) = aot.select(["sm_80:sm80:fwd.bf16.d64.causal"])
    monkeypatch.setattr(native, "OPERANDS", native.OPERANDS[1:])
    with pytest.raises(RuntimeError, match=r"d64.causal takes q, which the native library cannot pass"):
        native.tables([variant])


@needs_dsl
def test_errors_of_the_command_line_are_one_line(tmp_path):
    command = [sys.executable, "-m", "flashattn_hopper.native", "export", "--out", str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    done = subprocess.run([*command, "--list", "no-such-list"], capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    assert done.stderr.startswith("flashattn_hopper: 'no-such-list' is neither one of smoke") and not done.stdout


@needs_dsl
@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.skipif(not (shutil.which("cmake") and shutil.which("c++")), reason="needs cmake and a C++ compiler")
def test_cmake_builds_and_tests_the_library(tmp_path):
    def run(*command):
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    patterns = "sm_80:sm80:*.bf16.d64.causal", "sm_90a:sm90:*.bf16.d64.causal", *aot._fp8(("bf16",), (64,), ("causal",))
    (tmp_path / "list").write_text("\n".join(patterns))
    options = f"-DFLASHATTN_HOPPER_VARIANTS={tmp_path / 'list'}", f"-DPython3_EXECUTABLE={sys.executable}"
    configured = run("cmake", "-S", str(ROOT), "-B", "build", "-DFLASHATTN_HOPPER_PROCESSES=2", *options)
    run("cmake", "--build", "build")
    said = run("ctest", "--test-dir", "build", "--output-on-failure")
    assert "100% tests passed" in said
    names = ("header_c", "plan", "call", "request", "driver_one", "bundle", "install", "consumer", "installed_bundle")
    left_out = re.findall(r"test (\w+) is left out", configured)
    expected = dict.fromkeys(names, "Passed") | dict.fromkeys(left_out, "Skipped")
    for name, outcome in expected.items():
        assert any(f": {name} ." in line and outcome in line for line in said.splitlines()), said
