"""What a matrix leaves behind: everything as plain values (`record`), and of these a table and JSON."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timezone
from itertools import groupby
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from ..train.environment import describe
from .cells import REFUSED
from .run import FAILED, STATUSES, Result

SCHEMA = "flashattn_hopper.matrix/2"
PACKAGE = Path(__file__).resolve().parents[1]
_MACHINE = ("gpu", "driver", "platform", "cpu threads")  # names of describe(); the versions are the others
_PRIVATE = ("kernel cache",)


def record(results: Sequence[Result], quick: bool, revision: str | None = None) -> dict:
    """The whole matrix as plain values: `cells`, and the `runs` that they came from, here one. `revision` replaces what
    git says, for a copy of the tree without its history."""
    machine = describe()
    run = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "revision": revision or checked_out(),
        "versions": {name: text for name, text in machine.items() if name not in (*_MACHINE, *_PRIVATE)},
        **{name.replace(" ", "_"): machine[name] for name in _MACHINE},
        "quick": quick,
    }
    return assembled([run], [_cell(result) for result in results])


def assembled(runs: list[dict], cells: list[dict]) -> dict:
    return {"schema": SCHEMA, "runs": runs, "counts": counts(cells), "cells": cells}


def _cell(result: Result) -> dict:
    spec, traits = result.cell.spec, result.cell.traits
    return {
        "id": result.cell.id,
        "arch": result.cell.arch,
        "kernel": spec.name,
        "pass": traits.phase,
        "precision": traits.dtype,
        "headdim": traits.headdim,
        "headdim_v": traits.headdim_v,
        "mask": traits.mask,
        "features": sorted(traits.features),
        "on_request": spec.on_request,
        "status": result.status,
        "reason": result.reason,
        "error_multiple": result.multiple,
        "budget_share": result.share,
        "worst_output": result.worst,
        "calls": result.calls,
        "registers": result.registers,
        "local_bytes": result.local,
        "run": 0,
    }


def row_of(cell: dict) -> tuple[str, str, str]:
    """(arch, kernel, precision): one line of the table and of the heat map."""
    return cell["arch"], cell["kernel"], cell["precision"]


def counts(cells: Sequence[dict]) -> dict[str, int]:
    found = Counter(cell["status"] for cell in cells)
    return {status: found[status] for status in STATUSES}


def summary(found: dict) -> str:
    return ", ".join(f"{n} {status}" for status, n in found["counts"].items() if n) or "no cells"


def table(found: dict) -> Table:
    """One line for each arch, kernel and precision in which something is not refused."""
    made = Table(
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
        caption="error: the worst, in errors of plain PyTorch; budget: the largest part used of what is allowed; "
        "regs: the most registers of a thread at launch, + bytes that it spills",
        caption_justify="left",
    )
    for name in ("arch", "kernel", "dtype", "cells"):
        made.add_column(name, no_wrap=name != "cells")
    for name in ("error", "budget", "regs"):
        made.add_column(name, justify="right", no_wrap=True)
    for key, group in groupby(found["cells"], row_of):
        mine = list(group)
        told = {status: n for status, n in counts(mine).items() if n and status != REFUSED}
        if not told:
            continue
        words = (f"[bold red]{n} {status}[/]" if status == FAILED else f"{n} {status}" for status, n in told.items())
        error, budget, registers, local = (
            max((cell[name] for cell in mine if cell[name] is not None), default=None)
            for name in ("error_multiple", "budget_share", "registers", "local_bytes")
        )
        made.add_row(
            *key,
            ", ".join(words),
            "" if error is None else f"{error:.2f}",
            "" if budget is None else f"{budget:.0%}",
            "" if registers is None else f"{registers}" + (f" + {local} B" if local else ""),
        )
    return made


def notes(found: dict) -> list[str]:
    """Failures in full, then the reasons of refusals, each once with its kernels; for the terminal."""
    lines = [
        f"[bold red]failed[/] {escape(cell['id'])}: {escape(cell['reason'])}"
        for cell in found["cells"]
        if cell["status"] == FAILED
    ]
    reasons: dict[str, Counter] = {}
    for cell in found["cells"]:
        if cell["status"] == REFUSED:
            reasons.setdefault(cell["reason"], Counter())[cell["kernel"]] += 1
    return lines + [
        f"[bold]refused[/] {sum(names.values())} cells of {', '.join(names)}: {escape(reason)}"
        for reason, names in reasons.items()
    ]


def checked_out() -> str | None:
    """The commit of the checkout that this package is in, with "+" where files differ. None outside of one."""

    def git(*arguments):
        command = ["git", "-C", str(PACKAGE), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")  # an environment may lie inside another project's checkout
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def write_json(found: dict, path: Path) -> None:
    path.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def exit_status(found: dict) -> int:
    """0 where nothing failed, else 1."""
    return int(found["counts"][FAILED] > 0)
