"""Which cells the matrix has, and what becomes of each on this machine: the catalog unrolled, no list by hand."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from .. import planner
from ..catalog import CATALOG
from ..planner import Capability
from ..reference import LIMITS
from ..spec.arch import CPU
from ..spec.kernel import KernelSpec
from ..spec.problem import DTYPES, MASKS, Shape, Traits

RUN, COMPILE, REFUSED = "run", "compile", "refused"
QUICK_FEATURES = ((), ("gqa",))
# Batch where a sequence has one query. Why: of two rows, plain PyTorch's largest error is small by chance too often.
SINGLE_ROWS = 16


@dataclass(frozen=True)
class Cell:
    """One kernel on one arch, asked for `traits`."""

    spec: KernelSpec  # with the arch and the tiles of that arch
    traits: Traits

    @property
    def arch(self) -> str:
        return CPU if self.spec.arch is None else self.spec.arch.name

    @property
    def id(self) -> str:
        return f"{self.arch}/{self.spec.name}/{self.traits.slug}"


class Call(NamedTuple):
    """One call of hopper_attention. `mask` holds its keyword arguments."""

    shape: Shape
    mask: dict


class Fate(NamedTuple):
    """RUN, COMPILE or REFUSED; `reason` for the last."""

    what: str
    reason: str = ""


def on_archs(spec: KernelSpec) -> list[KernelSpec]:
    """The kernel as it is on each of its archs: its own first, then those that it is ported to."""
    ports = getattr(spec, "ports", ())
    return [spec, *(replace(spec, arch=arch, tiles=tiles, ports=()) for arch, tiles in ports)]


def arch_names(catalog: Sequence[KernelSpec] = CATALOG) -> list[str]:
    return list(dict.fromkeys(Cell(one, None).arch for spec in catalog for one in on_archs(spec)))


def kernel_names(catalog: Sequence[KernelSpec] = CATALOG) -> list[str]:
    return [spec.name for spec in catalog]


def headdims(catalog: Sequence[KernelSpec] = CATALOG) -> list[tuple[int, int]]:
    """What some kernel compiles, one that is padded, and one beyond the widest."""
    kernels = [one for spec in catalog for one in on_archs(spec) if one.headdims]
    found = sorted({dims for one in kernels for dims in one.headdims})
    step = max((one.multiple for one in kernels), default=8)
    first, last = (found[0][0], found[-1][0]) if found else (64, 64)
    return sorted({(first - step, first - step), *found, (last + step, last + step)})


def feature_sets(catalog: Sequence[KernelSpec] = CATALOG) -> list[tuple[str, ...]]:
    """No feature, then each that some kernel declares, alone."""
    return [(), *((word,) for word in sorted(frozenset().union(*(spec.features for spec in catalog))))]


def cells(
    archs: Iterable[str] | None = None,
    quick: bool = False,
    here: Capability = None,
    catalog: Sequence[KernelSpec] = CATALOG,
    kernels: Iterable[str] | None = None,
) -> list[Cell]:
    """Every cell of `archs` and `kernels` (None: all). `here` is the compute capability of this machine's GPU, None
    without one.

    `quick`: one head dimension a kernel and few features. Of what can only be compiled here, one cell a kernel, and
    unless archs are named those of the kernel's own arch only.

    Raises: ValueError for an arch that no kernel of the catalog is for, and for a kernel that is not in it.
    """
    wanted = _among(archs, arch_names(catalog), "--arch {}: no kernel is for it; there are {}")
    named = _among(kernels, kernel_names(catalog), "--kernel {}: there is none of that name; there are {}")
    found = []
    for spec in catalog:
        for one in on_archs(spec):
            if Cell(one, None).arch in wanted and spec.name in named:
                mine = _unrolled(one, quick, catalog)
                found += _thinned(mine, here, ported=one is not spec and archs is None) if quick else mine
    return found


def _among(words, known, message):
    words = known if words is None else list(words)
    if unknown := [word for word in words if word not in known]:
        raise ValueError(message.format(unknown[0], ", ".join(known)))
    return words


def _unrolled(spec, quick, catalog) -> Iterator[Cell]:
    dims = [spec.headdims[0]] if quick and spec.headdims else headdims(catalog)[1:2] if quick else headdims(catalog)
    features = QUICK_FEATURES if quick else feature_sets(catalog)
    for dtype, pair, mask, words in itertools.product(DTYPES, dims, MASKS, features):
        try:
            traits = Traits(spec.phase, dtype, *pair, mask, **dict.fromkeys(words, True))
        except ValueError:
            continue  # a feature that this dtype cannot have
        yield Cell(spec, traits)


def _thinned(mine, here, ported) -> Iterator[Cell]:
    """All that runs here or is refused, and one that is compiled: with the last mask, which has the most edges."""
    fates = [(cell, fate(cell, here).what) for cell in mine]
    compiled = [cell for cell, what in fates if what == COMPILE]
    if compiled and ported:
        return
    kept = next((cell for cell in compiled if cell.traits.mask == cell.spec.masks[-1]), None)
    yield from (cell for cell, what in fates if what != COMPILE or cell is kept)


def fate(cell: Cell, here: Capability) -> Fate:
    """What this machine can do with a cell: refused where the kernel refuses on its own arch."""
    spec, traits = cell.spec, cell.traits
    device = None if spec.arch is None else spec.arch.capability
    if reason := spec.refuses(traits, device, spec.backend):
        return Fate(REFUSED, reason)
    if spec.arch is None or here is not None:
        chosen = _chosen(cell, None if spec.arch is None else here)
        if chosen is not None and chosen.arch == spec.arch:
            same = chosen.name == spec.name
            return Fate(RUN) if same else Fate(REFUSED, f"{chosen.name} comes first in the catalog and takes it")
    return Fate(COMPILE)


def _chosen(cell, capability) -> KernelSpec | None:
    try:
        return planner.plan(cell.traits, capability, cell.spec.backend, calls(cell)[0].shape).spec
    except NotImplementedError:
        return None


def variants(cell: Cell) -> list[tuple]:
    """What is compiled for a cell: `(spec, compiled traits, tile, arch)`, one for each tile that some length takes."""
    spec, compiled = cell.spec, cell.spec.compiled(cell.traits)
    tiles = [None] if spec.tiles is None else [row.tile for row in spec.tiles.rows_for(compiled)]
    return [(spec, compiled, tile, spec.arch) for tile in dict.fromkeys(tiles)]


def calls(cell: Cell) -> list[Call]:
    """Small ragged calls that end just before, on and behind the edges of every tile; Sq below and above Sk."""
    spec, traits = cell.spec, cell.traits
    heads = (4, 2) if traits.gqa else (2, 2)
    found = []
    for least, m, n in _edges(spec, traits):
        lengths = ((m + 1, least + 2 * n + 13), (m + 17, least + n - 1), (1, least + n + 1), (m, least + n))
        windows = ((n // 2, 0), (n + 7, n // 2), (None, 9), (0, 0))  # in keys, both sides of the diagonal
        for (seqlen_q, seqlen_k), window in zip(lengths, windows):
            mask = {"full": {}, "causal": {"causal": True}, "window": {"window_size": window}}[traits.mask]
            batch = SINGLE_ROWS if seqlen_q == 1 else 1
            found.append(Call(Shape(batch, seqlen_q, seqlen_k, *heads), mask))
    return found


def _edges(spec, traits):
    """(least seqlen_k in whole tiles, tile_m, tile_n) of every tile; those of PyTorch code are the reference's."""
    if spec.tiles is None:
        return [(0, LIMITS["cpu"].rows, LIMITS["cpu"].keys)]
    rows = spec.tiles.rows_for(spec.compiled(traits))
    sizes = [(row.min_seqlen, row.tile.tile_m, row.tile.tile_n) for row in rows]
    return [(-(-least // n) * n, m, n) for least, m, n in sizes]
