"""The library as a bundle: every variant of its manifest is loaded without a compiler, in a process of its own.

python bundle.py FOLDER, with FLASHATTN_HOPPER_AOT=FOLDER, and no cache.
"""

import json
import sys
from pathlib import Path


def main(folder: Path) -> None:
    sys.modules["cutlass"] = None  # not to be imported
    from flashattn_hopper import aot, jit

    listed = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["variants"]
    variants = aot.select(dict.fromkeys(variant["name"] for variant in listed))
    for variant in variants:
        function = jit.compiled(*variant)
        try:
            function()
        except TypeError as error:
            assert "Expects 1 parameters" in str(error), error
        else:
            raise AssertionError(f"{variant.name}: a call without operands was accepted")
    stats = jit.stats()
    print(stats)
    assert len(variants) == len(listed) == stats.bundle_hits, len(variants)
    assert stats.compiles == stats.disk_hits == 0


main(Path(sys.argv[1]))
