"""GPU tests: what they need, kernels compiled before they start, outputs poisoned before a kernel writes them.

They need a Hopper GPU, or with `gpu(since=capability)` one of that compute capability or a newer one. On a machine
without it `-m "not gpu"` leaves them out. Selected there all the same, they are skipped with the reason, and the run
fails: a session that could not test the kernel must not end green.
"""

from __future__ import annotations

import functools
import importlib
import sys
from pathlib import Path

import pytest

_NO_GPU = "needs a Hopper GPU (compute capability 9.0); deselect with -m 'not gpu'"
_NO_NEWER_GPU = "needs a GPU of compute capability {}.{} or newer; deselect with -m 'not gpu'"
_LEFT_OUT = "deselect with -m 'not gpu'"
_not_run: list[str] = []


@functools.cache
def _capability() -> tuple[int, int] | None:
    import torch

    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def _runs(marker) -> bool:
    here, since = _capability(), marker.kwargs.get("since")
    return here == (9, 0) if since is None else here is not None and here >= since


def pytest_collection_modifyitems(config, items):
    """Tests marked own_process run where they are asked for, which tests/test_own_process.py does."""
    if "own_process" not in config.option.markexpr:
        items[:] = [item for item in items if not item.get_closest_marker("own_process")]


def pytest_runtest_setup(item):
    marker = item.get_closest_marker("gpu")
    if marker and not _runs(marker):
        since = marker.kwargs.get("since")
        pytest.skip(_NO_GPU if since is None else _NO_NEWER_GPU.format(*since))


def pytest_runtest_logreport(report):
    if report.skipped and _LEFT_OUT in str(report.longrepr):
        _not_run.append(report.nodeid)


def pytest_sessionfinish(session):
    if _not_run and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter):
    if _not_run:
        terminalreporter.write_line(f"{len(_not_run)} GPU tests did not run: no such GPU, {_LEFT_OUT}", red=True)


@pytest.fixture(autouse=True)
def _every_test(request):
    """The same random numbers in whatever order tests run; for GPU tests, kernels from the disk cache."""
    # Why not import it: the tests of the vocabulary run without torch.
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
    if request.node.get_closest_marker("gpu"):
        request.getfixturevalue("kernels")


@pytest.fixture(scope="session")
def kernels():
    """Every Hopper variant of the catalog, compiled by as many processes as there are cores. Tests of another arch have
    a fixture of this name in their file."""
    from flashattn_hopper import jit
    from flashattn_hopper.kernels.sm90 import specs as sm90

    from . import cases

    variants = [*cases.variants(sm90.FORWARD), *cases.variants(sm90.BACKWARD)]
    return jit.warmup([*variants, *cases.other_variants(sm90.FORWARD)])


@pytest.fixture(scope="module")
def accuracy():
    """bench/fp8_accuracy.py: the input sets and recipes of the acceptance numbers."""
    bench = str(Path(__file__).resolve().parents[1] / "bench")
    sys.path.insert(0, bench)
    try:
        yield importlib.import_module("fp8_accuracy")
    finally:
        sys.path.remove(bench)
        for name in ("fp8_accuracy", "record"):
            sys.modules.pop(name, None)


class Poison:
    """What the runner's outputs are allocated from: NaN, with guard elements on both sides in the same allocation.

    8-bit codes are bytes here: 0x7F is NaN in e4m3, and in int8 the largest code.
    """

    GUARD = 4096

    def __init__(self):
        self.buffers = []

    def allocator(self, shape, dtype, device):
        """In place of runner._allocator."""
        return lambda: self.empty(shape, dtype, device)

    def empty(self, shape, dtype, device):
        import torch

        size = torch.Size(shape).numel() + 2 * self.GUARD
        value, kind = (0x7F, torch.uint8) if dtype.itemsize == 1 else (float("nan"), dtype)
        buffer = torch.full((size,), value, dtype=kind, device=device)
        for guard in self.guards(buffer):
            guard.fill_(self.sign(buffer))
        self.buffers.append(buffer)
        return buffer[self.GUARD : -self.GUARD].view(dtype).view(shape)

    def sign(self, buffer):
        return 1.5 if buffer.is_floating_point() else 0x55

    def guards(self, buffer):
        return buffer[: self.GUARD], buffer[-self.GUARD :]

    def check(self, allocations: int):
        """Raise unless that many tensors were handed out since the last check, with nothing written beside them."""
        buffers, self.buffers = self.buffers, []
        assert len(buffers) == allocations, f"{len(buffers)} outputs were poisoned, expected {allocations}"
        for buffer in buffers:
            for side, guard in zip(("before", "behind"), self.guards(buffer)):
                assert bool((guard == self.sign(buffer)).all()), f"the kernel wrote {side} a {buffer.dtype} output"


@pytest.fixture
def poison(monkeypatch):
    """See Poison. Every element of an output that a kernel leaves out stays NaN."""
    from flashattn_hopper import api, ops, runner, runner_fp8

    poison = Poison()
    monkeypatch.setattr(runner, "_allocator", poison.allocator)
    # What the runner prepares holds its allocator, so calls prepared before or later are kept apart.
    monkeypatch.setattr(api, "_calls", runner.Memo())
    for module in (ops, runner_fp8):
        monkeypatch.setattr(module, "_prepared", runner.Memo())
    runner_fp8._allocators.cache_clear()
    yield poison
    runner_fp8._allocators.cache_clear()
