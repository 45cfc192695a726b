"""Real text that every machine has: the source of Python's own standard library, as bytes."""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

VOCAB = 256
SEPARATOR = b"\0"
# Why: distributions ship the test suites or not, and site-packages holds whatever the user installed; both would make
# the text differ between machines.
EXCLUDED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
# A file whose SHA-256 starts with a byte below this is validation text: one in sixteen.
VALIDATION_BELOW = 16


@dataclass(frozen=True)
class Corpus:
    """Training and validation text, each a 1-D uint8 tensor of whole files joined by a zero byte."""

    train: torch.Tensor
    val: torch.Tensor
    train_files: tuple[str, ...]
    val_files: tuple[str, ...]

    @property
    def unigram_loss(self) -> float:
        """Validation loss in nats per byte of a model that knows only how often each byte occurs in training."""
        counts = torch.bincount(self.train.long(), minlength=VOCAB).double() + 1.0
        return -(counts / counts.sum()).log()[self.val.long()].mean().item()


def is_validation(content: bytes) -> bool:
    """Which side a file falls on. Decided by its content, so that copies of one file stay on one side."""
    return hashlib.sha256(content).digest()[0] < VALIDATION_BELOW


def load_corpus(root: Path | None = None) -> Corpus:
    """All `*.py` files below `root` (default: the running Python's standard library), in the order of their paths.

    Raises:
        RuntimeError: fewer than two files, or one side of the split stays empty.
    """
    root = Path(root or sysconfig.get_path("stdlib"))
    named = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
    parts: dict[bool, dict[str, bytes]] = {False: {}, True: {}}
    for name in sorted(named):
        if EXCLUDED.isdisjoint(name.split("/")[:-1]):
            content = named[name].read_bytes()
            if content.strip():
                parts[is_validation(content)][name] = content
    if not (parts[False] and parts[True]):
        raise RuntimeError(f"{root} has too few *.py files to train on ({len(parts[False]) + len(parts[True])})")
    train, val = (
        torch.frombuffer(bytearray(SEPARATOR.join(parts[side].values())), dtype=torch.uint8) for side in (False, True)
    )
    return Corpus(train, val, tuple(parts[False]), tuple(parts[True]))


def sample(text: torch.Tensor, batch: int, seqlen: int, generator: torch.Generator) -> torch.Tensor:
    """`batch` random windows of `seqlen + 1` bytes: int64 `(batch, seqlen + 1)`, inputs and shifted targets in one."""
    if len(text) <= seqlen + 1:
        raise ValueError(f"seqlen={seqlen}: the text has only {len(text)} bytes")
    starts = torch.randint(len(text) - seqlen, (batch, 1), generator=generator)
    return text[starts + torch.arange(seqlen + 1)].long()
