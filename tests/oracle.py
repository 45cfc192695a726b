"""The error budget of `flashattn_hopper.oracle` as assertions, which tests read as one line.

    multiples = check_forward(out, lse, q, k, v, causal=True)                      # lse may be None
    multiples = check_grads((dq, dk, dv), q, k, v, dout, dlse, window_size=(7, 0)) # a gradient may be None

Both return error / plain PyTorch's error by output name, and raise AssertionError with all figures in the text.
"""

from __future__ import annotations

from flashattn_hopper.oracle import FACTOR, FLOORS, Dense, attention, budget, error, judge, plain, visible

__all__ = ["FACTOR", "FLOORS", "Dense", "attention", "budget", "error", "judge", "plain", "visible"]


def assert_close_to_oracle(actual, oracle, plain, dtype, what, *, terms=None, label="") -> float:
    """Raise unless `actual` is as close to `oracle` as the rule asks; return error / plain PyTorch's error."""
    verdict = judge(actual, oracle, plain, dtype, what, terms)
    assert not verdict.wrong, f"{f'{label} {what}'.strip()}: {verdict.wrong}"
    return verdict.multiple


def check_forward(
    out, lse, q, k, v, *, causal=False, window_size=None, softmax_scale=None, label="", per_sequence=False
) -> dict[str, float]:
    """Hold out (and lse unless None) against float64; multiples of plain PyTorch's error by output name.

    `per_sequence` judges each batch entry by itself, so that a loud one cannot hide a quiet one.
    """
    mask = {"causal": causal, "window_size": window_size, "softmax_scale": softmax_scale}
    return _check({"out": out, "lse": lse}, q, k, v, mask, label, per_sequence)


def check_grads(
    grads, q, k, v, dout, dlse=None, *, causal=False, window_size=None, softmax_scale=None, label="", per_sequence=False
) -> dict[str, float]:
    """Hold (dq, dk, dv), each possibly None, against float64; multiples of plain PyTorch's error by name."""
    mask = {"causal": causal, "window_size": window_size, "softmax_scale": softmax_scale}
    mask |= {"dout": dout, "dlse": dlse}
    return _check(dict(zip(("dq", "dk", "dv"), grads)), q, k, v, mask, label, per_sequence)


def _check(results, q, k, v, arguments, label, per_sequence):
    exact, usual = attention(q, k, v, **arguments), plain(q, k, v, **arguments)
    parts = [slice(b, b + 1) for b in range(q.shape[0])] if per_sequence else [slice(None)]
    multiples = {}
    for what, actual in results.items():
        if actual is None:
            continue
        for part in parts:
            one = f"{label} sequence {part.start}" if per_sequence else label
            multiple = assert_close_to_oracle(
                actual[part],
                getattr(exact, what)[part],
                getattr(usual, what)[part],
                q.dtype,
                what,
                terms=exact.terms[what][part],
                label=one,
            )
            multiples[what] = max(multiple, multiples.get(what, 0.0))
    return multiples
