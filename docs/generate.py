"""Writes the generated parts of the documents: docs/support.md, marked blocks of README.md and of kernel pages.

    python docs/generate.py            write what differs
    python docs/generate.py --check    write nothing; exit status 1 where something differs

Sources are the catalog, the committed results in bench/results, and `explain()`. A block stands between
`<!-- generated: NAME -->` and `<!-- end generated -->`; `BLOCKS` has the names.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from types import ModuleType
from unittest import mock

from flashattn_hopper.catalog import CATALOG
from flashattn_hopper.spec.arch import SM90, ArchSpec
from flashattn_hopper.spec.kernel import KernelSpec
from flashattn_hopper.spec.problem import BWD, DTYPES, FWD, PHASES, Traits
from flashattn_hopper.spec.tile import BwdTile, FwdTile, Row, Sm80BwdTile, Sm80FwdTile, TileTable

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
SUPPORT = ROOT / "docs" / "support.md"
PAGES = (ROOT / "README.md", ROOT / "docs" / "numerics.md", *sorted((ROOT / "docs" / "kernels").glob("*.md")))
BLOCK = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end generated -->)", re.S)
NO_RESULTS = (
    "No results are committed yet. On an H100 or H200, `make bench ARGS={}` measures and writes the file that "
    "this table is made from."
)


def plot() -> ModuleType:
    """bench/plot.py, which is a script and in no package."""
    spec = importlib.util.spec_from_file_location("flashattn_hopper_bench_plot", ROOT / "bench" / "plot.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def grid(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *lines))


def words(found) -> str:
    return ", ".join(sorted(found)) or "none"


# ------------------------------------------------------------------------------------------------------- support.md
def support() -> str:
    """The whole of docs/support.md."""
    parts = [
        "# What runs where",
        "Written by `docs/generate.py` from `flashattn_hopper/catalog.py`: edit the catalog, then run `make docs`.\n"
        "The first row of a phase that does not refuse a call runs it; `explain()` names that row and the reasons of "
        "the others.",
        "## Kernels",
        grid(
            ("kernel", "phase", "devices", "dtypes", "headdim, headdim_v", "masks", "features", "note"),
            [
                [
                    f"`{spec.name}`",
                    spec.phase,
                    devices(spec),
                    ", ".join(dtype for dtype in DTYPES if dtype in spec.dtypes),
                    dims(spec),
                    ", ".join(spec.masks),
                    words(spec.features),
                    "; ".join(filter(None, (spec.on_request, spec.note))),
                ]
                for spec in CATALOG
            ],
        ),
        "\n".join(missing()),
    ]
    for spec in CATALOG:
        if spec.tiles is not None:
            parts += tiled(spec)
    return "\n\n".join(parts) + "\n"


def devices(spec: KernelSpec) -> str:
    if spec.arch is not None:
        archs = ["{}.{} ({})".format(*arch.capability, arch.target) for arch, _ in ((spec.arch, None), *spec.ports)]
        where = f"compute capability {', '.join(archs)}"
        return f'{where}, with `backend="{spec.backend}"` only' if spec.on_request else where
    serves = ", ".join(sorted(spec.serves))
    return serves if spec.serves == {"cpu", "cuda"} else f'{serves}; elsewhere with `backend="{spec.backend}"`'


def dims(spec: KernelSpec) -> str:
    if spec.headdims is None:
        return "any"
    tops = {max(tiles.headdims): [] for tiles in tables(spec)}
    for tiles, archs in tables(spec).items():
        tops[max(tiles.headdims)] += [arch.target for arch in archs]
    limit = lambda top, archs: "{}, {}".format(*top) + f" ({', '.join(archs)})" * (len(tops) > 1)
    return f"multiples of {spec.multiple} up to {' or '.join(limit(*each) for each in tops.items())}"


def missing():
    """What no kernel of a phase takes, what no compiled one takes, and phases without a compiled row of their own."""
    for phase in PHASES:
        rows = [spec for spec in CATALOG if spec.phase == phase]
        for word, some in (("", rows), ("compiled ", [spec for spec in rows if spec.arch])):
            lacking = [dtype for dtype in DTYPES if not any(dtype in spec.dtypes for spec in some)]
            if lacking:
                yield f"- {phase}: no {word}kernel takes {', '.join(lacking)}."
        chosen = [spec for spec in rows if not spec.on_request]
        if not any(spec.arch for spec in chosen):
            yield f"- {phase}: no compiled kernel is chosen by itself; {', '.join(f'`{s.name}`' for s in chosen)} run."
    if compiled := [spec for spec in CATALOG if spec.phase == FWD and spec.arch and "fp8" in spec.dtypes]:
        names = ", ".join(f"`{spec.name}`" for spec in compiled)
        yield f"- {BWD} of fp8: after {names}, a kernel for fp16 or bf16 on the dequantized codes."


def tiled(spec: KernelSpec):
    """Sections on one compiled kernel: padding, variants, tiles."""
    yield f"## `{spec.name}`: head dimensions"
    yield (
        "A head dimension between compiled ones runs as the next larger; nothing is copied, the loads fill in zeros.\n"
        "Work grows with the compiled dimension."
    )
    yield grid(("headdim = headdim_v", "runs as"), padding(spec))
    if any(headdim != headdim_v for headdim, headdim_v in spec.headdims):
        pairs = ", ".join("({}, {})".format(*pair) for pair in spec.headdims)
        yield f"Where headdim and headdim_v differ, the first of these that holds both runs: {pairs}."
    free = sorted(spec.invariant_to & spec.features)
    yield f"## `{spec.name}`: tiles"
    roles = "a producer and of a consumer thread" if len(spec.tiles[0].tile.registers) == 2 else "a thread, at most"
    of = lambda arch: f", of {arch.smem_bytes / 1024:.0f} KiB" if not spec.ports else ""
    yield (
        f"Compiled variants: dtype x head dimensions x mask class. These features compile nothing of their own: "
        f"{words(free)}.\nRegisters are those of {roles}; shared memory is that of one thread block{of(spec.arch)}."
    )
    columns = TILE_COLUMNS[type(spec.tiles[0].tile)]
    head = "headdim, headdim_v", "dtypes", "masks", "seqlen_k", "tile_m x tile_n", *columns
    for tiles, archs in tables(spec).items():
        if spec.ports:
            limits = ", ".join(f"{arch.target} ({arch.smem_bytes / 1024:.0f} KiB)" for arch in archs)
            yield f"On {limits}:"
        lines = [tile_line(row, spec.phase, columns) for row in tiles]
        yield grid((*head, "threads", "registers", "KiB"), lines)
    file = RESULTS / f"{spec.evidence}.json"
    if file.exists():
        where = os.path.relpath(file, SUPPORT.parent)
        yield f"Chosen from [{file.relative_to(ROOT).as_posix()}]({where})."


def tables(spec: KernelSpec) -> dict[TileTable, list[ArchSpec]]:
    """Every tile table of a kernel, with the archs that use it."""
    found: dict[TileTable, list[ArchSpec]] = {}
    for arch, tiles in ((spec.arch, spec.tiles), *spec.ports):
        found.setdefault(tiles, []).append(arch)
    return found


def padding(spec: KernelSpec) -> list[list[str]]:
    """(asked range, compiled pair) for equal head dimensions."""
    asked = range(spec.multiple, max(spec.headdims)[0] + 1, spec.multiple)
    traits = [Traits(spec.phase, min(spec.dtypes), d, d) for d in asked]
    pairs = [(t.headdim, spec.padded(t)) for t in traits]
    lines = []
    for pair, group in groupby(pairs, key=lambda item: (item[1].headdim, item[1].headdim_v)):
        group = [d for d, _ in group]
        lines.append([f"{group[0]} to {group[-1]}", "{}, {}".format(*pair)])
    return lines


DQ_OF = ("its own kernel", "summed", "summed, late", "summed, late and staggered")
STAGED = {"own": "its own memory", "q": "the slab of Q", "v": "a stage of V"}
TILE_COLUMNS: dict[type, dict[str, Callable]] = {
    FwdTile: {
        "schedule": lambda tile: tile.schedule + ", first scores ahead" * tile.ahead + ", keys upwards" * tile.rising,
        "Q stages": lambda tile: str(tile.q_stages),
        "O staged in": lambda tile: STAGED[tile.output],
    },
    BwdTile: {
        "consumer warpgroups": lambda tile: str(tile.num_consumers),
        "dQ": lambda tile: (
            "summed" + " in turn" * tile.in_turn + ", late" * tile.late if tile.summed else "its own kernel"
        ),
    },
    Sm80BwdTile: {
        "warps that share keys": lambda tile: str(tile.split),
        "dQ": lambda tile: DQ_OF[tile.summed + tile.late + tile.staggered],
    },
    Sm80FwdTile: {
        "stages": lambda tile: str(tile.num_stages),
        "queries of a warp": lambda tile: str(16 * tile.atoms),
        "Q in": lambda tile: "registers" if tile.q_in_registers else "shared memory",
    },
}


def tile_line(row: Row, phase: str, columns: Mapping[str, Callable]) -> list[str]:
    tile, dtype = row.tile, min(row.dtypes)
    traits = Traits(phase, dtype, *row.dims)
    return [
        "{}, {}".format(*row.dims),
        words(row.dtypes) + {(False,): ", e4m3", (True,): ", int8 q and k"}.get(row.int8_qk, ""),
        ", ".join(row.masks),
        f"from {row.min_seqlen}" if row.min_seqlen else "any",
        f"{tile.tile_m} x {tile.tile_n}",
        *(show(tile) for show in columns.values()),
        str(tile.num_threads),
        " / ".join(map(str, tile.registers)),
        f"{tile.smem_bytes(traits) / 1024:.0f}",
    ]


# ----------------------------------------------------------------------------------------------------------- blocks
def results_of(suite: str) -> list[Path]:
    return sorted(RESULTS.glob(f"*/{suite}.json"))


def measured(suite: str, page: Path, caption: str = "TFLOP/s over sequence length, {}") -> str:
    """Per results file of a suite its table; then the committed figures."""
    files = results_of(suite)
    if not files:
        return NO_RESULTS.format(suite)
    parts = [plot().markdown_table(file).rstrip("\n") for file in files]
    figures = sorted((ROOT / "bench" / "figures").glob(f"{suite}*.svg"))
    link = lambda path: os.path.relpath(path, page.parent)
    parts.append("\n".join(f"![{caption.format(path.stem)}]({link(path)})" for path in figures))
    return "\n\n".join(part for part in parts if part)


def forward(page: Path) -> str:
    return measured("forward", page)


def backward(page: Path) -> str:
    return measured("backward", page)


def memory(page: Path) -> str:
    return measured("memory", page, "memory of forward and backward over sequence length")


def forward_cells(page: Path) -> str:
    """Ours alone, with what explains a number: cycles, clock, power, tile, error."""
    files = results_of("forward")
    if not files:
        return NO_RESULTS.format("forward")
    return "\n\n".join(cells_of(plot().load(file), os.path.relpath(file, page.parent)) for file in files)


def cells_of(results: Mapping, source: str) -> str:
    head = "variant", "B", "S", "heads", "TFLOP/s", "of ceiling", "cycles", "MHz", "W", "error", "tile"
    shown = lambda value, form="{:.0f}": "–" if value is None else form.format(value)
    lines = [
        [
            row["slug"],
            str(row["batch"]),
            str(row["seqlen"]),
            f"{row['heads']}:{row['kv_heads']}",
            shown(row.get("tflops")),
            shown(row.get("share"), "{:.2f}"),
            shown(row.get("cycles_per_tile")),
            shown(row.get("sm_mhz")),
            shown(row.get("power_w")),
            shown(row.get("rel_error"), "{:.1e}"),
            f"`{row['tile']}`" if row.get("tile") else "–",
        ]
        for row in results["rows"]
        if row["contestant"] == "ours"
    ]
    said = (
        f"{results['gpu']['name']}, {results['date'][:10]}, revision {results['revision']}; from [{source}]({source}). "
        "`cycles` are those of one multiprocessor for 128 x 128 scores of one head; `error` is relative to float64."
    )
    return f"{said}\n\n{grid(head, lines)}"


def explained(page: Path) -> str:
    """What explain() says about one call, planned as on a Hopper GPU (meta tensors: nothing is allocated)."""
    import torch

    from flashattn_hopper import explain, planner

    q = torch.empty(2, 4096, 16, 120, dtype=torch.bfloat16, device="meta")
    k, v = torch.empty(2, 2, 4096, 4, 120, dtype=torch.bfloat16, device="meta")
    with mock.patch.object(planner, "capability_of", lambda device: SM90.capability):
        return f"```text\n{explain(q, k, v, causal=True)}\n```"


FP8_COLUMNS = (
    *(("fp8", error) for error in ("out", "out_worst", "lse_rms", "lse_rms_worst", "dq", "dk", "dv")),
    *(("fp8, int8 q and k", error) for error in ("out", "lse_rms")),
    *((recipe, "out") for recipe in ("fp8, no rotation", "fp8, no smoothing", "fp8, neither", "bf16")),
)


def fp8_accuracy(page: Path) -> str:
    """Errors by input set; a column is a recipe and what is measured."""
    files = results_of("fp8_accuracy")
    if not files:
        return "No results are committed yet: `python bench/fp8_accuracy.py` writes the file of this table."
    return "\n\n".join(fp8_errors_of(plot().load(file), os.path.relpath(file, page.parent)) for file in files)


def fp8_errors_of(results: Mapping, source: str) -> str:
    cells: dict[tuple[str, str], dict[str, Mapping]] = {}
    for row in results["rows"]:
        cells.setdefault((row["set"], row["mask"]), {})[row["recipe"]] = row
    said = lambda error: error.replace("lse_rms", "lse (nats)").replace("_worst", ", worst seed")
    head = ("inputs", "mask", *(f"{recipe}: {said(error)}" for recipe, error in FP8_COLUMNS))
    lines = [
        [*cell, *(f"{found[recipe][error]:.2g}" for recipe, error in FP8_COLUMNS)] for cell, found in cells.items()
    ]
    size = "S={seqlen}, headdim {headdim}, mean of {n} seeds".format(
        **results["settings"], n=len(results["settings"]["seeds"])
    )
    where = f"by the kernels on one {results['gpu']['name']}" if results["gpu"]["num_sms"] else "on a CPU"
    return f"{size}, torch {results['versions']['torch']} {where}. [All rows]({source}).\n\n{grid(head, lines)}"


BLOCKS: dict[str, Callable[[Path], str]] = {
    "fp8-accuracy": fp8_accuracy,
    "forward": forward,
    "forward-cells": forward_cells,
    "backward": backward,
    "memory": memory,
    "explain": explained,
}


def filled(text: str, page: Path) -> str:
    """`text` with every block written anew. Raises KeyError for an unknown name, ValueError for a block left open."""
    if text.count("<!-- generated:") != len(BLOCK.findall(text)):
        raise ValueError(f"{page}: a generated block is not closed")
    return BLOCK.sub(lambda found: f"{found[1]}{BLOCKS[found[2]](page)}\n{found[3]}", text)


def outdated() -> dict[Path, str]:
    """File -> what should be in it, for every file that differs."""
    wanted = {SUPPORT: support()} | {page: filled(page.read_text(encoding="utf-8"), page) for page in PAGES}
    return {
        path: text for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where something differs")
    check = parser.parse_args(argv).check
    different = outdated()
    for path, text in different.items():
        if not check:
            path.write_text(text, encoding="utf-8")
        print(f"{path.relative_to(ROOT)}: {'differs from its sources; run make docs' if check else 'written'}")
    return int(check and bool(different))


if __name__ == "__main__":
    sys.exit(main())
