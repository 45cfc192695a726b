"""The documents: generated parts are current, code runs, links resolve, names exist, figures have a source."""

import builtins
import contextlib
import importlib.util
import inspect
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import flashattn_hopper
from flashattn_hopper import _cache, jit
from flashattn_hopper.catalog import CATALOG
from flashattn_hopper.spec.arch import SM90
from flashattn_hopper.spec.problem import Traits
from flashattn_hopper.spec.tile import FwdTile

ROOT = Path(__file__).resolve().parents[1]
README, KERNELS = ROOT / "README.md", ROOT / "docs" / "kernels"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "bench" / "README.md"])
FOLDERS = ("flashattn_hopper", "kernels", "bench", "tests", "docs")
SOURCES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


def text_of(page):
    return page.read_text(encoding="utf-8")


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", text_of(page), re.S | re.M)


def prose(page):
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", text_of(page), flags=re.S | re.M)


@pytest.fixture
def generate():
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -------------------------------------------------------------------------------------------------- generated parts
def test_generated_parts_are_current(generate):
    stale = [path.relative_to(ROOT).as_posix() for path in generate.outdated()]
    assert not stale, f"run make docs: {stale}"


def test_a_stale_page_is_reported_then_repaired(generate, tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- generated: forward -->\nold\n<!-- end generated -->\nafter\n")
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    monkeypatch.setattr(generate, "RESULTS", tmp_path)
    monkeypatch.setattr(generate, "SUPPORT", tmp_path / "support.md")
    monkeypatch.setattr(generate, "PAGES", (page,))
    assert generate.main(["--check"]) == 1
    assert "old" in page.read_text() and not (tmp_path / "support.md").exists()
    assert generate.main([]) == 0
    assert generate.main(["--check"]) == 0
    lines = page.read_text().splitlines()
    assert [lines[0], lines[-1]] == ["before", "after"] and "No results are committed yet" in lines[2]
    assert "support.md: differs" in capsys.readouterr().out


def test_a_block_must_be_known_and_closed(generate):
    with pytest.raises(KeyError):
        generate.filled("<!-- generated: nonsense -->\n<!-- end generated -->", README)
    with pytest.raises(ValueError, match="not closed"):
        generate.filled("<!-- generated: forward -->\n", README)


def test_blocks_carry_the_committed_results(generate, tmp_path, monkeypatch):
    row = {"slug": "fwd.bf16.d128.causal", "batch": 4, "heads": 16, "kv_heads": 16, "window": None}
    ours = {"contestant": "ours", "tflops": 512.3, "share": 0.65, "cycles_per_tile": 2600, "rel_error": 0.002}
    results = {
        "suite": "forward",
        "date": "2001-02-03T04:05:06+00:00",
        "revision": "abc",
        "gpu": {"name": "NVIDIA H200"},
        "versions": {"torch": "2", "dsl": "4"},
        "contestants": {"ours": "1"},
        "rows": [
            row | ours | {"seqlen": 512, "sm_mhz": 1700.0, "power_w": 690.0, "tile": "FwdTile(64, 32)"},
            row | {"contestant": "fa3", "seqlen": 512, "tflops": 500.0},
            row | {"contestant": "ours", "seqlen": 1024, "failed": "no"},
        ],
    }
    (tmp_path / "some-gpu").mkdir()
    (tmp_path / "some-gpu" / "forward.json").write_text(json.dumps(results))
    monkeypatch.setattr(generate, "RESULTS", tmp_path)
    table = generate.forward(README)
    assert "512 / 500 fa3 / **1.02**" in table and "2001-02-03" in table
    cells = generate.forward_cells(KERNELS / "sm90_forward.md").splitlines()
    assert "2001-02-03, revision abc" in cells[0]
    assert cells[-2] == (
        "| fwd.bf16.d128.causal | 4 | 512 | 16:16 | 512 | 0.65 | 2600 | 1700 | 690 | 2.0e-03 | `FwdTile(64, 32)` |"
    )
    assert cells[-1].startswith("| fwd.bf16.d128.causal | 4 | 1024 | 16:16 | – | –")


def test_support_follows_the_catalog(generate, monkeypatch):
    sm90 = next(spec for spec in CATALOG if spec.name == "sm90.forward")
    row = replace(sm90.tiles[0], tile=FwdTile(64, 48), min_seqlen=777, masks=("causal",))
    planted = replace(sm90, name="sm99.forward", tiles=type(sm90.tiles)(row), dtypes=sm90.dtypes | {"fp8"})
    monkeypatch.setattr(generate, "CATALOG", (planted, *CATALOG))
    page = generate.support()
    assert "| `sm99.forward` | fwd | compute capability 9.0 (sm_90a) | fp16, bf16, fp8 |" in page
    assert "| causal | from 777 | 64 x 48 | grid | 1 | the slab of Q | 256 |" in page
    assert "- fwd: no compiled kernel takes fp32, fp64." in page
    assert "- bwd: no compiled kernel takes fp8, fp32, fp64." in page
    assert "fwd: no kernel takes" not in page and "fwd: no compiled kernel is chosen" not in page


def test_support_says_what_runs_only_on_request(generate, monkeypatch):
    sm90 = next(spec for spec in CATALOG if spec.name == "sm90.backward")
    asked, ready = replace(sm90, on_request="it is young"), replace(sm90, on_request="")
    rows = [spec for spec in CATALOG if spec is not sm90 and not (spec.phase == "bwd" and spec.arch)]
    monkeypatch.setattr(generate, "CATALOG", (*rows, asked))
    page = generate.support()
    assert '(sm_90a), with `backend="sm90"` only |' in page and "| it is young |" in page
    assert "bwd: no compiled kernel is chosen by itself" in page
    assert "| tile_m x tile_n | consumer warpgroups |" in page
    monkeypatch.setattr(generate, "CATALOG", (*(replace(spec, on_request="") for spec in rows), ready))
    assert "only |" not in generate.support() and "is chosen by itself" not in generate.support()


def test_support_pads_as_the_planner_does(generate):
    sm90 = next(spec for spec in CATALOG if spec.name == "sm90.forward")
    seen = {}
    for asked, runs in generate.padding(sm90):
        first, last = map(int, asked.split(" to "))
        seen |= {d: tuple(map(int, runs.split(", "))) for d in range(first, last + 1, sm90.multiple)}
    for headdim, runs in seen.items():
        traits = Traits("fwd", "bf16", headdim, headdim)
        assert sm90.refuses(traits, SM90.capability) is None
        assert (sm90.compiled(traits).headdim, sm90.compiled(traits).headdim_v) == runs
    assert sorted(seen) == list(range(8, max(sm90.headdims)[0] + 1, 8))


# ------------------------------------------------------------------------------------------------------ code blocks
PRINT = re.compile(r"^ *print\(.*\)  # (.+)$")


@pytest.mark.parametrize(
    "page", [p for p in PAGES if blocks(p, "python")], ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_code_runs_and_prints_what_it_says(page, monkeypatch):
    """The blocks of a page run in order, in one namespace, on the CPU; every print has its output as a comment."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    torch.manual_seed(0)
    code = "\n".join(blocks(page, "python"))
    prints = [line for line in code.splitlines() if "print(" in line]
    assert prints, "a page whose code shows nothing"
    unexplained = [line for line in prints if not PRINT.match(line)]
    assert not unexplained, f"prints without the expected output: {unexplained}"
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(code, str(page), "exec"), {"__name__": page.stem})
    assert out.getvalue().splitlines() == [PRINT.match(line)[1] for line in prints]


@every_page
def test_make_targets_exist(page):
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    named = set(re.findall(r"(?:^|`)make ([a-z]+)", text_of(page), re.M))
    assert named <= targets


# ------------------------------------------------------------------------------------------------ links and names
def anchors(page):
    headings = re.findall(r"^#+ (.+)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            yield target


@every_page
def test_links_resolve(page):
    assert not list(broken_links(page))


def test_a_broken_link_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# One `two`: three\n[a](page.md) [b](#one-two-three) [c](gone.md) [d](page.md#four) [e](https://x)\n"
    )
    assert list(broken_links(page)) == ["gone.md", "page.md#four"]


def test_every_page_is_reachable_from_the_readme():
    seen, new = set(), {README}
    while new:
        seen |= new
        links = {
            (p.parent / link.partition("#")[0]).resolve()
            for p in new
            for link in re.findall(r"\]\(([^)\s]+)\)", prose(p))
        }
        new = {link for link in links if link.suffix == ".md" and link.exists()} - seen
    assert set(PAGES) <= seen


CLASSES = {name for path in SOURCES for name in re.findall(r"^class (\w+)", text_of(path), re.M)}
FILES = {path.name for path in SOURCES}


def unknown_names(text):
    """Back-quoted paths, file names and class names that do not exist in the tree."""
    for code in re.findall(r"`([^`\n]+)`", text):
        if re.fullmatch(r"[\w.-]+(/[\w.-]+)*/|[\w.-]+(/[\w.-]+)+\.\w+|[\w-]+\.(toml|yaml)", code):
            known = (ROOT / code).exists()
        elif re.fullmatch(r"\w+\.py", code):
            known = code in FILES
        elif re.fullmatch(r"[A-Z][a-z]+[A-Z]\w*", code):
            known = code in CLASSES or hasattr(builtins, code)
        else:
            continue
        if not known:
            yield code


@pytest.mark.parametrize(
    "page", [p for p in PAGES if p.parent != ROOT / "bench"], ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_named_files_and_classes_exist(page):
    assert not list(unknown_names(prose(page)))


def test_an_unknown_name_is_found():
    text = (
        "`kernels/sm90/forward.py` `forward.py` `docs/` `FwdTile` `TypeError` `gone/` `a/b.py` `gone.py` `NoSuchPart`"
    )
    assert list(unknown_names(text)) == ["gone/", "a/b.py", "gone.py", "NoSuchPart"]


def test_the_public_face_is_documented():
    index = text_of(ROOT / "docs" / "index.md")
    assert {name for name in flashattn_hopper.__all__ if not name.startswith("__")} - {"Explanation"} <= set(
        re.findall(r"^\| `(\w+)` \|", index, re.M)
    )
    words = text_of(README) + index
    arguments = set(inspect.signature(flashattn_hopper.hopper_attention).parameters) - {"q", "k", "v"}
    assert not {name for name in arguments if not re.search(rf"\b{name}\b", words)}


def test_environment_variables_are_documented():
    package = [path for path in SOURCES if path.is_relative_to(ROOT / "flashattn_hopper")]
    used = {name for path in package for name in re.findall(r"FLASHATTN_HOPPER_[A-Z_]+", text_of(path))}
    assert used == set(re.findall(r"FLASHATTN_HOPPER_[A-Z_]+", text_of(ROOT / "docs" / "jit.md")))


def test_the_jit_page_agrees_with_the_code():
    page = text_of(ROOT / "docs" / "jit.md")
    rows = re.findall(
        r"^\| ((?:`\w+`(?:, )?)+) \|", page[page.index("## What enters") : page.index("## Environment")], re.M
    )
    sm90 = next(spec for spec in CATALOG if spec.name == "sm90.forward")
    try:
        key = jit.fingerprint(sm90, Traits("fwd", "bf16", 64, 64), sm90.tiles[0].tile, SM90)
    except ImportError:
        pytest.skip("needs nvidia-cutlass-dsl")
    assert set(re.findall(r"`(\w+)`", " ".join(rows))) == set(key)
    assert f"After {_cache.LOCK_SECONDS} s" in page and f"for {_cache.UNUSED_DAYS} days" in page


def test_the_numerics_page_has_the_kernels_constants():
    """Read as text, because importing the kernel's modules needs the GPU compiler."""
    page = text_of(ROOT / "docs" / "numerics.md")
    softmax = text_of(ROOT / "kernels" / "common" / "softmax.py")
    ceilings = dict(re.findall(r'"(\w+)": 2\.0\*\*(\d+)', re.search(r"^CEILING = .*$", softmax, re.M)[0]))
    assert dict(re.findall(r"^\| (\w+) \| 2\^(\d+) \|", page, re.M)) == ceilings
    limit = re.search(r"^BIAS_LIMIT = 2\.0\*\*(\d+)$", softmax, re.M)[1]
    assert f"|bias| > 2^{limit}" in page
    round_ = re.search(r"^ROUND = (\d+)$", text_of(ROOT / "kernels" / "common" / "schedule.py"), re.M)[1]
    assert f"round of {round_} query tiles" in page
    factor = re.search(r"^FACTOR = (\d+)\.0$", text_of(ROOT / "flashattn_hopper" / "oracle.py"), re.M)[1]
    assert f"<=  {factor} * max |plain - float64| + floor" in page


# --------------------------------------------------------------------------------------------------------- figures
FIGURE = re.compile(r"\d[\d.,]*\s*(?:[TP]FLOP/?[sS]?\b|tokens/s)")
DATED = re.compile(r"H[12]00\b.*\b20\d\d-\d\d-\d\d", re.S)


def written_by_hand(text):
    return re.sub(r"<!-- generated: .*?<!-- end generated -->", "", text, flags=re.S)


@every_page
def test_figures_come_from_results(page):
    """Rates stand in generated blocks only; a step record of a kernel page names GPU and date beside each."""
    text = written_by_hand(text_of(page))
    items = re.split(r"\n\n|\n(?=\d+\. |- |\| )", text)
    with_figures = [item for item in items if FIGURE.search(item)]
    if page.parent == KERNELS:
        with_figures = [item for item in with_figures if not DATED.search(item)]
    assert not with_figures


def test_a_figure_by_hand_is_found():
    generated = "<!-- generated: forward -->\n700 TFLOP/s\n<!-- end generated -->"
    assert not FIGURE.search(written_by_hand(generated))
    for text in ("reaches 700 TFLOP/s", "up to 0.7 PFLOP/s", "1,234.5 TFLOPS", "52,000 tokens/s"):
        assert FIGURE.search(written_by_hand(generated + text))
    assert DATED.search("681 TFLOP/s (H200,\n2026-11-29)") and not DATED.search("681 TFLOP/s (H200)")
