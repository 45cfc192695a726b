"""`flashattn_hopper._cubin` for tests, and as a command.

python tests/inspect_cubin.py kernel.cubin ... # registers, local memory and instructions as text
"""

from __future__ import annotations

import sys
from pathlib import Path

from flashattn_hopper._cubin import Usage, count_instructions, find_nvdisasm, inspect, inspect_all, sizes_of

__all__ = ["Usage", "count_instructions", "find_nvdisasm", "inspect", "inspect_all", "sizes_of"]


def main(paths):
    for path in paths:
        for method, usage in inspect_all(Path(path).read_bytes()).items():
            print(f"{path}: {method}, {usage.name}")
            print(f"  registers {usage.registers}, block {usage.block}, stack {usage.stack}")
            for name, n in sorted(usage.opcodes.items()):
                print(f"  {n:6d}  {name}")
            print(f"  local memory: {usage.local_memory or 'none'}")


if __name__ == "__main__":
    main(sys.argv[1:])
