"""Which kernel runs a problem: the first row of the catalog that does not refuse it. Knows no tensors."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import NamedTuple

import torch

from .catalog import CATALOG
from .spec.arch import device_word
from .spec.kernel import KernelSpec
from .spec.problem import BWD, Shape, Traits
from .spec.tile import Tile

BACKENDS = ("auto", *dict.fromkeys(spec.backend for spec in CATALOG))

Capability = tuple[int, int] | None  # None is the CPU


class Plan(NamedTuple):
    """The chosen kernel as it is on that device, the traits it is compiled for (headdim padded) and its tile (None:
    written in PyTorch)."""

    spec: KernelSpec
    traits: Traits
    tile: Tile | None


def plan(traits: Traits, capability: Capability, backend: str, shape: Shape) -> Plan:
    """The plan for one call.

    Raises: NotImplementedError with the reason of every row of that phase, if all refuse.
    """
    return _plan(traits, capability, _backend_for(traits, capability, backend), shape)


@lru_cache(maxsize=4096)
def _plan(traits, capability, backend, shape):
    for spec in CATALOG:
        if spec.refuses(traits, capability, backend) is None:
            spec = spec.on(capability)
            compiled = spec.compiled(traits)
            return Plan(spec, compiled, tile_for(spec, compiled, shape))
    raise _refusal(traits, capability, backend)


def tile_for(spec: KernelSpec, traits: Traits, shape: Shape) -> Tile | None:
    """The row of the tile table for compiled `traits`; seqlen_k chooses among compiled variants."""
    return None if spec.tiles is None else spec.tiles.find(traits, shape.seqlen_k)


def refusals(traits: Traits, capability: Capability, backend: str = "auto") -> dict[str, str]:
    """Kernel name -> why it does not run `traits` there, for every row of that phase that refuses.

    A row for other dtypes is not named where its backend has a row for this one: that one has answered.
    """
    used = _backend_for(traits, capability, backend)
    # Why: a row of the backend that was named has a reason of its own, though the automatic one took over.
    heard = lambda spec: backend if spec.backend == backend else used
    phase = [spec for spec in CATALOG if spec.phase == traits.phase]
    answered = {spec.backend for spec in phase if traits.dtype in spec.dtypes}
    asked = [spec for spec in phase if traits.dtype in spec.dtypes or spec.backend not in answered]
    rows = ((spec.name, spec.refuses(traits, capability, heard(spec))) for spec in asked)
    return {name: reason for name, reason in rows if reason is not None}


def _backend_for(traits: Traits, capability: Capability, backend: str) -> str:
    """Why: `backend` names the forward kernel; where its backward refuses, the automatic one is taken."""
    if traits.phase == BWD and all(spec.refuses(traits, capability, backend) for spec in CATALOG):
        return "auto"
    return backend


def _refusal(traits, capability, backend):
    lines = [f"no kernel runs {traits.slug} on {device_word(capability)}:"]
    lines += [f"  {name}: {reason}" for name, reason in refusals(traits, capability, backend).items()]
    if any(not spec.refuses(traits, capability, "reference") for spec in CATALOG):
        lines.append('backend="reference" runs it as tiled PyTorch, far slower than a kernel')
    return NotImplementedError("\n".join(lines))


def capability_of(device: torch.device) -> Capability:
    """Compute capability of a CUDA device, None for the CPU."""
    return _capability(device.index) if device.type == "cuda" else None


@cache
def _capability(index):
    return torch.cuda.get_device_capability(index)


@cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors of a CUDA device: the resident thread blocks of schedule="dynamic"."""
    return torch.cuda.get_device_properties(device).multi_processor_count
