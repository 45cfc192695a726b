"""The native library on a machine without a GPU: its tables agree with the planner, and CMake builds and tests it."""

import os
import random
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from flashattn_hopper import _toolchain, aot, native, planner
from flashattn_hopper.spec.problem import BWD, FWD, MASKS, PHASES, Shape, Traits

ROOT = Path(__file__).resolve().parents[1]
needs_dsl = pytest.mark.skipif(_toolchain._folder_of("nvidia_cutlass_dsl") is None, reason="needs nvidia-cutlass-dsl")


def first_that_fits(spec, asked, seqlen_k):
    """What the C++ side does with native.choices."""
    for words, min_seqlen, variant in native.choices(spec):
        if (
            asked.headdim <= words.headdim
            and asked.headdim_v <= words.headdim_v
            and (asked.dtype, asked.mask, asked.deterministic) == (words.dtype, words.mask, words.deterministic)
            and seqlen_k >= min_seqlen
        ):
            return variant
    return None


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
            assert native._answer(asked, capability, backend, seqlen_k)[:2] == (got.name, got.tile)
            planned += 1
    assert planned > 100


def test_every_choice_is_a_variant_that_can_be_listed():
    listed = set(aot.catalog_variants())
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

    (tmp_path / "list").write_text("sm_80:sm80:*.bf16.d64.causal\nsm_90a:sm90:*.bf16.d64.causal\n")
    options = f"-DFLASHATTN_HOPPER_VARIANTS={tmp_path / 'list'}", f"-DPython3_EXECUTABLE={sys.executable}"
    run("cmake", "-S", str(ROOT), "-B", "build", "-DFLASHATTN_HOPPER_PROCESSES=2", *options)
    run("cmake", "--build", "build")
    said = run("ctest", "--test-dir", "build", "--output-on-failure")
    assert "100% tests passed" in said
    names = ("header_c", "plan", "call", "request", "driver_one", "bundle", "install", "consumer", "installed_bundle")
    for name in names:
        assert any(f": {name} ." in line and "Passed" in line for line in said.splitlines()), said
