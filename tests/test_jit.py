"""The JIT without a GPU: what enters a key, what is compiled once, and what happens when the disk misbehaves."""

import gc
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from flashattn_hopper import _cache, _toolchain, jit
from flashattn_hopper.spec.arch import SM90
from flashattn_hopper.spec.kernel import KernelSpec
from flashattn_hopper.spec.problem import FWD, HALF, Shape, Traits
from flashattn_hopper.spec.tile import FwdTile

pytestmark = pytest.mark.compile
HERE = Path(__file__).parent

SPEC = KernelSpec("toy.forward", FWD, HALF, frozenset(), arch=SM90, entry="toy_kernel:Toy")
TRAITS = Traits(FWD, "bf16", 64, 64)
TILE = FwdTile(128, 128)
VARIANT = (SPEC, TRAITS, TILE, SM90)

needs_dsl = pytest.mark.skipif(_toolchain._folder_of("nvidia_cutlass_dsl") is None, reason="needs nvidia-cutlass-dsl")
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a fake CUDA tensor must not reach a real device")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch, caplog):
    """An empty cache folder, an empty memory, counters at zero."""
    where = tmp_path / "cache"
    monkeypatch.setenv("FLASHATTN_HOPPER_CACHE_DIR", str(where))
    monkeypatch.delenv("FLASHATTN_HOPPER_CACHE", raising=False)
    monkeypatch.syspath_prepend(str(HERE))
    _cache._said.clear()
    jit.clear()
    jit.reset_stats()
    caplog.set_level(logging.INFO, "flashattn_hopper")
    return where


def key_of(spec=SPEC, traits=TRAITS, tile=TILE, arch=SM90):
    return jit.entry_of(spec, traits, tile, arch).name.split(".")[-2]


def entries(folder):
    return sorted(folder.glob("*.so"))


def warnings_in(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# --------------------------------------------------------------------------------------- processes of their own

_CHILD = """
import json, sys, time
sys.modules["torch"] = None  # not needed here, and slow to import
{before}
from dataclasses import replace
from flashattn_hopper import jit
from flashattn_hopper.spec.arch import SM90
from flashattn_hopper.spec.kernel import KernelSpec
from flashattn_hopper.spec.problem import FWD, HALF, Traits
from flashattn_hopper.spec.tile import FwdTile
spec = KernelSpec("toy.forward", FWD, HALF, frozenset(), arch=SM90, entry="{entry}")
start = time.perf_counter()
function = jit.compiled(spec, Traits(FWD, "bf16", 64, 64), FwdTile(128, 128), SM90)
seconds = time.perf_counter() - start
try:
    function(1)
except TypeError as error:
    answer = str(error)
print(json.dumps(dict(stats=jit.stats()._asdict(), seconds=seconds, cutlass="cutlass" in sys.modules, answer=answer)))
"""


def start(before="", entry="toy_kernel:Toy", **environment):
    return subprocess.Popen(
        [sys.executable, "-c", _CHILD.format(before=before, entry=entry)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(HERE), **environment},
    )


def result(process):
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    answer = json.loads(out.splitlines()[-1])
    assert "Expects 2 parameters" in answer["answer"], answer  # whichever way it came, it is the toy
    answer["stats"] = jit.Stats(**answer["stats"])
    answer["stderr"] = err
    return answer


# ------------------------------------------------------------------------------------------------------ the key


def altered(value, field):
    """A copy with another value in one field, past the checks of its constructor."""
    old = getattr(value, field)
    new = not old if isinstance(old, bool) else 64 if old is None else old + {int: 1, str: "-other"}[type(old)]
    other = object.__new__(type(value))
    other.__dict__.update(value.__dict__, **{field: new})
    return other


@needs_dsl
@pytest.mark.parametrize("field", [f.name for f in fields(Traits)])
def test_each_trait_changes_the_key(field):
    assert key_of(traits=altered(TRAITS, field)) != key_of()


@needs_dsl
@pytest.mark.parametrize("field", [f.name for f in fields(FwdTile)])
def test_each_tile_field_changes_the_key(field):
    assert key_of(tile=altered(TILE, field)) != key_of()


@needs_dsl
def test_target_and_entry_change_the_key():
    assert key_of(arch=replace(SM90, target="sm_80")) != key_of()
    assert key_of(spec=replace(SPEC, entry="toy_kernel:Stalling")) != key_of()


@needs_dsl
def test_every_part_of_the_toolchain_changes_the_key(monkeypatch):
    before, tools = key_of(), _toolchain.find()
    for change in ({"dsl": "0"}, {"ffi": "0"}, {"flavour": "cu12 0"}):
        monkeypatch.setattr(_toolchain, "find", lambda change=change: tools._replace(**change))
        assert key_of() != before, change
    monkeypatch.setattr(_toolchain, "find", lambda: tools)
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert key_of() != before


@needs_dsl
def test_compiler_settings_in_the_environment_change_the_key(monkeypatch):
    before = key_of()
    monkeypatch.setenv("CUTE_DSL_LOG_LEVEL", "10")
    assert key_of() == before
    monkeypatch.setenv("CUTE_DSL_ENABLE_ASSERTIONS", "1")
    assert key_of() != before


@needs_dsl
def test_the_key_has_no_shape():
    described = set(jit.fingerprint(*VARIANT))
    shape_words = {f.name for f in fields(Shape)} | {"window_left", "window_right", "softmax_scale"}
    values = repr(jit.fingerprint(*VARIANT))
    assert not shape_words & (described | {f.name for f in fields(Traits)} | {f.name for f in fields(FwdTile)})
    assert not [word for word in shape_words if word in values]


def test_sources_of_the_package_change_the_key(tmp_path, monkeypatch):
    package = tmp_path / "toy_package_of_test_jit"
    (package / "deep").mkdir(parents=True)
    for name in ("__init__.py", "kernel.py", "part.py", "deep/part.py"):
        (package / name).write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    entry = f"{package.name}.kernel:Toy"
    seen = {jit.sources(entry)}
    assert jit.sources(entry) in seen
    for name in ("kernel.py", "part.py", "deep/part.py"):
        (package / name).write_text("x = 1\n")
        seen.add(jit.sources(entry))
    (package / "part.py").rename(package / "renamed.py")
    seen.add(jit.sources(entry))
    assert len(seen) == 5


def test_shared_sources_are_part_of_every_key(tmp_path, monkeypatch):
    seen = {jit.sources(SPEC.entry)}
    for name in jit._SHARED_SOURCES:
        monkeypatch.setattr(jit, "_SHARED_SOURCES", tuple(n for n in jit._SHARED_SOURCES if n != name))
        seen.add(jit.sources(SPEC.entry))
        monkeypatch.undo()
        monkeypatch.syspath_prepend(str(HERE))
    assert len(seen) == 1 + len(jit._SHARED_SOURCES)


_KEY = """
import sys
from dataclasses import replace
from flashattn_hopper import jit
from flashattn_hopper.kernels.sm90.specs import FORWARD
from flashattn_hopper.spec.arch import SM90
from flashattn_hopper.spec.problem import Traits
traits = Traits("fwd", "bf16", 128, 128)
jit.fingerprint(FORWARD, traits, FORWARD.tiles.find(traits, 1024), SM90)
heavy = {"torch", "cutlass", "tvm_ffi"} & set(sys.modules)
assert not heavy, heavy
"""


@needs_dsl
def test_the_key_is_computed_without_the_compiler():
    subprocess.run([sys.executable, "-c", _KEY], check=True)


# ------------------------------------------------------------------------------------------- layers, one process


@needs_dsl
def test_memory_then_disk(folder, caplog):
    first = jit.compiled(*VARIANT)
    assert jit.stats()[:3] == (1, 0, 0)
    assert jit.stats().seconds_compiling > 0
    assert jit.compiled(*VARIANT) is first
    assert jit.compiled(SPEC, Traits(FWD, "bf16", 64, 64), FwdTile(128, 128), SM90) is first  # equal, not the same
    assert jit.stats()[:3] == (1, 2, 0)
    jit.clear()
    jit.compiled(*VARIANT)
    assert jit.stats()[:3] == (1, 2, 1)
    lines = [r.getMessage() for r in caplog.records if TRAITS.slug in r.getMessage()]
    assert [("compiled in" in line, "loaded in" in line) for line in lines] == [(True, False), (False, True)], lines
    assert not warnings_in(caplog)


@needs_dsl
def test_variants_do_not_collide(folder):
    """Libraries in one process with different code: each checks its own dtype."""
    bf16, fp16 = (jit.compiled(SPEC, replace(TRAITS, dtype=dtype), TILE, SM90) for dtype in ("bf16", "fp16"))
    assert len(entries(folder)) == 2
    for function, name in ((bf16, "bfloat16"), (fp16, "float16")):
        with pytest.raises(ValueError, match=rf"\(\[n0\], {name}\).*expected device_type=cuda"):
            function(torch.zeros(8, dtype=torch.bfloat16), 1.0)


# Why a process of its own: the DSL hands out a function to call only for the target that it was first imported for.
@needs_dsl
@needs_no_gpu
@pytest.mark.parametrize("source", [pytest.param("compiler", marks=pytest.mark.own_process), "disk"])
def test_arguments_are_checked_and_accepted(source, monkeypatch):
    import fake_cuda

    if source == "compiler":
        monkeypatch.setenv("FLASHATTN_HOPPER_CACHE", "0")
    function = jit.compiled(*VARIANT)
    x = torch.zeros(64, dtype=torch.bfloat16)
    assert fake_cuda.accepts(function, x, 2.0) == "accepted"
    assert fake_cuda.accepts(function, x[:0], 2.0) == "accepted"
    assert "expected dtype=bfloat16" in fake_cuda.accepts(function, x.half(), 2.0)
    assert "expected ndim=1" in fake_cuda.accepts(function, x.view(8, 8), 2.0)
    assert "alignment=16" in fake_cuda.accepts(function, x[1:], 2.0)
    assert "Expects 2 parameters" in fake_cuda.accepts(function, x)


@needs_dsl
def test_cache_off(folder, monkeypatch):
    monkeypatch.setenv("FLASHATTN_HOPPER_CACHE", "0")
    jit.compiled(*VARIANT)
    jit.clear()
    jit.compiled(*VARIANT)
    assert jit.stats()[:3] == (2, 0, 0)
    assert not folder.exists()


@needs_dsl
def test_no_c_compiler(folder, monkeypatch, caplog):
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("CC", raising=False)
    assert _toolchain.linker() is None
    for _ in range(2):
        jit.clear()
        jit.compiled(*VARIANT)
    assert jit.stats()[:3] == (2, 0, 0)
    (warning,) = warnings_in(caplog)
    assert "no C compiler (cc, gcc, clang or $CC)" in warning
    assert not entries(folder)
    with pytest.raises(RuntimeError, match="C compiler"):
        jit.warmup([VARIANT])


@needs_dsl
def test_failing_linker_warns(folder, monkeypatch, caplog):
    monkeypatch.setenv("CC", "false")
    assert callable(jit.compiled(*VARIANT))
    assert jit.stats().compiles == 2  # for the linker, and then for this process
    (warning,) = warnings_in(caplog)
    assert "could not be exported" in warning
    assert not entries(folder)


@needs_dsl
def test_no_folder_may_execute(folder, monkeypatch, caplog):
    def refuse(path, symbol):
        raise OSError("failed to map segment from shared object")

    monkeypatch.setattr(_toolchain, "load", refuse)
    assert callable(jit.compiled(*VARIANT))
    assert jit.stats()[:3] == (2, 0, 0)  # for the folder, and then for this process
    (warning,) = warnings_in(caplog)
    assert "cannot be loaded" in warning


@needs_dsl
def test_edited_sources_are_not_stored(folder, monkeypatch):
    monkeypatch.setattr(jit, "_first_sources", lambda entry: "as they were when the process started")
    jit.compiled(*VARIANT)
    assert not entries(folder)


@needs_dsl
def test_threads_compile_each_variant_once():
    variants = [(SPEC, replace(TRAITS, dtype=dtype), TILE, SM90) for dtype in ("bf16", "fp16")] * 4
    barrier, got = threading.Barrier(len(variants)), []

    def work(variant):
        barrier.wait()
        got.append((variant[1].dtype, jit.compiled(*variant)))

    threads = [threading.Thread(target=work, args=(variant,)) for variant in variants]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 8
    assert len({id(function) for _, function in got}) == 2
    assert jit.stats()[:3] == (2, 6, 0)


@needs_dsl
def test_a_failed_compile_is_tried_again(folder):
    broken = replace(SPEC, entry="toy_kernel:Broken")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="a toy that does not compile"):
            jit.compiled(broken, *VARIANT[1:])
    assert jit.stats().compiles == 0
    assert not entries(folder)
    jit.compiled(*VARIANT)  # no lock was left behind


@needs_dsl
@pytest.mark.parametrize("enabled", [True, False])
def test_a_compile_leaves_the_garbage_collector_as_it_was(enabled):
    (gc.enable if enabled else gc.disable)()
    try:
        for entry in ("toy_kernel:Toy", "toy_kernel:Broken"):
            with suppress(RuntimeError):
                jit.compiled(replace(SPEC, entry=entry), *VARIANT[1:])
            assert gc.isenabled() is enabled
    finally:
        gc.enable()


def test_a_roomy_function_maps_its_stack_once():
    """At no depth do calls in a loop fault in a new page each, as they do where a piece of the stack ends."""

    def leaf(): ...

    leaf.__code__ = leaf.__code__.replace(co_stacksize=200)

    def faults(depth):
        if depth:
            return faults(depth - 1)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(500):
            leaf()
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    @_toolchain.roomy
    def worst():
        return max(map(faults, range(300)))

    assert worst() < 100


@needs_dsl
def test_a_forked_child_is_free_of_a_compile_in_its_parent():
    with jit._compiling, _toolchain.no_collections():
        child = os.fork()
        if child == 0:
            os._exit(0 if jit._compiling.acquire(timeout=1) and gc.isenabled() else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@needs_dsl
def test_cubin_is_an_elf_file_and_nothing_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cubin = jit.compile_cubin(*VARIANT)
    assert cubin[:4] == b"\x7fELF"
    assert b"kernel_cutlass" in cubin
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------ a hostile disk


def _truncated(blob):
    return blob[: len(blob) // 2]


def _flipped(blob):
    return blob[:500] + bytes([blob[500] ^ 1]) + blob[501:]


def _unsealed(blob):
    return blob[: -_cache._SEAL.size]


@needs_dsl
@pytest.mark.parametrize(
    "damage", [_truncated, _flipped, _unsealed, lambda blob: b"", lambda blob: b"not a kernel" * 99]
)
def test_damaged_entry_is_replaced(folder, caplog, damage):
    jit.compiled(*VARIANT)
    (path,) = entries(folder)
    intact = path.read_bytes()
    # Not in place: a mapped library must keep its bytes.
    path.unlink()
    path.write_bytes(damage(intact))
    jit.clear()
    jit.compiled(*VARIANT)
    assert jit.stats()[:3] == (2, 0, 0)
    (warning,) = warnings_in(caplog)
    assert "damaged" in warning and str(path) in warning
    assert _cache.current().find(path.name) == path


@needs_dsl
def test_entry_of_another_key_is_refused(folder):
    jit.compiled(*VARIANT)
    (path,) = entries(folder)
    other = jit.entry_of(SPEC, replace(TRAITS, dtype="fp16"), TILE, SM90).name
    (folder / other).write_bytes(path.read_bytes())
    assert _cache.current().find(other) is None
    assert not (folder / other).exists()


@needs_dsl
def test_folder_that_cannot_be_one(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLASHATTN_HOPPER_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for _ in range(2):
        jit.clear()
        with pytest.raises(TypeError, match="Expects 2 parameters"):  # it works all the same
            jit.compiled(*VARIANT)(1)
    assert jit.stats()[:3] == (2, 0, 0)
    (warning,) = warnings_in(caplog)
    assert "FLASHATTN_HOPPER_CACHE_DIR" in warning
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# Without it, a superuser writes wherever it likes. See capabilities(7): DAC_OVERRIDE is bit 1, DAC_READ_SEARCH bit 2.
_OBEY_PERMISSIONS = """
import ctypes
libc, head, sets = ctypes.CDLL(None), (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
assert libc.capget(head, sets) == 0
sets[0] &= ~0b110
assert libc.capset(head, sets) == 0
"""


@needs_dsl
def test_read_only_folder(folder):
    folder.mkdir()
    folder.chmod(0o555)
    try:
        done = result(start(before=_OBEY_PERMISSIONS))
        assert done["stats"].compiles == 1
        assert done["stderr"].count("kernel cache") == 1, done["stderr"]
        assert not list(folder.iterdir())
        folder.chmod(0o755)
        result(start())
        folder.chmod(0o555)
        (path,) = entries(folder)
        path.chmod(0o444)
        done = result(start(before=_OBEY_PERMISSIONS))  # what is there is used, without a word
        assert done["stats"].disk_hits == 1
        assert "kernel cache" not in done["stderr"]
    finally:
        folder.chmod(0o755)


def test_folder_is_chosen_by_the_environment(monkeypatch, tmp_path):
    assert _cache.folder() == tmp_path / "cache"
    monkeypatch.delenv("FLASHATTN_HOPPER_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert _cache.folder() == tmp_path / "xdg" / "flashattn_hopper"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored, says the specification
    monkeypatch.setenv("HOME", str(tmp_path))
    assert _cache.folder() == tmp_path / ".cache" / "flashattn_hopper"
    monkeypatch.setenv("FLASHATTN_HOPPER_CACHE", "0")
    assert _cache.folder() is None


def test_unused_entries_are_removed_and_other_files_are_not(folder):
    cache = _cache.Cache(folder)
    old, new, name = (f"toy.fwd.{digit * 64}.so" for digit in "abc")
    assert cache.store(old, b"old") and cache.store(new, b"new")
    unfinished = folder / f".{name}.x_1.tmp"
    for other in (folder / "libother.so", unfinished):
        other.write_bytes(b"")
    for file, days in ((folder / old, 200), (folder / "libother.so", 200), (unfinished, 2), (folder / new, 100)):
        os.utime(file, (time.time() - days * 86400,) * 2)
    assert cache.store(name, b"name")
    assert {file.name for file in folder.iterdir()} == {new, name, "libother.so"}


# --------------------------------------------------------------------------------------------------- processes


@needs_dsl
@pytest.mark.slow
def test_eight_processes_compile_once_and_a_later_one_loads(folder):
    results = [result(process) for process in [start() for _ in range(8)]]
    assert sum(r["stats"].compiles for r in results) == 1, results
    assert sum(r["stats"].disk_hits for r in results) == 7, results
    assert len(entries(folder)) == 1
    later = result(start())
    print(f"disk hit in a fresh process: {later['seconds']:.3f} s")
    assert later["stats"][:3] == (0, 0, 1)
    assert later["seconds"] < 1
    assert not later["cutlass"]


@needs_dsl
@pytest.mark.slow
def test_a_process_killed_while_it_compiles_leaves_nothing_behind(folder, tmp_path):
    stalled = tmp_path / "stalled"
    victim = start(entry="toy_kernel:Stalling", TOY_STALLED=str(stalled))
    while not stalled.exists():
        assert victim.poll() is None, victim.communicate()
        time.sleep(0.05)
    waiting = start(entry="toy_kernel:Stalling")  # blocks on the victim's lock
    time.sleep(0.5)
    assert waiting.poll() is None
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    assert not entries(folder)
    assert result(waiting)["stats"].compiles == 1
    assert result(start(entry="toy_kernel:Stalling"))["stats"][:3] == (0, 0, 1)
    assert not list(folder.glob(".*.tmp"))


@needs_dsl
@pytest.mark.slow
def test_warmup(folder):
    variants = [(SPEC, TRAITS, FwdTile(128, tile_n), SM90) for tile_n in (64, 128)]
    broken = (replace(SPEC, entry="toy_kernel:Broken"), *VARIANT[1:])
    with pytest.raises(RuntimeError, match=rf"toy.forward {TRAITS.slug}: RuntimeError: a toy that does not compile"):
        jit.warmup([variants[0], broken], processes=1)
    assert len(entries(folder)) == 1  # a failure does not take the others with it
    assert jit.warmup([*variants, variants[1]], processes=2)[:3] == (1, 0, 0)
    assert len(entries(folder)) == 2
    for variant in variants:
        jit.compiled(*variant)
    assert jit.stats()[:3] == (0, 0, 2)
    assert jit.warmup(variants) == jit.Stats()


# ------------------------------------------------------------------------------------------- missing toolchain

_WITHOUT = """
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocker())
for name in {blocked!r}:
    sys.modules.pop(name, None)  # a .pth file may have imported it when Python started
"""


@pytest.mark.parametrize(
    "blocked, said",
    [
        (("cutlass", "nvidia_cutlass_dsl"), "not installed: nvidia-cutlass-dsl"),
        (("tvm_ffi",), "not installed: apache-tvm-ffi"),
    ],
)
def test_missing_toolchain_is_named(blocked, said):
    process = start(before=_WITHOUT.format(blocked=blocked))
    _, err = process.communicate()
    assert process.returncode
    last = err.strip().splitlines()[-1]
    assert last.startswith("ImportError: flashattn_hopper needs nvidia-cutlass-dsl for CUDA tensors: pip install "), err
    assert "'flashattn-hopper[cuda]'" in last and said in last


@needs_dsl
def test_another_package_named_cutlass_is_named(tmp_path):
    (tmp_path / "cutlass").mkdir()
    (tmp_path / "cutlass" / "__init__.py").write_text("")
    process = start(before=f"sys.path.insert(0, {str(tmp_path)!r})")
    _, err = process.communicate()
    assert process.returncode
    last = err.strip().splitlines()[-1]
    assert "uninstall nvidia-cutlass, reinstall nvidia-cutlass-dsl" in last and str(tmp_path / "cutlass") in last


@needs_dsl
def test_flavour_is_the_one_that_the_compiler_chooses():
    cutlass = pytest.importorskip("cutlass")
    assert _toolchain.find().flavour.split()[0] == f"cu{cutlass.CUDA_VERSION.major}"


@pytest.mark.parametrize("driver, expected", [(None, 13), (13, 13), (14, 13), (12, 12)])
def test_flavour_follows_the_driver(tmp_path, monkeypatch, driver, expected):
    for major in (12, 13):
        (tmp_path / f"cu{major}" / "lib").mkdir(parents=True)
        (tmp_path / f"cu{major}" / "lib" / "libcute_dsl_runtime.so").touch()
    monkeypatch.setattr(_toolchain, "_driver_major", lambda: driver)
    assert _toolchain._flavour(tmp_path) == (expected, tmp_path / f"cu{expected}" / "lib" / "libcute_dsl_runtime.so")


def test_driver_that_is_too_old_is_named(tmp_path, monkeypatch):
    (tmp_path / "cu13" / "lib").mkdir(parents=True)
    (tmp_path / "cu13" / "lib" / "libcute_dsl_runtime.so").touch()
    monkeypatch.setattr(_toolchain, "_driver_major", lambda: 12)
    with pytest.raises(ImportError, match="the driver supports CUDA 12, installed are libraries for cu13"):
        _toolchain._flavour(tmp_path)
