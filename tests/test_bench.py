"""The benchmark harness without a GPU: what a suite asks, what a row says, and what is drawn from it."""

import collections
import ctypes
import dataclasses
import importlib
import importlib.util
import itertools
import json
import math
import pathlib
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from flashattn_hopper import planner
from flashattn_hopper.kernels.sm90.specs import FORWARD
from flashattn_hopper.spec.mask import Band, Seqlens
from flashattn_hopper.spec.problem import Traits
from flashattn_hopper.spec.tile import FwdTile, Row, TileTable

BENCH = pathlib.Path(__file__).resolve().parents[1] / "bench"


@pytest.fixture(scope="module")
def bench():
    """The modules of bench/, which is a folder of scripts and no package."""
    names = (
        *("suites", "timing", "peers", "record", "plot", "tasks", "memory", "fp8", "quantizer"),
        *("run", "tune", "host", "curves"),
    )
    sys.path.insert(0, str(BENCH))
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    finally:
        sys.path.remove(str(BENCH))
        for name in names:
            sys.modules.pop(name, None)


# ------------------------------------------------------------------------------------------------------ suites
def test_forward_suite_holds_tokens_and_hidden_size(bench):
    cells = bench.suites.SUITES["forward"].cells
    assert {c.batch * c.seqlen for c in cells} == {16384}
    swept = [c for c in cells if c.headdim in (64, 128, 256) and c.dtype == "bf16" and c.num_heads_q == c.num_heads_kv]
    assert {c.headdim * c.num_heads_q for c in swept} == {2048}
    slugs = {(c.traits.slug, c.seqlen) for c in cells}
    for headdim in (64, 128, 256):
        for mask in ("full", "causal"):
            for seqlen in (512, 1024, 2048, 4096, 8192, 16384):
                assert (f"fwd.bf16.d{headdim}.{mask}", seqlen) in slugs
    for slug in ("d128.causal.gqa", "d96.full", "d192.causal", "d192x128.full"):
        assert (f"fwd.bf16.{slug}", 4096) in slugs
    assert ("fwd.bf16.d128.window", 16384) in slugs and ("fwd.fp16.d128.causal", 4096) in slugs
    assert all(Traits.parse(c.traits.slug) == c.traits for c in cells)


@pytest.mark.parametrize(
    ("key", "flops"),
    [
        ("fwd.bf16.d128.full b1 s16384 h16:16", 2**41),  # 4 * 16 heads * 2^28 pairs * 128
        ("fwd.bf16.d128.causal b1 s16384 h16:16", 2**40),
        ("fwd.bf16.d64.full b32 s512 h32:32", 2**36),
        ("fwd.bf16.d192x128.full b4 s4096 h16:16", 2 * 4 * 16 * 4096**2 * 320),
        ("fwd.bf16.d128.causal.gqa b4 s4096 h32:8", 4 * 4 * 32 * 4096**2 * 128 / 2),  # query heads count
        ("fwd.bf16.d128.window b1 s16384 h16:16", 4 * 16 * 128 * (1024 * 1025 // 2 + 15360 * 1024)),
    ],
)
def test_flops_by_hand(bench, key, flops):
    (cell,) = (c for c in bench.suites.SUITES["forward"].cells if c.key == key)
    assert cell.flops == flops


def test_backward_suite(bench):
    cells = bench.suites.SUITES["backward"].cells
    assert {c.batch * c.seqlen for c in cells} == {16384} and {c.dtype for c in cells} == {"bf16"}
    found = {(c.traits.slug, c.seqlen) for c in cells}
    for headdim in (64, 128, 256):
        for mask in ("full", "causal"):
            for seqlen in (512, 1024, 2048, 4096, 8192, 16384):
                assert (f"bwd.bf16.d{headdim}.{mask}", seqlen) in found
            for seqlen in (1024, 4096):
                assert (f"bwd.bf16.d{headdim}.{mask}.deterministic", seqlen) in found
    for slug in ("d128.causal.gqa", "d96.full", "d192.causal", "d192x128.full"):
        assert (f"bwd.bf16.{slug}", 4096) in found
    assert ("bwd.bf16.d128.window", 16384) in found
    by_key = {c.key: c for c in cells}
    assert by_key["bwd.bf16.d128.full b1 s16384 h16:16"].flops == 5 * 2**40  # 2.5 times the forward's 2^41
    pairs = 4 * 16 * 4096**2
    assert by_key["bwd.bf16.d192x128.full b4 s4096 h16:16"].flops == 2 * pairs * (3 * 192 + 2 * 128)


@pytest.mark.parametrize("band", [Band(), Band(right=0), Band(2, 0), Band(1, 1), Band(None, -2), Band(0, 3)])
@pytest.mark.parametrize("seqlens", [Seqlens(4, 4), Seqlens(3, 7), Seqlens(7, 3)])
def test_visible_pairs_is_the_masks_own_count(bench, band, seqlens):
    kept = sum(bool(band.keep(i, j, seqlens)) for i in range(seqlens.q) for j in range(seqlens.k))
    assert bench.suites.visible_pairs(band, seqlens) == kept


def test_a_window_counts_the_query_itself(bench):
    assert bench.suites.visible_pairs(bench.suites.window(2), Seqlens(4, 4)) == 1 + 2 + 2 + 2


def test_select(bench):
    suite = bench.suites.SUITES["forward"]
    assert suite.select() == suite.cells
    quick = suite.select(quick=True)
    assert {c.seqlen for c in quick} == {512, 1024, 4096, 16384}
    assert {c.traits.slug for c in quick} == {c.traits.slug for c in suite.cells}
    only = suite.select(only="d128.causal b16 s1024")
    assert [c.key for c in only] == ["fwd.bf16.d128.causal b16 s1024 h16:16"]
    assert suite.select(only="d999") == ()
    assert {c.key for c in suite.cells} - {c.key for c in suite.select(skip="d256")} == {
        c.key for c in suite.cells if c.headdim == 256
    }


def test_a_suite_refuses_a_cell_twice_or_of_another_phase(bench):
    cell = bench.suites.Cell(1, 64, 1, 1, 64, 64)
    with pytest.raises(ValueError, match="share a key"):
        bench.suites.Suite("x", "fwd", (cell, cell))
    with pytest.raises(ValueError, match="another phase"):
        bench.suites.Suite("x", "bwd", (cell,))


def test_every_suite_has_a_task_and_settings(bench):
    for suite in bench.suites.SUITES.values():
        assert all(bench.tasks.TASKS[cell.task] for cell in suite.cells)
        assert len(bench.run.OF_SUITE.get(suite.name, bench.run.SETTINGS[suite.phase])) == 2


# ------------------------------------------------------------------------------------------------------ timing
def brief(bench, rounds=2):
    return bench.timing.clock_for(
        "cpu", bench.timing.Settings(rounds=rounds, warmup_ms=0.01, rep_ms=0.05, rest_s=0.0, flush_bytes=4)
    )


def test_contestants_take_turns_and_the_first_one_changes(bench, monkeypatch):
    order = []
    monkeypatch.setattr(bench.timing, "measure", lambda fn, clock: [fn()])
    calls = {name: (lambda name=name: order.append(name) or 1.0) for name in "abc"}
    found = bench.timing.interleave(calls, brief(bench, rounds=3))
    assert "".join(order) == "abccbabca"
    assert all(len(t.rounds) == len(t.spans) == 3 for t in found.values())


@pytest.mark.parametrize("count", range(1, 8))
def test_everyone_follows_everyone_else_equally_often(bench, count):
    rows = bench.timing.orders(count)
    assert all(sorted(row) == list(range(count)) for row in rows)
    pairs = collections.Counter(pair for row in rows for pair in itertools.pairwise(row))
    assert len(pairs) == count * (count - 1) and len(set(pairs.values())) <= 1
    assert {row[0] for row in rows} == set(range(count))
    if count > 2:  # of three contestants five pairs of six is the most that three rounds can have
        early = [pair for row in rows[:3] for pair in itertools.pairwise(row)]
        assert len(set(early)) == len(early) - (count == 3)


def test_a_contestant_that_breaks_later_is_left_out(bench):
    left = iter([None])

    def breaks():
        next(left)

    found = bench.timing.interleave({"good": lambda: None, "bad": breaks}, brief(bench))
    assert isinstance(found["bad"], StopIteration) and len(found["good"].rounds) == 2


def test_median_is_over_rounds_and_percentiles_over_samples(bench):
    taken = bench.timing.Timing(rounds=[[1.0, 2.0, 3.0], [2.0, 4.0, 9.0], [8.0, 8.0, 8.0]])
    assert taken.ms == 4.0  # of 2, 4, 8
    assert taken.percentile(0) == 1.0 and taken.percentile(100) == 9.0 and taken.percentile(50) == 4.0
    assert bench.timing.percentile([1.0, 2.0], 20) == pytest.approx(1.2)
    assert bench.timing.tflops(2e12, 4.0) == 500.0


# --------------------------------------------------------------------------------------------------- contestants
def contestant(bench, name, change=lambda out: out):
    """Exact attention by torch on the CPU, its output then changed."""

    class Fake(bench.peers.Contestant):
        def native(self, q, k, v, causal=False, window=(None, None), scale=None):
            left, right = window
            band = Band(left, 0 if causal else right)
            seqlens = Seqlens(q.shape[1], k.shape[1])
            keep = band.keep(torch.arange(seqlens.q)[:, None], torch.arange(seqlens.k), seqlens)
            q, k, v = (x.transpose(1, 2).double() for x in (q, k, v))
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
            out = (q @ k.mT * (scale or q.shape[-1] ** -0.5)).masked_fill(~keep, -math.inf).softmax(-1) @ v
            return change(out.transpose(1, 2).bfloat16())

    made = Fake()
    made.name = name
    return made


SMALL = {"batch": 2, "seqlen": 40, "num_heads_q": 4, "num_heads_kv": 2, "headdim": 16, "headdim_v": 8}


def cell_of(bench, band, **changes):
    return bench.suites.Cell(**(SMALL | changes), band=band)


@pytest.mark.parametrize("band", [Band(), Band(right=0), Band(7, 0)], ids=lambda b: b.kind)
def test_error_against_float64_sees_every_kind_of_mistake(bench, band):
    torch.manual_seed(0)
    cell = cell_of(bench, band)
    ops = bench.tasks.operands(cell, "cpu")
    right = contestant(bench, "right").call(*ops, cell.causal, cell.window_size, cell.softmax_scale)
    worst, relative = bench.tasks.forward_error(cell, ops, right, heads=8, rows=16)
    assert 0 < relative < 5e-3 and 0 < worst < 0.05
    wrong_heads = right.roll(1, dims=2)
    assert bench.tasks.forward_error(cell, ops, wrong_heads)[1] > 0.1
    wrong_last_row = right.clone()
    wrong_last_row[:, -1] += 1
    assert bench.tasks.forward_error(cell, ops, wrong_last_row)[1] > 0.1
    nans = right.clone()
    nans[:, 0] = math.nan
    assert all(map(math.isnan, bench.tasks.forward_error(cell, ops, nans)))
    with pytest.raises(ValueError, match="output of shape"):
        bench.tasks.forward_error(cell, ops, right.transpose(1, 2))


def broken(out):
    raise RuntimeError("no such kernel\nsecond line")


def test_a_cell_from_measurement_to_file_and_table(bench, tmp_path):
    torch.manual_seed(0)
    cell = cell_of(bench, Band(right=0))
    fakes = [
        contestant(bench, "ours"),
        contestant(bench, "fa3"),
        contestant(bench, "wrong", lambda out: out * 1.5),
        contestant(bench, "nan", lambda out: out * math.nan),
        contestant(bench, "broken", broken),
    ]
    rows = bench.run.run_cell(
        cell, fakes, brief(bench), "cpu", ceiling=1e-3, describe=lambda *_: {"kernel": "sm90.forward", "tile": "T"}
    )
    ours, fa3, wrong, nan, bad = rows
    assert ours["slug"] == "fwd.bf16.d16x8.causal.gqa" and (ours["heads"], ours["kv_heads"]) == (4, 2)
    assert ours["kernel"] == "sm90.forward" and "kernel" not in fa3
    for row in (ours, fa3):
        assert 0 < row["p20"] <= row["p80"] and row["ms"] > 0 and row["rel_error"] < 5e-3
        assert row["tflops"] == pytest.approx(cell.flops / row["ms"] / 1e9, abs=0.06)
    assert "wrong result: relative error 5.0e-01" in wrong["failed"] and "nan" in nan["failed"]
    assert bad["failed"] == "RuntimeError: no such kernel"
    assert not any("tflops" in row for row in (wrong, nan, bad))
    # Rates this low round to 0.0: give the table numbers to show.
    ours["tflops"], fa3["tflops"] = 300.0, 240.0
    results = bench.record.environment("cpu", "abc+dirty") | {"suite": "forward", "rows": rows}
    path = bench.record.save(results, bench.record.path_for(tmp_path, "NVIDIA H200", "forward"))
    assert path == tmp_path / "nvidia-h200" / "forward.json"
    assert bench.record.load(path) == json.loads(json.dumps(results))
    assert [results["revision"], results["dirty"]] == ["abc", True]
    line = bench.run.cell_line(rows)
    assert "ours    300" in line and "ours/best 1.25" in line and "broken: RuntimeError: no such kernel" in line
    table = bench.run.table(rows)
    assert table.splitlines()[1].split() == [
        *("fwd.bf16.d16x8.causal.gqa", "2", "40", "4:2", "300", "240", "–", "–", "–", "1.25")
    ]
    assert "geometric mean 1.250, ahead in 1 of 1" in table


def test_ours_runs_through_the_public_function(bench):
    torch.manual_seed(0)
    for band in (Band(right=0), Band(7, 0)):
        cell = cell_of(bench, band)
        (row,) = bench.run.run_cell(cell, [bench.peers.OURS], brief(bench), "cpu", describe=bench.run.ours_ran)
        assert row["rel_error"] < 1e-2 and row["samples"] >= 2
        assert (row["kernel"], row["tile"]) == ("reference.forward", None)


def test_a_file_is_never_half_written_and_other_schemas_are_refused(bench, tmp_path):
    path = bench.record.save({"schema": 1, "rows": []}, tmp_path / "x.json")
    assert bench.record.load(path) == {"schema": 1, "rows": []}
    with pytest.raises(ValueError, match="not JSON compliant"):
        bench.record.save({"schema": 1, "rows": [{"ms": math.nan}]}, path)
    assert bench.record.load(path)["rows"] == []
    path.write_text('{"schema": 0}')
    with pytest.raises(ValueError, match="schema 0"):
        bench.record.load(path)


def test_absent_peers_say_why(bench, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    class Absent(bench.peers.Contestant):
        name, needs = "fa9", ("no_such_module_fa9",)

    monkeypatch.setitem(bench.peers.PEERS, "fa9", Absent())
    ready, said = bench.run.contestants_for("cudnn,fa9")
    assert said["cudnn"] == "unavailable: no CUDA device"
    assert said["fa9"].startswith("unavailable: import no_such_module_fa9: ModuleNotFoundError")
    assert not {"cudnn", "fa9"} & {c.name for c in ready}
    with pytest.raises(ValueError, match="unknown peer fa7; known are cudnn"):
        bench.peers.parse("fa3,fa7")
    assert bench.peers.parse("none") == ()


def test_without_a_gpu_the_commands_say_so(bench, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.run.main(["forward", "backward", "memory", "fp8", "quantizer"]) == 2
    assert bench.tune.main(["--headdim", "64"]) == 2
    assert bench.host.main([]) == 2
    assert capsys.readouterr().err.count("torch sees none here") == 3


def test_part_of_a_suite_never_replaces_the_whole(bench):
    name = bench.run.file_name
    assert len({name("forward", quick, only) for quick in (False, True) for only in ("", "d64")}) == 4
    assert name("forward", False, "") == "forward"


# ------------------------------------------------------------------------------------------------------ backward
class Spoiled(torch.autograd.Function):
    """The identity, with gradients changed on the way back."""

    @staticmethod
    def forward(ctx, x, change):
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.change(grad), None


def trainee(bench, name, which=0, change=None):
    """A contestant whose gradient of q, k or v (`which` of them) is changed."""
    made = contestant(bench, name)
    exact = made.native
    if change:

        def native(*tensors, **options):
            tensors = list(tensors)
            tensors[which] = Spoiled.apply(tensors[which], change)
            return exact(*tensors, **options)

        made.native = native
    return made


def backward_cell(bench, band, **changes):
    return cell_of(bench, band, phase="bwd", **changes)


@pytest.mark.parametrize("band", [Band(), Band(right=0), Band(7, 0)], ids=lambda b: b.kind)
def test_exact_gradients_are_autograds(bench, band):
    torch.manual_seed(0)
    cell = backward_cell(bench, band)
    ops = bench.tasks.operands(cell, "cpu")
    q, k, v = (x.double().requires_grad_() for x in ops)
    dout = torch.randn(2, 40, 4, 8, dtype=torch.bfloat16)
    keep = band.keep(torch.arange(40)[:, None], torch.arange(40), Seqlens(40, 40))
    wide = [x.repeat_interleave(2, 2).transpose(1, 2) for x in (k, v)]
    scores = (q.transpose(1, 2) @ wide[0].mT * 16**-0.5).masked_fill(~keep, -math.inf)
    out = (scores.softmax(-1) @ wide[1]).transpose(1, 2)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout.double())
    for rows in (7, 1024):  # several chunks, the last one short; one chunk
        mine = bench.tasks.exact_gradients(cell, ops, dout, 1, 1, rows)
        torch.testing.assert_close(mine.dq, dq[1, :, 2:4])
        torch.testing.assert_close(mine.dk, dk[1, :, 1])
        torch.testing.assert_close(mine.dv, dv[1, :, 1])


def row_off(index):
    def change(grad):
        grad = grad.clone()
        grad[:, index] = 0
        return grad

    return change


def nan_somewhere(grad):
    grad = grad.clone()
    grad[0, 0, 0, 0] = math.nan  # of the first sequence and head, which the sample need not have
    return grad


def test_wrong_gradients_are_not_timed(bench):
    torch.manual_seed(0)
    cell = backward_cell(bench, Band(right=0), seqlen=200)
    fakes = {
        "ours": trainee(bench, "ours"),
        "scaled": trainee(bench, "scaled", 0, lambda grad: grad * 1.1),
        "heads": trainee(bench, "heads", 1, lambda grad: grad.roll(1, dims=2)),
        "last": trainee(bench, "last", 0, row_off(-1)),
        "early": trainee(bench, "early", 1, row_off(3)),
        "nan": trainee(bench, "nan", 2, nan_somewhere),
        "broken": contestant(bench, "broken", broken),
        "detached": contestant(bench, "detached", torch.Tensor.detach),
    }
    rows = bench.run.run_cell(cell, list(fakes.values()), brief(bench), "cpu", ceiling=1e-3)
    ours, *others = rows
    assert ours["slug"] == "bwd.bf16.d16x8.causal.gqa" and ours["rel_error"] < 1e-2
    assert ours["rel_error"] == max(ours[name] for name in ("dq", "dk", "dv")) <= ours["block_error"] < 3e-2
    assert ours["tflops"] == pytest.approx(cell.flops / ours["ms"] / 1e9, abs=0.06)
    assert "extra_bytes" not in ours  # only CUDA counts
    said = {row["contestant"]: row["failed"] for row in others}
    assert said["scaled"].startswith("wrong result: relative error of dq 1.0e-01")
    assert "relative error of dk" in said["heads"]
    assert said["nan"] == "wrong result: dv is not finite everywhere"
    assert said["early"].startswith("wrong result: relative error")
    assert said["last"].startswith("wrong result: relative error")
    assert said["broken"] == "RuntimeError: no such kernel" and said["detached"] == "RuntimeError: records no graph"
    assert not any("tflops" in row for row in others)


def test_one_wrong_row_of_many_is_found(bench):
    cell = backward_cell(bench, Band(), batch=1, seqlen=4096, num_heads_q=1, num_heads_kv=1)
    exact = bench.tasks.Gradients(*(torch.randn(4096, *shape) for shape in ((1, 16), (16,), (8,))))
    grads = bench.tasks.Gradients(exact.dq[None], exact.dk[None, :, None].clone(), exact.dv[None, :, None])
    grads.dk[0, 1000] = 0
    errors = bench.tasks.gradient_errors(cell, grads, {(0, 0): exact})
    assert errors["dq"] == errors["dv"] == 0 and errors["dk"] < 2e-2 < 6e-2 < errors["block_error"]
    assert math.isnan(bench.tasks.worst_of([1.0, math.nan, 2.0]))


def test_the_backward_alone_is_timed(bench):
    counted = contestant(bench, "counted")
    forwards, exact = [], counted.native
    counted.native = lambda *args: forwards.append(1) or exact(*args)
    task = bench.tasks.BackwardTask(backward_cell(bench, Band()), "cpu")
    call = task.bind(counted)
    assert len(forwards) == 1
    first, again = call(), call()
    assert len(forwards) == 1
    assert all(torch.equal(a, b) for a, b in zip(first, again))


def test_deterministic_cells_reach_those_who_offer_it(bench, monkeypatch):
    task = bench.tasks.BackwardTask(backward_cell(bench, Band(), num_heads_kv=4, deterministic=True), "cpu")
    assert task.cell.traits.slug == "bwd.bf16.d16x8.full.deterministic"
    _, _, why = bench.run.first_call(task, contestant(bench, "peer"))
    assert why == "NotImplementedError: peer: no deterministic backward"
    seen = []
    monkeypatch.setattr(bench.peers.Fa4, "native", lambda self, q, k, v, *args, **options: seen.append(options) or q)
    bench.peers.Fa4().graph(*task.ops, deterministic=True), bench.peers.Fa4().graph(*task.ops)
    assert seen == [{"deterministic": True}, {}]
    with bench.peers.Fa2().session(deterministic=True):
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
    assert not torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory
    with bench.peers.Fa2().session():
        assert not torch.are_deterministic_algorithms_enabled()


def test_peers_without_backward_say_so(bench, monkeypatch):
    monkeypatch.setattr(bench.peers.Fa3, "needs", ())
    ready, said = bench.run.contestants_for("fa3", "bwd")
    assert said["fa3"] == "unavailable: the package fa3-fwd has no backward" and "fa3" not in {c.name for c in ready}
    assert "fa3" in {c.name for c in bench.run.contestants_for("fa3", "fwd")[0]}


def test_the_peer_that_cmake_builds(bench, monkeypatch, tmp_path):
    """Absent without its library, named when it cannot load, and asked only for what CUTLASS's example computes."""
    peer, seen = bench.peers.Cutlass(), []
    monkeypatch.setattr(peer, "library", tmp_path / "libcutlass_fmha.so")
    assert "no libcutlass_fmha.so; cmake -DFLASHATTN_HOPPER_PEER=ON builds it" in peer.available()
    peer.library.write_text("no library")
    assert peer.available().startswith("unavailable: OSError: ")

    class Loaded:
        answer = 0

        def cutlass_fmha_forward(self, *arguments):
            seen.append(arguments)
            return self.answer

    peer.loaded = Loaded()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: type("Stream", (), {"cuda_stream": 7}))
    q, k = torch.zeros(2, 128, 4, 64, dtype=torch.bfloat16), torch.zeros(2, 256, 4, 64, dtype=torch.bfloat16)
    out = peer.call(q, k, k, scale=0.125)
    (call,) = seen
    assert call[:6] == (False, 2, 4, 128, 256, 64) and call[-1] == 7
    assert call[6:10] == (q.data_ptr(), k.data_ptr(), k.data_ptr(), out.data_ptr()) and out.shape == q.shape
    peer.loaded.answer = 1
    with pytest.raises(RuntimeError, match="refuses these lengths"):
        peer.call(q, k, k)
    gqa = k[:, :, :2].contiguous()
    for arguments, options in (
        ((q, k, k), {"causal": True}),
        ((q, k, k), {"window": (3, 0)}),
        ((q, k, k), {"scale": 1.0}),
        ((q, gqa, gqa), {}),
        ((q.half(), k.half(), k.half()), {}),
        ((q.transpose(1, 2), q.transpose(1, 2), q.transpose(1, 2)), {}),
    ):
        with pytest.raises(NotImplementedError):
            peer.call(*arguments, **options)
    assert len(seen) == 2


def test_ours_trains_through_the_public_function(bench, monkeypatch):
    torch.manual_seed(0)
    (asked,) = bench.run.run_cell(backward_cell(bench, Band()), [bench.peers.OURS], brief(bench), "cpu")
    # Asked for by name: never the reference in silence.
    assert asked["failed"] == "NotImplementedError: no kernel runs fwd.bf16.d16x8.full.gqa on cpu"
    monkeypatch.setattr(bench.peers.Ours, "train_backend", "auto")
    for band, deterministic in ((Band(right=0), False), (Band(7, 0), True)):
        cell = backward_cell(bench, band, deterministic=deterministic)
        (row,) = bench.run.run_cell(cell, [bench.peers.OURS], brief(bench), "cpu", describe=bench.run.ours_ran)
        assert row["rel_error"] < 1e-2 and row["kernel"] == "reference.backward"
    with pytest.raises(RuntimeError, match="records no graph"):
        contestant(bench, "detached", torch.Tensor.detach).graph(*bench.tasks.operands(cell, "cpu"))


def test_our_variants_of_a_backward_are_both_compiled(bench, monkeypatch):
    monkeypatch.setattr(planner, "capability_of", lambda device: (9, 0))
    for cell in bench.suites.SUITES["backward"].cells:
        forward, backward = bench.run.ours_plans(cell, "cuda")
        assert (forward.spec.name, backward.spec.name) == ("sm90.forward", "sm90.backward")
        assert backward.traits.deterministic in (False, cell.deterministic)
    assert len(bench.run.ours_plans(bench.suites.SUITES["forward"].cells[0], "cuda")) == 1


def test_sm80_suites_ask_for_the_kernels_of_older_gpus(bench, monkeypatch):
    monkeypatch.setattr(planner, "capability_of", lambda device: (9, 0))
    for name, phase in (("sm80_forward", "fwd"), ("sm80_backward", "bwd")):
        suite = bench.suites.SUITES[name]
        assert {cell.headdim for cell in suite.cells} == {64, 128, 256} and suite.phase == phase
        ours, *_ = bench.peers.lineup("fa2", suite.backend)
        assert (ours.name, ours.backend, ours.train_backend) == ("ours", "sm80", "sm80")
        for cell in suite.cells:
            plans = bench.run.ours_plans(cell, "cuda", suite.backend)
            assert {spec.name.split(".")[0] for spec, _, _ in plans} == {"sm80"}
    (ours,) = bench.peers.lineup("none")
    assert (ours.backend, ours.train_backend) == ("auto", "sm90")


class FakeMemory:
    """torch.cuda's counters, moved by hand."""

    def __init__(self, monkeypatch, bench):
        self.now = self.peak = 1000
        for name in ("synchronize", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.cuda, name, lambda *_: None)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda *_: self.now)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *_: self.peak)


def test_extra_memory_is_the_peak_beside_inputs_and_results(bench, monkeypatch):
    counters = FakeMemory(monkeypatch, bench)

    def step():
        counters.peak = 1000 + 5000
        return torch.zeros(100), torch.zeros(200, dtype=torch.bfloat16)

    assert bench.tasks.peak_beside_results(step, "cuda") == 5000 - 400 - 400
    assert bench.tasks.peak_beside_results(step, "cpu") is None


def small_memory_cells(bench, seqlens=(64, 128, 256)):
    make = lambda s, d: bench.suites.Cell(1, s, 2, 2, 16, 16, Band(right=0), phase="bwd", deterministic=d)
    return [make(seqlen, deterministic) for deterministic in (False, True) for seqlen in seqlens]


def test_memory_suite(bench, monkeypatch, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    cells = bench.memory.cells()
    assert [c.seqlen for c in cells] == [2**n for n in range(11, 18)] * 2
    assert {c.traits.slug for c in cells} == {"bwd.bf16.d128.causal", "bwd.bf16.d128.causal.deterministic"}
    assert bench.memory.dense_bytes(cells[0]) == 2 * 2048 * 2048 * 2
    assert bench.memory.operand_bytes(cells[0]) == 8 * 2048 * 2 * 128 * 2  # q, k, v, out and their gradients
    monkeypatch.setattr(bench.memory, "cells", lambda quick: small_memory_cells(bench))
    monkeypatch.setattr(bench.peers.Ours, "train_backend", "auto")
    counted = bench.tasks.BackwardTask.extra_bytes
    # The reference on a CPU has no counter: run its call all the same, and stand in a linear number.
    monkeypatch.setattr(
        bench.tasks.BackwardTask, "extra_bytes", lambda self, c: counted(self, c) or 2**20 * self.cell.seqlen
    )
    options = SimpleNamespace(quick=False, seed=0, revision="abc", out=tmp_path)
    assert bench.run.run_memory(options, "cpu") == 0
    said = capsys.readouterr().out
    assert said.count("MiB, dense softmax") == 6 and "reference.backward" in said
    (path,) = tmp_path.glob("*/memory.json")
    rows = bench.record.load(path)["rows"]
    assert [row["extra_bytes"] >> 20 for row in rows] == [64, 128, 256] * 2
    table = bench.plot.markdown_table(path)
    assert "| 128 | 128.0 | 128.0 | 0.1 | 0.1 |" in table and "revision abc" in table
    figures = [bench.plot.draw(bench.plot.load(path), tmp_path / where)[0] for where in "ab"]
    svg = figures[0].read_text()
    assert figures[0].name == "memory.svg" and svg == figures[1].read_text()
    for text in ("dense softmax", "flashattn_hopper", "deterministic", ">256<", "MiB"):
        assert text in svg, text
    assert bench.plot.draw({"suite": "memory", "rows": []}, tmp_path) == []


def test_memory_rows_keep_failures(bench, monkeypatch):
    monkeypatch.setattr(bench.peers.Ours, "train_backend", "auto")
    cell = small_memory_cells(bench)[0]
    row = bench.memory.row(cell, trainee(bench, "nan", 2, nan_somewhere), "cpu", bench.run.ours_ran)
    assert row["failed"] == "ValueError: dv is not finite everywhere" and row["dense_bytes"] == 2 * 64 * 64 * 2
    assert "not finite" in bench.memory.line(row | bench.run.identity(cell))


# ----------------------------------------------------------------------------------------------------------- fp8
def test_fp8_suite(bench):
    cells = bench.suites.SUITES["fp8"].cells
    assert {c.batch * c.seqlen for c in cells} == {16384} and {c.dtype for c in cells} == {"fp8"}
    found = {(c.slug, c.seqlen) for c in cells}
    for headdim in (64, 128, 256):
        for mask in ("full", "causal"):
            for seqlen in (2048, 4096, 8192, 16384):
                assert {(f"fwd.fp8.d{headdim}.{mask}{end}", seqlen) for end in ("", ".from_bf16")} <= found
    for cell in cells:
        half = bench.suites.Cell(**{f: getattr(cell, f) for f in SMALL}, band=cell.band)
        assert cell.flops == half.flops and cell.task == (cell.source or "codes")
    line = bench.fp8.lineup("cudnn,fa3,fa4,fa2")
    alone, source = cells[0], cells[-1]
    assert [c.name for c in line if c.takes(alone)] == ["ours", "ours_int8", "cudnn", "fa3"]
    assert [c.name for c in line if c.takes(source)] == ["ours", "bf16"]
    with pytest.raises(ValueError, match="unknown peer"):
        bench.fp8.lineup("fa9")


def test_fp8_variants_are_compiled_before_they_are_timed(bench, monkeypatch):
    monkeypatch.setattr("flashattn_hopper.planner.capability_of", lambda device: (9, 0))
    compiled = []
    monkeypatch.setattr("flashattn_hopper.jit.warmup", lambda variants: compiled.extend(variants))
    cells = bench.suites.SUITES["fp8"].select(only="d128.causal")
    bench.run.warm(cells, "cuda")
    names = {(spec.name, traits.slug) for spec, traits, *_ in compiled}
    assert names == {
        ("sm90.forward_fp8", "fwd.fp8.d128.causal"),
        ("sm90.forward_fp8", "fwd.fp8.d128.causal.int8_qk"),
        ("sm90.forward", "fwd.bf16.d128.causal"),
        ("sm90.quantize", "quantize.bf16.d128.hadamard.smooth_k"),
        ("sm90.quantize", "quantize.bf16.d128.hadamard.int8_qk.smooth_k"),
    }
    for cell in cells:
        ran = bench.run.ours_ran(cell, "cuda")
        assert ran["kernel"] == "sm90.forward_fp8" and ran["tile"].startswith("FwdTile(128, 128")


@pytest.fixture
def emulated(bench, monkeypatch):
    """The kernels' host side with PyTorch in their place, and FlashAttention-3's function by name."""
    from flashattn_hopper import quantize_fp8, reference_fp8, runner_fp8
    from flashattn_hopper.quantize import BlockScaled

    def quantize(q, k, v, int8_qk=True):
        scaled = quantize_fp8(q, k, v, qk_dtype="int8" if int8_qk else "fp8")
        return runner_fp8.from_scaled(*scaled)._replace(k_mean=scaled[1].mean)

    def bind(chosen, problem, dtype, device):
        def attend(codes, want_lse=True):
            scaled = runner_fp8.to_scaled(codes, dtype)
            return *reference_fp8.forward(*scaled, problem.band, problem.softmax_scale), None

        return attend

    def flash(q, k, v, softmax_scale, causal, q_descale, k_descale, v_descale):
        codes = zip((q, k, v), (q_descale, k_descale, v_descale), (None, None, None))
        codes = [BlockScaled(x, scale[..., None], rows, torch.bfloat16) for x, scale, rows in codes]
        return reference_fp8.forward(*codes, Band(right=0 if causal else None), softmax_scale)

    in_pytorch = SimpleNamespace(spec=SimpleNamespace(arch=None))
    monkeypatch.setattr(runner_fp8, "plan", lambda *_: in_pytorch)
    monkeypatch.setattr(runner_fp8, "bind", bind)
    monkeypatch.setattr(runner_fp8, "quantize", quantize)
    monkeypatch.setattr(bench.fp8, "BACKEND", "reference")
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", SimpleNamespace(flash_attn_func=flash))
    return runner_fp8


@pytest.mark.parametrize("band", [Band(), Band(right=0)], ids=lambda b: b.kind)
def test_fp8_cells_are_judged_by_float64_of_the_tensors(bench, emulated, band):
    torch.manual_seed(0)
    shape = {"batch": 2, "seqlen": 200, "num_heads_q": 4, "num_heads_kv": 4, "headdim": 32, "headdim_v": 32}
    line = bench.fp8.lineup("fa3")
    found = {}
    for source in ("", "from_bf16"):
        cell = bench.suites.Cell(**shape, band=band, dtype="fp8", source=source)
        here = [contestant for contestant in line if contestant.takes(cell)]
        rows = bench.run.run_cell(cell, here, brief(bench), "cpu")
        assert {row["slug"] for row in rows} == {cell.slug} and not any(row.get("failed") for row in rows)
        found |= {(row["contestant"], source): row for row in rows}
    errors = {who: row["rel_error"] for who, row in found.items()}
    alone, source = {(n, "") for n in ("ours", "ours_int8", "fa3")}, {(n, "from_bf16") for n in ("ours", "bf16")}
    assert set(errors) == alone | source
    assert 0.01 < errors["ours_int8", ""] < errors["ours", ""] < 0.08 and errors["fa3", ""] < 0.08
    assert 0.02 < errors["ours", "from_bf16"] < 0.08 and errors["bf16", "from_bf16"] < 5e-3


def test_a_wrong_fp8_kernel_is_not_timed(bench, emulated, monkeypatch):
    """V with its keys in another order, as a wrong layout would have it."""
    cell = bench.suites.Cell(1, 200, 2, 2, 32, 32, dtype="fp8")
    pack = emulated.pack_values
    monkeypatch.setattr(emulated, "pack_values", lambda v: pack(v.roll(1, 1)))
    row, *_ = bench.run.run_cell(cell, [bench.fp8.OURS], brief(bench), "cpu")
    assert "wrong result: relative error" in row["failed"]


def test_cudnns_graph_has_every_operand(bench, monkeypatch):
    """The calls of the frontend that are made, and that the output's own scale is undone."""
    seen = {}

    class Tensor(SimpleNamespace):
        def __getattr__(self, name):
            return lambda value: seen.setdefault("set", []).append((self.index, name, value)) or self

        __hash__ = object.__hash__

    class Graph:
        def __init__(self, **options):
            self.tensors = []
            seen["options"] = options

        def tensor(self, dim, stride, data_type):
            self.tensors.append(Tensor(index=len(self.tensors), shape=dim, steps=stride, kind=data_type))
            return self.tensors[-1]

        def sdpa_fp8(self, *operands, **options):
            seen["call"] = [x.index for x in operands], options
            return [Tensor(index=name) for name in ("out", "stats", "amax_s", "amax_o")]

        def get_workspace_size(self):
            return 8

        def execute(self, tensors, space, handle):
            by = {x.index: value for x, value in tensors.items()}
            q, k, v = (by[i].float() * by[3 + i] for i in range(3))
            exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)
            by["out"].copy_((exact * by[8]).to(torch.float8_e4m3fn))

        def __getattr__(self, name):  # validate, build_operation_graph, ...
            return lambda *_: seen.setdefault("built", []).append(name)

    cudnn = SimpleNamespace(
        pygraph=Graph,
        create_handle=lambda: "handle",
        set_stream=lambda handle, stream: None,
        data_type=SimpleNamespace(FP8_E4M3="e4m3", FLOAT="float"),
        heur_mode=SimpleNamespace(A="a", FALLBACK="b"),
    )
    monkeypatch.setitem(sys.modules, "cudnn", cudnn)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    cell = bench.suites.Cell(2, 96, 3, 3, 32, 32, Band(right=0), dtype="fp8")
    monkeypatch.setattr(type(cell), "softmax_scale", 0.3)
    (row,) = bench.run.run_cell(cell, [bench.fp8.Cudnn()], brief(bench), "cpu")
    assert row.get("failed") is None and 0.02 < row["rel_error"] < 0.1
    assert seen["call"] == (list(range(9)), {"generate_stats": False, "attn_scale": 0.3, "use_causal_mask": True})
    assert ("out", "set_stride", [96 * 96, 32, 96, 1]) in seen["set"] and ("amax_s", "set_output", False) in seen["set"]
    assert seen["built"][-1] == "build_plans"


def test_quantizer_rows(bench, emulated, tmp_path):
    cell = bench.suites.Cell(2, 200, 4, 2, 32, 32, dtype="fp8")
    assert bench.quantizer.moved_bytes(cell) == 400 * 32 * (4 * 3 + (2 + 2) * 5)
    assert bench.quantizer.moved_bytes(cell, 1) == 400 * 32 * (4 + 2 + 2) * 3
    ours, copy = bench.quantizer.rows(cell, brief(bench), "cpu", emulated.quantize)
    assert (ours["slug"], ours["kv_heads"]) == ("quantize.bf16.d32.hadamard.smooth_k", 2)
    assert ours["share"] == round(copy["ms"] / ours["ms"], 3) and copy["gb_s"] > 0
    assert 0.02 < ours["rel_error"] < 0.03 and "rel_error" not in copy
    assert "share" in bench.quantizer.line([ours, copy])
    spoiled = lambda *tensors: emulated.quantize(*(x * 1.1 for x in tensors))
    (row,) = bench.quantizer.rows(cell, brief(bench), "cpu", spoiled)
    assert "wrong result" in row["failed"] and "failed" in bench.quantizer.line([row])
    assert len({c.key for c in bench.quantizer.cells()}) == 16
    head = {"suite": "quantizer", "date": "2026-11-29T1", "revision": "abc", "gpu": {"name": "NVIDIA H200"}}
    assert ours["least_share"] == pytest.approx(ours["share"] * 24 / 32, abs=1e-3)
    rows = [ours | {"gb_s": 3000, "share": 0.75, "least_share": 0.6}, copy | {"gb_s": 4000}]
    path = bench.record.save({"schema": 1, **head, "rows": rows}, tmp_path / "quantizer.json")
    assert "| 32 | 2 | 200 | 4:2 | 3000 | 4000 | 0.75 | 0.60 |" in bench.plot.markdown_table(path)
    assert bench.plot.draw(bench.plot.load(path), tmp_path) == []


def test_fp8_table_and_figures(bench, results_file, tmp_path):
    """int8 scores are ours: no peer to be ahead of. Tensors have panels of their own beside codes."""
    results, rows = bench.plot.load(results_file), []
    for seqlen in (2048, 4096):
        for source, rates in (
            ("", {"ours": 900.0, "ours_int8": 950.0, "fa3": 800.0, "cudnn": 850.0}),
            ("from_bf16", {"ours": 800.0, "bf16": 640.0}),
        ):
            cell = bench.suites.Cell(2, seqlen, 4, 4, 128, 128, dtype="fp8", source=source)
            rows += [{"contestant": n, **bench.run.identity(cell), "tflops": rate} for n, rate in rates.items()]
    path = bench.record.save(results | {"suite": "fp8", "rows": rows}, tmp_path / "fp8.json")
    lines = bench.plot.markdown_table(path).splitlines()
    assert "| fp8 | 128 | full | 900 / 850 cudnn / **1.06** | 900 / 850 cudnn / **1.06** |" in lines
    assert "| fp8 | 128 | full from_bf16 | 800 / 640 bf16 / **1.25** | 800 / 640 bf16 / **1.25** |" in lines
    assert "least 1.06" in bench.run.table(rows)
    line = bench.run.cell_line([row | {"rel_error": 0.05} for row in rows[:4]])
    assert "ours/best 1.06" in line and "ours_int8    950" in line
    pytest.importorskip("matplotlib")
    (figure,) = bench.plot.draw(bench.plot.load(path), tmp_path)
    assert figure.name == "fp8_128.svg"
    for text in (">full<", ">full from_bf16<", "int8 q and k", "flashattn_hopper in bf16"):
        assert text in figure.read_text()


# ---------------------------------------------------------------------------------------------- a run of a suite
def options(tmp_path, **changes):
    defaults = {"quick": True, "only": "", "skip": "", "peers": "none", "out": tmp_path, "revision": "abc", "seed": 0}
    return SimpleNamespace(**(defaults | changes))


@pytest.fixture
def small_run(bench, monkeypatch):
    """A backward suite of three small cells with two fakes, on the CPU; calls context_lost as on a GPU."""
    cells = tuple(backward_cell(bench, Band(right=0), seqlen=s, num_heads_kv=4) for s in (16, 32, 40))
    monkeypatch.setitem(bench.suites.SUITES, "backward", bench.suites.Suite("backward", "bwd", cells))
    monkeypatch.setattr(bench.suites, "QUICK_SEQLENS", (16, 32, 40))
    settings = brief(bench).settings
    monkeypatch.setitem(bench.run.SETTINGS, "bwd", (settings, settings))
    monkeypatch.setattr(bench.timing, "matmul_ceiling", lambda clock: 700.0)
    fakes = [contestant(bench, "ours"), contestant(bench, "fa4")]
    monkeypatch.setattr(bench.run, "contestants_for", lambda *_: (fakes, {c.name: "1" for c in fakes}))
    monkeypatch.setattr(bench.run, "ours_ran", lambda *_, **__: {"kernel": "sm90.backward", "tile": "T"})
    return fakes


def test_a_run_writes_each_cell_as_it_finishes(bench, small_run, monkeypatch, tmp_path, capsys):
    saved, save = [], bench.record.save
    monkeypatch.setattr(
        bench.record, "save", lambda results, path: saved.append(len(results["rows"])) or save(results, path)
    )
    assert bench.run.run_suite("backward", options(tmp_path), "cpu") == 0
    assert saved == [2, 4, 6]
    (path,) = tmp_path.glob("*/backward-quick.json")
    results = bench.record.load(path)
    assert results["suite"] == "backward" and results["ceiling"]["tflops"] == 700.0
    assert all(row["ms"] > 0 and row["rel_error"] < 1e-2 for row in results["rows"])
    said = capsys.readouterr().out
    assert said.count("sm90") == 0 and sum(line.startswith("bwd.bf16.d16x8.causal ") for line in said.splitlines()) == 6


def test_a_failing_cell_does_not_end_a_run_but_a_lost_context_does(bench, small_run, monkeypatch, tmp_path, capsys):
    real = bench.tasks.BackwardTask

    def task(cell, device):
        if cell.seqlen == 32:
            raise MemoryError("too large")
        return real(cell, device)

    monkeypatch.setitem(bench.run.TASKS, "bwd", task)
    assert bench.run.run_suite("backward", options(tmp_path), "cpu") == 0
    (path,) = tmp_path.glob("*/backward-quick.json")
    rows = bench.record.load(path)["rows"]
    assert [row.get("failed") for row in rows] == [None] * 2 + ["MemoryError: too large"] * 2 + [None] * 2
    monkeypatch.setattr(bench.run, "context_lost", lambda device: "AcceleratorError: illegal access")
    assert bench.run.run_suite("backward", options(tmp_path), "cpu") == bench.run.CONTEXT_LOST
    assert len(bench.record.load(path)["rows"]) == 4
    assert "stopped at bwd.bf16.d16x8.causal b2 s32 h4:4" in capsys.readouterr().err


def test_a_device_that_answers_no_more_is_noticed(bench, monkeypatch):
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: torch.tensor([0]))
    assert bench.run.context_lost("cuda") is None

    def illegal(*_, **__):
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    monkeypatch.setattr(torch, "zeros", illegal)
    assert bench.run.context_lost("cuda") == "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert bench.run.context_lost("cpu") is None


def test_a_hanging_cell_ends_the_process(bench):
    code = f"import sys; sys.path.insert(0, {str(BENCH)!r}); import time, timing\n"
    code += "with timing.limited(0.5, 'cell x'): time.sleep(60)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert ended.returncode == 1 and "still at cell x" in ended.stderr and "Timeout" in ended.stderr


def test_a_suite_or_cell_that_does_not_exist_is_refused(bench, capsys):
    for words in (["sideways"], ["backward", "--only", "d999"], ["forward", "--only", "d64", "--skip", "bf16"]):
        with pytest.raises(SystemExit):
            bench.run.main(words)
    assert "no cell of backward contains 'd999'" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------- plot
@pytest.fixture
def results_file(bench, tmp_path):
    """Invented rates: a sweep, one shape beside it, and a peer that failed."""
    rows = []

    def add(cell, **speeds):
        for name, rate in speeds.items():
            row = {"contestant": name, **bench.run.identity(cell)}
            rows.append(row | ({"tflops": rate} if rate else {"failed": "RuntimeError: no"}))

    for band in (Band(), Band(right=0)):
        for seqlen, ours, fa3 in ((512, 533.0, 496.0), (4096, 710.4, 740.0)):
            add(cell_of(bench, band, seqlen=seqlen, num_heads_kv=4, headdim_v=16), ours=ours, fa3=fa3, fa2=300.0)
    add(cell_of(bench, bench.suites.window(8)), ours=500.0, fa3=None)
    head = {
        "suite": "forward",
        "date": "2026-11-29T10:00:00+00:00",
        "revision": "abc",
        "gpu": {"name": "NVIDIA H200"},
        "versions": {"torch": "2.11", "dsl": "4.8.1"},
        "contestants": {"ours": "1.0", "fa3": "0.0.3", "fa4": "unavailable: import x"},
        "ceiling": {"what": "8192³ bf16 product", "tflops": 783.2},
    }
    return bench.record.save({"schema": 1, **head, "rows": rows}, tmp_path / "forward.json")


def test_plot_is_loaded_by_path_alone(results_file):
    spec = importlib.util.spec_from_file_location("bench_plot_alone", BENCH / "plot.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert "| 533 / 496 fa3 / **1.07** |" in module.markdown_table(results_file)


def test_markdown_table(bench, results_file, capsys):
    text = bench.plot.markdown_table(results_file)
    lines = text.splitlines()
    assert "| dtype | headdim | mask | 512 | 4096 |" in lines
    assert "| bf16 | 16 | causal | 533 / 496 fa3 / **1.07** | 710 / 740 fa3 / **0.96** |" in lines
    assert "| bf16 | 16x8 | window gqa (7, 0) | 2 | 40 | 4:2 | 500 / – / – |" in lines
    assert "NVIDIA H200, 2026-11-29, revision abc:" in lines[0] and "8192³ bf16 product, 783" in lines[0]
    assert "fa3 0.0.3" in lines[0] and "fa4" not in lines[0]
    assert bench.plot.main([str(results_file), "--readme"]) == 0
    assert capsys.readouterr().out == text
    assert bench.plot.main([str(results_file.with_name("absent.json"))]) == 2


def test_figures_are_reproducible_and_keep_text(bench, results_file, tmp_path):
    pytest.importorskip("matplotlib")
    first = bench.plot.draw(bench.plot.load(results_file), tmp_path / "a")
    again = bench.plot.draw(bench.plot.load(results_file), tmp_path / "b")
    assert [p.name for p in first] == ["forward_16.svg"]
    svg = first[0].read_text()
    assert svg == again[0].read_text()
    for text in ("flashattn_hopper", "FlashAttention-3", "TFLOP/s", ">full<", ">causal<", ">4096<", ">533<", "H200"):
        assert text in svg, text
    assert "FlashAttention-4" not in svg


def test_backward_table_and_figures(bench, results_file, tmp_path):
    pytest.importorskip("matplotlib")
    results = bench.plot.load(results_file)
    rows = [row | {"slug": row["slug"].replace("fwd.", "bwd."), "extra_bytes": 3 << 20} for row in results["rows"]]
    again = [row | {"slug": row["slug"] + ".deterministic"} for row in rows if row["contestant"] == "ours"]
    path = bench.record.save(results | {"suite": "backward", "rows": rows + again}, tmp_path / "backward.json")
    lines = bench.plot.markdown_table(path).splitlines()
    assert "| bf16 | 16 | causal | 533 / 496 fa3 / **1.07** | 710 / 740 fa3 / **0.96** |" in lines
    assert "| bf16 | 16 | causal deterministic | 533 / – / – | 710 / – / – |" in lines
    assert "| bf16 | 16 | causal | 3 / 3 fa3 | 3 / 3 fa3 |" in lines
    (figure,) = bench.plot.draw(bench.plot.load(path), tmp_path)
    assert figure.name == "backward_16.svg"
    assert ">full<" in figure.read_text() and "deterministic" not in figure.read_text()


# ---------------------------------------------------------------------------------------------------------- tune
A, B, C = FwdTile(128, 128), FwdTile(192, 80, schedule="dynamic", output="own"), FwdTile(128, 96, ping_pong=False)


@pytest.mark.parametrize("value", [A, B, C])
def test_source_is_code_that_makes_the_tile(bench, value):
    assert eval(bench.record.source(value)) == value


def test_rows_follow_the_winners_and_ignore_noise(bench):
    speeds = {
        512: {A: 500.0, B: 400.0, C: 499.0},
        1024: {A: 600.0, B: 500.0, C: 605.0},  # A is within one per cent: no change of tile
        4096: {A: 600.0, B: 700.0, C: 650.0},
        16384: {A: 650.0, B: 740.0, C: 741.0},  # likewise
    }
    winners = bench.tune.segments(speeds)
    assert [seqlen for seqlen, _ in winners] == [512, 4096] and winners[1][1] == B
    assert winners[0][1] == C  # of two that are good at both lengths, the faster on the whole
    assert [s for s, _ in bench.tune.segments(speeds, tolerance=0.0)] == [512, 1024, 4096, 16384]
    traits = Traits("fwd", "bf16", 128, 128, "full")
    lines = "".join(bench.tune.row_lines(traits, winners))
    table = TileTable(*eval(f"[{lines}]", {"Row": Row, "FwdTile": FwdTile}))
    assert [table.find(traits, s) for s in (1, 512, 4095, 4096, 32768)] == [C, C, C, B, B]


def test_candidates_begin_with_the_present_table(bench):
    for row in FORWARD.tiles:
        traits = Traits("fwd", "bf16", *row.dims, row.masks[0])
        tiles = bench.tune.candidates(traits)
        assert tiles[0] == FORWARD.tiles.rows_for(traits)[0].tile
        assert len(tiles) == len(set(tiles)) > len(FORWARD.tiles.rows_for(traits))


def write(address, tensor):
    """Fill the memory at an operand's address, as a kernel would."""
    tensor = tensor.contiguous()
    ctypes.memmove(address, tensor.data_ptr(), tensor.nbytes)


@pytest.mark.parametrize("band", [Band(right=0), Band(7, 0)], ids=lambda b: b.kind)
@pytest.mark.parametrize("tile", [A, B], ids=["grid", "dynamic"])
def test_launcher_passes_what_the_variant_has(bench, band, tile):
    cell = cell_of(bench, band)
    launcher = bench.tune.Launcher(cell.traits, band, num_ctas=132, device="cpu")
    exact, seen = contestant(bench, "exact"), []

    def function(ops):
        seen.append(ops)
        out = exact.call(ops.q, ops.k, ops.v, cell.causal, cell.window_size, ops.softmax_scale)
        write(ops.o, out.to(ops.q.dtype))

    launcher.functions[tile] = function
    assert bench.tune.check(launcher, tile, cell, "cpu") is None
    (ops,) = seen
    assert (ops.window_left, ops.window_right) == ((7, 0) if band.left else (None, None))
    assert (ops.num_ctas is None) == (ops.tickets is None) == (tile.schedule == "grid")
    assert ops.lse
    launcher.functions[tile] = lambda ops: write(ops.o, ops.q.new_zeros(*ops.q.shape[:3], ops.v.shape[3]))
    assert bench.tune.check(launcher, tile, cell, "cpu").startswith("relative error 1.0e+00")


def test_codes_of_an_operand_are_made_once(bench, monkeypatch):
    """For all tiles; each tile is bound with the problem and the plan that it belongs to."""
    from flashattn_hopper import runner_fp8

    cell = cell_of(bench, Band(right=0), dtype="fp8")
    exact, quantized, plans = contestant(bench, "exact"), [], []

    def bind(plan, problem, dtype, device):
        plans.append(plan)
        assert problem.traits.int8_qk and problem.band == cell.band
        return lambda codes, want_lse: (exact.call(*codes, cell.causal, cell.window_size, cell.softmax_scale),)

    monkeypatch.setattr(runner_fp8, "quantize", lambda q, k, v, int8_qk: quantized.append(int8_qk) or (q, k, v))
    monkeypatch.setattr(runner_fp8, "bind", bind)
    traits = dataclasses.replace(cell.traits, int8_qk=True)
    launcher = bench.tune.CodesLauncher(traits, cell.band)
    ops = bench.tasks.operands(cell, "cpu")
    tiles = bench.tune.candidates(traits)[:2]
    for tile in (*tiles, tiles[0]):
        assert bench.tasks.forward_error(cell, ops, launcher(tile, *ops))[1] < 1e-2
    assert quantized == [True] and [plan.tile for plan in plans] == list(tiles)
    assert all(plan.spec.name == "sm90.forward_fp8" for plan in plans)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)])
def test_one_kind_of_tile_can_be_tuned_alone(bench, dims):
    traits = Traits("fwd", "bf16", *dims, "causal")
    tiles = bench.tune.chosen(traits, dict([bench.tune.setting("schedule=grid")]))
    assert tiles and {tile.schedule for tile in tiles} == {"grid"}
    assert set(tiles) < set(bench.tune.candidates(traits))
    # What is checked has an even and an odd number of query tiles.
    for tile_m in {tile.tile_m for tile in tiles}:
        assert {-(-seqlen // tile_m) % 2 for seqlen in bench.tune.CHECKED} == {0, 1}


def test_settings_of_tiles_are_read_as_their_type(bench):
    assert dict(map(bench.tune.setting, ("tile_m=192", "output=own", "schedule=grid"))) == {
        "tile_m": 192,
        "output": "own",
        "schedule": "grid",
    }
    with pytest.raises(bench.tune.argparse.ArgumentTypeError):
        bench.tune.setting("tile_x=3")


# ---------------------------------------------------------------------------------------------------------- host
def test_host_time_counts_calls_not_waits(bench):
    made, waited = [], []
    found = bench.host.per_call(lambda: made.append(1), lambda: waited.append(1), calls=50, rounds=4)
    assert len(made) == 3 + 4 * 50 and len(waited) == 2 * 4
    assert 0 < found["min_us"] <= found["median_us"] < 1000


def test_host_rows_have_both_modes_and_keep_failures(bench):
    rows = bench.host.eager_calls(
        [
            contestant(bench, "ours"),
            contestant(bench, "detached", torch.Tensor.detach),
            contestant(bench, "bad", broken),
        ],
        "cpu",
        calls=1,
        rounds=1,
    )
    found = {(row["contestant"], row["mode"]): row for row in rows}
    assert len(rows) == 6 and found["ours", "graph"]["min_us"] > 0 and found["detached", "no_grad"]["min_us"] > 0
    assert found["detached", "graph"]["failed"] == "RuntimeError: records no graph"
    assert found["bad", "no_grad"]["failed"] == "RuntimeError: no such kernel"
    trained = bench.host.train_calls(
        [trainee(bench, "ours"), contestant(bench, "bad", broken), bench.peers.Fa3()], "cpu", calls=1, rounds=1
    )
    modes = [row["mode"] for row in trained]
    assert modes == ["train"] * 3 + ["train_one_thread"] * 3 and torch.autograd.is_multithreading_enabled()
    for ours, bad, fa3 in (trained[:3], trained[3:]):
        assert ours["min_us"] > 0 and bad["failed"] == "RuntimeError: no such kernel"
        assert fa3["failed"] == "the package fa3-fwd has no backward"
    rows += trained
    text = bench.host.report({"calls": rows, "first": {"fresh": {"first_call_s": 3.5}}})
    assert "first call, fresh: first_call_s 3.5" in text and "us median" in text


@pytest.mark.compile
def test_a_first_call_is_measured_from_a_bundle_too(bench, monkeypatch):
    """As on a Hopper GPU, with a probe that obtains the kernel and calls nothing."""
    monkeypatch.setattr(planner, "capability_of", lambda device: (9, 0))
    monkeypatch.setattr(
        bench.host,
        "PROBE",
        """
from flashattn_hopper import jit, planner
from flashattn_hopper.spec.problem import Shape, Traits
_, seqlen, _, headdim = {shape}
plan = planner.plan(Traits("fwd", "bf16", headdim, headdim, "causal"), (9, 0), "auto", Shape(1, seqlen, seqlen, 1, 1))
jit.compiled(*plan, plan.spec.arch)
import json
print(json.dumps(dict(stats=jit.stats()._asdict())))
""",
    )
    found = bench.host.first_calls("cuda")
    counters = ("compiles", "disk_hits", "bundle_hits")
    assert {name: tuple(row["stats"][one] for one in counters) for name, row in found.items()} == {
        "fresh": (1, 0, 0),
        "disk": (0, 1, 0),
        "bundle": (0, 0, 1),
    }
    monkeypatch.setattr(planner, "capability_of", lambda device: (7, 0))
    monkeypatch.setattr(bench.host, "probe", lambda environ: {})
    assert "no kernel runs" in bench.host.first_calls("cuda")["bundle"]["failed"]


def test_torch_alone_has_every_mode(bench):
    nothing = bench.host.Nothing()
    rows = bench.host.eager_calls([nothing], "cpu", calls=1, rounds=1)
    rows += bench.host.train_calls([nothing], "cpu", calls=1, rounds=1)
    assert [row["mode"] for row in rows] == ["no_grad", "graph", "train", "train_one_thread"]
    assert all(row["contestant"] == "torch" and row["min_us"] > 0 for row in rows)


# -------------------------------------------------------------------------------------------------------- curves
def training_run(attention, seed, last):
    config = {"attention": attention, "precision": "bf16", "seed": seed, "batch": 16, "seqlen": 1024}
    losses = [5.0 - i * (5.0 - last) / 299 for i in range(300)]
    found = {"train_loss": last, "val_loss": last + 0.1, "val": [[300, last + 0.1]], "losses": losses}
    rest = {"tokens_per_second": 1e5, "unigram": 3.2, "explanation": "", "parameters": 57e6, "seconds": 9.0}
    return {"config": config, "machine": {"gpu": "NVIDIA H200"}} | found | rest


def test_curves_keep_what_they_draw(bench, tmp_path, capsys):
    runs = [training_run("sdpa", 1, 1.5), training_run("sdpa", 0, 1.42), training_run("hopper", 0, 1.41)]
    for i, run in enumerate(runs):
        (tmp_path / f"{i}.json").write_text(json.dumps(run))
    where = ["--results", str(tmp_path), "--figures", str(tmp_path)]
    assert bench.curves.main([*(str(tmp_path / f"{i}.json") for i in range(3)), "--keep", "gpt", *where]) == 0
    first = capsys.readouterr().out
    assert [line.split(" | ")[:2] for line in first.splitlines()[2:]] == [
        ["| hopper bf16, seed 0", "1.4100"],
        ["| sdpa bf16, seed 0", "1.4200"],
        ["| sdpa bf16, seed 1", "1.5000"],
    ]
    drawn = (tmp_path / "train-gpt.svg").read_bytes()
    assert bench.curves.main(["gpt", *where]) == 0 and capsys.readouterr().out == first
    assert (tmp_path / "train-gpt.svg").read_bytes() == drawn and b"hopper bf16, seed 0" in drawn


def test_a_smoothed_curve_is_the_mean_of_the_last_steps(bench):
    assert bench.curves.smooth([4.0, 2.0, 6.0, 1.0], 2) == [4.0, 3.0, 4.0, 3.5]
