"""What compiles, links and loads kernels, found without importing it.

Importing the DSL costs most of a second and a kernel from the disk cache does not need it. So versions come from
package metadata, the runtime library from the package's folder, and only `import_cute` imports `cutlass`.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

_DSL, _FFI = "nvidia-cutlass-dsl", "apache-tvm-ffi"
_MODULES = {_DSL: "nvidia_cutlass_dsl", _FFI: "tvm_ffi"}
_RUNTIME = "libcute_dsl_runtime.so"


class Toolchain(NamedTuple):
    dsl: str  # version of nvidia-cutlass-dsl
    ffi: str  # version of apache-tvm-ffi
    flavour: str  # CUDA major that kernels are compiled for, and the version of its libraries: "cu13 4.8.1"
    runtime: Path  # shared library that every compiled kernel needs
    ffi_library: Path

    def pins(self) -> tuple[str, str]:
        """As requirements: what kernels that were compiled here can be used with."""
        return f"{_DSL}[{self.flavour.split()[0]}]=={self.dsl}", f"{_FFI}=={self.ffi}"


def _missing(what: str) -> ImportError:
    return ImportError(
        f"flashattn_hopper needs nvidia-cutlass-dsl for CUDA tensors: pip install 'flashattn-hopper[cuda]' ({what})"
    )


def _folder_of(module: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]) if places else None


@functools.cache
def find() -> Toolchain:
    """The installed toolchain. Raises ImportError that names what is missing."""
    versions, folders = {}, {}
    for package, module in _MODULES.items():
        folders[package] = _folder_of(module)
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            folders[package] = None
    absent = [package for package, folder in folders.items() if folder is None]
    if absent:
        raise _missing(f"not installed: {', '.join(absent)}")
    major, runtime = _flavour(folders[_DSL])
    try:
        libraries = metadata.version(f"{_DSL}-libs-cu{major}")
    except metadata.PackageNotFoundError:
        libraries = versions[_DSL]
    ffi_library = folders[_FFI] / "lib" / "libtvm_ffi.so"
    return Toolchain(versions[_DSL], versions[_FFI], f"cu{major} {libraries}", runtime, ffi_library)


def _flavour(root: Path) -> tuple[int, Path]:
    """CUDA major and runtime library, by the rule that the DSL follows when it is imported: the newest one that the
    driver supports, or without a driver the newest one.
    """
    found = {}
    for path in root.glob(f"cu*/lib/{_RUNTIME}"):
        if match := re.fullmatch(r"cu(\d+)", path.parent.parent.name):
            found[int(match[1])] = path
    if not found:
        raise _missing(f"not installed: {_DSL}-libs-cu13 or {_DSL}-libs-cu12")
    driver = _driver_major()
    usable = [major for major in found if driver is None or major <= driver]
    if not usable:
        have = ", ".join(f"cu{major}" for major in sorted(found))
        raise _missing(f"the driver supports CUDA {driver}, installed are libraries for {have}")
    return max(usable), found[max(usable)]


def _driver_major() -> int | None:
    version = ctypes.c_int()
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) == 0:
            return version.value // 1000
    except (OSError, AttributeError):
        pass
    return None


def import_cute(target: str):
    """`cutlass.cute`, or an ImportError that says what to install or remove."""
    find()
    # Trap: without a driver the DSL falls to a Blackwell target, and it reads this variable once, when imported.
    if "cutlass" not in sys.modules:
        os.environ.setdefault("CUTE_DSL_ARCH", target)
    try:
        import cutlass.cute as cute
    except Exception as error:
        where = _folder_of("cutlass")
        if isinstance(error, ImportError) and where and _MODULES[_DSL] not in where.parts:
            hint = (
                f"the module `cutlass` in {where} is not the one of {_DSL}: uninstall nvidia-cutlass, reinstall {_DSL}"
            )
        else:
            hint = f"`import cutlass.cute` failed: {error}"
        raise _missing(hint) from error
    return cute


def roomy(function):
    """`function`, with half a MiB of Python stack in one piece for what it calls.

    Why: CPython (3.11 and later) maps its stack in pieces of 16 KiB and unmaps a piece when the last frame in it
    returns. Where a busy loop sits at the end of a piece, every call in it does both: thousands of times while a kernel
    is traced. A frame that claims 2**16 slots of 8 bytes gets a piece of the next power of two for itself.
    """
    code = function.__code__
    function.__code__ = code.replace(co_stacksize=code.co_stacksize + 2**16)
    return function


_paused = False  # whether the garbage collector is to be started again


def _resume():
    global _paused
    if _paused:
        gc.enable()
    _paused = False


os.register_at_fork(after_in_child=_resume)  # a thread that paused it does not exist in the child


@contextmanager
def no_collections():
    """One thread at a time. Why: tracing makes many objects, and a collection visits all that torch made too."""
    global _paused
    _paused = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        _resume()


def linker() -> list[str] | None:
    """Command of a C compiler that links: $CC, cc, gcc or clang. None if there is none."""
    for command in (os.environ.get("CC"), "cc", "gcc", "clang"):
        words = shlex.split(command or "")
        if words and shutil.which(words[0]):
            return words
    return None


def shared_library(function, symbol: str, link: list[str]) -> bytes:
    """Export a function of `cute.compile` as a shared library in which it is called `symbol`.

    Trap: libraries that share a symbol name collide in one process, so it must be unique. Raises OSError.
    """
    tools = find()
    with tempfile.TemporaryDirectory(prefix="flashattn_hopper-") as folder:
        exported, linked = os.path.join(folder, "kernel.o"), os.path.join(folder, "kernel.so")
        function.export_to_c(exported, function_name=symbol)
        command = [*link, "-shared", "-o", linked, exported, str(tools.runtime), str(tools.ffi_library)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        if done.returncode:
            raise OSError(f"{shlex.join(command)}: {done.stderr.strip() or done.returncode}")
        return Path(linked).read_bytes()


_owners = []


def positional(function):
    """A function of `cute.compile` as `load` would give it: called by position, without a Python wrapper's cost."""
    unwrap = getattr(function, "__tvm_ffi_object__", None)
    # Trap: None inside where cutlass was imported for another target than the kernel's; the wrapper's call says so.
    bare = None if unwrap is None else unwrap()
    if bare is None:
        return function
    _owners.append(function)  # it owns the code
    return bare


@functools.cache
def _open_runtime(path: Path) -> ctypes.CDLL:
    # Why: kernels name this library without a folder; the loader then takes the one that is already open.
    # Trap: not RTLD_GLOBAL. It carries a CUDA runtime of its own, which must not answer for torch's.
    return ctypes.CDLL(str(path))


def loader():
    """What opens libraries of kernels; the first time it is imported, which takes longer than to open one."""
    import tvm_ffi

    _open_runtime(find().runtime)
    return tvm_ffi.load_module


def load(path: Path, symbol: str):
    """The function `symbol` of a shared library. Raises whatever the loader raises."""
    return loader()(str(path))[symbol]


def load_unkept(library: bytes, symbol: str):
    """As `load`, for a library that no folder keeps: its file is gone once it is loaded."""
    with tempfile.TemporaryDirectory(prefix="flashattn_hopper-") as folder:
        path = Path(folder) / "kernel.so"
        path.write_bytes(library)
        return load(path, symbol)
