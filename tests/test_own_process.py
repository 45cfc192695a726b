"""Starts the tests that need a process of their own, in which no kernel has been compiled, or for one arch only."""

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
FILES = ("test_sm80_fragments.py", "test_sm80_blocks.py", "test_jit.py")


@pytest.mark.parametrize("file", FILES)
def test_in_a_process_of_its_own(file):
    command = [sys.executable, "-m", "pytest", "-q", "-m", "own_process", "-p", "no:xdist", str(HERE / file)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE.parent, timeout=580)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_every_file_of_such_tests_is_started():
    marked = {path.name for path in HERE.glob("test_*.py") if "pytest.mark.own_process" in path.read_text()}
    assert marked - {Path(__file__).name} == set(FILES)
