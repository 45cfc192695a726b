"""GPU architectures as records: the few numbers that kernels, tiles and dispatch need."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ArchSpec:
    """One compilation target.

    `smem_bytes` is what one thread block may use, `registers` what one multiprocessor has.
    """

    name: str
    target: str  # what the compiler is told
    capability: tuple[int, int]
    smem_bytes: int
    registers: int = 65536
    max_threads: int = 1024


SM80 = ArchSpec("sm80", "sm_80", (8, 0), 166912)
SM90 = ArchSpec("sm90", "sm_90a", (9, 0), 232448)

CPU = "cpu"


def device_word(capability: tuple[int, int] | None) -> str:
    """How messages name a device: `cpu`, or its compute capability as `sm_90`."""
    return CPU if capability is None else "sm_{}{}".format(*capability)
