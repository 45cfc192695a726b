"""Packs a bundle (_bundle.py) as a wheel: once it is installed, its kernels need no compiler and no variable.

    flashattn_hopper_kernels-<version>-py3-none-<platform>.whl
      flashattn_hopper_kernels/    __init__.py, the bundle's manifest and its libraries

It holds for one version of this package and of the toolchain, as the keys of its kernels do; its metadata says which.
"""

from __future__ import annotations

import json
import sysconfig
import tempfile
from collections.abc import Iterable
from email.message import Message
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from . import _bundle, _toolchain, aot, jit
from ._version import __version__

NAME, OURS = "flashattn-hopper-kernels", "flashattn-hopper"
WORK = "bundle"  # folder beside the wheel
_INIT = '"""Kernels that flashattn_hopper finds here, compiled ahead of time. Nothing is to be imported."""\n'


class Built(NamedTuple):
    wheel: Path
    done: jit.Stats


def build(out: Path, variants: Iterable[aot.Variant], processes: int | None = None) -> Built:
    """Write a wheel of `variants` into the folder `out`. The bundle stays in `out`/bundle: what is there already is not
    compiled again.

    Raises: as aot.bundle; ImportError also where the package wheel is not installed.
    """
    wheel_file()  # Why here: to compile takes long, and the last step should not be what fails
    done = aot.bundle(out / WORK, variants, processes)
    return Built(_pack(out.absolute(), out.absolute() / WORK), done)


def wheel_file() -> type:
    """`wheel.wheelfile.WheelFile`, or an ImportError that says what to install."""
    try:
        from wheel.wheelfile import WheelFile
    except ImportError as error:
        raise ImportError(f"a wheel is written by the package wheel: pip install '{OURS}[wheel]' ({error})") from error
    return WheelFile


def _pack(out: Path, bundle: Path) -> Path:
    tag = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
    path = out / f"{_bundle.INSTALLED}-{__version__}-{tag}.whl"
    manifest = json.loads((bundle / _bundle.MANIFEST).read_text(encoding="utf-8"))
    licence = _licence()
    # Why a folder: WheelFile reads version and tag from the file's name.
    with tempfile.TemporaryDirectory(prefix=".wheel-", dir=out) as folder:
        unfinished = Path(folder) / path.name
        with wheel_file()(unfinished, "w") as wheel:  # adds RECORD: the digest of each file
            wheel.writestr(f"{_bundle.INSTALLED}/__init__.py", _INIT)
            for name in (_bundle.MANIFEST, *dict.fromkeys(variant["library"] for variant in manifest["variants"])):
                wheel.write(str(bundle / name), f"{_bundle.INSTALLED}/{name}")
            if licence is not None:
                wheel.writestr(f"{wheel.dist_info_path}/licenses/LICENSE", licence)
            wheel.writestr(f"{wheel.dist_info_path}/METADATA", _metadata(with_licence=licence is not None))
            wheel.writestr(f"{wheel.dist_info_path}/WHEEL", _tags(tag))
        unfinished.replace(path)
    return path


def _metadata(with_licence: bool) -> str:
    fields = [
        ("Metadata-Version", "2.4"),
        ("Name", NAME),
        ("Version", __version__),
        ("Summary", "Kernels of flashattn_hopper, compiled ahead of time"),
        ("License-Expression", "BSD-3-Clause"),
        *([("License-File", "LICENSE")] if with_licence else []),
        ("Requires-Dist", f"{OURS}=={__version__}"),
        *(("Requires-Dist", pin) for pin in _toolchain.find().pins()),
    ]
    return _headers(fields)


def _tags(tag: str) -> str:
    by = f"{OURS} {__version__}"
    return _headers([("Wheel-Version", "1.0"), ("Generator", by), ("Root-Is-Purelib", "false"), ("Tag", tag)])


def _headers(fields: Iterable[tuple[str, str]]) -> str:
    message = Message()
    for name, value in fields:
        message[name] = value
    return message.as_string()


def _licence() -> str | None:
    """Ours, as it was installed."""
    try:
        return metadata.distribution(OURS).read_text("licenses/LICENSE")
    except metadata.PackageNotFoundError:
        return None
