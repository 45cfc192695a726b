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

    def runs_on(self, capability: tuple[int, int] | None) -> bool:
        """Whether machine code for this target runs there: on later minor revisions too, unless it is specific."""
        if capability is None or self.target.endswith("a"):
            return capability == self.capability
        return capability[0] == self.capability[0] and capability[1] >= self.capability[1]


SM80 = ArchSpec("sm80", "sm_80", (8, 0), 166912)
SM86 = ArchSpec("sm86", "sm_86", (8, 6), 101376)
SM87 = ArchSpec("sm87", "sm_87", (8, 7), 166912)
SM89 = ArchSpec("sm89", "sm_89", (8, 9), 101376)
SM90 = ArchSpec("sm90", "sm_90a", (9, 0), 232448)
SM100 = ArchSpec("sm100", "sm_100", (10, 0), 232448)
SM110 = ArchSpec("sm110", "sm_110", (11, 0), 232448)
SM120 = ArchSpec("sm120", "sm_120", (12, 0), 101376)

CPU = "cpu"


def device_word(capability: tuple[int, int] | None) -> str:
    """How messages name a device: `cpu`, or its compute capability as `sm_90`."""
    return CPU if capability is None else "sm_{}{}".format(*capability)
