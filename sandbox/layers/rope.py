"""Rotary position embedding (RoPE, arXiv 2104.09864): the table that the ops rotate with, and YaRN.

Pair `i` of `R / 2` turns by `position * frequency[i]`. A table holds the cosines and sines of all
positions. They are computed in float64 and rounded once, to float32: an entry is right to half a
unit in the last place at any position. Code that multiplies position and frequency in float32, as
most does, is off by some `position * 4e-8`, 0.006 at the end of DeepSeek-V3's context.

YaRN (arXiv 2309.00071) stretches a model to a context `factor` times as long. Fast pairs, which
turn `beta_fast` times or more within the original context, keep their frequency; slow ones,
`beta_slow` times or fewer, have it divided by `factor`; a ramp lies between. DeepSeek's code has
two temperatures on top (arXiv 2405.04434): `yarn_mscale(factor, mscale_all_dim)` on all of a query
and of a key, which makes its square a factor of the softmax scale, and `yarn_mscale(factor,
mscale)` on what is rotated, of which the table brings what the first does not.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sandbox import arrays


@dataclass(frozen=True, eq=False)
class Rope:
    """A table of rotations and how to use it.

    Args:
        cos_sin: float32 `[max_positions, R]`, each row `[cos(R / 2) | sin(R / 2)]`; kept read-only.
        interleaved: whether a pair is columns `(2i, 2i + 1)`, as the ops rotate them and DeepSeek's
            weights want it, or `(i, i + R / 2)`; see `half_split_to_interleaved`.
        softmax_factor: what the softmax scale `(P + R) ** -0.5` is multiplied by.

    Raises:
        TypeError: the table is no float32 NumPy array.
        ValueError: it has no row, or no even number of columns; the factor is not positive.
    """

    cos_sin: np.ndarray
    interleaved: bool = True
    softmax_factor: float = 1.0
    _tables: dict[arrays.Kind, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        table = self.cos_sin
        if not isinstance(table, np.ndarray) or table.dtype != np.float32:
            kind = getattr(table, "dtype", type(table).__name__)
            raise TypeError(f"cos_sin is {kind}, expected a NumPy array of float32")
        if table.ndim != 2 or 0 in table.shape or table.shape[1] % 2:
            raise ValueError(
                f"cos_sin has shape {table.shape}, expected [max_positions, R] with R even"
            )
        _require("softmax_factor", self.softmax_factor, 0, above=True)
        table = table.view()
        table.flags.writeable = False
        object.__setattr__(self, "cos_sin", table)

    def table(self, kind: arrays.Kind) -> Any:
        """`cos_sin` where arrays of `kind` are; all layers with this rope share one copy a GPU."""
        if kind.gpu is None:
            return self.cos_sin
        kind = arrays.Kind.on(kind.gpu)
        if kind not in self._tables:
            self._tables[kind] = kind.xp.asarray(self.cos_sin, blocking=True)
        return self._tables[kind]

    @classmethod
    def default(
        cls, width: int, max_positions: int, theta: float = 10000.0, interleaved: bool = True
    ) -> Rope:
        """RoPE as it was first: pair `i` turns by `theta ** (-2i / width)` a position.

        Args:
            width: `R`, positive and even.
            max_positions: rows of the table; a position beyond is none.
            theta: base of the frequencies, above 1.
            interleaved: as for `Rope`.

        Raises:
            ValueError: a number is not what is said here.
        """
        return cls._turning(frequencies(width, theta), max_positions, interleaved)

    @classmethod
    def linear(
        cls,
        width: int,
        max_positions: int,
        *,
        factor: float,
        theta: float = 10000.0,
        interleaved: bool = True,
    ) -> Rope:
        """Position interpolation: every frequency divided by `factor`, at least 1.

        Raises:
            ValueError: as for `default`, or `factor` is below 1.
        """
        _require("factor", factor, 1)
        return cls._turning(frequencies(width, theta) / factor, max_positions, interleaved)

    @classmethod
    def yarn(
        cls,
        width: int,
        *,
        factor: float,
        original_max_positions: int,
        max_positions: int | None = None,
        theta: float = 10000.0,
        beta_fast: float = 32,
        beta_slow: float = 1,
        mscale: float = 1.0,
        mscale_all_dim: float = 0.0,
        attention_factor: float | None = None,
        interleaved: bool = True,
        truncate: bool = True,
    ) -> Rope:
        """YaRN with DeepSeek's two temperatures; defaults are those of DeepSeek's code.

        Args:
            width, theta, interleaved: as for `default`.
            factor, original_max_positions, beta_fast, beta_slow, truncate: as for
                `yarn_frequencies`.
            max_positions: rows of the table, or None for `original_max_positions * factor`.
            mscale, mscale_all_dim: of the rotated columns and of all; the softmax factor is
                `yarn_mscale(factor, mscale_all_dim) ** 2`.
            attention_factor: what the table is multiplied by, or None for
                `yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)`.

        Raises:
            ValueError: a number is not what is said here.
        """
        turns = yarn_frequencies(
            width,
            factor=factor,
            original_max_positions=original_max_positions,
            theta=theta,
            beta_fast=beta_fast,
            beta_slow=beta_slow,
            truncate=truncate,
        )
        if max_positions is None:
            max_positions = round(original_max_positions * factor)
        _require("mscale", mscale, 0)
        _require("mscale_all_dim", mscale_all_dim, 0)
        overall = yarn_mscale(factor, mscale_all_dim)
        if attention_factor is None:
            attention_factor = yarn_mscale(factor, mscale) / overall
        _require("attention_factor", attention_factor, 0, above=True)
        return cls._turning(turns, max_positions, interleaved, attention_factor, overall**2)

    @classmethod
    def _turning(
        cls,
        turns: np.ndarray,
        max_positions: int,
        interleaved: bool,
        table_factor: float = 1.0,
        softmax_factor: float = 1.0,
    ) -> Rope:
        """The table of pairs that turn by `turns` radians a position, times `table_factor`."""
        _require("max_positions", max_positions, 1, whole=True)
        angles = np.arange(max_positions, dtype=np.float64)[:, None] * turns
        half = len(turns)
        table = np.empty((max_positions, 2 * half), np.float32)
        for function, columns in (np.cos, table[:, :half]), (np.sin, table[:, half:]):
            np.multiply(function(angles), table_factor, out=columns, casting="same_kind")
        return cls(table, interleaved, softmax_factor)


def frequencies(width: int, theta: float = 10000.0) -> np.ndarray:
    """Radians a position of each pair, float64 `[width / 2]`: `theta ** (-2i / width)`.

    Raises:
        ValueError: `width` is not positive and even, or `theta` is not above 1.
    """
    _require("width", width, 2, whole=True)
    if width % 2:
        raise ValueError(f"width is {width}, expected an even number: RoPE rotates pairs")
    _require("theta", theta, 1, above=True)
    return float(theta) ** (-np.arange(0, width, 2) / width)


def yarn_frequencies(
    width: int,
    *,
    factor: float,
    original_max_positions: int,
    theta: float = 10000.0,
    beta_fast: float = 32,
    beta_slow: float = 1,
    truncate: bool = True,
) -> np.ndarray:
    """YaRN's radians a position of each pair, float64 `[width / 2]`.

    Args:
        width, theta: as for `frequencies`.
        factor: how many times longer the context becomes, at least 1.
        original_max_positions: the context that the model was trained on first.
        beta_fast, beta_slow: turns within that context at the two ends of the ramp;
            `beta_fast >= beta_slow > 0`.
        truncate: whether the ramp begins and ends at whole pairs.

    Raises:
        ValueError: a number is not what is said here.
    """
    kept = frequencies(width, theta)
    _require("factor", factor, 1)
    _require("original_max_positions", original_max_positions, 1, whole=True)
    _require("beta_slow", beta_slow, 0, above=True)
    _require("beta_fast", beta_fast, beta_slow)
    # Pair i turns original_max_positions * theta ** (-2i / width) / (2 pi) times; solved for i.
    low, high = (
        width * math.log(original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))
        for turns in (beta_fast, beta_slow)
    )
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    # Bounds of one side each, and by the width rather than the pairs, as models were trained.
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001
    slow = np.clip((np.arange(width // 2) - low) / (high - low), 0, 1)
    return kept / factor * slow + kept * (1 - slow)


def yarn_mscale(factor: float, mscale: float) -> float:
    """`0.1 * mscale * ln(factor) + 1`, or 1 for a context that is not stretched."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def half_split_to_interleaved(width: int) -> np.ndarray:
    """int64 `[width]`: rows of a projection's RoPE part in the order that interleaved pairs want.

    The weights of a model that rotates columns `i` and `i + width / 2` give the same scores under
    interleaved rotation once these rows of both q's and k's part are taken: `weight[index]`.

    Raises:
        ValueError: `width` is not a non-negative even number.
    """
    _require("width", width, 0, whole=True)
    if width % 2:
        raise ValueError(f"width is {width}, expected an even number: RoPE rotates pairs")
    return np.arange(width).reshape(2, width // 2).T.ravel()


def _require(
    name: str, value: Any, least: float, *, above: bool = False, whole: bool = False
) -> None:
    """Refuse a value that is no finite number, or below `least`, or, with `above`, equal to it."""
    kind = numbers.Integral if whole else numbers.Real
    number = isinstance(value, kind) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < least or (above and value == least):
        sort, bound = "an integer" if whole else "a finite number", "above" if above else "at least"
        raise ValueError(f"{name} is {value!r}, expected {sort}, {bound} {least}")
