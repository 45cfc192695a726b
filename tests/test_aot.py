"""Bundles without a GPU, in a named folder or an installed wheel: what is listed, what a fresh process loads from one,
and what it says when it cannot."""

import json
import logging
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import flashattn_hopper
from flashattn_hopper import _bundle, _cache, _toolchain, aot, jit, kernel_wheel
from flashattn_hopper.catalog import CATALOG
from flashattn_hopper.spec.arch import SM90
from flashattn_hopper.spec.kernel import KernelSpec
from flashattn_hopper.spec.problem import BWD, FWD, HALF, Traits
from flashattn_hopper.spec.tile import FwdTile

pytestmark = pytest.mark.compile
HERE = Path(__file__).parent

SPEC = KernelSpec("toy.forward", FWD, HALF, frozenset(), arch=SM90, entry="toy_kernel:Toy")
TOY = aot.Variant(SPEC, Traits(FWD, "bf16", 64, 64), FwdTile(128, 128), SM90)
REAL = "sm_80:sm80:fwd.bf16.d64.causal"

needs_dsl = pytest.mark.skipif(_toolchain._folder_of("nvidia_cutlass_dsl") is None, reason="needs nvidia-cutlass-dsl")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A bundle of the toy and of one real kernel."""
    folder = tmp_path_factory.mktemp("built") / "bundle"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))
        done = aot.bundle(folder, [TOY, *aot.select([REAL])], processes=1)
    assert done.compiles == 2
    return folder


@pytest.fixture
def fresh(tmp_path, monkeypatch, caplog):
    """No bundle, an empty cache, and nothing in memory."""
    monkeypatch.delenv("FLASHATTN_HOPPER_AOT", raising=False)
    monkeypatch.setenv("FLASHATTN_HOPPER_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("FLASHATTN_HOPPER_CACHE", raising=False)
    monkeypatch.syspath_prepend(str(HERE))
    _cache._said.clear()
    _bundle.forget()
    jit.clear()
    jit.reset_stats()
    caplog.set_level(logging.INFO, "flashattn_hopper")
    yield
    _bundle.forget()
    jit.clear()


@pytest.fixture
def bundle(built, fresh, tmp_path, monkeypatch):
    """A copy of it that the environment names."""
    folder = shutil.copytree(built, tmp_path / "bundle")
    monkeypatch.setenv("FLASHATTN_HOPPER_AOT", str(folder))
    return folder


@pytest.fixture(scope="module")
def wheel(built, tmp_path_factory):
    """A wheel of what the bundle has."""
    pytest.importorskip("wheel")
    out = tmp_path_factory.mktemp("wheel")
    shutil.copytree(built, out / kernel_wheel.WORK)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))
        made = kernel_wheel.build(out, [TOY, *aot.select([REAL])])
    assert made.done == jit.Stats()  # nothing is compiled twice
    return made.wheel


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory):
    """The folder that it is installed in."""
    target = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index"]
    done = subprocess.run([*pip, "--no-compile", "--target", target, wheel], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


@pytest.fixture
def installed(site, fresh, tmp_path, monkeypatch):
    """A copy of the installed package, on the path."""
    monkeypatch.syspath_prepend(str(shutil.copytree(site, tmp_path / "site")))
    return tmp_path / "site" / "flashattn_hopper_kernels"


def edit(folder, change):
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def warnings_in(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# ------------------------------------------------------------------------------------------------------ what is listed


def test_every_preset_names_variants():
    counts = {name: len(aot.select(aot.patterns_of(name))) for name in aot.PRESETS}
    assert 0 < counts["smoke"] < counts["small"] < counts["training"] < counts["all"] == len(aot.catalog_variants())


def test_the_list_of_all_is_what_the_catalog_can_ask_for():
    from . import cases

    listed = set(aot.catalog_variants())
    for spec in CATALOG:
        if spec.arch is not None:
            for _, traits, tile, arch in cases.variants(spec):
                assert aot.Variant(replace(spec, ports=()), traits, tile, arch) in listed


def test_gradients_that_are_wanted_alone_are_listed():
    """As runner.prepare_backward asks for them."""
    alone = [variant for variant in aot.catalog_variants() if getattr(variant.tile, "wanted", "all") != "all"]
    assert {variant.name.rpartition(":")[2] for variant in alone} == {"dq", "dkdv"}
    for variant in alone:
        asked = replace(variant.traits, deterministic=True)
        assert variant.traits == variant.spec.compiled(asked)
        assert replace(variant.tile, wanted="all") in [row.tile for row in variant.spec.tiles.rows_for(variant.traits)]
    bf16 = [v.traits for v in alone if (v.spec.name, v.traits.dtype, v.arch) == ("sm90.backward", "bf16", SM90)]
    assert {traits.headdim for traits in bf16} == {64, 96, 128, 192, 256}
    assert all(traits.phase == BWD for traits in bf16)


def test_a_list_is_a_preset_or_a_file(tmp_path):
    file = tmp_path / "list"
    file.write_text(f"# comment\n\n{REAL}  # one\nsm_90a:sm90:fwd.?p16.d128.full\n")
    names = [variant.name for variant in aot.select(aot.patterns_of(str(file)))]
    assert names == [REAL, *["sm_90a:sm90:fwd.fp16.d128.full"] * 2]  # two tiles, by sequence length
    with pytest.raises(ValueError, match="neither one of smoke, small, training, hopper, all nor a file"):
        aot.patterns_of(str(tmp_path / "nothing"))
    file.write_text("# nothing\n")
    with pytest.raises(ValueError, match="lists no variant"):
        aot.patterns_of(str(file))
    with pytest.raises(ValueError, match=r"'sm_75:\*' names no variant"):
        aot.select(["sm_75:*"])


# ------------------------------------------------------------------------------------------------- fresh processes

# The compiler is poisoned: a module that cannot be imported, and a linker that fails. Nor is torch needed.
_CHILD = """
import json, sys, time
sys.modules["cutlass"] = sys.modules["torch"] = None
from flashattn_hopper import aot, jit
from flashattn_hopper.spec.arch import SM90
from flashattn_hopper.spec.kernel import KernelSpec
from flashattn_hopper.spec.problem import FWD, HALF, Traits
from flashattn_hopper.spec.tile import FwdTile
toy = KernelSpec("toy.forward", FWD, HALF, frozenset(), arch=SM90, entry="toy_kernel:Toy")
variants = [(toy, Traits(FWD, "bf16", 64, 64), FwdTile(128, 128), SM90), *aot.select([{real!r}])]
seconds, answers = [], []
for variant in variants:
    start = time.perf_counter()
    function = jit.compiled(*variant)
    seconds.append(time.perf_counter() - start)
    try:
        function(1, 2, 3)
    except TypeError as error:
        answers.append(str(error))
print(json.dumps(dict(stats=jit.stats()._asdict(), seconds=seconds, answers=answers)))
"""


def child(**environment):
    done = subprocess.run(
        [sys.executable, "-c", _CHILD.format(real=REAL)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(HERE), "CC": "false", **environment},
    )
    return done


@needs_dsl
@pytest.mark.parametrize("variable, fixture", [("FLASHATTN_HOPPER_AOT", "built"), ("PYTHONPATH", "site"), (None, None)])
def test_what_opens_a_bundle_is_imported_with_the_operators(request, tmp_path, variable, fixture):
    """So that a first call does not wait for it. Without a bundle the import stays light."""
    code = "import sys, flashattn_hopper.ops; print('tvm_ffi' in sys.modules)"
    environ = {name: value for name, value in os.environ.items() if name != "FLASHATTN_HOPPER_AOT"}
    environ |= {variable: str(request.getfixturevalue(fixture))} if variable else {}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ, cwd=tmp_path)
    assert done.stdout.split() == [str(variable is not None)], done.stderr


def test_a_bundle_without_the_loader_does_not_stop_the_import(built, tmp_path):
    code = "import sys; sys.modules['tvm_ffi'] = None; import flashattn_hopper.ops; print('fine')"
    environ = os.environ | {"FLASHATTN_HOPPER_AOT": str(built)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ, cwd=tmp_path)
    assert done.stdout.split() == ["fine"], done.stderr


@needs_dsl
def test_a_fresh_process_compiles_nothing(bundle, tmp_path):
    done = child()
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    stats = jit.Stats(**answer["stats"])
    assert (stats.compiles, stats.disk_hits, stats.bundle_hits) == (0, 0, 2)
    assert ["Expects 2 parameters" in answer["answers"][0], "Expects 1 parameters" in answer["answers"][1]] == [
        True
    ] * 2
    assert not (tmp_path / "cache").exists()
    assert "kernel bundle" not in done.stderr
    print("seconds of the first and the second kernel:", *[f"{s:.3f}" for s in answer["seconds"]])
    assert answer["seconds"][0] < 1  # imports tvm_ffi
    assert answer["seconds"][1] < 0.5


@needs_dsl
def test_without_the_bundle_the_poison_works(bundle):
    done = child(FLASHATTN_HOPPER_AOT="")
    assert done.returncode and "ImportError" in done.stderr.splitlines()[-1]


# ------------------------------------------------------------------------------------------------------ one process


@needs_dsl
def test_bundle_comes_before_the_disk_cache(bundle, tmp_path, caplog):
    function = jit.compiled(*TOY)
    assert jit.compiled(*TOY) is function
    assert jit.stats()._replace(seconds_compiling=0) == jit.Stats(memory_hits=1, bundle_hits=1)
    assert any(f"from the bundle {bundle}" in record.getMessage() for record in caplog.records)
    assert not warnings_in(caplog)
    assert not (tmp_path / "cache").exists()


@needs_dsl
def test_warmup_leaves_out_what_the_bundle_has(bundle):
    assert jit.warmup([TOY]) == jit.Stats()


@needs_dsl
def test_what_the_bundle_lacks_is_compiled_without_a_warning(bundle, caplog):
    jit.compiled(SPEC, replace(TOY.traits, dtype="fp16"), TOY.tile, SM90)
    assert jit.stats()[:3] == (1, 0, 0) and jit.stats().bundle_hits == 0
    assert not warnings_in(caplog)
    assert any("not in the bundle" in record.getMessage() for record in caplog.records)


@needs_dsl
def test_another_version_is_named_once(bundle, caplog):
    def other(manifest):
        for variant in manifest["variants"]:
            variant["fingerprint"] |= {"dsl": "4.7.0", "sources": "0" * 64}
            variant["key"] = variant["key"][::-1]

    edit(bundle, other)
    for _ in range(2):
        jit.clear()
        jit.compiled(*TOY)
    assert jit.stats()[:3] == (1, 0, 1) and jit.stats().bundle_hits == 0
    (warning,) = warnings_in(caplog)
    assert f"dsl 4.7.0 (here {_toolchain.find().dsl})" in warning
    assert "sources 000000000000 (here " in warning and "toy.forward fwd.bf16.d64.full" in warning


def _truncate(path):
    blob = path.read_bytes()
    path.unlink()  # a mapped library must keep its bytes
    path.write_bytes(blob[: len(blob) // 2])


@needs_dsl
@pytest.mark.parametrize("damage, said", [(_truncate, "is damaged"), (Path.unlink, "cannot be read")])
def test_damaged_library_is_named_and_left_alone(bundle, caplog, damage, said):
    (library,) = bundle.glob("toy.*.so")
    damage(library)
    before = sorted(bundle.iterdir())
    for _ in range(2):
        jit.clear()
        jit.compiled(*TOY)
    assert jit.stats()[:3] == (1, 0, 1)
    (warning,) = warnings_in(caplog)
    assert said in warning and str(library) in warning
    assert sorted(bundle.iterdir()) == before


def _no_json(folder):
    (folder / "manifest.json").write_text("{")


def _other_format(folder):
    edit(folder, lambda manifest: manifest.update(format=99))


def _no_key(folder):
    edit(folder, lambda manifest: manifest["variants"][0].pop("key"))


@needs_dsl
@pytest.mark.parametrize(
    "damage, said",
    [
        (_no_json, "Expecting property name"),
        (_other_format, "its format is 99, this package reads 1"),
        (_no_key, "no 'key'"),
        (lambda folder: (folder / "manifest.json").unlink(), "No such file"),
    ],
)
def test_a_bundle_that_cannot_be_read_is_named(bundle, caplog, damage, said):
    damage(bundle)
    for _ in range(2):
        assert _bundle.current() is None
        _bundle.forget()
    (warning,) = warnings_in(caplog)
    assert said in warning and f"FLASHATTN_HOPPER_AOT={bundle}" in warning


@needs_dsl
def test_manifest(built):
    manifest = json.loads((built / "manifest.json").read_text())
    toy, real = manifest["variants"]
    assert toy["operands"] == ["x", "factor"]
    assert real["operands"] == ["q", "k", "v", "o", "lse", "softmax_scale", None, None, None, None]
    assert (real["name"], real["spec"], real["arch"]) == (REAL, "sm80.forward", "sm_80")
    assert Traits(**real["traits"]).slug == "fwd.bf16.d64.causal"
    assert real["tile"]["kind"] == "Sm80FwdTile" and real["tile"]["tile_m"] == 128
    assert _bundle.digest(built / real["library"]) == real["sha256"]
    files = {path.name for path in built.iterdir()}
    assert files == {"manifest.json", toy["library"], real["library"]}
    assert built.stat().st_mode & 0o055 == 0o055 & ~_umask()  # for others too, unlike a cache


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


@needs_dsl
def test_a_second_build_compiles_nothing_and_a_failed_one_says_what(built, monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    before = (built / "manifest.json").read_bytes()
    assert aot.bundle(built, [TOY, *aot.select([REAL])]) == jit.Stats()
    assert (built / "manifest.json").read_bytes() == before
    broken = TOY._replace(spec=replace(SPEC, entry="toy_kernel:Broken"))
    with pytest.raises(RuntimeError, match=r"toy.forward fwd.bf16.d64.full: RuntimeError: a toy that does not compile"):
        aot.bundle(built, [broken])
    assert (built / "manifest.json").read_bytes() == before


@needs_dsl
def test_command_line(tmp_path):
    pytest.importorskip("typer")
    command = [sys.executable, "-m", "flashattn_hopper", "bundle", "--out", str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "COLUMNS": "200"}
    done = subprocess.run([*command, "--preset", "everything"], capture_output=True, text=True, env=environment)
    assert done.returncode == 2 and "neither one of smoke" in done.stderr
    (tmp_path / "list").write_text(REAL)
    done = subprocess.run([*command, "--list", str(tmp_path / "list")], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert f"FLASHATTN_HOPPER_AOT={tmp_path / 'out'}" in done.stdout
    assert len(json.loads((tmp_path / "out" / "manifest.json").read_text())["variants"]) == 1


@needs_dsl
def test_info_names_the_bundle(bundle, monkeypatch):
    from flashattn_hopper.train import environment

    assert environment.describe()["kernel bundle"] == f"{bundle} (2 kernels)"
    monkeypatch.setenv("FLASHATTN_HOPPER_AOT", "/nowhere")
    assert environment.kernel_bundle() == "unusable: /nowhere"
    monkeypatch.delenv("FLASHATTN_HOPPER_AOT")
    assert environment.kernel_bundle() == "none"


# ----------------------------------------------------------------------------------------------------------- as a wheel


@needs_dsl
def test_a_wheel_says_what_it_is_for(wheel):
    from packaging.requirements import Requirement
    from packaging.tags import sys_tags
    from packaging.utils import parse_wheel_filename
    from wheel.wheelfile import WheelFile

    name, version, _, tags = parse_wheel_filename(wheel.name)
    assert (name, str(version)) == ("flashattn-hopper-kernels", flashattn_hopper.__version__)
    (tag,) = tags
    assert (tag.interpreter, tag.abi) == ("py3", "none") and tag.platform != "any" and tag in set(sys_tags())
    with WheelFile(wheel) as opened:  # raises for a file that differs from its digest in RECORD
        texts = {file: opened.read(file) for file in opened.namelist()}
        info = opened.dist_info_path
    assert b"Root-Is-Purelib: false" in texts[f"{info}/WHEEL"] and f"Tag: {tag}".encode() in texts[f"{info}/WHEEL"]
    lines = texts[f"{info}/METADATA"].decode().splitlines()
    asked = [Requirement(line.partition(": ")[2]) for line in lines if line.startswith("Requires-Dist: ")]
    tools = _toolchain.find()
    assert {(requirement.name, str(requirement.specifier)) for requirement in asked} == {
        ("flashattn-hopper", f"=={flashattn_hopper.__version__}"),
        ("nvidia-cutlass-dsl", f"=={tools.dsl}"),
        ("apache-tvm-ffi", f"=={tools.ffi}"),
    }


@needs_dsl
def test_a_fresh_process_finds_the_installed_wheel(site, fresh, tmp_path):
    done = child(PYTHONPATH=os.pathsep.join([str(HERE), str(site)]))
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert jit.Stats(**answer["stats"]) == jit.Stats(bundle_hits=2)
    assert not done.stderr and not (tmp_path / "cache").exists()


@needs_dsl
def test_the_environment_comes_before_the_installed_wheel(installed, built, monkeypatch, caplog):
    from flashattn_hopper.train import environment

    assert environment.kernel_bundle() == f"{installed} (2 kernels)"
    monkeypatch.setenv("FLASHATTN_HOPPER_AOT", str(built))
    assert _bundle.current().folder == built
    monkeypatch.setenv("FLASHATTN_HOPPER_AOT", "/nowhere")  # and is not replaced by it
    assert _bundle.current() is None and environment.kernel_bundle() == "unusable: /nowhere"
    assert len(warnings_in(caplog)) == 1
    for off in ("", "0", "off", "False"):
        monkeypatch.setenv("FLASHATTN_HOPPER_AOT", off)
        assert _bundle.current() is None and environment.kernel_bundle() == "none"
    monkeypatch.delenv("FLASHATTN_HOPPER_AOT")
    assert _bundle.current().folder == installed
    assert len(warnings_in(caplog)) == 1


@needs_dsl
def test_what_is_installed_is_looked_for_once(installed, monkeypatch):
    assert _bundle.current().folder == installed
    monkeypatch.setattr(_bundle.importlib.util, "find_spec", None)
    assert _bundle.current().folder == installed


@needs_dsl
def test_a_folder_of_that_name_is_not_installed(installed, caplog):
    (installed / "__init__.py").unlink()
    _bundle.forget()
    assert _bundle.current() is None and not warnings_in(caplog)


@needs_dsl
def test_a_damaged_library_of_the_wheel_is_named(installed, caplog):
    (library,) = installed.glob("toy.*.so")
    _truncate(library)
    jit.compiled(*TOY)
    assert jit.stats()[:3] == (1, 0, 0) and jit.stats().bundle_hits == 0
    (warning,) = warnings_in(caplog)
    assert "is damaged" in warning and str(library) in warning


@needs_dsl
def test_a_wheel_for_another_version_is_told_apart(installed, monkeypatch, caplog):
    edit(installed, lambda manifest: manifest.update(package="0.0.9"))
    assert _bundle.current() is None
    (warning,) = warnings_in(caplog)
    assert f"flashattn_hopper_kernels={installed}" in warning
    assert f"it is for flashattn_hopper 0.0.9, this is {flashattn_hopper.__version__}" in warning
    monkeypatch.setenv("FLASHATTN_HOPPER_AOT", str(installed))  # who names it leaves it to the keys
    assert _bundle.current().folder == installed


@needs_dsl
def test_command_line_of_the_wheel(built, fresh, tmp_path, monkeypatch):
    pytest.importorskip("wheel")
    app = pytest.importorskip("flashattn_hopper.train.cli").app
    testing = pytest.importorskip("typer.testing")
    (tmp_path / "list").write_text(REAL)
    command = ["wheel", "--out", str(tmp_path / "out"), "--list", str(tmp_path / "list")]
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "wheel.wheelfile", None)
        refused = testing.CliRunner().invoke(app, command)
    assert refused.exit_code == 2 and "pip install 'flashattn-hopper[wheel]'" in refused.output
    assert not (tmp_path / "out").exists()
    shutil.copytree(built, tmp_path / "out" / "bundle")
    done = testing.CliRunner().invoke(app, command)
    (file,) = (tmp_path / "out").glob("*.whl")
    assert done.exit_code == 0 and f"0 compiled in 0 s of compiler time; pip install {file}" in done.output
    shutil.unpack_archive(file, tmp_path / "unpacked", "zip")
    (library,) = (tmp_path / "unpacked").rglob("*.so")  # what the folder has from elsewhere stays out
    assert library.name.startswith("sm80.forward.fwd.bf16.d64.causal.")


@needs_dsl
def test_object_files(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    files = aot.objects(tmp_path / "objects", [TOY], processes=1)
    assert files == {TOY: jit.object_file(tmp_path / "objects", jit.entry_of(*TOY))}
    blob = files[TOY].read_bytes()
    assert blob[:4] == b"\x7fELF" and f"__tvm_ffi_{jit.entry_of(*TOY).symbol}".encode() in blob
    assert [path.name for path in files[TOY].parent.iterdir()] == [files[TOY].name]
    assert jit.export(tmp_path / "objects", [TOY]) == jit.Stats()


@needs_dsl
def test_edited_sources_are_not_exported(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setattr(jit, "_first_sources", lambda entry: "as they were when the process started")
    with pytest.raises(RuntimeError, match="its sources changed meanwhile"):
        jit._export_to(tmp_path / "objects", TOY)
    assert not (tmp_path / "objects").exists()
