"""The library as a bundle: every variant of its manifest is loaded without a compiler, in a process of its own.

python bundle.py FOLDER, with FLASHATTN_HOPPER_AOT=FOLDER, and no cache.
"""

import json
import sys
from pathlib import Path

sys.modules["cutlass"] = None  # not to be imported

from flashattn_hopper import aot, jit

manifest = json.loads((Path(sys.argv[1]) / "manifest.json").read_text(encoding="utf-8"))
names = list(dict.fromkeys(variant["name"] for variant in manifest["variants"]))
variants = aot.select(names)
for variant in variants:
    function = jit.compiled(*variant)
    try:
        function()
        sys.exit(f"{variant.name}: a call without operands was accepted")
    except TypeError as error:
        assert "Expects 1 parameters" in str(error), error
stats = jit.stats()
print(stats)
assert len(variants) == len(manifest["variants"]) == stats.bundle_hits, len(variants)
assert stats.compiles == stats.disk_hits == 0
