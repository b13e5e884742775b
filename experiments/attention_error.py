"""How far attention over restored rows is from attention over the rows themselves, in float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

METRICS: dict[str, str] = {
    "latent_rms": "rms error of the latents over their rms",
    "latent_max": "largest error of a latent over the largest latent",
    "latent_snr_db": "signal to noise of the latents in dB",
    "key_rms": "rms error of the keys over their rms",
    "key_max": "largest error of a key over the largest key",
    "key_snr_db": "signal to noise of the keys in dB",
    "score_rms": "rms error of softmax_scale * q.k",
    "score_max": "largest error of softmax_scale * q.k",
    "kl": "KL divergence of a head's attention in nats, mean over heads",
    "kl_worst": "the same, of the worst head",
    "tv": "attention that lies on other tokens, total variation, mean over heads",
    "tv_worst": "the same, of the worst head",
    "output_rms": "norm of a head's output error over that of its output, median over heads",
    "output_rms_worst": "the same, of the worst head",
    "output_cosine": "1 - cosine of a head's output and the exact one, median over heads",
    "output_cosine_worst": "the same, of the worst head",
}
"""Names and meanings. All are fractions but those in dB and nats; scores are in nats too."""


@dataclass(frozen=True)
class Attention:
    """Absorbed decode of one token: keys are whole rows, values their first `L` elements.

    Attributes:
        rows: float64 `[T, L + R]`.
        L: elements of the latent.
        scores: `softmax_scale * q @ rows.T`, `[N, T]`.
        log_weights: log of the softmax over tokens, `[N, T]`.
        out: `[N, L]`.
    """

    rows: np.ndarray
    L: int
    scores: np.ndarray
    log_weights: np.ndarray
    out: np.ndarray

    @property
    def entropies(self) -> np.ndarray:
        """Of each head's attention, in nats."""
        return -(np.exp(self.log_weights) * self.log_weights).sum(axis=1)

    @property
    def sinks(self) -> np.ndarray:
        """What the first token takes of each head's attention."""
        return np.exp(self.log_weights[:, 0])


def attend(rows: np.ndarray, q: np.ndarray, L: int, softmax_scale: float) -> Attention:
    """Attention of queries `[N, L + R]` over rows `[T, L + R]`."""
    rows = rows.astype(np.float64)
    scores = softmax_scale * (q.astype(np.float64) @ rows.T)
    log_weights = scores - scores.max(axis=1, keepdims=True)
    log_weights -= np.log(np.exp(log_weights).sum(axis=1, keepdims=True))
    return Attention(rows, L, scores, log_weights, np.exp(log_weights) @ rows[:, :L])


def errors(exact: Attention, found: Attention) -> dict[str, float | None]:
    """`METRICS` of `found` against `exact`; those of the keys are None where there are none."""
    L = exact.L
    weights, off = np.exp(exact.log_weights), found.scores - exact.scores
    kl = (weights * (exact.log_weights - found.log_weights)).sum(axis=1)
    tv = 0.5 * np.abs(weights - np.exp(found.log_weights)).sum(axis=1)
    output = _norms(found.out - exact.out) / _norms(exact.out)
    cosine = 1 - (found.out * exact.out).sum(axis=1) / (_norms(found.out) * _norms(exact.out))
    return {
        **_of_elements("latent", exact.rows[:, :L], found.rows[:, :L]),
        **_of_elements("key", exact.rows[:, L:], found.rows[:, L:]),
        "score_rms": float(np.sqrt(np.square(off).mean())),
        "score_max": float(np.abs(off).max()),
        "kl": float(kl.mean()),
        "kl_worst": float(kl.max()),
        "tv": float(tv.mean()),
        "tv_worst": float(tv.max()),
        "output_rms": float(np.median(output)),
        "output_rms_worst": float(output.max()),
        "output_cosine": float(np.median(cosine)),
        "output_cosine_worst": float(cosine.max()),
    }


def _norms(out: np.ndarray) -> np.ndarray:
    return np.sqrt(np.square(out).sum(axis=1))


def _of_elements(name: str, exact: np.ndarray, found: np.ndarray) -> dict[str, float | None]:
    if not exact.size:
        return dict.fromkeys((f"{name}_rms", f"{name}_max", f"{name}_snr_db"))
    off = found - exact
    with np.errstate(divide="ignore"):
        rms = float(np.sqrt(np.square(off).mean() / np.square(exact).mean()))
        snr = float(-20 * np.log10(rms))
    largest = float(np.abs(off).max() / np.abs(exact).max())
    return {f"{name}_rms": rms, f"{name}_max": largest, f"{name}_snr_db": snr}
