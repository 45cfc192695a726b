"""From a results file: figures (SVG), and the table the README shows.

    python bench/plot.py [FILE] [--out DIR]     bench/figures/forward_<headdim>.svg
    python bench/plot.py [FILE] --readme        a markdown table on standard output

Reads JSON only: no torch, no GPU, no sibling module, so that the documents' generator can load it by path.
The same file gives the same bytes.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

HERE = pathlib.Path(__file__).resolve().parent
DEFAULT = HERE / "results" / "nvidia-h200" / "forward.json"
FIGURES = HERE / "figures"
OURS = "ours"


class Style(NamedTuple):
    label: str
    color: str  # Okabe-Ito, told apart by marker and dash as well
    marker: str
    dash: str = "-"
    width: float = 1.3


STYLES = {
    OURS: Style("flashattn_hopper", "#0072B2", "o", width=2.8),
    "cudnn": Style("cuDNN", "#E69F00", "s", "--"),
    "fa3": Style("FlashAttention-3", "#009E73", "^", "-."),
    "fa4": Style("FlashAttention-4", "#CC79A7", "D", ":"),
    "fa2": Style("FlashAttention-2", "#7F7F7F", "v", "--"),
    "flex": Style("FlexAttention", "#56B4E9", "P", ":"),
}
RC = {
    "svg.hashsalt": "flashattn_hopper",  # element ids, otherwise drawn at random
    "svg.fonttype": "none",  # text stays text
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E5E5E5",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
}


# ------------------------------------------------------------------------------------------------- reading rows
def load(path) -> dict:
    return json.loads(pathlib.Path(path).read_text())


def by_cell(rows: Sequence[Mapping]) -> list[list[Mapping]]:
    """Rows of the same cell together, in order."""
    groups: dict[tuple, list[Mapping]] = {}
    for row in rows:
        window = tuple(row["window"]) if row["window"] else None
        key = (row["slug"], row["batch"], row["seqlen"], row["heads"], row["kv_heads"], window)
        groups.setdefault(key, []).append(row)
    return list(groups.values())


def rates(rows: Sequence[Mapping]) -> dict[str, float]:
    """Contestant -> TFLOP/s of one cell; those that failed are absent."""
    return {row["contestant"]: row["tflops"] for row in rows if row.get("tflops")}


def best_peer(rows: Sequence[Mapping]) -> tuple[str, float] | None:
    """(name, TFLOP/s) of the fastest contestant that is not ours."""
    found = {name: rate for name, rate in rates(rows).items() if name != OURS}
    name = max(found, key=found.get, default=None)
    return None if name is None else (name, found[name])


def ratio(rows: Sequence[Mapping]) -> float | None:
    """Ours over the fastest peer of one cell; None unless both are there."""
    ours, best = rates(rows).get(OURS), best_peer(rows)
    return ours / best[1] if ours and best else None


def sweeps(groups: Sequence[Sequence[Mapping]]) -> dict[str, dict[int, Sequence[Mapping]]]:
    """slug -> seqlen -> rows, for the variants measured at more than one length."""
    found: dict[str, dict[int, Sequence[Mapping]]] = {}
    for group in groups:
        found.setdefault(group[0]["slug"], {})[group[0]["seqlen"]] = group
    return {slug: cells for slug, cells in found.items() if len(cells) > 1}


def words(slug: str) -> tuple[str, str, str]:
    """(dtype, head dimension, the rest): what a slug says beside the phase."""
    _, dtype, dims, *rest = slug.split(".")
    return dtype, dims.removeprefix("d"), " ".join(rest)


# ---------------------------------------------------------------------------------------------------- markdown
def verdict(group: Sequence[Mapping] | None) -> str:
    """`ours / best peer, its name / ratio` of one cell."""
    if not group:
        return ""
    ours, best, share = rates(group).get(OURS), best_peer(group), ratio(group)
    return " / ".join(
        [
            f"{ours:.0f}" if ours else "–",
            f"{best[1]:.0f} {best[0]}" if best else "–",
            f"**{share:.2f}**" if share else "–",
        ]
    )


def grid(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = ["---"] * len(head)
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *lines))


def markdown_table(path) -> str:
    """The committed numbers as markdown: a line on the machine, the sweeps, then the single shapes.

    Args:
        path: a results file that bench/run.py wrote.
    """
    results = load(path)
    groups = by_cell(results["rows"])
    swept = sweeps(groups)
    lengths = sorted({s for cells in swept.values() for s in cells})
    gpu, tools = results["gpu"], results["versions"]
    peers = ", ".join(
        f"{name} {text}"
        for name, text in results["contestants"].items()
        if name != OURS and not text.startswith("unavailable")
    )
    ceiling = results.get("ceiling") or {}
    parts = [
        f"TFLOP/s on one {gpu['name']}, {results['date'][:10]}, revision {results['revision']}"
        f"{'+dirty' if results.get('dirty') else ''}: ours / best peer / ours over best."
        + (f" Ceiling: {ceiling['what']}, {ceiling['tflops']:.0f}." if ceiling else "")
        + f" torch {tools['torch']}, CuTe DSL {tools['dsl']}"
        + (f"; peers {peers}." if peers else ".")
    ]
    if swept:
        lines = []
        for slug, cells in swept.items():
            dtype, dims, mask = words(slug)
            lines.append([dtype, dims, mask, *(verdict(cells.get(s)) for s in lengths)])
        parts.append(grid(["dtype", "headdim", "mask", *map(str, lengths)], lines))
    single = [group for group in groups if group[0]["slug"] not in swept]
    if single:
        lines = []
        for group in single:
            row = group[0]
            shape = [str(row["batch"]), str(row["seqlen"]), f"{row['heads']}:{row['kv_heads']}"]
            mask = words(row["slug"])[2]
            if row["window"]:
                mask += " ({}, {})".format(*("open" if edge is None else edge for edge in row["window"]))
            lines.append([*words(row["slug"])[:2], mask, *shape, verdict(group)])
        parts.append(grid(["dtype", "headdim", "mask", "B", "S", "heads", "ours / best / ratio"], lines))
    return "\n\n".join(parts) + "\n"


# ----------------------------------------------------------------------------------------------------- figures
def draw(results: Mapping, out=FIGURES) -> list[pathlib.Path]:
    """One figure per swept head dimension, one panel per mask: TFLOP/s over the sequence length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    out = pathlib.Path(out)
    out.mkdir(parents=True, exist_ok=True)
    panels: dict[tuple[str, str], dict[str, dict]] = {}
    for slug, cells in sweeps(by_cell(results["rows"])).items():
        dtype, dims, mask = words(slug)
        panels.setdefault((dtype, dims), {})[mask] = cells
    written = []
    for (dtype, dims), masks in panels.items():
        with pyplot.rc_context(RC):
            figure, axes = pyplot.subplots(
                1, len(masks), figsize=(4.2 * len(masks), 3.4), sharey=True, squeeze=False, layout="constrained"
            )
            for axis, (mask, cells) in zip(axes[0], masks.items()):
                panel(axis, mask, cells, (results.get("ceiling") or {}).get("tflops"))
            axes[0][0].set_ylabel("TFLOP/s")
            handles, labels = axes[0][0].get_legend_handles_labels()
            # Two rows: text is drawn with the reader's font, which may be wider than the one measured here.
            figure.legend(handles, labels, loc="outside lower center", ncols=-(-len(labels) // 2), frameon=False)
            figure.suptitle(f"{results['suite']}, {dtype}, headdim {dims}, {results['gpu']['name']}", fontsize=10)
            name = f"{results['suite']}_{dims}" + ("" if dtype == "bf16" else f"_{dtype}")
            path = out / f"{name}.svg"
            figure.savefig(path, metadata={"Date": None, "Creator": None})
            pyplot.close(figure)
        written.append(path)
    return written


def panel(axis, mask: str, cells: Mapping[int, Sequence[Mapping]], ceiling: float | None) -> None:
    lengths = sorted(cells)
    names = dict.fromkeys(row["contestant"] for group in cells.values() for row in group)
    # Ours is listed first and drawn on top.
    for name in sorted(names, key=lambda n: (n != OURS, list(names).index(n))):
        points = [(s, rates(cells[s])[name]) for s in lengths if name in rates(cells[s])]
        if not points:
            continue
        style = STYLES.get(name, Style(name, "#000000", "x", ":"))
        axis.plot(
            *zip(*points),
            label=style.label,
            color=style.color,
            marker=style.marker,
            markersize=6 if name == OURS else 4,
            linestyle=style.dash,
            linewidth=style.width,
            zorder=4 if name == OURS else 3,
        )
        if name == OURS:
            for s, rate in points:
                ahead = rate >= max(rates(cells[s]).values())
                axis.annotate(
                    f"{rate:.0f}",
                    (s, rate),
                    xytext=(0, 7 if ahead else -14),  # on the side where no peer is near
                    textcoords="offset points",
                    ha="center",
                    color=style.color,
                    fontsize=8,
                )
    if ceiling:
        axis.axhline(ceiling, color="#555555", linewidth=0.8, linestyle=(0, (1, 2)), label="matrix product 8192³")
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [str(s) for s in lengths])
    axis.minorticks_off()
    axis.set_ylim(bottom=0)
    axis.set_title(mask, fontsize=9)
    axis.set_xlabel("sequence length")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", default=str(DEFAULT), help="default: %(default)s")
    parser.add_argument("--out", default=str(FIGURES), metavar="DIR", help="default: bench/figures")
    parser.add_argument("--readme", action="store_true", help="print the markdown table instead")
    o = parser.parse_args(argv)
    if not pathlib.Path(o.file).exists():
        print(f"{o.file} does not exist: run bench/run.py on a GPU first", file=sys.stderr)
        return 2
    if o.readme:
        print(markdown_table(o.file), end="")
        return 0
    for path in draw(load(o.file), o.out):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
