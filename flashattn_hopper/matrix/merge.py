"""Matrices of several machines as one: what another machine ran or compiled is neither run nor compiled again."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..planner import Capability
from . import report
from .cells import COMPILE, REFUSED, RUN, Cell, cells, fate
from .run import COMPILED, FAILED, PASSED

# What a status says, most first: where several machines have a cell, the first of these stands.
RANKS = {FAILED: 0, PASSED: 1, COMPILED: 2, REFUSED: 3}
# What leaves nothing to do for a cell with that fate.
ENOUGH = {RUN: RANKS[PASSED], COMPILE: RANKS[COMPILED], REFUSED: RANKS[REFUSED]}


def read(path: Path) -> dict:
    """A file that `report.write_json` wrote. Raises ValueError where it is another one, or of another catalog."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
    schema = found.get("schema") if isinstance(found, dict) else None
    if schema != report.SCHEMA:
        raise ValueError(f"{path}: its schema is {schema!r}, this package reads {report.SCHEMA!r}")
    known = _order()
    if unknown := [cell["id"] for cell in found["cells"] if cell["id"] not in known]:
        raise ValueError(f"{path}: {unknown[0]} is no cell of this catalog")
    return found


def left(wanted: Iterable[Cell], added: Sequence[dict], here: Capability) -> list[Cell]:
    """The cells of which this machine can say more than `added` does."""
    known = {cell["id"]: RANKS[cell["status"]] for cell in assembled(added)["cells"]}
    return [cell for cell in wanted if known.get(cell.id, len(RANKS)) > ENOUGH[fate(cell, here).what]]


def assembled(matrices: Sequence[dict]) -> dict:
    """One matrix of several, its cells in the order of the catalog; each says which of `runs` it came from."""
    runs, best = [], {}
    for found in matrices:
        for cell in found["cells"]:
            mine = cell | {"run": cell["run"] + len(runs)}
            known = best.get(cell["id"])
            if known is None or RANKS[mine["status"]] < RANKS[known["status"]]:
                best[cell["id"]] = mine
        runs += found["runs"]
    order = _order()
    return report.assembled(runs, sorted(best.values(), key=lambda cell: order[cell["id"]]))


def _order() -> dict[str, int]:
    return {cell.id: place for place, cell in enumerate(cells())}
