"""From results files: figures (SVG), and the tables of the documents.

    python bench/plot.py [FILE ...] [--out DIR]     bench/figures/<suite>_<headdim>.svg, memory.svg
    python bench/plot.py [FILE ...] --readme        markdown tables on standard output

Without FILE, those of the suites that have been measured.

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
RESULTS = HERE / "results" / "nvidia-h200"
SUITES = ("forward", "backward", "fp8", "quantizer", "memory")
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
    "ours_int8": Style("flashattn_hopper, int8 q and k", "#D55E00", "X", width=2.0),
    "bf16": Style("flashattn_hopper in bf16", "#56B4E9", "P", "--"),
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
    """(name, TFLOP/s) of the fastest contestant that is neither ours nor a variant of it."""
    found = {name: rate for name, rate in rates(rows).items() if not name.startswith(OURS)}
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


def repeatable(slug: str) -> bool:
    """Whether the variant's results repeat bit by bit on request: rows for a table, beside the sweeps of a figure."""
    return "deterministic" in slug.split(".")


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


def memory_verdict(group: Sequence[Mapping] | None) -> str:
    """`ours / least of the peers, its name` in MiB."""
    found = {row["contestant"]: row["extra_bytes"] / 2**20 for row in group or () if row.get("extra_bytes") is not None}
    if not found:
        return ""
    ours = found.pop(OURS, None)
    name = min(found, key=found.get, default=None)
    return " / ".join(["–" if ours is None else f"{ours:.0f}", "–" if name is None else f"{found[name]:.0f} {name}"])


def whence(results: Mapping) -> str:
    """Machine, day and revision."""
    dirty = "+dirty" if results.get("dirty") else ""
    return f"on one {results['gpu']['name']}, {results['date'][:10]}, revision {results['revision']}{dirty}"


def memory_table(results: Mapping) -> str:
    """The memory suite as markdown: one line for each length."""
    mib = lambda row, name: "–" if row.get(name) is None else f"{row[name] / 2**20:,.1f}"
    cells: dict[int, dict[str, Mapping]] = {}
    for row in results["rows"]:
        cells.setdefault(row["seqlen"], {})[row["slug"]] = row
    slugs = list(dict.fromkeys(row["slug"] for row in results["rows"]))
    lines = []
    for seqlen, found in sorted(cells.items()):
        some = next(iter(found.values()))
        extra = [mib(found.get(slug, {}), "extra_bytes") for slug in slugs]
        lines.append([str(seqlen), *extra, mib(some, "operand_bytes"), mib(some, "dense_bytes")])
    head = ["seqlen", *(f"`{slug}`" for slug in slugs), "operands and gradients", "dense softmax"]
    heads = results["rows"][0]["heads"] if results["rows"] else 0
    return (
        f"MiB {whence(results)}: peak of one forward and backward beside its operands, results and gradients; batch 1, "
        f"{heads} heads. The dense softmax is one seqlen x seqlen matrix of each head, in the operands' dtype.\n\n"
        f"{grid(head, lines)}\n"
    )


def quantizer_table(results: Mapping) -> str:
    """The quantizer suite as markdown: one line for each shape."""
    lines = []
    for group in by_cell(results["rows"]):
        row, rate = group[0], {one["contestant"]: one["gb_s"] for one in group if one.get("gb_s")}
        shape = [words(row["slug"])[1], str(row["batch"]), str(row["seqlen"]), f"{row['heads']}:{row['kv_heads']}"]
        shares = [f"{row[name]:.2f}" if row.get(name) else "–" for name in ("share", "least_share")]
        lines.append([*shape, *(f"{rate[name]:.0f}" if name in rate else "–" for name in (OURS, "copy")), *shares])
    head = ["headdim", "B", "S", "heads", "quantizer", "copy", "share", "share, k and v once"]
    what = "q read once, k and v twice, codes written; a copy of as many bytes"
    return f"GB/s {whence(results)}: {what}.\n\n{grid(head, lines)}\n"


def markdown_table(path) -> str:
    """The committed numbers as markdown: a line on the machine, the sweeps, then the single shapes.

    Args:
        path: a results file that bench/run.py wrote.
    """
    results = load(path)
    if results["suite"] == "memory":
        return memory_table(results)
    if results["suite"] == "quantizer":
        return quantizer_table(results)
    groups = by_cell(results["rows"])
    swept = sweeps(groups)
    lengths = sorted({s for cells in swept.values() for s in cells})
    tools = results["versions"]
    peers = ", ".join(
        f"{name} {text}"
        for name, text in results["contestants"].items()
        if name != OURS and not text.startswith("unavailable")
    )
    ceiling = results.get("ceiling") or {}
    parts = [
        f"TFLOP/s {whence(results)}: ours / best peer / ours over best."
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
    measured = {slug: cells for slug, cells in swept.items() if any(map(memory_verdict, cells.values()))}
    if measured:
        lines = [[*words(slug), *(memory_verdict(cells.get(s)) for s in lengths)] for slug, cells in measured.items()]
        parts.append(
            "Peak memory of one forward and backward beside operands and gradients, MiB: ours / least of the peers."
        )
        parts.append(grid(["dtype", "headdim", "mask", *map(str, lengths)], lines))
    return "\n\n".join(parts) + "\n"


# ----------------------------------------------------------------------------------------------------- figures
def draw(results: Mapping, out=FIGURES) -> list[pathlib.Path]:
    """One figure per swept head dimension, one panel per mask: TFLOP/s over the sequence length. Or that of memory."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    out = pathlib.Path(out)
    out.mkdir(parents=True, exist_ok=True)
    if results["suite"] == "memory":
        return draw_memory(results, out)
    if results["suite"] == "quantizer":
        return []  # a table says it
    panels: dict[tuple[str, str], dict[str, dict]] = {}
    for slug, cells in sweeps(by_cell(results["rows"])).items():
        if repeatable(slug):
            continue
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
            named = {}
            for axis in axes[0]:
                for handle, label in zip(*axis.get_legend_handles_labels()):
                    named.setdefault(label, handle)
            labels, handles = list(named), list(named.values())
            # Two rows: text is drawn with the reader's font, which may be wider than the one measured here.
            figure.legend(handles, labels, loc="outside lower center", ncols=-(-len(labels) // 2), frameon=False)
            figure.suptitle(f"{results['suite']}, {dtype}, headdim {dims}, {results['gpu']['name']}", fontsize=10)
            name = f"{results['suite']}_{dims}" + ("" if dtype in ("bf16", results["suite"]) else f"_{dtype}")
            path = out / f"{name}.svg"
            figure.savefig(path, metadata={"Date": None, "Creator": None})
            pyplot.close(figure)
        written.append(path)
    return written


def draw_memory(results: Mapping, out: pathlib.Path) -> list[pathlib.Path]:
    """One figure, both axes logarithmic: what grows with seqlen has slope 1, a dense softmax slope 2."""
    from matplotlib import pyplot

    rows = [row for row in results["rows"] if row.get("extra_bytes")]
    if not rows:
        return []
    lengths = sorted({row["seqlen"] for row in rows})
    named = lambda test: {row["seqlen"]: row for row in rows if test(row["slug"])}
    ours = STYLES[OURS]
    lines = (
        (
            ours._replace(label="extra memory of flashattn_hopper"),
            named(lambda slug: not repeatable(slug)),
            "extra_bytes",
        ),
        (ours._replace(label="the same, deterministic", dash="--", marker="D"), named(repeatable), "extra_bytes"),
        (Style("operands and gradients", "#7F7F7F", "v", ":"), {row["seqlen"]: row for row in rows}, "operand_bytes"),
        (Style("dense softmax", "#D55E00", "s", "-."), {row["seqlen"]: row for row in rows}, "dense_bytes"),
    )
    with pyplot.rc_context(RC):
        figure, axis = pyplot.subplots(figsize=(5.2, 3.6), layout="constrained")
        for style, found, what in lines:
            if found:
                axis.plot(
                    sorted(found),
                    [found[s][what] / 2**20 for s in sorted(found)],
                    label=style.label,
                    color=style.color,
                    marker=style.marker,
                    markersize=4,
                    linestyle=style.dash,
                    linewidth=style.width,
                )
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        axis.set_xticks(lengths, [str(s) for s in lengths])
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.minorticks_off()
        axis.set_xlabel("sequence length")
        axis.set_ylabel("MiB")
        figure.legend(loc="outside lower center", ncols=2, frameon=False)
        shape = f"{rows[0]['heads']} heads of {words(rows[0]['slug'])[1]}"
        figure.suptitle(f"memory of forward and backward, {shape}, {results['gpu']['name']}", fontsize=10)
        path = out / "memory.svg"
        figure.savefig(path, metadata={"Date": None, "Creator": None})
        pyplot.close(figure)
    return [path]


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
    parser.add_argument("files", nargs="*", metavar="FILE", help=f"default: of {RESULTS}, those that exist")
    parser.add_argument("--out", default=str(FIGURES), metavar="DIR", help="default: bench/figures")
    parser.add_argument("--readme", action="store_true", help="print the markdown tables instead")
    o = parser.parse_args(argv)
    files = [pathlib.Path(file) for file in o.files]
    missing = [str(file) for file in files if not file.exists()]
    files = files or [file for suite in SUITES if (file := RESULTS / f"{suite}.json").exists()]
    if missing or not files:
        print(
            f"no results to read{': ' + ', '.join(missing) if missing else ''}: run bench/run.py on a GPU first",
            file=sys.stderr,
        )
        return 2
    if o.readme:
        print("\n".join(map(markdown_table, files)), end="")
        return 0
    for path in (path for file in files for path in draw(load(file), o.out)):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
