"""The correctness matrix: its cells are the catalog's, its verdicts are earned, its files say what was found."""

import html.parser
import json
import os
from dataclasses import dataclass, replace

import pytest
import torch

from flashattn_hopper import hopper_attention
from flashattn_hopper.catalog import CATALOG
from flashattn_hopper.kernels.sm90 import specs as sm90
from flashattn_hopper.matrix import build, cells, run
from flashattn_hopper.spec.arch import SM80, SM90
from flashattn_hopper.spec.kernel import KernelSpec
from flashattn_hopper.spec.problem import DTYPES, MASKS, QuantizeTraits, Traits

report = pytest.importorskip("flashattn_hopper.matrix.report")
page = pytest.importorskip("flashattn_hopper.matrix.page")
merge = pytest.importorskip("flashattn_hopper.matrix.merge")

ALL = cells.cells()
KERNELS = [spec for spec in CATALOG if spec.arch is not None]


def cell(slug, arch="cpu"):
    """The cell that runs or compiles `slug` on an arch."""
    found = [one for one in ALL if (one.arch, one.traits.slug) == (arch, slug)]
    return next(one for one in found if cells.fate(one, None).what != cells.REFUSED)


def other(spec, **changes):
    return replace(spec, name=f"sm99.{spec.phase}", arch=replace(SM80, name="sm99", capability=(9, 9)), **changes)


# The cells


@pytest.mark.parametrize("spec", CATALOG, ids=lambda spec: spec.name)
def test_everything_that_a_kernel_declares_has_a_cell(spec):
    mine = [one for one in ALL if one.spec.name == spec.name]
    ok = [one.traits for one in mine if cells.fate(one, None).what != cells.REFUSED]
    assert len({one.id for one in mine}) == len(mine)
    assert {t.dtype for t in ok} == spec.dtypes and {t.dtype for t in (one.traits for one in mine)} == set(DTYPES)
    assert {t.mask for t in ok} == set(spec.masks) and set().union(*(t.features for t in ok)) == spec.features
    assert {(t.headdim, t.headdim_v) for t in ok} >= set(spec.headdims or ())


def test_every_variant_of_a_kernel_is_compiled():
    for spec in KERNELS:
        mine = [one for one in ALL if one.spec == spec and cells.fate(one, None).what == cells.COMPILE]
        tiles = {row.tile for row in spec.tiles}
        assert {tile for one in mine for _, _, tile, _ in cells.variants(one)} == tiles


def test_a_planted_kernel_has_cells_of_its_own():
    planted = other(sm90.FORWARD, dtypes=frozenset({"fp8"}), masks=("causal",), multiple=16)
    catalog = (*CATALOG, planted)
    assert cells.arch_names(catalog) == [*cells.arch_names(), "sm99"]
    mine = cells.cells(["sm99"], catalog=catalog)
    assert {one.arch for one in mine} == {"sm99"}
    compiled = [one.traits for one in mine if cells.fate(one, None).what == cells.COMPILE]
    assert {(t.dtype, t.mask) for t in compiled} == {("fp8", "causal")}
    assert {t.headdim for t in compiled} >= {48, 64, 128, 256} and (272, 272) in cells.headdims(catalog)


def test_a_kernel_has_cells_on_every_arch_that_it_is_ported_to():
    tiles = type(sm90.FORWARD_TILES)(replace(sm90.FORWARD_TILES[0], masks=sm90.FORWARD.masks))
    port = (replace(SM90, name="sm98", target="sm_98", capability=(9, 8)), tiles)
    if hasattr(sm90.FORWARD, "ports"):
        spec = replace(sm90.FORWARD, ports=(port,))
    else:

        @dataclass(frozen=True)
        class Ported(KernelSpec):
            ports: tuple = ()

        spec = Ported(**{**vars(sm90.FORWARD), "ports": (port,)})
    own, ported = cells.on_archs(spec)
    assert own is spec and (ported.arch, ported.tiles, ported.ports) == (port[0], tiles, ())
    mine = cells.cells(catalog=(spec,))
    assert {one.arch for one in mine} == {"sm90", "sm98"}
    for one in mine:
        if one.arch == "sm98" and cells.fate(one, None).what == cells.COMPILE:
            assert cells.variants(one)[0][2:] == (tiles[0].tile, port[0])
    assert {one.arch for one in cells.cells(catalog=(spec,), quick=True)} == {"sm90"}
    assert {one.arch for one in cells.cells(["sm98"], catalog=(spec,), quick=True)} == {"sm98"}


def test_an_unknown_arch_is_named():
    with pytest.raises(ValueError, match=r"sm77: no kernel is for it; there are .*cpu"):
        cells.cells(["cpu", "sm77"])


def test_cells_of_one_kernel():
    assert {one.spec.name for one in cells.cells(kernels=["sm80.backward"])} == {"sm80.backward"}
    mine = cells.cells(["sm90"], kernels=["sm80.backward", "sm90.forward"])
    assert mine == [one for one in cells.cells(["sm90"]) if one.spec.name in ("sm80.backward", "sm90.forward")]
    with pytest.raises(
        ValueError, match=r"--kernel sm90.sideways: there is none of that name; there are sm90.forward,"
    ):
        cells.cells(kernels=["sm90.sideways"])


def test_quick_compiles_one_cell_a_kernel_and_leaves_out_no_precision():
    found = cells.cells(quick=True)
    compiled = [one for one in found if cells.fate(one, None).what == cells.COMPILE]
    assert [one.spec for one in compiled] == KERNELS
    assert {one.traits.dtype for one in found} == set(DTYPES) and set(found) < set(ALL)
    ran = [one.traits for one in found if cells.fate(one, None).what == cells.RUN]
    assert {t.mask for t in ran} == set(MASKS) and {t.phase for t in ran} == {"fwd", "bwd"}
    assert len({(t.headdim, t.headdim_v) for t in ran}) == 1
    with_gpu = [one for one in cells.cells(["sm90"], True, (9, 0)) if cells.fate(one, (9, 0)).what == cells.RUN]
    assert len(with_gpu) > len(compiled)


@pytest.mark.parametrize("here", [None, (8, 0), (9, 0)])
def test_what_becomes_of_a_cell(here):
    for one in ALL:
        spec, (what, reason) = one.spec, cells.fate(one, here)
        refusal = spec.refuses(one.traits, spec.arch and spec.arch.capability, spec.backend)
        if refusal:
            assert (what, reason) == (cells.REFUSED, refusal)
        elif spec.arch == SM90:
            assert what == (cells.RUN if here == (9, 0) else cells.COMPILE)
        elif spec.arch is None:
            assert what == cells.RUN


def test_a_kernel_behind_another_is_not_taken_for_it(monkeypatch):
    second = replace(sm90.FORWARD, name="sm90.forward_again")
    monkeypatch.setattr(cells.planner, "CATALOG", (*CATALOG, second))
    cells.planner._plan.cache_clear()
    one = replace(cell("fwd.bf16.d64.full", "sm90"), spec=second)
    assert cells.fate(one, (9, 0)) == (cells.REFUSED, "sm90.forward comes first in the catalog and takes it")
    cells.planner._plan.cache_clear()


def test_calls_meet_the_edges_of_every_tile():
    for slug, arch in (
        ("fwd.bf16.d128.full.gqa", "sm90"),
        ("bwd.fp16.d64.window", "sm90"),
        ("fwd.fp8.d64.causal", "cpu"),
    ):
        one = cell(slug, arch)
        found = cells.calls(one)
        shapes = [call.shape for call in found]
        assert {s.seqlen_q > s.seqlen_k for s in shapes} == {True, False}
        assert all((s.num_heads_q != s.num_heads_kv) == one.traits.gqa for s in shapes)
        edges = cells._edges(one.spec, one.traits)
        windows = len(found) // len(edges) if one.traits.mask == "window" else 1  # each of its own for every tile
        assert len({str(call.mask) for call in found}) == windows
        if one.spec.tiles is not None:
            reached = {one.spec.tiles.find(one.spec.compiled(one.traits), s.seqlen_k) for s in shapes}
            assert reached == {tile for _, _, tile, _ in cells.variants(one)}
        for _, m, n in edges:
            assert {s.seqlen_q % m for s in shapes} >= {0, 1} and {s.seqlen_k % n for s in shapes} >= {0, 1, n - 1}


# What runs


@pytest.fixture
def one_thread():
    with run._one_thread():
        yield


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rest", ["fwd.{}.d96.causal.gqa", "bwd.{}.d64.window.deterministic"])
def test_the_reference_passes(dtype, rest):
    one = cell(rest.format(dtype))
    result = run.run(one)
    assert (result.status, result.reason, result.calls) == (run.PASSED, "", len(cells.calls(one)))
    assert 0 < result.share <= 1
    assert (result.multiple is None and dtype == "fp64") or result.multiple > 0  # None: float64 makes no error there
    assert result.worst in (("out", "lse") if one.traits.phase == "fwd" else ("dq", "dk", "dv"))


def broken(change):
    """hopper_attention with a changed result."""

    def attention(*args, **kwargs):
        out, lse = hopper_attention(*args, **kwargs)
        return change(out, lse)

    return attention


WRONG = {
    "scaled": (lambda out, lse: (out * 1.05, lse), "out: largest error"),
    "base 2": (lambda out, lse: (out, lse * 1.4427), "lse: largest error"),
    "NaN": (lambda out, lse: (out.index_fill(1, torch.tensor([0]), float("nan")), lse), "out: NaN in"),
    "transposed": (lambda out, lse: (out, lse.mT), "lse: shape"),
    "noisy": (lambda out, lse: (out + torch.rand(()) * 1e-7, lse), "out differ between two equal calls"),
}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_forward_fails(name, monkeypatch):
    change, message = WRONG[name]
    monkeypatch.setattr(run, "hopper_attention", broken(change))
    result = run.run(cell("fwd.fp32.d64.causal.deterministic"))
    assert result.status == run.FAILED and message in result.reason and "Sq 257, Sk 525" in result.reason


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", ["bf16", "fp8", "fp64"])
def test_a_wrong_gradient_fails(dtype, monkeypatch):
    slip = {"bf16": 1.05, "fp8": 1.3, "fp64": 1 + 1e-9}[dtype]
    monkeypatch.setattr(
        run, "hopper_attention", lambda q, k, v, **rest: hopper_attention(q, k, _scale_grad(v, slip), **rest)
    )
    result = run.run(cell(f"bwd.{dtype}.d64.full"))
    assert result.status == run.FAILED and "dv: largest error" in result.reason


@pytest.mark.usefixtures("one_thread")
def test_one_key_for_each_query_in_float32(monkeypatch):
    """Plain PyTorch's dv is exactly dout there; one whose P comes from a stored lse is not, by the logit's rounding."""
    one = cell("bwd.fp8.d192x128.window.fp32_out")
    alone = [call for call in cells.calls(one) if call.mask["window_size"] == (0, 0)]
    monkeypatch.setattr(run, "calls", lambda _: alone)
    assert run.run(one).status == run.PASSED
    monkeypatch.setattr(
        run, "hopper_attention", lambda q, k, v, **rest: hopper_attention(q, k, _scale_grad(v, 1 + 3e-5), **rest)
    )
    result = run.run(one)
    assert result.status == run.FAILED and "dv: largest error" in result.reason and "makes 0.000e+00" in result.reason


def _scale_grad(x, factor):
    return x * factor - (x * (factor - 1)).detach()


def test_what_raises_is_refused_or_failed(monkeypatch):
    def raising(error):
        def attention(*args, **kwargs):
            raise error

        return attention

    for error, status, reason in (
        (NotImplementedError("not yet"), run.REFUSED, "not yet"),
        (ImportError("no compiler"), run.REFUSED, "no compiler"),
        (RuntimeError("launch failed"), run.FAILED, "RuntimeError: launch failed"),
    ):
        monkeypatch.setattr(run, "hopper_attention", raising(error))
        result = run.run(cell("fwd.bf16.d64.full"))
        assert result.status == status and result.reason.endswith(reason)


def test_a_feature_that_cannot_be_asked_for_is_not_passed(monkeypatch):
    monkeypatch.setattr(run, "FEATURES", {"fwd": {"gqa"}})
    result = run.run(cell("fwd.bf16.d64.full.deterministic"))
    assert (result.status, result.reason) == (run.REFUSED, "the matrix has no call for deterministic")


@dataclass(frozen=True)
class Worded(Traits):
    """Traits with words that this tree's Traits may not have."""

    words: tuple = ()

    @property
    def features(self):
        return super().features | set(self.words)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("word", [*run.OUTPUTS, *run.CODES])
def test_features_of_fp8_are_asked_for_by_the_operands(word, monkeypatch):
    asked = []

    def attention(q, k, v, **rest):
        out = hopper_attention(q, k, v, **rest)
        asked.append((q, out[0].dtype))
        return out

    monkeypatch.setattr(run, "hopper_attention", attention)
    one = cell("fwd.fp8.d64.causal")
    result = run.run(replace(one, traits=Worded("fwd", "fp8", 64, 64, "causal", words=(word,))))
    assert result.status == run.PASSED, result.reason
    for q, out_dtype in asked:
        assert out_dtype == run.OUTPUTS.get(word, torch.bfloat16)
        assert q.data.dtype == torch.int8 if word == "int8_qk" else q.dtype == out_dtype
    gradient = replace(cell("bwd.fp8.d64.causal"), traits=Worded("bwd", "fp8", 64, 64, "causal", words=(word,)))
    assert run.run(gradient).status == (run.REFUSED if word in run.CODES else run.PASSED)


def test_cells_of_the_cpu_run_in_processes_of_their_own():
    mine = [cell(slug) for slug in ("fwd.bf16.d64.causal", "bwd.fp32.d64.full", "fwd.bf16.d64.causal")]
    steps = []
    results = run.run_all(mine, None, most_calls=1, processes=2, on_start=steps.append, on_step=lambda: steps.append(1))
    assert steps == [2, 1, 1] and [one.cell for one in results] == mine
    with run._one_thread():
        assert results == [run.run(one, 1) for one in mine]


def test_a_cell_whose_process_dies_fails():
    worker = build._Worker()
    with pytest.raises(EOFError):
        worker.ask(build.Job(os._exit, (7,)))
    assert worker.close() == 7
    with build.Crew([build.Job(os._exit, (7,)), build.Job(os.getpid, ())], processes=1) as crew:
        with pytest.raises(RuntimeError, match="its process ended with status 7"):
            crew.answer(build.Job(os._exit, (7,)))
        assert crew.answer(build.Job(os.getpid, ())) != os.getpid()


# What is compiled


def test_without_a_compiler_the_reason_stands_in_the_cell(monkeypatch):
    monkeypatch.setattr(run, "missing_compiler", lambda: "pip install it")
    (result,) = run.run_all([cell("fwd.bf16.d64.full", "sm90")], None)
    assert (result.status, result.reason) == (run.REFUSED, "pip install it")


class Worker:
    """In place of a process: answers by tile, dies on the one that has no answer."""

    asked: list = []  # noqa: RUF012

    def __init__(self):
        self.count = 0

    def ask(self, job):
        spec, _traits, tile, _arch = job.arguments
        assert spec.tiles is None
        Worker.asked.append(tile)
        if tile.tile_n not in (128, 64):
            raise EOFError
        return build.Used(tile.tile_n, 8 if tile.tile_n == 64 else 0)

    def close(self):
        return -6


class AtHand:
    """In place of a process: does the job here, where the test has changed something."""

    def ask(self, job):
        return job.function(*job.arguments)

    def close(self):
        return 0


@pytest.fixture
def at_hand(monkeypatch):
    monkeypatch.setattr(build, "_Worker", AtHand)


@pytest.fixture
def workers(monkeypatch):
    Worker.asked = []
    monkeypatch.setattr(build, "_Worker", Worker)
    monkeypatch.setattr(run, "missing_compiler", lambda: "")
    return Worker


def test_cells_share_a_compilation_and_a_dead_compiler_fails_its_cell_only(workers):
    slugs = ("fwd.bf16.d96.full", "fwd.bf16.d96.full.gqa", "fwd.bf16.d192.full", "fwd.bf16.d256.full")
    steps = []
    mine = [cell(slug, "sm90") for slug in slugs]
    results = run.run_all(mine, None, processes=1, on_start=steps.append, on_step=lambda: steps.append("step"))
    assert [(r.status, r.registers, r.local) for r in results] == [
        (run.COMPILED, 128, 0),
        (run.COMPILED, 128, 0),
        (run.FAILED, None, None),  # 112 keys
        (run.FAILED, None, None),  # one of its two tiles has 80 keys
    ]
    assert results[2].reason == "its process ended with status -6"
    assert len(workers.asked) == 4 and steps == [4, *["step"] * 4]


@pytest.mark.usefixtures("at_hand")
def test_kernels_of_this_gpu_are_compiled_before_they_run(monkeypatch):
    """As on a Hopper GPU, with the call left out."""
    warmed, ran = [], []
    monkeypatch.setattr(run.jit, "warmup", lambda variants, processes: warmed.extend(variants))
    monkeypatch.setattr(run, "run", lambda one, most: ran.append(one) or run.Result(one, run.PASSED))
    mine = [cell("bwd.bf16.d64.full", "sm90"), cell("fwd.bf16.d256.full", "sm90"), cell("fwd.bf16.d64.full")]
    results = run.run_all(mine, (9, 0))
    assert [one for one in ran if one.arch == "sm90"] == mine[:2] and {one.cell for one in results} == set(ran)
    assert {one.status for one in results} == {run.PASSED}
    assert warmed == [*run.launched(mine[0]), *cells.variants(mine[1])] and len(warmed) == 5


def test_what_a_kernel_needs_is_compiled_before_too():
    for slug, backend in (("bwd.bf16.d192x128.causal.gqa", "sm90"), ("bwd.fp16.d48.full", "sm80")):
        one = next(one for one in ALL if (one.arch, one.spec.backend, one.traits.slug) == ("sm90", backend, slug))
        mine, (spec, traits, tile, arch) = run.launched(one)[:-1], run.launched(one)[-1]
        assert mine == cells.variants(one) and (spec.name, arch) == (f"{backend}.forward", SM90)
        assert traits == spec.compiled(replace(one.traits, phase="fwd")) and tile in {row.tile for row in spec.tiles}
    for slug, traits in (
        ("fwd.fp8.d128.causal.gqa", QuantizeTraits("bf16", 128, 128)),
        ("fwd.fp8.d192x128.full.fp16_out", QuantizeTraits("fp16", 192, 128)),
    ):
        one = cell(slug, "sm90")
        assert run.launched(one) == [*cells.variants(one), (sm90.QUANTIZER, traits, None, SM90)]
    for slug in ("fwd.fp8.d128.causal.int8_qk", "fwd.bf16.d128.causal"):
        assert run.launched(cell(slug, "sm90")) == cells.variants(cell(slug, "sm90"))


@pytest.mark.compile
def test_a_variant_is_compiled_and_read():
    mine = [cell(slug, "sm90") for slug in ("fwd.fp16.d64.full", "fwd.fp16.d64.full.gqa")]
    assert cells.variants(mine[0]) == cells.variants(mine[1])
    wrong = replace(mine[0], spec=replace(mine[0].spec, entry="flashattn_hopper.no_such:Kernel"))
    good, same, bad = run.run_all([*mine, wrong], None, processes=1)
    assert good.status == same.status == run.COMPILED
    assert (good.registers, good.local) == (same.registers, same.local) and 24 <= good.registers <= 255
    assert good.local == 0  # test_compile.py asks for as much
    assert bad.status == run.FAILED and "ModuleNotFoundError" in bad.reason


# What is reported


@pytest.fixture
def results():
    return [
        run.Result(cell("fwd.bf16.d64.full"), run.PASSED, share=0.3, multiple=1.25, worst="out", calls=4),
        run.Result(cell("fwd.fp32.d64.full"), run.PASSED, share=0.9, multiple=None, worst="lse", calls=4),
        run.Result(cell("bwd.bf16.d64.causal"), run.FAILED, "dq: 3 < 4 & <b>", multiple=9.0, worst="dq"),
        run.Result(cell("fwd.bf16.d64.full", "sm90"), run.COMPILED, registers=168, local=0),
        run.Result(cell("bwd.bf16.d64.full", "sm90"), run.COMPILED, registers=255, local=40),
        run.Result(cell("fwd.bf16.d64.window", "sm90"), run.REFUSED, "no window mask"),
    ]


def test_json_has_every_cell_and_where_it_ran(results, tmp_path):
    report.write_json(report.record(results, quick=True), tmp_path / "m.json")
    found = json.loads((tmp_path / "m.json").read_text())
    (ran,) = found["runs"]
    assert (found["schema"], ran["quick"]) == (report.SCHEMA, True)
    assert found["counts"] == {"passed": 2, "failed": 1, "compiled-only": 2, "refused": 1}
    assert ran["versions"]["torch"].startswith(torch.__version__) and {"date", "gpu", "revision"} <= ran.keys()
    assert {one["run"] for one in found["cells"]} == {0}
    assert report.record(results, quick=True, revision="abc+")["runs"][0]["revision"] == "abc+"
    assert [one["id"] for one in found["cells"]] == [one.cell.id for one in results]
    first, second, failed, *_ = found["cells"]
    assert (first["error_multiple"], first["budget_share"], second["error_multiple"]) == (1.25, 0.3, None)
    assert (failed["arch"], failed["pass"], failed["mask"], failed["status"]) == ("cpu", "bwd", "causal", "failed")


class Squares(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.found, self.open, self.tags = [], [], set()

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        if tag == "td":
            self.found.append(dict(attributes))
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_has_a_square_for_each_cell_and_loads_nothing(results):
    text = page.page(report.record(results, quick=False))
    seen = Squares()
    seen.feed(text)
    assert not seen.open and not {"script", "link", "img", "iframe"} & seen.tags
    assert not any(word in text for word in ("http:", "https:", "url(", "@import", "src="))
    filled = [square for square in seen.found if square]
    assert sorted(square["class"] for square in filled) == ["built", "failed", "p1", "p3", "refused", "spill"]
    tips = {square["class"]: square["title"] for square in filled}
    assert "1.25 times plain PyTorch's, 30% of what is allowed" in tips["p1"] and "makes none" in tips["p3"]
    assert "dq: 3 < 4 & <b>" in tips["failed"] and "<b>dq" not in text and "no window mask" in tips["refused"]
    assert "255 registers, 40 bytes of local memory" in tips["spill"]
    assert "prefers-color-scheme: dark" in text and "<h2>Failed</h2>" in text


def test_the_table_and_the_notes_are_what_was_found(results):
    console = pytest.importorskip("rich.console").Console(width=120, record=True, quiet=False)
    found = report.record(results, quick=False)
    console.print(report.table(found))
    text = console.export_text()
    for words in ("1 failed", "1 passed", "1.25", "90%", "255 + 40 B"):
        assert words in text
    failed, refused = report.notes(found)
    assert "dq: 3 < 4" in failed and "1 cells of sm90.forward: no window mask" in refused
    assert report.summary(found) == "2 passed, 1 failed, 2 compiled-only, 1 refused"


# Several machines


def one_cell(status, arch="sm90", **rest):
    """The matrix of a machine that has one cell."""
    found = report.record([run.Result(cell("fwd.bf16.d64.full", arch), status, **rest)], quick=False)
    found["runs"][0]["gpu"] = f"{arch} {status}"
    return found


def test_the_machine_that_knows_most_of_a_cell_is_believed():
    refused, compiled = one_cell(run.REFUSED, reason="no compiler"), one_cell(run.COMPILED, registers=168, local=0)
    passed, failed = one_cell(run.PASSED, share=0.3, multiple=1.25, worst="out", calls=4), one_cell(run.FAILED)
    for matrices, status in (
        ([compiled, passed], run.PASSED),
        ([passed, compiled, refused], run.PASSED),
        ([passed, failed], run.FAILED),
        ([refused, compiled], run.COMPILED),
    ):
        found = merge.assembled([*matrices, one_cell(run.PASSED, "cpu")])
        first, second = found["cells"]
        assert (first["status"], first["arch"], second["arch"]) == (status, "sm90", "cpu")  # the order of the catalog
        assert [found["runs"][one["run"]]["gpu"] for one in (first, second)] == [f"sm90 {status}", "cpu passed"]
        assert sum(found["counts"].values()) == 2 and report.exit_status(found) == (status == run.FAILED)
    again = merge.assembled([one_cell(run.COMPILED, "sm80"), merge.assembled([compiled, passed])])
    assert [again["runs"][one["run"]]["gpu"] for one in again["cells"]] == ["sm90 passed", "sm80 compiled-only"]


def test_only_what_no_other_machine_has_is_left(tmp_path):
    mine = [cell("fwd.bf16.d64.full", arch) for arch in ("sm90", "sm80", "cpu")]
    left = lambda *added, here=(9, 0): [one.arch for one in merge.left(mine, added, here)]
    assert left() == ["sm90", "sm80", "cpu"]
    assert left(one_cell(run.COMPILED), one_cell(run.COMPILED, "sm80")) == ["sm90", "cpu"]  # it runs here
    assert left(one_cell(run.COMPILED), here=None) == ["sm80", "cpu"]
    assert left(one_cell(run.PASSED), one_cell(run.FAILED, "cpu")) == ["sm80"]
    assert left(one_cell(run.REFUSED, "sm80"), here=None) == ["sm90", "sm80", "cpu"]  # there was no compiler


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda found: found.update(schema="flashattn_hopper.matrix/1"), "its schema is 'flashattn_hopper.matrix/1'"),
        (lambda found: found["cells"][0].update(id="cpu/other.forward/x"), "cpu/other.forward/x is no cell"),
    ],
)
def test_a_file_of_something_else_is_not_added(change, message, tmp_path):
    found, path = one_cell(run.PASSED), tmp_path / "m.json"
    report.write_json(found, path)
    assert merge.read(path) == found
    change(found)
    report.write_json(found, path)
    with pytest.raises(ValueError, match=message):
        merge.read(path)
    path.write_text("[]")
    with pytest.raises(ValueError, match="its schema is None"):
        merge.read(path)


# The command


@pytest.fixture
def command(monkeypatch, at_hand):
    """The command on three cells."""
    cli = pytest.importorskip("flashattn_hopper.matrix.cli")
    testing = pytest.importorskip("typer.testing")
    few = ("fwd.bf16.d64.causal", "bwd.fp32.d64.window", "fwd.fp64.d64.full")

    def chosen(archs, quick, here, kernels):
        cells.cells(archs, True, kernels=kernels)  # what it refuses
        return [cell(slug) for slug in few]

    monkeypatch.setattr(cli, "cells", chosen)
    return lambda *args: testing.CliRunner().invoke(cli.app, ["matrix", *map(str, args)])


def test_the_command_writes_both_files(command, tmp_path):
    result = command("--arch", "cpu", "--quick", "--json", tmp_path / "m.json", "--html", tmp_path / "m.html")
    assert result.exit_code == 0, result.output
    assert "3 passed" in result.output and "reference.backward" in result.output
    assert json.loads((tmp_path / "m.json").read_text())["counts"]["passed"] == 3
    assert (tmp_path / "m.html").read_text().startswith("<!DOCTYPE html>")


def test_a_failed_cell_is_exit_status_1(command, monkeypatch):
    monkeypatch.setattr(run, "hopper_attention", broken(lambda out, lse: (out * 1.05, lse)))
    result = command("--quick")
    assert result.exit_code == 1 and "3 failed" in result.output


def test_the_command_adds_what_another_machine_ran(command, tmp_path):
    report.write_json(one_cell(run.COMPILED, registers=168, local=0), tmp_path / "other.json")
    first = command("--quick", "--json", tmp_path / "m.json", "--add", tmp_path / "other.json", "--revision", "abc")
    assert first.exit_code == 0 and "3 passed, 1 compiled-only" in first.output, first.output
    found = json.loads((tmp_path / "m.json").read_text())
    assert [(one["arch"], one["run"]) for one in found["cells"]] == [("sm90", 1), *[("cpu", 0)] * 3]
    assert found["runs"][0]["revision"] == "abc"
    second = command("--quick", "--add", tmp_path / "m.json", "--html", tmp_path / "m.html")
    assert "matrix  0 cells" in second.output and "3 passed, 1 compiled-only" in second.output
    text = (tmp_path / "m.html").read_text()
    assert "1 of sm90" in text and "3 of cpu" in text and text.count("<dl>") == 2


@pytest.mark.parametrize(
    "args",
    [
        ("--arch", "sm77"),
        ("--kernel", "sm90.sideways"),
        ("--json", "/no/such/folder/m.json"),
        ("--processes", "0"),
        ("--add", "/no/such/m.json"),
    ],
)
def test_a_request_that_is_refused_is_exit_status_2(command, args):
    result = command(*args)
    assert result.exit_code == 2 and "Traceback" not in result.output
