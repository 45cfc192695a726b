"""A bundle: kernels compiled ahead of time, as a folder that only readers touch. aot.py writes it.

    manifest.json    for every variant: its key and everything that went into it, the library and the symbol
    *.so             shared libraries; one for each variant, or, built by CMake, one for all

`FLASHATTN_HOPPER_AOT` names the folder; 0, off, no, false and nothing mean none. Where it is not set, the folder is the
package flashattn_hopper_kernels, if that is installed: kernel_wheel.py makes it. Trouble with a bundle is said once, in
the log, and never raised: what it cannot give comes from the disk cache or the compiler.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
from pathlib import Path
from typing import NamedTuple

from ._cache import OFF, warn_once
from ._version import __version__

FORMAT = 1
MANIFEST = "manifest.json"
VARIABLE = "FLASHATTN_HOPPER_AOT"
INSTALLED = "flashattn_hopper_kernels"
# These say which variant it is; the other parts of a fingerprint say what it was made from and with.
_IDENTITY = ("entry", "traits", "tile", "target")


class Found(NamedTuple):
    library: Path
    symbol: str


class Place(NamedTuple):
    """Where a bundle is to be."""

    folder: str
    by: str  # what names it: VARIABLE or INSTALLED


class Bundle:
    def __init__(self, folder: Path, variants: list[dict]):
        self.folder = folder
        self.by_key = {variant["key"]: variant for variant in variants}
        self.by_identity = {_identity(variant["fingerprint"]): variant for variant in variants}

    def __contains__(self, key: str) -> bool:
        return key in self.by_key

    def find(self, key: str) -> Found | None:
        """Where the variant with that key is. None, with a warning, where its library is missing or damaged."""
        variant = self.by_key[key]
        library = self.folder / variant["library"]
        trouble = _trouble(library, variant["sha256"])
        if trouble is None:
            return Found(library, variant["symbol"])
        warn_once(f"bundle {library}", "kernel bundle: %s %s; its kernels are not taken from there", library, trouble)
        return None

    def difference(self, fingerprint: dict[str, str]) -> str | None:
        """How this variant was made in the bundle, where that is not how it is made here. None: it has none."""
        variant = self.by_identity.get(_identity(fingerprint))
        if variant is None:
            return None
        theirs = variant["fingerprint"]
        parts = [part for part in {**fingerprint, **theirs} if fingerprint.get(part) != theirs.get(part)]
        return ", ".join(f"{part} {_short(theirs.get(part))} (here {_short(fingerprint.get(part))})" for part in parts)


def current() -> Bundle | None:
    """The bundle that is named now, or installed; None without one, or, with a warning, where it cannot be used."""
    found = place()
    return None if found is None else _read(found)


def place() -> Place | None:
    """The environment's choice, even where there is nothing; else the installed one."""
    chosen = os.environ.get(VARIABLE)
    if chosen is None:
        return _installed()
    return None if chosen.lower() in ("", *OFF) else Place(chosen, VARIABLE)


@functools.cache
def _installed() -> Place | None:
    try:
        spec = importlib.util.find_spec(INSTALLED)
    except (ImportError, ValueError):
        return None
    # Trap: any folder of that name on the path, such as one in the current folder, is found too, but as a namespace.
    return Place(os.path.dirname(spec.origin), INSTALLED) if spec is not None and spec.has_location else None


@functools.cache
def _read(found: Place) -> Bundle | None:
    folder, by = found
    path = Path(folder).expanduser().absolute()
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise ValueError(f"its format is {manifest['format']!r}, this package reads {FORMAT}")
        # Why: one warning for a wheel, where keys would speak for each kernel. A folder that somebody names is theirs.
        if by == INSTALLED and manifest["package"] != __version__:
            raise ValueError(f"it is for flashattn_hopper {manifest['package']}, this is {__version__}")
        return Bundle(path, manifest["variants"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else error
        warn_once(f"bundle {folder}", "kernel bundle: %s=%s cannot be used (%s)", by, folder, what)
        return None


@functools.cache
def _trouble(library: Path, sha256: str) -> str | None:
    """What is wrong with a library. Read once in a process: one library may hold many variants."""
    try:
        return None if digest(library) == sha256 else "is damaged: its SHA-256 is not the manifest's"
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def forget() -> None:
    """Look for the installed bundle, and read manifest and libraries, again when they are needed next."""
    _installed.cache_clear()
    _read.cache_clear()
    _trouble.cache_clear()


def _identity(fingerprint):
    return tuple(fingerprint[part] for part in _IDENTITY)


def _short(value):
    return "without" if value is None else value[:12] if len(value) == 64 else value
