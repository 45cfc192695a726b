"""Compiles kernels: from memory, else from a bundle, else from disk, else by the compiler.

    compiled(spec, traits, tile, arch)
      memory    a dict keyed by plain values; one lookup, no lock                          (every call)
      bundle    a folder of kernels compiled ahead of time, named or installed             (once per process)
      disk      a shared library, found by a hash of everything that decides its content   (once per process)
      compiler  CuTe DSL; one compile per key among threads and processes                  (once per machine)

No shape can enter a key: kernels read static facts from traits and tile only, and get the rest as operands.
Each kernel that is compiled or loaded is one INFO line of the logger `flashattn_hopper`;
`FLASHATTN_HOPPER_LOG=info` prints it without any set-up. `_cache.folder` lists the variables of the disk cache.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import inspect
import json
import logging
import os
import pickle
import platform
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from . import _bundle, _cache, _toolchain
from .spec.arch import ArchSpec
from .spec.kernel import KernelSpec
from .spec.problem import Traits

log = logging.getLogger("flashattn_hopper")
if _level := os.environ.get("FLASHATTN_HOPPER_LOG"):
    log.addHandler(logging.StreamHandler())
    log.setLevel(_level.upper())

_OPTIONS = "--enable-tvm-ffi"
# Sources that decide a kernel's code, beside the package of its entry.
_SHARED_SOURCES = ("flashattn_hopper.kernels.common", "flashattn_hopper.spec")
# The DSL reads CUTE_DSL_* variables. These do not change the code that comes out; any other one enters the key.
_NEUTRAL = frozenset(
    "CUTE_DSL_" + name
    for name in (
        *("ARCH", "LIBS", "CACHE_DIR", "NO_CACHE", "DISABLE_FILE_CACHING", "JIT_CACHE_MAX_ELEMS", "DUMP_DIR"),
        *("LOG_LEVEL", "LOG_TO_CONSOLE", "LOG_TO_FILE", "JIT_TIME_PROFILING", "SHOW_STACKTRACE"),
    )
)


class Stats(NamedTuple):
    """What `compiled` did in this process since the start or `reset_stats`. Times in seconds."""

    compiles: int = 0
    memory_hits: int = 0
    disk_hits: int = 0
    seconds_compiling: float = 0.0
    bundle_hits: int = 0


class _Tally:
    __slots__ = Stats._fields

    def __init__(self):
        self.reset()

    def reset(self):
        for name, value in Stats()._asdict().items():
            setattr(self, name, value)


_memory: dict[tuple, Callable] = {}
_tally = _Tally()


def _renew_locks() -> None:
    global _compiling, _locks
    _compiling = threading.Lock()  # Trap: two cute.compile at once abort the process
    _locks = {}  # one lock for each key


_renew_locks()
os.register_at_fork(after_in_child=_renew_locks)  # a thread that holds one does not exist in the child


def compiled(spec: KernelSpec, traits: Traits, tile: Any, arch: ArchSpec) -> Callable:
    """The compiled kernel `spec` for `traits`, which are already `spec.compiled(traits)`, cut by `tile`.

    It is called with the run-time operands that the entry's `arguments()` describes, without the stream: that is
    torch's current one. Operands of another dtype, rank, alignment or device raise TypeError or ValueError.

    Raises: ImportError where the compiler is not installed. Trouble with the disk cache only warns.
    """
    key = (spec.entry, traits, tile, arch.target)
    function = _memory.get(key)
    if function is not None:
        _tally.memory_hits += 1
        return function
    with _locks.setdefault(key, threading.Lock()):
        function = _memory.get(key)
        if function is None:
            function = _memory[key] = _obtain(spec, traits, tile, arch)
        else:
            _tally.memory_hits += 1
        return function


def stats() -> Stats:
    """A snapshot of the counters."""
    return Stats(*(getattr(_tally, name) for name in Stats._fields))


def reset_stats() -> None:
    """Set the counters to zero."""
    _tally.reset()


def clear() -> None:
    """Forget the kernels in memory. Those on disk stay."""
    _memory.clear()


def fingerprint(spec: KernelSpec, traits: Traits, tile: Any, arch: ArchSpec) -> dict[str, str]:
    """Everything that decides a compiled kernel, by name. Imports neither torch nor cutlass.

    Raises: ImportError where the compiler is not installed.
    """
    tools = _toolchain.find()
    environment = {k: v for k, v in os.environ.items() if k.startswith("CUTE_DSL_") and k not in _NEUTRAL}
    return {
        "format": str(_cache.FORMAT),
        "entry": spec.entry,
        "sources": _first_sources(spec.entry),
        "traits": repr(traits),
        "tile": repr(tile),
        "target": arch.target,
        "options": _OPTIONS,
        "environment": repr(sorted(environment.items())),
        "machine": platform.machine(),
        "dsl": tools.dsl,
        "ffi": tools.ffi,
        "cuda": tools.flavour,
    }


def sources(entry: str) -> str:
    """Hash of the Python files that decide the code of `entry`: its package, the shared parts and the vocabulary."""
    module = entry.partition(":")[0]
    package = module.rpartition(".")[0]
    digest = hashlib.sha256()
    for name in dict.fromkeys((package or module, *_SHARED_SOURCES)):
        found = importlib.util.find_spec(name)
        if found is None:
            raise ModuleNotFoundError(f"no module named {name!r}", name=name)
        for root in map(Path, found.submodule_search_locations or [found.origin]):
            for file in sorted(root.rglob("*.py")) if root.is_dir() else [root]:
                label = f"{name}/{file.relative_to(root).as_posix()}"
                digest.update(b"%s\0%s" % (label.encode(), hashlib.sha256(file.read_bytes()).digest()))
    return digest.hexdigest()


# Why: the first look at the files belongs to the modules that get imported. A later one might see an edit that the
# running process does not have; `_keep` compares the two before it writes.
_first_sources = functools.cache(sources)


class Entry(NamedTuple):
    """What a compiled variant is called on disk."""

    key: str
    name: str  # file name in the cache
    symbol: str  # of the function in the shared library


def entry_of(spec: KernelSpec, traits: Traits, tile: Any, arch: ArchSpec) -> Entry:
    """Raises: ImportError where the compiler is not installed."""
    return _entry_for(spec, traits, fingerprint(spec, traits, tile, arch))


def _entry_for(spec, traits, made_from) -> Entry:
    key = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()
    return Entry(key, f"{spec.name}.{traits.slug}.{key}.so", f"kernel_{key}")


def _obtain(spec, traits, tile, arch) -> Callable:
    """From a bundle, else from disk, else compiled. Called by one thread per key."""
    bundle = _bundle.current()
    function = None if bundle is None else _unpack(bundle, spec, traits, tile, arch)
    if function is not None:
        return function
    cache, link = _cache.current(), _toolchain.linker()
    if cache is None:
        return _callable(spec, traits, tile, arch)
    entry = entry_of(spec, traits, tile, arch)
    function = _load(cache, entry, spec, traits, arch)
    if function is not None:
        return function
    if link is None:
        _cache.warn_once(
            "linker", "kernel cache: off, because no C compiler (cc, gcc, clang or $CC) was found to link with"
        )
        return _callable(spec, traits, tile, arch)
    with cache.lock(entry.name):
        function = _load(cache, entry, spec, traits, arch)  # another process may have been first
        if function is None:
            function = _keep(cache, entry, spec, traits, tile, arch, link)
        return function


def _unpack(bundle, spec, traits, tile, arch) -> Callable | None:
    """From `bundle`. None, with the reason in the log, where it has nothing that can be used."""
    start = time.perf_counter()
    made_from = fingerprint(spec, traits, tile, arch)
    entry = _entry_for(spec, traits, made_from)
    if entry.key not in bundle:
        difference = bundle.difference(made_from)
        if difference is None:
            log.info("%s %s for %s: not in the bundle %s", spec.name, traits.slug, arch.target, bundle.folder)
        else:
            _cache.warn_once(
                f"bundle {bundle.folder} {difference}",
                "kernel bundle: %s was made from or with something else: %s; %s %s and others like it are not taken "
                "from there",
                *(bundle.folder, difference, spec.name, traits.slug),
            )
        return None
    found = bundle.find(entry.key)
    function = None if found is None else _open(found.library, found.symbol)
    if function is not None:
        _tally.bundle_hits += 1
        log.info(
            "%s %s for %s: loaded in %.3f s from the bundle %s",
            *(spec.name, traits.slug, arch.target, time.perf_counter() - start, bundle.folder),
        )
    return function


def _load(cache, entry, spec, traits, arch) -> Callable | None:
    start = time.perf_counter()
    path = cache.find(entry.name)
    function = None if path is None else _open(path, entry.symbol)
    if function is not None:
        _tally.disk_hits += 1
        log.info(
            "%s %s for %s: loaded in %.2f s from %s",
            *(spec.name, traits.slug, arch.target, time.perf_counter() - start, path),
        )
    return function


def get_ready() -> None:
    """Where there is a bundle, import now what opens it: a first call is not to wait for that. Never fails."""
    if _bundle.current() is not None:
        with suppress(Exception):  # said where a kernel is asked for
            _toolchain.loader()


def _open(path, symbol) -> Callable | None:
    try:
        return _toolchain.load(path, symbol)
    except Exception as error:  # such as a folder mounted without the right to execute
        _cache.warn_once(f"load {path.parent}", "kernel cache: %s cannot be loaded (%s); compiling", path, error)
        return None


def _keep(cache, entry, spec, traits, tile, arch, link) -> Callable:
    """Compile and store, and return the kernel as later processes will get it. What cannot be stored works too."""
    fresh = _compile_counted(spec, traits, tile, arch)
    try:
        with _compiling:
            library = _toolchain.shared_library(fresh, entry.symbol, link)
    except Exception as error:
        _cache.warn_once("export", "kernel cache: %s could not be exported (%s)", entry.name, error)
        return _callable(spec, traits, tile, arch)
    path = None
    if sources(spec.entry) == _first_sources(spec.entry):
        path = cache.store(entry.name, library)
    else:
        log.info("kernel cache: %s is not kept, its sources changed while this process runs", entry.name)
    function = None if path is None else _open(path, entry.symbol)
    if function is None:
        try:
            function = _toolchain.load_unkept(library, entry.symbol)
        except Exception:  # no folder for temporary files, or one without the right to execute
            function = _callable(spec, traits, tile, arch)
    return function


def _callable(spec, traits, tile, arch) -> Callable:
    """Compiled in this process, for this process."""
    return _toolchain.positional(_compile_counted(spec, traits, tile, arch, engine=True))


def _compile_counted(spec, traits, tile, arch, engine: bool = False) -> Callable:
    start = time.perf_counter()
    function = _compile(spec, traits, tile, arch, engine=engine)
    seconds = time.perf_counter() - start
    _tally.compiles += 1
    _tally.seconds_compiling += seconds
    log.info("%s %s for %s: compiled in %.2f s, %s", spec.name, traits.slug, arch.target, seconds, tile)
    return function


@_toolchain.roomy
def _compile(spec, traits, tile, arch, options: str = "", engine: bool = False):
    """`engine` makes the result callable, which compiles its host half twice more: not needed to export it."""
    with _compiling, _toolchain.no_collections():
        cute = _toolchain.import_cute(arch.target)
        kernel = _kernel(spec, traits, tile)
        options = f"{_OPTIONS} --gpu-arch {arch.target} {options}".strip()
        return cute.compile(kernel, *kernel.arguments(), options=options, no_jit_engine=not engine)


def _kernel(spec, traits, tile):
    module, _, name = spec.entry.partition(":")
    return getattr(importlib.import_module(module), name)(traits, tile)


def compile_cubin(spec: KernelSpec, traits: Traits, tile: Any, arch: ArchSpec) -> bytes:
    """The machine code (an ELF file) of a kernel, for reading registers and instructions. Always compiles.

    Raises: ImportError where the compiler is not installed.
    """
    # Trap: without an existing dump folder the DSL hands back a path in place of the bytes.
    with tempfile.TemporaryDirectory(prefix="flashattn_hopper-") as folder:
        cubin = _compile(spec, traits, tile, arch, f"--keep-cubin --dump-dir {shlex.quote(folder)}").__cubin__
        if not isinstance(cubin, bytes):
            files = list(Path(folder).glob("*.cubin"))
            if len(files) != 1:
                raise RuntimeError(f"{spec.name} {traits.slug}: the compiler kept {len(files)} cubins, 1 was expected")
            cubin = files[0].read_bytes()
        return cubin


def warmup(variants: Iterable[tuple[KernelSpec, Traits, Any, ArchSpec]], processes: int | None = None) -> Stats:
    """Put `(spec, traits, tile, arch)` variants into the disk cache, compiled by parallel processes; needs no GPU.

    `processes` None is one for each usable core. Returns the sum of what they did; variants that are on disk or in the
    bundle already cost nothing.

    Raises: RuntimeError where the disk cache cannot be used, or with the first error of each failed process.
    """
    cache, bundle = _cache.current(), _bundle.current()
    if cache is None or _toolchain.linker() is None:
        raise RuntimeError(
            "warmup fills the disk cache, which needs FLASHATTN_HOPPER_CACHE not to be 0 and a C compiler"
        )
    return fill(cache, [v for v in variants if entry_of(*v).key not in (bundle or ())], processes)


def fill(cache: _cache.Cache, variants: Iterable[tuple], processes: int | None = None) -> Stats:
    """`warmup` into any folder."""
    entries = {entry_of(*variant): variant for variant in variants}
    todo = [variant for entry, variant in entries.items() if cache.find(entry.name) is None]
    return in_processes(_keep_in, cache.folder, todo, processes)


def export(folder: Path, variants: Iterable[tuple], processes: int | None = None) -> Stats:
    """Write an object file for each variant, `Entry.name` with the suffix `.o`, as `warmup` compiles: what a linker
    takes, in place of a shared library. Object files that are there already cost nothing."""
    todo = [variant for variant in variants if not object_file(folder, entry_of(*variant)).exists()]
    return in_processes(_export_to, folder, todo, processes)


def object_file(folder: Path, entry: Entry) -> Path:
    return (folder / entry.name).with_suffix(".o")


def operand_names(spec: KernelSpec, traits: Traits, tile: Any, arch: ArchSpec) -> tuple[str | None, ...]:
    """The run-time operands of a variant in the order of its call; None where the call passes None."""
    _toolchain.import_cute(arch.target)
    kernel = _kernel(spec, traits, tile)
    parameters = [name for name in inspect.signature(kernel.__call__).parameters if name != "stream"]
    names = []
    for name, value in zip(parameters, kernel.arguments()):
        fields = getattr(value, "_fields", None)
        names += [name] if fields is None else [f if getattr(value, f) is not None else None for f in fields]
    return tuple(names)


# What the processes do with a variant.


def _keep_in(folder: Path, variant) -> None:
    compiled(*variant)  # the environment names the folder


def _export_to(folder: Path, variant) -> None:
    entry = entry_of(*variant)
    function = _compile_counted(*variant)
    if sources(variant[0].entry) != _first_sources(variant[0].entry):
        raise RuntimeError("its sources changed meanwhile")
    path = object_file(folder, entry)
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    with _compiling:
        function.export_to_c(str(unfinished), function_name=entry.symbol)
    os.replace(unfinished, path)


def in_processes(task: Callable[[Path, tuple], None], folder: Path, variants: list, processes: int | None) -> Stats:
    """`task(folder, variant)` for each variant in processes of their own. Raises RuntimeError with what failed."""
    if not variants:
        return Stats()
    count = max(1, min(len(variants), processes or len(os.sched_getaffinity(0))))
    slim = [
        (replace(spec, tiles=None, ports=()), *rest) for spec, *rest in variants
    ]  # tables are not needed to compile
    shares = [(task, folder, slim[i::count]) for i in range(count)]
    with ThreadPoolExecutor(count) as pool:
        results = list(pool.map(_in_process, shares))
    errors = [error for _, error in results if error]
    if errors:
        raise RuntimeError("compilation failed: " + "; ".join(errors))
    return Stats(*map(sum, zip(*(done for done, _ in results))))


def _in_process(share) -> tuple[Stats, str | None]:
    # Why: not multiprocessing. A fork breaks once CUDA runs, and a spawn imports the caller's script again.
    path = os.pathsep.join(place or os.getcwd() for place in sys.path)
    _, folder, _ = share
    cache = {"FLASHATTN_HOPPER_CACHE": "1", "FLASHATTN_HOPPER_CACHE_DIR": str(folder), _bundle.VARIABLE: ""}
    done = subprocess.run(
        [sys.executable, "-c", "from flashattn_hopper import jit; jit._serve()"],
        input=pickle.dumps(share),
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path, **cache},
    )
    if done.returncode or not done.stdout:
        return Stats(), f"a process ended with status {done.returncode}"
    return pickle.loads(done.stdout)


def _serve() -> None:
    """The other end of `_in_process`: a task and variants on standard input, `(Stats, error)` on standard output."""
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what compilers print must not mix with the answer
    error = None
    task, folder, variants = pickle.load(sys.stdin.buffer)
    for variant in variants:
        try:
            task(folder, variant)
        except Exception as failure:
            error = error or f"{variant[0].name} {variant[1].slug}: {type(failure).__name__}: {failure}"
    with answer:
        pickle.dump((stats(), error), answer)
