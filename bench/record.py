"""Where a result comes from: revision, machine, versions, clocks; and the files results are kept in."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import statistics
import subprocess
import threading
import time

import torch

SCHEMA = 1
HERE = pathlib.Path(__file__).resolve().parent
RESULTS = HERE / "results"

GPU_FIELDS = ("name", "driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.draw", "power.limit")
SAMPLED = ("clocks.sm", "clocks.mem", "power.draw")


def environment(device: str, revision: str | None = None) -> dict:
    """The head of a results file. `revision` replaces what git says, for a copy of the tree without its history."""
    return {
        "schema": SCHEMA,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        **git_state(revision),
        "gpu": gpu_state(device),
        "versions": versions(),
    }


def git_state(revision: str | None = None) -> dict:
    def git(*words):
        return subprocess.run(("git", "-C", str(HERE), *words), capture_output=True, text=True, check=True).stdout

    if revision:
        return {"revision": revision.removesuffix("+dirty"), "dirty": revision.endswith("+dirty")}
    try:
        # Results themselves do not make a tree dirty: the second suite of a run follows the first one's file.
        changed = [line for line in git("status", "--porcelain").splitlines() if "bench/results/" not in line]
        return {"revision": git("rev-parse", "--short=12", "HEAD").strip(), "dirty": bool(changed)}
    except (OSError, subprocess.CalledProcessError):
        return {"revision": "unknown", "dirty": None}


def versions() -> dict:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "dsl": distribution("nvidia-cutlass-dsl"),
        "flashattn_hopper": distribution("flashattn-hopper"),
    }


def distribution(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def gpu_state(device: str) -> dict:
    """Name, clocks (MHz), power (W) and driver as nvidia-smi reports them; multiprocessors from torch."""
    if torch.device(device).type != "cuda":
        return {"name": platform.processor() or platform.machine(), "num_sms": None}
    properties = torch.cuda.get_device_properties(device)
    state = {"name": properties.name, "num_sms": properties.multi_processor_count}
    return state | {field: value for field, value in query(GPU_FIELDS).items() if field != "name"}


def query(fields) -> dict:
    """One nvidia-smi reading of this process's first device; {} where there is no nvidia-smi."""
    try:
        run = subprocess.run(smi(fields), capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(fields, map(number, run.stdout.splitlines()[0].split(","))))


def smi(fields) -> list[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
    return ["nvidia-smi", f"--id={visible}", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]


def number(text: str):
    try:
        return float(text)
    except ValueError:
        return text.strip()


class Monitor:
    """Samples clocks and power while it is open, from one nvidia-smi process that prints every `period_ms`."""

    def __init__(self, device: str, period_ms: int = 100):
        self.wanted = torch.device(device).type == "cuda"
        self.period_ms = period_ms
        self.samples: list[tuple[float, list]] = []
        self.process = None

    def __enter__(self):
        if self.wanted:
            command = [*smi(SAMPLED), f"--loop-ms={self.period_ms}"]
            try:
                self.process = subprocess.Popen(
                    command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, bufsize=1
                )
            except OSError:
                return self
            threading.Thread(target=self._read, daemon=True).start()
        return self

    def _read(self):
        for line in self.process.stdout:
            self.samples.append((time.monotonic(), [number(word) for word in line.split(",")]))

    def __exit__(self, *_):
        if self.process is not None:
            self.process.terminate()
            self.process.wait()

    def during(self, spans) -> dict:
        """Medians of the samples taken within `spans` of time.monotonic(); {} if there are none."""
        inside = [row for t, row in list(self.samples) if any(begin <= t <= end for begin, end in spans)]
        readings = {}
        for i, field in enumerate(SAMPLED):
            values = [row[i] for row in inside if len(row) > i and isinstance(row[i], float)]
            if values:
                readings[field] = statistics.median(values)
        return readings


def source(value) -> str:
    """A flat dataclass as the code that makes it, defaults left out: `FwdTile(192, 80, output="own")`."""
    text = lambda content: json.dumps(content) if isinstance(content, str) else repr(content)
    words = []
    for f in dataclasses.fields(value):
        content = getattr(value, f.name)
        if f.default is dataclasses.MISSING:
            words.append(text(content))
        elif content != f.default:
            words.append(f"{f.name}={text(content)}")
    return f"{type(value).__name__}({', '.join(words)})"


def slug(name: str) -> str:
    """A folder name: `NVIDIA H200` is `nvidia-h200`."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "unknown"


def path_for(out, gpu_name: str, suite: str) -> pathlib.Path:
    return pathlib.Path(out) / slug(gpu_name) / f"{suite}.json"


def save(results: dict, path) -> pathlib.Path:
    """Write `results` whole or not at all; a run that is stopped leaves the cells it finished."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    # One row a line: a diff of two runs then reads as a table.
    rows = results.get("rows", [])
    head = json.dumps({k: v for k, v in results.items() if k != "rows"}, indent=1, allow_nan=False)
    body = ",\n  ".join(json.dumps(row, allow_nan=False) for row in rows)
    draft.write_text(head.removesuffix("\n}") + f',\n "rows": [\n  {body}\n ]\n}}\n')
    draft.replace(path)
    return path


def load(path) -> dict:
    results = json.loads(pathlib.Path(path).read_text())
    if results.get("schema") != SCHEMA:
        raise ValueError(f"{path}: schema {results.get('schema')}, this code reads {SCHEMA}")
    return results
