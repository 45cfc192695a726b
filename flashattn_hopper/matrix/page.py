"""The matrix as one HTML file with a heat map: no script, no font, nothing that is loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from itertools import groupby
from pathlib import Path

# Of the allowed error, up to which share a cell has which shade.
SHADES = (0.25, 0.5, 0.75, 1.0)

STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --paper: #fff; --line: #d5d9de; --quiet: #6a727b;
  --p0: #cdebd3; --p1: #9fd8ab; --p2: #e6dd82; --p3: #f0b24c; --failed: #c8202f; --built: #c6d8f5; --spill: #d9b8ef;
  --refused: #eef0f2; --mark: #1c2024; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7ea; --paper: #15181b; --line: #3a4047; --quiet: #9aa3ad;
  --p0: #1d4a2a; --p1: #2c6b3d; --p2: #6f6615; --p3: #8a5a0e; --failed: #e0404e; --built: #24416e; --spill: #5a3676;
  --refused: #22262a; --mark: #f2f4f6; } }
body { font: 14px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 1.5rem; }
.scroll { overflow: auto; max-height: 85vh; border: 1px solid var(--line); }
table { border-collapse: separate; border-spacing: 1px; }
th { font-weight: 500; text-align: left; white-space: nowrap; padding: 2px 6px; background: var(--paper); }
thead { position: sticky; top: 0; z-index: 2; background: var(--paper); }
thead th { border-left: 1px solid var(--line); font-size: 12px; }
thead tr:last-child th { writing-mode: vertical-rl; font-size: 11px; color: var(--quiet); padding: 4px 0; }
tbody th { position: sticky; left: 0; font-size: 12px; z-index: 1; }
td { min-width: 26px; height: 20px; text-align: center; font-size: 10px; color: var(--mark); border-radius: 2px; }
td:focus { outline: 2px solid var(--ink); }
.p0 { background: var(--p0); } .p1 { background: var(--p1); } .p2 { background: var(--p2); }
.p3 { background: var(--p3); } .failed { background: var(--failed); color: #fff; font-weight: 700; }
.built { background: var(--built); } .spill { background: var(--spill); }
.refused { background: var(--refused); color: var(--quiet); }
.legend span { display: inline-block; padding: 1px 8px; margin: 0 10px 4px 0; border-radius: 2px; color: var(--mark); }
.legend .failed { color: #fff; } .legend .refused { color: var(--quiet); } dt { float: left; width: 9rem;
  color: var(--quiet); } dd { margin-left: 9.5rem; } .reasons { white-space: pre-wrap; }
"""

LEGEND = (
    *((f"p{i}", f"passed, at most {share:.0%} of the allowed error") for i, share in enumerate(SHADES)),
    ("failed", "× failed"),
    ("built", "compiled, not run: for an arch that is not in this machine"),
    ("spill", "the same, and registers spill to local memory"),
    ("refused", "· refused"),
)
NUMBERS = (
    "Numbers: where a cell passed, the error of its worst output in errors of plain PyTorch; where it was compiled, "
    "registers of a thread. Each cell has a tooltip, with the reason where it was refused."
)


def page(found: dict) -> str:
    """The HTML text of `report.record`'s answer."""
    cells = found["cells"]
    columns = sorted({_column(cell) for cell in cells})
    rows = {}
    for cell in cells:
        rows.setdefault((cell["arch"], cell["kernel"], cell["precision"]), {})[_column(cell)] = cell
    head = "".join(f"<tr><th></th>{''.join(line)}</tr>" for line in _head(columns))
    body = "".join(
        f'<tr><th scope="row">{escape(" ".join(key))}</th>{"".join(_square(row.get(c)) for c in columns)}</tr>'
        for key, row in rows.items()
    )
    legend = "".join(f'<span class="{name}">{escape(text)}</span>' for name, text in LEGEND)
    counts = ", ".join(f"{n} {status}" for status, n in found["counts"].items() if n)
    quick = any(run["quick"] for run in found["runs"])
    title = "flashattn_hopper: correctness matrix"
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>\n<body>'
        f"<h1>{title}</h1>\n<p>{escape(counts)}{' (--quick)' if quick else ''}.</p>\n"
        f'<p class="legend">{legend}</p>\n<p>{NUMBERS}</p>\n'
        f'<div class="scroll"><table><thead>{head}</thead>\n<tbody>{body}</tbody></table></div>\n'
        f"{_failures(cells)}<h2>Where this ran</h2>\n{''.join(map(_facts, _runs(found)))}</body></html>\n"
    )


def write_html(found: dict, path: Path) -> None:
    path.write_text(page(found), encoding="utf-8")


def _column(cell: dict) -> tuple:
    return (cell["headdim"], cell["headdim_v"]), cell["mask"], "+".join(cell["features"])


def _head(columns) -> Iterable[list[str]]:
    """Three lines: head dimensions, mask, feature; equal neighbours share one heading."""
    for depth in (1, 2, 3):
        line = []
        for key, group in groupby(column[:depth] for column in columns):
            last = key[-1]
            text = f"{last[0]}, {last[1]}" if depth == 1 else last or "–"
            line.append(f'<th scope="col" colspan="{len(list(group))}">{escape(text)}</th>')
        yield line


def _square(cell: dict | None) -> str:
    if cell is None:
        return "<td></td>"
    name, text = LOOKS[cell["status"]](cell)
    return f'<td class="{name}" tabindex="0" title="{escape(_tooltip(cell))}">{escape(text)}</td>'


def _passed(cell):
    multiple = cell["error_multiple"]
    shade = next((i for i, share in enumerate(SHADES) if cell["budget_share"] <= share), len(SHADES) - 1)
    return f"p{shade}", "0" if multiple == 0 else f"{multiple:.1f}" if multiple is not None else "✓"


def _compiled(cell):
    return "spill" if cell["local_bytes"] else "built", str(cell["registers"])


LOOKS = {
    "passed": _passed,
    "compiled-only": _compiled,
    "failed": lambda cell: ("failed", "×"),
    "refused": lambda cell: ("refused", "·"),
}


def _tooltip(cell: dict) -> str:
    lines = [cell["id"], cell["status"] + (f": {cell['reason']}" if cell["reason"] else "")]
    if cell["budget_share"] is not None:
        multiple = cell["error_multiple"]
        beside = "plain PyTorch makes none" if multiple is None else f"{multiple:.2f} times plain PyTorch's"
        lines.append(f"error of {cell['worst_output']}: {beside}, {cell['budget_share']:.0%} of what is allowed")
        lines.append(f"{cell['calls']} calls")
    if cell["registers"] is not None:
        lines.append(f"{cell['registers']} registers, {cell['local_bytes']} bytes of local memory per thread")
    if cell["on_request"]:
        lines.append(f"only on request: {cell['on_request']}")
    return "\n".join(lines)


def _failures(cells) -> str:
    failed = [cell for cell in cells if cell["status"] == "failed"]
    items = "".join(f"<li><b>{escape(cell['id'])}</b>: {escape(cell['reason'])}</li>" for cell in failed)
    return f'<h2>Failed</h2>\n<ul class="reasons">{items}</ul>\n' if failed else ""


def _runs(found: dict) -> Iterable[dict]:
    """What each run has to do with the page, and where it was."""
    for place, run in enumerate(found["runs"]):
        mine = [cell for cell in found["cells"] if cell["run"] == place]
        archs = ", ".join(dict.fromkeys(cell["arch"] for cell in mine))
        if mine:
            yield {"cells": f"{len(mine)} of {archs}"} | run


def _facts(run: dict) -> str:
    facts = {name: run[name] for name in ("cells", "date", "revision", "gpu", "driver", "platform")} | run["versions"]
    terms = "".join(f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in facts.items())
    return f"<dl>{terms}</dl>\n"
