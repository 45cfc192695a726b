"""The machine in a few lines: the header of a bug report."""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from .. import _bundle, _cache
from .._version import __version__

PACKAGES = ("nvidia-cutlass-dsl", "apache-tvm-ffi", "cuda-bindings", "triton", "numpy")
DRIVER_FILE = Path("/proc/driver/nvidia/version")


def package_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def driver() -> str:
    """The NVIDIA driver's version, or "none"."""
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return DRIVER_FILE.read_text().splitlines()[0] if DRIVER_FILE.exists() else "none"


def gpus() -> str:
    if not torch.cuda.is_available():
        return "none"
    found = (torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count()))
    return "; ".join(f"{p.name} sm_{p.major}{p.minor} {p.total_memory >> 30} GiB" for p in found)


def kernel_cache() -> str:
    """The disk cache's folder, its entries and their size."""
    folder = _cache.folder()
    if folder is None:
        return "off"
    sizes = [path.stat().st_size for path in folder.glob("[!.]*.so")] if folder.is_dir() else []
    return f"{folder} ({len(sizes)} kernels, {sum(sizes) / 1e6:.1f} MB)"


def kernel_bundle() -> str:
    """The bundle that is named or installed, and what it has."""
    bundle, place = _bundle.current(), _bundle.place()
    if bundle is None:
        return "none" if place is None else f"unusable: {place.folder}"
    return f"{bundle.folder} ({len(bundle.by_key)} kernels)"


def describe() -> dict[str, str]:
    """Names and values, in the order they are printed."""
    return {
        "flashattn_hopper": __version__,
        "python": platform.python_version() + f" ({sys.executable})",
        "platform": platform.platform(),
        "cpu threads": str(torch.get_num_threads()),
        "torch": f"{torch.__version__} (CUDA {torch.version.cuda or 'none'})",
        **{name: package_version(name) for name in PACKAGES},
        "gpu": gpus(),
        "driver": driver(),
        "kernel cache": kernel_cache(),
        "kernel bundle": kernel_bundle(),
    }
