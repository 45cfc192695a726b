"""The training loop: AdamW with warm-up and cosine decay, validation on held-out files, errors of one real batch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from .accuracy import ErrorRow, capture, measure
from .attention import ATTEND, explain
from .config import RunConfig
from .data import Corpus, load_corpus, sample
from .model import GPT

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1  # on matrices only
GRAD_CLIP = 1.0
WARMUP = 0.05  # of the steps
FINAL_LR = 0.1  # of the peak
VALIDATIONS = 5  # over the run
VALIDATION_BATCHES = 4
FP16_LOSS_SCALE = 2.0**12


@dataclass
class Outcome:
    """What a run found. Losses are nats per byte; `val` is (step, loss); tokens/s leaves validation out."""

    config: RunConfig
    parameters: int = 0
    corpus: dict = field(default_factory=dict)
    unigram: float = 0.0
    explanation: str = ""
    losses: list[float] = field(default_factory=list)
    val: list[tuple[int, float]] = field(default_factory=list)
    seconds: float = 0.0
    tokens_per_second: float = 0.0
    errors: list[ErrorRow] = field(default_factory=list)

    @property
    def train_loss(self) -> float:
        """Mean over the last tenth of the steps: one batch alone is noisy."""
        tail = self.losses[-max(1, len(self.losses) // 10) :]
        return sum(tail) / len(tail)

    @property
    def val_loss(self) -> float:
        return self.val[-1][1]


class Clock:
    """Seconds of training alone; stopped while the job validates."""

    def __init__(self, device: str):
        self.cuda = device == "cuda"
        self.total = 0.0

    def __enter__(self):
        self._sync()
        self.began = time.perf_counter()

    def __exit__(self, *_):
        self._sync()
        self.total += time.perf_counter() - self.began

    def _sync(self):
        if self.cuda:
            torch.cuda.synchronize()


def learning_rate(step: int, config: RunConfig) -> float:
    """Linear warm-up, then half a cosine down to FINAL_LR of the peak."""
    warmup = max(1, round(WARMUP * config.steps))
    if step < warmup:
        return config.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, config.steps - warmup)
    return config.lr * (FINAL_LR + (1 - FINAL_LR) * 0.5 * (1 + math.cos(math.pi * progress)))


def make_optimizer(model: GPT, config: RunConfig) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.lr, betas=BETAS, fused=config.device == "cuda")


def validation_steps(steps: int) -> set[int]:
    """After how many steps the job validates: evenly spread, the last step included."""
    return {round(steps * (i + 1) / VALIDATIONS) for i in range(VALIDATIONS)} - {0}


class Trainer:
    """One run, step by step. `corpus` defaults to the standard library's source."""

    def __init__(self, config: RunConfig, corpus: Corpus | None = None):
        self.config = config
        self.corpus = corpus or load_corpus()
        torch.manual_seed(config.seed)
        self.batches = torch.Generator().manual_seed(config.seed)
        self.attend = ATTEND[config.attention](config)
        self.model = GPT(config.gpt, self.attend).to(config.device)
        self.compute_loss = torch.compile(self._loss) if config.compile else self._loss
        self.optimizer = make_optimizer(self.model, config)
        self.scaler = torch.amp.GradScaler(config.device, enabled=config.precision == "fp16")
        held_out = torch.Generator().manual_seed(config.seed + 1)
        self.val_batches = [self._sample(self.corpus.val, held_out) for _ in range(VALIDATION_BATCHES)]

    def _sample(self, text, generator):
        return sample(text, self.config.batch, self.config.seqlen, generator).to(self.config.device, non_blocking=True)

    def _loss(self, model: GPT, tokens):
        with torch.autocast(self.config.device, self.config.dtype, enabled=self.config.dtype != torch.float32):
            return model.loss(tokens)

    def step(self, index: int) -> torch.Tensor:
        """One optimizer step; the loss comes back as a tensor, so that a GPU need not be waited for."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(index, self.config)
        loss = self.compute_loss(self.model, self._sample(self.corpus.train, self.batches))
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), GRAD_CLIP)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    @torch.no_grad()
    def validate(self) -> float:
        return sum(self._loss(self.model, tokens).item() for tokens in self.val_batches) / len(self.val_batches)

    def capture(self):
        scale = FP16_LOSS_SCALE if self.config.precision == "fp16" else 1.0
        return capture(self.model, self._loss, self.val_batches[0], scale)


Report = Callable[[Outcome], None]


def train(
    config: RunConfig,
    corpus: Corpus | None = None,
    on_start: Report = lambda outcome: None,
    on_step: Report = lambda outcome: None,
) -> Outcome:
    """Train one model and measure its attention.

    `on_start` is called once it is known which kernel runs, `on_step` whenever losses were added.

    Raises:
        NotImplementedError: hopper_attention does not offer what the configuration asks for.
    """
    trainer = Trainer(config, corpus)
    outcome = Outcome(config, sum(p.numel() for p in trainer.model.parameters()))
    outcome.corpus = {
        "train_bytes": len(trainer.corpus.train),
        "val_bytes": len(trainer.corpus.val),
        "train_files": len(trainer.corpus.train_files),
        "val_files": len(trainer.corpus.val_files),
    }
    outcome.unigram = trainer.corpus.unigram_loss
    batch = trainer.capture()
    outcome.explanation = explain(config, *(x.to(config.dtype) for x in batch[:3]))
    on_start(outcome)

    clock = Clock(config.device)
    began = time.perf_counter()
    stops = validation_steps(config.steps)
    # Why: reading a loss makes the GPU drain, so there it is read in groups; the first step stands alone because it
    # compiles, and tokens/s leaves it out.
    group = 10 if config.device == "cuda" else 1
    done = 0
    while done < config.steps:
        limit = min([done + (group if done else 1), *(s for s in stops if s > done)])
        with clock:
            pending = [trainer.step(index) for index in range(done, limit)]
        outcome.losses += [loss.item() for loss in pending]
        if done == 0 and config.steps > 1:
            clock.total = 0.0
        done = limit
        if done in stops:
            outcome.val.append((done, trainer.validate()))
        on_step(outcome)
    outcome.seconds = time.perf_counter() - began
    outcome.tokens_per_second = max(1, config.steps - 1) * config.batch * config.seqlen / clock.total
    outcome.errors = measure(trainer.attend, trainer.capture(), config.dtype)
    return outcome
