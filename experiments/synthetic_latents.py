"""One sequence's latents, keys and absorbed queries: synthetic, or captured from a model.

Synthetic data is no model's. It has the properties that decide which format errs how much:

- Latents: a token's direction is a few shared directions, correlated from token to token, plus
  noise; then RMSNorm with a learnt weight, log-normal, and one channel in a hundred 4 times larger.
- Keys are not normalised. A few of the channel pairs that RoPE turns slowly are larger than the
  others by the factor `key_outlier` and have a mean, as is known of the keys of models with RoPE.
  They are rotated by positions 0, 1, ... with base 10000, pairs interleaved.
- `magnitude` multiplies latents and keys. Reports put the two from 0.1 and 1 up to 10 and 1000;
  a format with scales sees only the ratio, one without sees the magnitude itself.
- Queries: the scores of a head have a standard deviation between 0.5 (flat attention) and 5 (a few
  tokens take all), from latent and key in a random proportion; the first token, a sink, takes from
  nothing to most of the attention.

Every number is drawn from the seed alone.
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sandbox.dims import MLADims

SHARED_DIRECTIONS = 8  # latent channels for each
WEIGHT_SIGMA, LARGE_WEIGHT, LARGE_WEIGHT_SHARE = 0.4, 4.0, 0.01
OUTLIER_SHARE = 0.1  # of the channel pairs
ROPE_BASE = 10000.0
SPREADS = 0.5, 5.0
SINKS = 0.01, 0.9


class BadData(ValueError):
    """Captured data cannot be used; the message names the file and the array."""


@dataclass(frozen=True)
class Latents:
    """Float32 `kv_c [T, L]`, rotated `k_pe [T, R]`, absorbed queries `q [N, L + R]`.

    `own_queries` says whether the queries were captured too.
    """

    kv_c: np.ndarray
    k_pe: np.ndarray
    q: np.ndarray
    own_queries: bool = False

    @property
    def rows(self) -> np.ndarray:
        return np.concatenate([self.kv_c, self.k_pe], axis=1)


def synthetic(
    dims: MLADims, tokens: int, heads: int, seed: int, key_outlier: float, magnitude: float
) -> Latents:
    """`tokens` rows and `heads` queries that come after them."""
    rng = np.random.default_rng(seed)
    hidden = _hidden(rng, tokens, max(1, dims.L // SHARED_DIRECTIONS))
    kv_c = magnitude * _latents(rng, hidden, dims.L)
    k_pe = magnitude * _keys(rng, hidden, dims, key_outlier)
    q = _queries(rng, kv_c, k_pe, heads, dims.softmax_scale)
    return Latents(kv_c.astype(np.float32), k_pe.astype(np.float32), q.astype(np.float32))


def captured(path: Path, dims: MLADims, heads: int, seed: int) -> Latents:
    """`kv_c [T, L]`, `k_pe [T, R]` (rotated) and perhaps `q [N, L + R]` of an `.npz` file.

    `q` are the absorbed queries of one token, `[ql_nope | rope(q_pe)]`; where the file has none,
    `heads` queries are made as for synthetic data.

    Raises:
        BadData: the file cannot be read, an array is missing or has another shape, or holds what
            is not a finite number.
    """
    if not zipfile.is_zipfile(path):
        raise BadData(f"{path} is missing, or no .npz file")
    try:
        with np.load(path) as stored:
            found = {name: stored[name] for name in ("kv_c", "k_pe", "q") if name in stored}
    except (OSError, ValueError, zipfile.BadZipFile) as failure:
        raise BadData(f"{path} cannot be read: {failure}") from failure
    for name, width in (("kv_c", dims.L), ("k_pe", dims.R), ("q", dims.E)):
        if name in found:
            found[name] = _checked(f"{path}: {name}", found[name], width)
        elif name != "q":
            raise BadData(f"{path}: {name} is missing, it has {', '.join(found) or 'neither'}")
    kv_c, k_pe = found["kv_c"], found["k_pe"]
    if len(kv_c) != len(k_pe):
        raise BadData(f"{path}: kv_c has {len(kv_c)} tokens, k_pe {len(k_pe)}")
    if "q" in found:
        return Latents(kv_c, k_pe, found["q"], own_queries=True)
    rng = np.random.default_rng(seed)
    q = _queries(rng, kv_c.astype(float), k_pe.astype(float), heads, dims.softmax_scale)
    return Latents(kv_c, k_pe, q.astype(np.float32))


def _checked(name: str, values: np.ndarray, width: int) -> np.ndarray:
    if values.dtype.kind != "f":
        raise BadData(f"{name} is {values.dtype}, expected float16, float32 or float64")
    if values.ndim != 2 or values.shape[1] != width or not len(values):
        raise BadData(f"{name} has shape {values.shape}, expected [tokens or heads, {width}]")
    with np.errstate(over="ignore"):
        values = values.astype(np.float32)
    if not np.isfinite(values).all():
        raise BadData(f"{name} holds a NaN or a number that float32 cannot hold")
    return values


def _hidden(rng: np.random.Generator, tokens: int, directions: int) -> np.ndarray:
    """What latents and keys share, `[tokens, directions]`: half of a token is the one before."""
    hidden = rng.standard_normal((tokens, directions))
    for token in range(1, tokens):
        hidden[token] = 0.5 * hidden[token - 1] + np.sqrt(0.75) * hidden[token]
    return hidden / np.sqrt(np.arange(1, directions + 1))


def _latents(rng: np.random.Generator, hidden: np.ndarray, width: int) -> np.ndarray:
    tokens, directions = hidden.shape
    values = _unit(hidden @ rng.standard_normal((directions, width)))
    values += 0.5 * rng.standard_normal((tokens, width))
    values /= np.sqrt(np.square(values).mean(axis=1, keepdims=True))
    weight = rng.lognormal(0.0, WEIGHT_SIGMA, width)
    large = rng.choice(width, max(1, round(LARGE_WEIGHT_SHARE * width)), replace=False)
    weight[large] *= LARGE_WEIGHT
    return values * weight


def _keys(
    rng: np.random.Generator, hidden: np.ndarray, dims: MLADims, outlier: float
) -> np.ndarray:
    tokens, directions = hidden.shape
    pairs = dims.R // 2
    keys = _unit(hidden @ rng.standard_normal((directions, dims.R)))
    keys += 0.5 * rng.standard_normal((tokens, dims.R))
    slow = np.arange(pairs // 2, pairs)
    count = max(1, round(OUTLIER_SHARE * pairs)) if pairs else 0
    chosen = rng.choice(slow, min(count, len(slow)), replace=False)
    channels = np.stack([2 * chosen, 2 * chosen + 1], axis=1).ravel()
    # Spread and mean of an outlier add up to `outlier` times the rms of other channels.
    means = np.sign(rng.standard_normal(len(channels)))
    keys[:, channels] = outlier * np.sqrt(0.2) * keys[:, channels] + outlier * np.sqrt(0.8) * means
    return _rotated(keys, dims) if dims.rope and pairs else keys


def _unit(values: np.ndarray) -> np.ndarray:
    """Values with a mean square of 1."""
    return values / np.sqrt(np.square(values).mean()) if values.size else values


def _rotated(keys: np.ndarray, dims: MLADims) -> np.ndarray:
    angles = np.outer(np.arange(len(keys)), ROPE_BASE ** -(np.arange(0, dims.R, 2) / dims.R))
    pairs = keys[:, 0::2] + 1j * keys[:, 1::2]
    turned = pairs * np.exp(1j * angles)
    return np.stack([turned.real, turned.imag], axis=2).reshape(keys.shape)


def _queries(
    rng: np.random.Generator, kv_c: np.ndarray, k_pe: np.ndarray, heads: int, softmax_scale: float
) -> np.ndarray:
    """`[heads, L + R]`: directions at random, then lengths by the scores that they give."""
    spreads = rng.permutation(np.geomspace(*SPREADS, heads))
    sinks = rng.permutation(np.linspace(*SINKS, heads))
    from_latent = rng.uniform(0.2, 0.8, heads) if k_pe.shape[1] else np.ones(heads)
    parts = []
    for keys, share in ((kv_c, from_latent), (k_pe, 1 - from_latent)):
        q = rng.standard_normal((heads, keys.shape[1]))
        spread = softmax_scale * (q @ keys.T).std(axis=1)
        wanted = spreads * np.sqrt(share)
        parts.append(q * np.divide(wanted, spread, where=spread > 0, out=np.zeros(heads))[:, None])
    q = np.concatenate(parts, axis=1)
    scores = softmax_scale * (parts[0] @ kv_c.T + parts[1] @ k_pe.T)
    others = np.logaddexp.reduce(scores[:, 1:], axis=1)
    sink = kv_c[0] / np.square(kv_c[0]).sum()
    missing = np.maximum(0.0, others + np.log(sinks / (1 - sinks)) - scores[:, 0])
    q[:, : kv_c.shape[1]] += (missing / softmax_scale)[:, None] * sink
    return q
