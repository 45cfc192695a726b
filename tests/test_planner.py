"""Which kernel is chosen, why the others are not, and what the runner hands to it. No GPU: kernels are stood in for."""

import ctypes
import logging
from dataclasses import replace

import pytest
import torch

from flashattn_hopper import planner, runner
from flashattn_hopper.catalog import CATALOG
from flashattn_hopper.kernels.common.operands import BwdOperands, FwdOperands
from flashattn_hopper.kernels.sm90 import specs as sm90
from flashattn_hopper.spec.mask import Band, Seqlens
from flashattn_hopper.spec.problem import BWD, FWD, AttentionProblem, Shape, Traits
from flashattn_hopper.spec.tile import ROW_PAD

SHAPE = Shape(2, 5, 9, 4, 2)
D128 = Traits(FWD, "bf16", 128, 128)
FULL = Band()


@pytest.mark.parametrize(
    "capability, backend, kernel",
    [
        ((9, 0), "auto", "sm90.forward"),
        ((9, 0), "sm90", "sm90.forward"),
        ((9, 0), "reference", "reference.forward"),
        ((8, 0), "reference", "reference.forward"),
        ((8, 0), "auto", "sm80.forward"),
        ((8, 9), "auto", "sm80.forward"),
        ((10, 0), "auto", "sm80.forward"),
        ((12, 0), "auto", "sm80.forward"),
        (None, "auto", "reference.forward"),
        (None, "reference", "reference.forward"),
    ],
)
def test_chosen(capability, backend, kernel):
    assert planner.plan(D128, capability, backend, SHAPE).spec.name == kernel


@pytest.mark.parametrize("capability", [(7, 0), (7, 5), (13, 0)])
def test_other_gpus_are_refused_with_every_reason(capability):
    with pytest.raises(NotImplementedError) as info:
        planner.plan(D128, capability, "auto", SHAPE)
    device, message = f"sm_{capability[0]}{capability[1]}", str(info.value)
    assert f"fwd.bf16.d128.full on {device}" in message
    assert f"sm90.forward: needs sm_90, the tensors are on {device}" in message
    assert "sm80.forward: needs one of sm_80, " in message
    assert f"reference.forward: runs on {device} only with backend='reference'" in message
    assert 'backend="reference" runs it' in message


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"headdim": 512, "headdim_v": 512}, "at most 256"),
        ({"headdim": 257, "headdim_v": 257}, "multiples of 8"),
        ({"headdim": 20, "headdim_v": 20}, "multiples of 8"),
        ({"dtype": "fp32"}, "no fp32"),
    ],
)
def test_hopper_refuses(changes, reason):
    with pytest.raises(NotImplementedError) as info:
        planner.plan(replace(D128, **changes), (9, 0), "auto", SHAPE)
    assert reason in str(info.value) and 'backend="reference"' in str(info.value)


def test_fp8_on_hopper_and_elsewhere():
    codes = replace(D128, dtype="fp8")
    assert planner.plan(codes, (9, 0), "auto", SHAPE).spec.name == "sm90.forward_fp8"
    with pytest.raises(NotImplementedError) as info:
        planner.plan(codes, (8, 0), "auto", SHAPE)
    message = str(info.value)
    assert "sm90.forward_fp8: " in message and 'backend="reference" runs it' in message
    assert "reference.forward_fp8: runs on sm_80 only" in message and "reference.forward:" not in message
    for device in ((8, 0), (9, 0)):
        assert planner.plan(codes, device, "reference", SHAPE).spec.name == "reference.forward_fp8"


@pytest.mark.parametrize("backend", ["auto", "sm90", "reference"])
@pytest.mark.parametrize("capability", [None, (9, 0)])
def test_every_forward_has_a_backward(backend, capability):
    """Of the backend that was named, where that has one that takes it."""
    traits = replace(D128, phase=BWD)
    chosen = planner.plan(traits, capability, backend, SHAPE)
    assert chosen.spec.phase == BWD and chosen.spec.refuses(traits, capability, chosen.spec.backend) is None
    if any(s.backend == backend and s.refuses(traits, capability, backend) is None for s in CATALOG):
        assert chosen.spec.backend == backend


TOO_WIDE, TOO_WIDE_V = (d + 8 for d in max(sm90.BACKWARD.headdims))
AT_MOST = "at most {} and {}".format(*max(sm90.BACKWARD.headdims))


@pytest.mark.parametrize(
    "changes, capability, kernel, reason",
    [
        ({}, (9, 0), "sm90.backward", None),
        ({"headdim": 72, "headdim_v": 40, "gqa": True, "mask": "window"}, (9, 0), "sm90.backward", None),
        ({"deterministic": True}, (9, 0), "sm90.backward", None),
        ({"headdim": TOO_WIDE}, (9, 0), "reference.backward", f"headdim {TOO_WIDE}, headdim_v 128: {AT_MOST}"),
        ({"headdim_v": TOO_WIDE_V}, (9, 0), "reference.backward", f"headdim 128, headdim_v {TOO_WIDE_V}: {AT_MOST}"),
        ({"headdim": 20}, (9, 0), "reference.backward", "headdim 20, headdim_v 128: both must be multiples of 8"),
        ({}, None, "reference.backward", "needs sm_90, the tensors are on cpu"),
    ],
)
def test_the_backward_of_sm90(changes, capability, kernel, reason):
    """By name, where it takes the problem; elsewhere the reference, and the reason is the kernel's own."""
    traits = replace(D128, phase=BWD, **changes)
    chosen = planner.plan(traits, capability, "sm90", SHAPE)
    assert chosen.spec.name == kernel
    assert planner.refusals(traits, capability, "sm90").get("sm90.backward") == reason
    if reason is None:
        assert chosen.tile == sm90.BACKWARD.tiles.find(chosen.traits, SHAPE.seqlen_k)
        assert not chosen.traits.gqa and (chosen.traits.headdim, chosen.traits.headdim_v) in sm90.BACKWARD.headdims
        # What must repeat bit by bit may not add to dQ from several thread blocks in any order.
        assert not chosen.traits.deterministic or chosen.tile.ordered or not chosen.tile.summed


def test_the_backward_of_sm90_is_chosen_by_itself():
    traits = replace(D128, phase=BWD)
    chosen = planner.plan(traits, (9, 0), "auto", SHAPE)
    assert chosen == planner.plan(traits, (9, 0), "sm90", SHAPE) and chosen.spec is sm90.BACKWARD
    assert planner.plan(traits, (9, 0), "reference", SHAPE).spec.name == "reference.backward"


def test_headdim_is_padded_and_features_that_change_nothing_are_dropped():
    traits = Traits(FWD, "bf16", 72, 72, "causal", gqa=True, deterministic=True)
    chosen = planner.plan(traits, (9, 0), "auto", SHAPE)
    assert chosen.traits == Traits(FWD, "bf16", 96, 96, "causal")
    assert chosen.tile == planner.tile_for(chosen.spec, chosen.traits, SHAPE)
    assert planner.plan(traits, None, "auto", SHAPE).traits == traits


@pytest.mark.parametrize("row", sm90.FORWARD_TILES, ids=lambda row: f"d{row.dims}.{row.masks}.from{row.min_seqlen}")
def test_every_tile_row_is_reached(row):
    traits = Traits(FWD, sorted(row.dtypes)[0], *row.dims, row.masks[0])
    chosen = planner.plan(traits, (9, 0), "auto", replace(SHAPE, seqlen_k=row.min_seqlen))
    assert chosen.tile == row.tile


def test_refusals_name_only_rows_of_the_phase():
    assert set(planner.refusals(D128, None)) == {"sm90.forward", "sm80.forward"}
    assert set(planner.refusals(replace(D128, phase=BWD), None)) == {"sm90.backward", "sm80.backward"}


def test_capability_of_the_cpu():
    assert planner.capability_of(torch.device("cpu")) is None


# What the runner hands over


class Recorder:
    """Stands in for a compiled kernel that takes `operands`."""

    def __init__(self, operands=FwdOperands):
        self.operands, self.calls = operands, []

    def __call__(self, operands):
        self.calls.append(self.operands(*operands))

    @property
    def last(self):
        return self.calls[-1]


def qkv(seqlen_q=5, seqlen_k=9, headdim=64, headdim_v=64, batch=2, heads=4, heads_kv=2):
    return [
        torch.ones(batch, s, h, d, dtype=torch.bfloat16)
        for s, h, d in ((seqlen_q, heads, headdim), (seqlen_k, heads_kv, headdim), (seqlen_k, heads_kv, headdim_v))
    ]


@pytest.fixture
def stream(monkeypatch):
    """A stream that tests can switch."""
    state = {"handle": 7, "capturing": False}
    monkeypatch.setattr(runner, "_raw_stream", lambda index: state["handle"])
    monkeypatch.setattr(runner, "_capturing", lambda: state["capturing"])
    monkeypatch.setattr(runner, "_tickets", {})
    state["counters"] = made = []
    new = runner._new_counters
    monkeypatch.setattr(runner, "_new_counters", lambda device, count: made.append(new(device, count)) or made[-1])
    return state


def bind(q, k, v, band=FULL, schedule=None):
    fn = Recorder()
    shape = Shape(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2])
    traits = Traits(FWD, "bf16", q.shape[3], v.shape[3], band.kind)
    chosen = planner.plan(traits, (9, 0), "auto", shape)
    if schedule is not None:
        tile = replace(chosen.tile, schedule=schedule, q_stages=1)
        chosen = chosen._replace(tile=tile)
    return fn, runner.bind(fn, chosen, AttentionProblem(traits, shape, band, 0.125), q, k, v)


def test_operands_in_order(stream):
    q, k, v = qkv(headdim=192, headdim_v=128)
    fn, forward = bind(q, k, v, schedule="grid")
    out, lse = forward(q, k, v)
    sent = fn.last
    assert sent.q is q and sent.k is k and sent.v is v and (sent.o, sent.lse) == (out.data_ptr(), lse.data_ptr())
    assert sent[5:] == (0.125, None, None, None, None)
    assert (out.shape, out.dtype, out.stride()) == ((2, 5, 4, 128), torch.bfloat16, (2560, 512, 128, 1))
    assert (lse.shape, lse.dtype, lse.stride()) == ((2, 4, 5), torch.float32, (20, 5, 1))
    assert forward(q, k, v, want_lse=False)[1] is None and fn.last.lse == 0


def test_a_padded_headdim_does_not_show(stream):
    q, k, v = qkv(headdim=72, headdim_v=72)
    fn, forward = bind(q, k, v)
    assert forward(q, k, v)[0].shape == (2, 5, 4, 72)
    assert fn.last.q is q


@pytest.mark.parametrize(
    "band, edges",
    [
        (Band(3, 0), (3, 0)),
        (Band(3, None), (3, 14)),
        (Band(None, 4), (14, 4)),
        (Band(2**40, 1), (14, 1)),
        (Band(0, 2**63), (0, 14)),
        (Band(-(2**40), 5), (-14, 5)),
    ],
)
def test_window_edges_fit_device_integers(stream, band, edges):
    q, k, v = qkv()
    fn, forward = bind(q, k, v, band)
    forward(q, k, v)
    assert (fn.last.window_left, fn.last.window_right) == edges
    for q_idx in range(5):  # a clamped edge shows the same keys
        for kv_idx in range(9):
            seqlens = Seqlens(5, 9)
            assert Band(*edges).keep(q_idx, kv_idx, seqlens) == band.keep(q_idx, kv_idx, seqlens)


@pytest.mark.parametrize("band", [Band(), Band(None, 0)], ids=["full", "causal"])
def test_no_edges_without_a_window(stream, band):
    q, k, v = qkv()
    fn, forward = bind(q, k, v, band)
    forward(q, k, v)
    assert fn.last.window_left is None and fn.last.window_right is None


def swapped(t):
    """The same values stored as (B, H, S, D)."""
    return t.transpose(1, 2).contiguous().transpose(1, 2)


READ_IN_PLACE = {
    "contiguous": lambda t: t,
    "stored BHSD": swapped,
    "stored SBHD": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "slice of a packed projection": lambda t: torch.cat([t, t, t], -1)[..., 64:128],
    "heads expanded": lambda t: t[:, :, :1].expand(-1, -1, t.shape[2], -1),
    "batch expanded": lambda t: t[:1].expand(t.shape[0], -1, -1, -1),
    "every second position": lambda t: torch.cat([t, t], 1)[:, ::2],
}
COPIED = {
    "last dimension strided": lambda t: torch.cat([t, t], -1)[..., ::2],
    "last dimension first": lambda t: t.transpose(1, 3).contiguous().transpose(1, 3),
    "rows of 65": lambda t: torch.cat([t, t[..., :1]], -1)[..., :64],
    "last dimension expanded": lambda t: t[..., :1].expand(-1, -1, -1, 64),
}


@pytest.mark.parametrize("place", range(3), ids="qkv")
@pytest.mark.parametrize("name", READ_IN_PLACE)
def test_read_in_place(stream, name, place):
    operands = qkv()
    operands[place] = READ_IN_PLACE[name](operands[place])
    fn, forward = bind(*operands)
    forward(*operands)
    assert fn.last[place] is operands[place]


@pytest.mark.parametrize("place", range(3), ids="qkv")
@pytest.mark.parametrize("name", COPIED)
def test_copied_once(stream, name, place):
    operands = qkv()
    operands[place] = COPIED[name](torch.randn_like(operands[place]))
    fn, forward = bind(*operands)
    forward(*operands)
    sent = fn.last[place]
    assert sent.is_contiguous() and torch.equal(sent, operands[place])
    assert sent.data_ptr() != operands[place].data_ptr()
    assert all(fn.last[i] is operands[i] for i in range(3) if i != place)
    assert runner.layout_note(operands[place]).endswith("copied once")


@pytest.mark.parametrize("strides", [(0, 64, 64, 1), (3, 64, 64, 1), (2**45, 64, 7, 1), (320, 64, 1, 1)])
def test_strides_of_extent_1_mean_nothing(stream, strides):
    storage = torch.randn(5 * 64).bfloat16()
    q = storage.as_strided((1, 5, 1, 64), strides)
    _, k, v = qkv(batch=1, heads_kv=1)
    fn, forward = bind(q, k, v)
    forward(q, k, v)
    sent = fn.last.q
    assert sent.data_ptr() == q.data_ptr() and torch.equal(sent, q)
    assert all(step * 2 % 16 == 0 and step * 2 < 2**40 for step in sent.stride()[:-1])


def test_base_pointers_are_checked_at_every_call(stream):
    q, k, v = qkv()
    fn, forward = bind(q, k, v)
    base = torch.randn(v.numel() + 8).bfloat16()
    off = base[1 : 1 + v.numel()].view(v.shape)  # the same strides, 2 bytes further
    forward(q, k, off)
    assert fn.last.v.data_ptr() % 16 == 0 and torch.equal(fn.last.v, off)
    assert fn.last.q is q and fn.last.k is k
    on = base[8 : 8 + v.numel()].view(v.shape)
    forward(q, k, on)
    assert fn.last.v is on


def test_tickets_belong_to_a_stream(stream):
    q, k, v = qkv()
    fn, forward = bind(q, k, v, schedule="dynamic")
    forward(q, k, v)
    first = fn.last.tickets
    assert fn.last.num_ctas == 132
    (counters,) = stream["counters"]
    assert first == counters.data_ptr()
    assert (counters.shape, counters.dtype, counters.tolist()) == ((2,), torch.int32, [0, 0])
    forward(q, k, v)
    assert fn.last.tickets == first
    stream["handle"] = 8
    forward(q, k, v)
    assert fn.last.tickets != first
    stream["handle"] = 7
    forward(q, k, v)
    assert fn.last.tickets == first and len(stream["counters"]) == 2


def test_captured_launches_have_tickets_of_their_own(stream):
    q, k, v = qkv()
    fn, forward = bind(q, k, v, schedule="dynamic")
    forward(q, k, v)
    stream["capturing"] = True
    forward(q, k, v)
    forward(q, k, v)
    eager, *captured = (call.tickets for call in fn.calls)
    assert len({eager, *captured}) == 3
    assert captured == [t.data_ptr() for t in stream["counters"][1:]]
    assert all(t.tolist() == [0, 0] for t in stream["counters"])
    stream["capturing"] = False
    forward(q, k, v)
    assert fn.last.tickets == eager


# prepare: plan, compile, bind


@pytest.fixture
def hopper(stream, monkeypatch):
    """CPU tensors planned as if they lay on an H100, with a recorded stand-in for the compiler."""
    fn, asked = Recorder(), []
    monkeypatch.setattr(planner, "capability_of", lambda device: (9, 0))
    monkeypatch.setattr(runner.jit, "compiled", lambda *args: asked.append(args) or fn)
    return fn, asked


def problem(q, k, v, band=FULL):
    shape = Shape(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2])
    return AttentionProblem(Traits(FWD, "bf16", q.shape[3], v.shape[3], band.kind), shape, band, 0.125)


def test_prepare_compiles_the_plan(hopper):
    fn, asked = hopper
    q, k, v = qkv(headdim=72, headdim_v=72)
    runner.prepare(problem(q, k, v), "auto", q, k, v)(q, k, v)
    chosen = planner.plan(problem(q, k, v).traits, (9, 0), "auto", problem(q, k, v).shape)
    assert asked == [(chosen.spec, chosen.traits, chosen.tile, chosen.spec.arch)] and len(fn.calls) == 1


@pytest.mark.parametrize(
    "sizes", [{"batch": 0}, {"seqlen_q": 0}, {"seqlen_k": 0}, {"heads": 0, "heads_kv": 0}], ids=str
)
def test_nothing_to_compute_launches_nothing(hopper, sizes):
    fn, asked = hopper
    q, k, v = qkv(**sizes)
    out, lse = runner.prepare(problem(q, k, v), "auto", q, k, v)(q, k, v)
    assert not asked and not fn.calls
    assert out.shape == q.shape and out.dtype == q.dtype and not out.any()
    assert lse.shape == (q.shape[0], q.shape[2], q.shape[1]) and bool((lse == -float("inf")).all())


def test_one_log_line_for_each_kernel(monkeypatch, caplog):
    monkeypatch.setattr(runner, "_announced", set())
    q, k, v = qkv()
    with caplog.at_level(logging.INFO, "flashattn_hopper"):
        for _ in range(2):
            runner.prepare(problem(q, k, v), "auto", q, k, v)
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert "reference.forward runs fwd.bf16.d64.full" in record.message and "needs sm_90" in record.message


def test_memo_is_bounded():
    memo = runner.Memo()
    for i in range(2 * memo.limit + 1):
        assert memo.remember(i, str(i)) == str(i)
        assert len(memo) <= memo.limit
    assert memo[2 * memo.limit] == str(2 * memo.limit)


class Elsewhere:
    """What the runner reads of a tensor, said to lie on cuda:1."""

    def __init__(self, like):
        self.shape, self.dtype, self.device = like.shape, like.dtype, torch.device("cuda", 1)
        self.stride, self.element_size, self.data_ptr = like.stride, like.element_size, lambda: 512


def test_a_launch_runs_on_the_device_of_its_tensors(stream, monkeypatch):
    current, seen = [0], []

    class Device:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            self.before, current[0] = current[0], self.index

        def __exit__(self, *_):
            current[0] = self.before

    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(runner, "_current_device", lambda: current[0])
    allocated = []  # devices; a tensor that claims to be elsewhere has no address to send
    allocator = lambda shape, dtype, device: lambda: allocated.append(device) or torch.empty(shape, dtype=dtype)
    monkeypatch.setattr(runner, "_allocator", allocator)
    monkeypatch.setattr(runner, "_new_counters", lambda device, count: allocator((count,), torch.int32, device)())
    operands = [Elsewhere(t) for t in qkv()]
    fn, forward = bind(*operands)
    fn_call = fn.__call__
    monkeypatch.setattr(Recorder, "__call__", lambda self, ops: (seen.append(current[0]), fn_call.__func__(self, ops)))
    forward(*operands)
    assert seen == [1] and current == [0]
    assert allocated == [torch.device("cuda", 1)] * 3


# The backward


@pytest.fixture
def kept(monkeypatch):
    """Every tensor that the runner allocates for a backward, in order."""
    made, empty = [], runner._empty
    monkeypatch.setattr(runner, "_empty", lambda *what: made.append(empty(*what)) or made[-1])
    return made


def forward_results(q, v):
    """What a forward of these would have left: out and lse."""
    out = torch.randn(*q.shape[:3], v.shape[3]).to(q.dtype)
    return out, torch.randn(q.shape[0], q.shape[2], q.shape[1])


@pytest.fixture(autouse=True)
def multiprocessors(monkeypatch):
    """As many as an H100 has."""
    monkeypatch.setattr(planner, "num_sms", lambda device: 132)


def launched(q, k, v, dout, dlse=None, out=None, lse=None, band=FULL):
    """(what the kernel was given, the gradients)"""
    asked = problem(q, k, v, band).for_phase(BWD)
    usual = forward_results(q, v)
    out, lse = usual[0] if out is None else out, usual[1] if lse is None else lse
    fn = Recorder(BwdOperands)
    chosen = planner.plan(asked.traits, (9, 0), "sm90", asked.shape)
    grads = runner.bind_backward(fn, chosen, asked, dout, q, k, v, (True,) * 3)(dout, dlse, q, k, v, out, lse)
    return fn.last, grads


def floats_at(address, count):
    """What lies at an address that a kernel was given, while the test keeps it alive."""
    return list((ctypes.c_float * count).from_address(address))


def test_backward_operands_in_order(kept):
    q, k, v = qkv(headdim=64, headdim_v=128)
    out, lse = forward_results(q, v)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    sent, (dq, dk, dv) = launched(q, k, v, dout, dlse, out, lse)
    assert sent.q is q and sent.k is k and sent.v is v and sent.do is dout
    assert (sent.o, sent.lse, sent.dlse) == (out.data_ptr(), lse.data_ptr(), dlse.data_ptr())
    assert (sent.dq, sent.dk, sent.dv) == (dq.data_ptr(), dk.data_ptr(), dv.data_ptr())
    assert sent[11:] == (0.125, None, None, 132)
    for grad, x in zip((dq, dk, dv), (q, k, v)):
        assert grad.shape == x.shape and grad.dtype == x.dtype and grad.is_contiguous()
    *grads, workspace = kept
    assert all(a is b for a, b in zip(grads, (dq, dk, dv))) and sent.workspace == workspace.data_ptr()


@pytest.mark.parametrize("seqlen_q", [1, 127, 128, 129, 500])
@pytest.mark.parametrize("dims", [(64, 64), (72, 72), (128, 128), (40, 128), (200, 200)], ids=str)
def test_the_workspace_holds_padded_rows(kept, seqlen_q, dims):
    q, k, v = qkv(seqlen_q=seqlen_q, headdim=dims[0], headdim_v=dims[1])
    asked = problem(q, k, v).for_phase(BWD)
    launched(q, k, v, torch.ones(*q.shape[:3], dims[1], dtype=q.dtype))
    workspace, plan = kept[-1], planner.plan(asked.traits, (9, 0), "sm90", asked.shape)
    assert workspace.dtype == torch.float32 and workspace.is_contiguous()
    rows = 2 * 4 * -(-seqlen_q // ROW_PAD) * ROW_PAD
    assert workspace.numel() == plan.tile.workspace_floats(rows, plan.traits.headdim)


@pytest.mark.parametrize(
    "band, edges", [(Band(3, 0), (3, 0)), (Band(None, 4), (14, 4)), (Band(2**40, 1), (14, 1)), (Band(None, 0), None)]
)
def test_backward_window_edges(band, edges):
    q, k, v = qkv()
    sent, _ = launched(q, k, v, torch.ones_like(q), band=band)
    assert (sent.window_left, sent.window_right) == (edges or (None, None))


def test_no_gradient_into_lse_is_address_0():
    q, k, v = qkv()
    assert launched(q, k, v, torch.ones_like(q))[0].dlse == 0


def test_no_gradient_into_out_is_zeros():
    q, k, v = qkv(headdim_v=128)
    dlse = torch.randn(2, 4, 5)
    sent, _ = launched(q, k, v, None, dlse)
    assert sent.do.shape == (2, 5, 4, 128) and sent.do.dtype == q.dtype and not sent.do.any()
    assert sent.dlse == dlse.data_ptr()


@pytest.mark.parametrize("name", READ_IN_PLACE)
def test_dout_read_in_place(name):
    q, k, v = qkv()
    dout = READ_IN_PLACE[name](torch.randn_like(q))
    assert launched(q, k, v, dout)[0].do is dout


@pytest.mark.parametrize(
    "name, dout",
    [
        *((name, copied(torch.randn(2, 5, 4, 64).bfloat16())) for name, copied in COPIED.items()),
        ("all strides zero", torch.ones((), dtype=torch.bfloat16).expand(2, 5, 4, 64)),
        ("misaligned", torch.randn(2 * 5 * 4 * 64 + 1).bfloat16()[1:].view(2, 5, 4, 64)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_dout_copied(name, dout):
    q, k, v = qkv()
    sent = launched(q, k, v, dout)[0].do
    assert sent.is_contiguous() and sent.data_ptr() % 16 == 0 and torch.equal(sent, dout)


@pytest.mark.parametrize("place", range(3), ids="qkv")
@pytest.mark.parametrize("name", COPIED)
def test_inputs_of_the_backward_are_copied_as_those_of_the_forward(name, place):
    operands = qkv()
    operands[place] = COPIED[name](torch.randn_like(operands[place]))
    sent, grads = launched(*operands, torch.ones_like(operands[0]))
    assert sent[place].is_contiguous() and torch.equal(sent[place], operands[place])
    assert all(sent[i] is operands[i] for i in range(3) if i != place)
    assert grads[place].shape == operands[place].shape and grads[place].is_contiguous()


def test_results_of_the_forward_come_as_contiguous_addresses(monkeypatch):
    """out and lse of another kernel, and a gradient into lse that autograd expanded."""
    q, k, v = qkv()
    out = torch.randn(2, 4, 5, 64).bfloat16().transpose(1, 2)
    lse = torch.randn(2, 5, 4).transpose(1, 2)
    dlse = torch.full((), 0.5, dtype=torch.float64).expand(2, 4, 5)
    seen = {}

    class Reader(Recorder):
        def __call__(self, operands):
            super().__call__(operands)
            halves = torch.tensor(list((ctypes.c_int16 * out.numel()).from_address(self.last.o)), dtype=torch.int16)
            seen["out"] = halves.view(torch.bfloat16).view(2, 5, 4, 64)
            seen["lse"], seen["dlse"] = (floats_at(x, lse.numel()) for x in (self.last.lse, self.last.dlse))

    monkeypatch.setitem(globals(), "Recorder", Reader)
    launched(q, k, v, torch.ones_like(q), dlse, out, lse)
    assert torch.equal(seen["out"], out)
    assert seen["lse"] == lse.contiguous().flatten().tolist() and seen["dlse"] == [0.5] * lse.numel()


def test_a_misaligned_out_is_copied():
    """The kernel reads it in vectors of 16 bytes."""
    q, k, v = qkv()
    out = torch.randn(q.numel() + 1).bfloat16()[1:].view(q.shape)
    assert out.is_contiguous() and out.data_ptr() % 16
    assert launched(q, k, v, torch.ones_like(q), out=out)[0].o % 16 == 0


@pytest.fixture
def hopper_backward(hopper, monkeypatch):
    fn, asked = Recorder(BwdOperands), hopper[1]
    monkeypatch.setattr(runner.jit, "compiled", lambda *args: asked.append(args) or fn)
    return fn, asked


@pytest.mark.parametrize(
    "needs, wanted",
    [
        ((True, True, True), "all"),
        ((True, False, True), "all"),
        ((False, True, False), "dkdv"),
        ((False, True, True), "dkdv"),
        ((True, False, False), "dq"),
    ],
    ids=str,
)
@pytest.mark.parametrize("headdim", [72, 128, 256])
def test_only_wanted_gradients_are_computed(hopper_backward, headdim, needs, wanted):
    fn, asked = hopper_backward
    q, k, v = qkv(headdim=headdim, headdim_v=headdim)
    out, lse = forward_results(q, v)
    grads = runner.backward(problem(q, k, v), "sm90", torch.ones_like(out), None, q, k, v, out, lse, needs)
    traits = problem(q, k, v).for_phase(BWD).traits
    # Where one side is left out, dQ must have a kernel of its own.
    traits = replace(traits, deterministic=wanted != "all")
    chosen = planner.plan(traits, (9, 0), "sm90", problem(q, k, v).shape)
    tile = replace(chosen.tile, wanted=wanted)
    assert asked == [(chosen.spec, sm90.BACKWARD.compiled(traits), tile, chosen.spec.arch)] and len(fn.calls) == 1
    sent = fn.last
    assert (sent.dq != 0, sent.dk != 0, sent.dv != 0) == (wanted != "dkdv", wanted != "dq", wanted != "dq")
    assert [g is not None for g in grads] == list(needs)
    assert all(g.shape == x.shape for g, x in zip(grads, (q, k, v)) if g is not None)


def test_a_saved_operand_may_come_back_in_other_strides(hopper_backward):
    """Under saved-tensor hooks: what was decided for the strides of the forward must not read it in place."""
    fn, _ = hopper_backward
    q, k, v = qkv()
    out, lse = forward_results(q, v)
    decided = runner.Prepared(problem(q, k, v), "sm90", None)
    run = lambda q: decided.backward(torch.ones_like(out), None, q, k, v, out, lse, (True,) * 3)
    run(q)
    assert fn.last.q is q
    odd = torch.randn(*q.shape[:3], q.shape[3] + 1).to(q.dtype)[..., :-1]  # rows that TMA cannot read
    run(odd)
    assert torch.equal(fn.last.q, odd) and all(step % 8 == 0 for step in fn.last.q.stride()[:-1])
    run(q)
    assert fn.last.q is q and len(decided.backwards) == 2


@pytest.mark.parametrize(
    "sizes", [{"batch": 0}, {"seqlen_q": 0}, {"seqlen_k": 0}, {"heads": 0, "heads_kv": 0}], ids=str
)
def test_an_empty_backward_launches_nothing(hopper_backward, sizes):
    fn, asked = hopper_backward
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv(**sizes))
    out, lse = forward_results(q, v)
    needs = True, False, True
    dq, dk, dv = runner.backward(problem(q, k, v), "sm90", torch.ones_like(out), None, q, k, v, out, lse, needs)
    assert not asked and not fn.calls and dk is None
    for grad, x in ((dq, q), (dv, v)):
        assert grad.shape == x.shape and grad.dtype == x.dtype and grad.is_contiguous() and not grad.any()


@pytest.mark.parametrize("backend, headdim", [("reference", 64), ("auto", TOO_WIDE), ("sm90", TOO_WIDE)])
def test_what_the_kernel_refuses_goes_to_the_reference(hopper_backward, backend, headdim):
    fn, asked = hopper_backward
    q, k, v = qkv(headdim=headdim)
    out, lse = forward_results(q, v)
    grads = runner.backward(problem(q, k, v), backend, torch.ones_like(out), None, q, k, v, out, lse, (True,) * 3)
    assert not asked and not fn.calls
    assert all(g.shape == x.shape and bool(g.any()) for g, x in zip(grads, (q, k, v)))


def test_the_log_says_why_the_kernel_was_not_taken(hopper, monkeypatch, caplog):
    monkeypatch.setattr(runner, "_announced", set())
    q, k, v = qkv(headdim=TOO_WIDE)
    out, lse = forward_results(q, v)
    with caplog.at_level(logging.INFO, "flashattn_hopper"):
        runner.backward(problem(q, k, v), "auto", torch.ones_like(out), None, q, k, v, out, lse, (True,) * 3)
    (record,) = caplog.records
    assert f"reference.backward runs bwd.bf16.d{TOO_WIDE}" in record.message
    assert f"not sm90.backward: headdim {TOO_WIDE}" in record.message
