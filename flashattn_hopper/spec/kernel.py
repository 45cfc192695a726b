"""What one kernel can do, and why it refuses the rest."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .arch import CPU, ArchSpec, device_word
from .problem import Traits
from .tile import TileTable


@dataclass(frozen=True)
class KernelSpec:
    """One row of the capability table.

    `arch` is None for a kernel written in PyTorch, which runs anywhere: `serves` then says on which devices it is
    chosen by itself ("cpu", "cuda"), and on others it runs only when asked for by name.
    `ports` are further archs that the same source is compiled for, each with its tile table: see `on`.
    `headdims` None means any; otherwise a problem's head dimensions are padded up to the next pair, in `multiple`s.
    `invariant_to` names features that do not change the compiled code, and so never enter a cache key.
    """

    name: str
    phase: str
    dtypes: frozenset[str]
    features: frozenset[str]
    masks: tuple[str, ...] = ("full", "causal", "window")
    arch: ArchSpec | None = None
    ports: tuple[tuple[ArchSpec, TileTable], ...] = ()
    serves: frozenset[str] = frozenset()
    tiles: TileTable | None = None
    multiple: int = 1
    invariant_to: frozenset[str] = frozenset()
    evidence: str = ""  # bench result that the tile table was chosen from
    entry: str = ""  # "module:Class", loaded only when compiled
    on_request: str = ""  # why backend="auto" does not choose it yet; naming its backend does
    note: str = ""  # said by explain() when this kernel is chosen

    @property
    def backend(self) -> str:
        """What the `backend` argument calls it: the part of the name before the dot."""
        return self.name.split(".")[0]

    @property
    def headdims(self) -> tuple[tuple[int, int], ...] | None:
        return None if self.tiles is None else self.tiles.headdims

    def on(self, capability: tuple[int, int] | None) -> KernelSpec | None:
        """This kernel with the arch and the tiles of that device; None where none of its archs runs there."""
        if self.arch is None:
            return self
        archs = [(self.arch, self.tiles), *self.ports]
        arch, tiles = max(
            (found for found in archs if found[0].runs_on(capability)),
            key=lambda found: found[0].capability,
            default=(None, None),
        )
        if arch is None:
            return None
        return self if arch is self.arch else replace(self, arch=arch, tiles=tiles, ports=())

    def refuses(self, traits: Traits, capability: tuple[int, int] | None, backend: str = "auto") -> str | None:
        """None if this kernel runs `traits` on that device, else the reason. `capability` None is the CPU."""
        device = device_word(capability)
        if traits.phase != self.phase:
            return f"it computes {self.phase}, not {traits.phase}"
        if backend not in ("auto", self.backend):
            return f"backend={backend!r} was asked for"
        here = self.on(capability)
        if here is None:
            archs = [device_word(arch.capability) for arch in (self.arch, *(arch for arch, _ in self.ports))]
            return f"needs {'one of ' * (len(archs) > 1)}{', '.join(archs)}, the tensors are on {device}"
        if self.on_request and backend == "auto":
            return f"only with backend={self.backend!r}: {self.on_request}"
        if self.arch is None and backend == "auto" and ("cpu" if device == CPU else "cuda") not in self.serves:
            return f"runs on {device} only with backend={self.backend!r}"
        if traits.dtype not in self.dtypes:
            return f"no {traits.dtype} (it takes {', '.join(sorted(self.dtypes))})"
        if traits.mask not in self.masks:
            return f"no {traits.mask} mask"
        missing = traits.features - self.features
        if missing:
            return f"no {', '.join(sorted(missing))}"
        if here.headdims is not None:
            asked = f"headdim {traits.headdim}, headdim_v {traits.headdim_v}"
            if traits.headdim % self.multiple or traits.headdim_v % self.multiple:
                return f"{asked}: both must be multiples of {self.multiple}"
            if here.padded(traits) is None:
                top = max(here.headdims)
                return f"{asked}: at most {top[0]} and {top[1]}"
        return None

    def padded(self, traits: Traits) -> Traits | None:
        """`traits` with the head dimensions that are compiled, or None where they are too large."""
        if self.headdims is None:
            return traits
        for headdim, headdim_v in self.headdims:
            if traits.headdim <= headdim and traits.headdim_v <= headdim_v:
                return replace(traits, headdim=headdim, headdim_v=headdim_v)
        return None

    def compiled(self, traits: Traits) -> Traits:
        """What is actually compiled for `traits`: padded, and without the features that change nothing."""
        padded = self.padded(traits)
        if padded is None:
            raise LookupError(f"{self.name} has no headdim for {traits.slug}")
        compiled = replace(padded, **dict.fromkeys(self.invariant_to & traits.features, False))
        # Determinism is a matter of tiles: where it chooses none of its own, it is the same code.
        plain = replace(compiled, deterministic=False)
        if self.tiles is not None and self.tiles.rows_for(plain) == self.tiles.rows_for(compiled):
            return plain
        return compiled
