"""The training job on a CPU: it learns, it repeats for a seed, it leaves its files, it refuses cleanly."""

import json
import math
import subprocess
import sys

import pytest
import torch

from flashattn_hopper.spec.problem import Traits
from flashattn_hopper.train.accuracy import Batch, Grads, capture, gradients, measure, plain
from flashattn_hopper.train.attention import ATTEND
from flashattn_hopper.train.config import DEFAULTS, pick_backend, resolve
from flashattn_hopper.train.data import is_validation, load_corpus, sample
from flashattn_hopper.train.job import Trainer, learning_rate, train, validation_steps
from flashattn_hopper.train.model import GPT, GPTConfig

TINY = {"steps": 12, "seqlen": 48, "batch": 4, "layers": 2, "dim": 32, "heads": 4, "kv_heads": 2, "lr": 1e-2}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Why: tiny tensors and several test processes; a thread pool per process would only wait for the others."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def corpus():
    return load_corpus()


@pytest.fixture(scope="module")
def outcome(corpus):
    return train(resolve(device="cpu", **TINY), corpus)


# -------------------------------------------------------------------------------------------------------- data
def test_split_is_disjoint_and_covers_everything(corpus):
    assert not set(corpus.train_files) & set(corpus.val_files)
    assert list(corpus.train_files) == sorted(corpus.train_files)
    share = len(corpus.val) / (len(corpus.train) + len(corpus.val))
    assert 0.01 < share < 0.2


def test_copies_of_a_file_stay_on_one_side(tmp_path):
    texts = [f"x = {i}\n".encode() for i in range(60)]
    for i, text in enumerate(texts):
        for folder in ("a", "b"):
            (tmp_path / folder).mkdir(exist_ok=True)
            (tmp_path / folder / f"{i}.py").write_bytes(text)
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "installed.py").write_text("installed = 1\n")
    found = load_corpus(tmp_path)
    assert len(found.train_files) + len(found.val_files) == 2 * len(texts)
    assert {name.split("/")[1] for name in found.val_files} == {
        f"{i}.py" for i, t in enumerate(texts) if is_validation(t)
    }
    assert not set(bytes(found.train).split(b"\0")) & set(bytes(found.val).split(b"\0"))


def test_too_little_text_is_said(tmp_path):
    with pytest.raises(RuntimeError, match=r"too few \*\.py files"):
        load_corpus(tmp_path)


def test_samples_are_windows_of_the_text(corpus):
    text = corpus.val[:1000]
    windows = sample(text, 8, 20, torch.Generator().manual_seed(0))
    assert windows.shape == (8, 21)
    assert all(bytes(w.to(torch.uint8)) in bytes(text) for w in windows)
    with pytest.raises(ValueError, match="seqlen=999"):
        sample(text, 1, 999, torch.Generator())


def test_unigram_loss_is_that_of_the_byte_frequencies(corpus):
    uniform = math.log(256)
    counts = torch.bincount(corpus.val.long(), minlength=256).double()
    p = counts[counts > 0] / counts.sum()
    entropy = -(p * p.log()).sum().item()
    assert entropy <= corpus.unigram_loss < min(uniform, entropy + 0.2)


# ------------------------------------------------------------------------------------------------------- model
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_model_sees_no_later_byte(kv_heads):
    torch.manual_seed(0)
    config = resolve(device="cpu", **(TINY | {"kv_heads": kv_heads}))
    model = GPT(config.gpt, ATTEND["hopper"](config))
    tokens = torch.randint(256, (1, 40))
    changed = tokens.clone()
    changed[0, 25:] = (changed[0, 25:] + 1) % 256
    a, b = model(tokens), model(changed)
    assert torch.equal(a[0, :25], b[0, :25])
    assert not torch.allclose(a[0, 25:], b[0, 25:])


def test_hopper_and_sdpa_compute_the_same_model():
    losses, grads = [], []
    for attention in ("hopper", "sdpa"):
        config = resolve(device="cpu", attention=attention, **TINY)
        torch.manual_seed(3)
        model = GPT(config.gpt, ATTEND[attention](config))
        loss = model.loss(torch.arange(98).view(2, 49))
        loss.backward()
        losses.append(loss.item())
        grads.append(model.blocks[0].attention.qkv.weight.grad)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"dim": 30, "heads": 4}, "even integer"),
        ({"kv_heads": 3}, "multiple of kv_heads"),
        ({"layers": 0}, "at least 1"),
    ],
)
def test_impossible_sizes_are_named(sizes, message):
    with pytest.raises(ValueError, match=message):
        GPTConfig(**({name: TINY[name] for name in ("layers", "dim", "heads", "kv_heads", "seqlen")} | sizes))


# --------------------------------------------------------------------------------------------------------- job
def test_tiny_run_learns(outcome):
    assert len(outcome.losses) == TINY["steps"]
    assert outcome.losses[0] == pytest.approx(math.log(256), abs=0.3)
    assert max(outcome.losses[-3:]) < outcome.losses[0] - 1.0
    assert outcome.val_loss < outcome.losses[0] - 1.0
    assert outcome.val[-1][0] == TINY["steps"]
    assert outcome.tokens_per_second > 0
    assert "reference" in outcome.explanation


def test_same_seed_same_run(outcome, corpus):
    again = train(resolve(device="cpu", **TINY), corpus)
    other = train(resolve(device="cpu", seed=1, **TINY), corpus)
    assert again.losses == outcome.losses and again.val == outcome.val
    assert other.losses != outcome.losses


def test_sixteen_bit_run_learns(corpus):
    for precision in ("bf16", "fp16"):
        found = train(resolve(device="cpu", precision=precision, **TINY), corpus)
        assert found.losses[-1] < found.losses[0] - 1.0
        assert all(math.isfinite(row.ours_max) for row in found.errors)


def test_learning_rate_warms_up_and_decays():
    config = resolve(device="cpu", steps=100, lr=1.0)
    rates = [learning_rate(step, config) for step in range(100)]
    top = rates.index(max(rates))
    assert max(rates) == 1.0 and top <= 5
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top + 1 :] == sorted(rates[top + 1 :], reverse=True)
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 250])
def test_the_last_step_is_validated(steps):
    stops = validation_steps(steps)
    assert max(stops) == steps and min(stops) >= 1


@pytest.mark.parametrize("device", list(DEFAULTS))
def test_default_sizes_are_valid(device):
    row = DEFAULTS[device]
    config = GPTConfig(**{name: row[name] for name in ("layers", "dim", "heads", "kv_heads", "seqlen")})
    assert config.headdim in (64, 128)


@pytest.mark.parametrize(
    "chosen",
    [
        {"device": "tpu"},
        {"precision": "int8"},
        {"attention": "linear"},
        {"steps": 0},
        {"attention": "sdpa", "precision": "fp8"},
    ],
)
def test_wrong_settings_are_named(chosen):
    with pytest.raises(ValueError, match=str(next(iter(chosen.values())))):
        resolve(**({"device": "cpu"} | chosen))


# ---------------------------------------------------------------------------------------------------- accuracy
def test_captured_batch_is_what_layer_0_saw(corpus):
    trainer = Trainer(resolve(device="cpu", **TINY), corpus)
    batch = trainer.capture()
    assert batch.q.shape == (4, 48, 4, 8) and batch.k.shape == batch.v.shape == (4, 48, 2, 8)
    assert batch.dout.shape == batch.q.shape and batch.dout.abs().max() > 0
    assert all(p.grad is None for p in trainer.model.parameters())
    # The captured gradient is the one that reaches dv: the chain rule through layer 0's value weights agrees.
    seen = []
    core = trainer.model.blocks[0].attention.core
    handle = core.register_forward_pre_hook(lambda _module, inputs: inputs[2].register_hook(seen.append) and None)
    again = capture(trainer.model, trainer._loss, trainer.val_batches[0])
    handle.remove()
    torch.testing.assert_close(gradients(trainer.attend, again).dv, seen[0])


def test_errors_of_a_run(outcome):
    assert [row.name for row in outcome.errors] == list(Grads._fields)
    for row in outcome.errors:
        assert 0 < row.ours_max < 1e-3 * row.scale
        assert row.ours_rms <= row.ours_max
        assert row.ratio_rms < 6  # the backward recomputes the probabilities from lse: one more rounding


def test_errors_tell_a_wrong_attention():
    torch.manual_seed(0)
    q, dout = torch.randn(2, 2, 16, 4, 8)
    k, v = torch.randn(2, 2, 16, 2, 8)
    right = measure(plain, Batch(q, k, v, dout), torch.float32)
    wrong = measure(lambda q, k, v: plain(q, k, v * 1.01), Batch(q, k, v, dout), torch.float32)
    assert all(row.ratio_max < 10 for row in right)
    assert all(row.ratio_max > 1000 for row in wrong)


# -------------------------------------------------------------------------------------------------- command line
@pytest.fixture
def command():
    pytest.importorskip("matplotlib")
    app = pytest.importorskip("flashattn_hopper.train.cli").app
    testing = pytest.importorskip("typer.testing")
    return lambda *args: testing.CliRunner().invoke(app, [str(arg) for arg in args])


def options(**chosen):
    return [text for name, value in chosen.items() for text in (f"--{name.replace('_', '-')}", value)]


def test_train_writes_png_and_json(command, tmp_path):
    result = command("train", *options(device="cpu", out=tmp_path / "run", **(TINY | {"steps": 3})))
    assert result.exit_code == 0, result.output
    assert (tmp_path / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert len(record["losses"]) == 3 and record["config"]["dim"] == TINY["dim"]
    assert [row["name"] for row in record["errors"]] == list(Grads._fields)
    assert record["machine"]["torch"].startswith(torch.__version__)
    for text in ("reference", "val loss", "tokens/s", "float64", "ratio"):
        assert text in result.output


def test_fp8_on_another_gpu_asks_for_the_emulation_and_says_why(monkeypatch):
    monkeypatch.setattr("flashattn_hopper.train.config.capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    backend, why = pick_backend("cuda", Traits("fwd", "fp8", 64, 64, "causal"))
    assert backend == "reference" and why.startswith("NVIDIA A100: ") and "sm90.forward_fp8: " in why
    assert pick_backend("cuda", Traits("fwd", "bf16", 64, 64, "causal")) == ("auto", "NVIDIA A100")


def test_fp8_on_a_hopper_gpu_takes_the_kernel(monkeypatch):
    monkeypatch.setattr("flashattn_hopper.train.config.capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert pick_backend("cuda", Traits("fwd", "fp8", 64, 64, "causal")) == ("auto", "NVIDIA H200")


def test_fp8_run_learns(command, tmp_path):
    sizes = TINY | {"steps": 30, "seqlen": 64}
    result = command("train", *options(device="cpu", precision="fp8", out=tmp_path / "run", **sizes))
    assert result.exit_code == 0 and "reference.forward_fp8" in result.output
    losses = json.loads((tmp_path / "run" / "run.json").read_text())["losses"]
    assert len(losses) == 30 and max(losses[-3:]) < losses[0] - 1.5


@pytest.mark.parametrize("args", [("--heads", "5"), ("--steps", "0"), ("--device", "tpu"), ("--precision", "int4")])
def test_wrong_options_exit_with_2(command, args):
    result = command("train", "--device", "cpu", *args)
    assert result.exit_code == 2 and "Traceback" not in result.output


def test_explain_names_the_kernel_or_the_reason(command):
    result = command("explain", *options(seqlen_q=70, heads=4, kv_heads=2, headdim=64, device="cpu"), "--causal")
    assert result.exit_code == 0 and "reference" in result.output
    result = command("explain", *options(heads=4, kv_heads=3, device="cpu"))
    assert result.exit_code == 2 and "Traceback" not in result.output


def test_info_is_a_bug_report_header(command, tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHATTN_HOPPER_CACHE_DIR", str(tmp_path))
    (tmp_path / "fwd.so").write_bytes(b"x" * 2_000_000)
    result = command("info")
    assert result.exit_code == 0
    for text in ("flashattn_hopper", torch.__version__, "nvidia-cutlass-dsl", "driver", "(1 kernels, 2.0 MB)"):
        assert text in result.output


def test_missing_extra_says_what_to_install(tmp_path):
    """A Python that cannot find typer: the command line says which extra brings it."""
    code = (
        "import sys\n"
        "from importlib import util\n"
        "found = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name == 'typer' else found(name, *rest)\n"
        "from flashattn_hopper.__main__ import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    assert "typer" in done.stderr and "flashattn-hopper[cli]" in done.stderr and "Traceback" not in done.stderr
