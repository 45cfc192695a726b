"""Command line: `python -m flashattn_hopper`, also installed as `flashattn-hopper`."""

from __future__ import annotations

import sys
from importlib.util import find_spec

NEEDED = ("typer", "rich", "matplotlib")


def main() -> None:
    """Hand over to the command line, or say what to install."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        sys.exit(
            f"The command line needs {', '.join(missing)}: pip install 'flashattn-hopper[cli]'\n"
            "(in a checkout, `make run` sets everything up)"
        )
    from .matrix.cli import app

    app()


if __name__ == "__main__":
    main()
