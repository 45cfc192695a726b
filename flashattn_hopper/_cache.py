"""The disk cache of compiled kernels: one sealed shared library per entry, safe among many processes.

An entry is a shared library followed by a seal (its key and the SHA-256 of its bytes), so a truncated, damaged or
foreign file is recognised before it is loaded. Trouble with the folder is said once, in the log, and never raised.

Invariant: entries appear by `os.replace` of a complete file, so correctness needs no lock. The lock only spares
work: of many processes that want one kernel, one compiles.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import struct
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

log = logging.getLogger("flashattn_hopper")

FORMAT = 1  # of entries; part of every key
UNUSED_DAYS = 180  # entries that nobody loaded for so long are removed
OFF = ("0", "off", "no", "false")  # in lower case: values of a variable that switch something off
LOCK_SECONDS = 300  # after which a waiting process compiles by itself

_SEAL = struct.Struct("<8s32s32s")
_MAGIC = b"FAHOPPR%d" % FORMAT
_OURS = re.compile(r"\.?[\w.-]+\.[0-9a-f]{64}\.so(\.lock|\..*\.tmp)?")  # entry, lock, unfinished write
_said: set[str] = set()


def warn_once(key: str, text: str, *args) -> None:
    """Log a warning the first time that `key` comes up in this process."""
    if key not in _said:
        _said.add(key)
        log.warning(text, *args)


def folder() -> Path | None:
    """Where entries live, or None where the cache is off.

    `FLASHATTN_HOPPER_CACHE=0` turns it off. `FLASHATTN_HOPPER_CACHE_DIR` names the folder; otherwise it is
    `flashattn_hopper` in `XDG_CACHE_HOME` or in `~/.cache`.
    """
    if os.environ.get("FLASHATTN_HOPPER_CACHE", "1").lower() in OFF:
        return None
    if chosen := os.environ.get("FLASHATTN_HOPPER_CACHE_DIR"):
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):
        base = os.path.expanduser("~/.cache")
    if not os.path.isabs(base):  # a user without a home, as in some containers
        warn_once(
            "home", "no home folder for the kernel cache; set FLASHATTN_HOPPER_CACHE_DIR to keep compiled kernels"
        )
        return None
    return Path(base) / "flashattn_hopper"


class Cache:
    """Entries of one folder. A name is `<readable part>.<key>.so` with a key of 64 hex digits."""

    def __init__(self, folder: Path):
        self.folder = folder

    def find(self, name: str) -> Path | None:
        """The file of an intact entry, or None. A bad file is deleted."""
        path = self.folder / name
        try:
            blob = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._complain(error)
            return None
        if blob[-_SEAL.size :] != _seal(name, blob[: -_SEAL.size]):
            log.warning("kernel cache: %s is damaged; it is removed and compiled anew", path)
            with suppress(OSError):
                path.unlink()
            return None
        with suppress(OSError):
            os.utime(path)  # in use: keeps it from ageing
        return path

    def store(self, name: str, library: bytes) -> Path | None:
        """Write an entry. Returns its file, or None where the folder cannot be written."""
        path, unfinished = self.folder / name, None
        try:
            self._make_folder()
            handle, unfinished = tempfile.mkstemp(prefix=f".{name}.", suffix=".tmp", dir=self.folder)
            with os.fdopen(handle, "wb") as file:
                # Trap: a loader ignores bytes behind the last ELF section, so the seal needs no second file.
                file.write(library + _seal(name, library))
                file.flush()
                os.fchmod(handle, 0o644)  # mkstemp's 0600 would close a shared folder to its other users
                os.fsync(handle)
            os.replace(unfinished, path)
            unfinished = None
        except OSError as error:
            self._complain(error)
            return None
        finally:
            if unfinished is not None:
                with suppress(OSError):
                    os.unlink(unfinished)
        self._sweep()
        return path

    @contextmanager
    def lock(self, name: str):
        """One process at a time; the system releases it when its holder dies. Never fails: see the invariant."""
        lock = None
        try:
            self._make_folder()
            lock = FileLock(str(self.folder / f".{name}.lock"))
            lock.acquire(timeout=LOCK_SECONDS)
        except Timeout:
            log.warning(
                "kernel cache: waited %d s for another process to compile %s; going on alone", LOCK_SECONDS, name
            )
            lock = None
        except (OSError, NotImplementedError, RuntimeError) as error:
            self._complain(error)
            lock = None
        try:
            yield
        finally:
            if lock is not None:
                with suppress(OSError):
                    lock.release()

    def _make_folder(self) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _complain(self, error: Exception) -> None:
        warn_once(
            f"folder {self.folder}",
            "kernel cache: %s cannot be used (%s); kernels that are not in it are compiled in each process. "
            "FLASHATTN_HOPPER_CACHE_DIR names another folder.",
            self.folder,
            error,
        )

    def _sweep(self) -> None:
        """Remove what nobody used for `UNUSED_DAYS`, and writes that were cut off a day ago."""
        now, day = time.time(), 86400
        with suppress(OSError):
            for file in os.scandir(self.folder):
                # Trap: the folder may be one that others use too, so only names of ours are touched.
                if _OURS.fullmatch(file.name):
                    limit = 1 if file.name.endswith(".tmp") else UNUSED_DAYS
                    with suppress(OSError):
                        if now - file.stat(follow_symlinks=False).st_mtime > limit * day:
                            os.unlink(file.path)


def current() -> Cache | None:
    """The cache that the environment describes now, or None where it is off."""
    where = folder()
    return None if where is None else Cache(where)


def _seal(name: str, library: bytes) -> bytes:
    return _SEAL.pack(_MAGIC, bytes.fromhex(name.split(".")[-2]), hashlib.sha256(library).digest())
