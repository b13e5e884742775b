"""The arithmetic of measuring: rotation, order, statistics, ranking. No GPU needed here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

COLD_FACTOR = 2
MAX_SETS = 256
REPLAY_US = 1000.0
MIN_ROUNDS, MAX_ROUNDS, FEWEST_ROUNDS = 20, 200, 5


class VariantFailed(Exception):
    """Timing `variant` failed, for the reason in `__cause__`; others can go on without it."""

    def __init__(self, variant: str) -> None:
        super().__init__(variant)
        self.variant = variant


@dataclass(frozen=True)
class Rotation:
    """How many copies of a case's arrays the launches go through in turn.

    `reuse_bytes` are touched between two uses of one set; `cold` says that they are more than
    `COLD_FACTOR` times the L2 cache, so that nothing of a set is still in it.
    """

    sets: int
    reuse_bytes: int
    cold: bool

    @property
    def l2(self) -> str:
        return "cold" if self.cold else "warm"


def rotation(bytes_touched: int, l2_bytes: int, most_sets: int = MAX_SETS) -> Rotation:
    """The fewest sets that make launches L2-cold, or `most_sets` where those are not enough.

    Args:
        bytes_touched: what one launch reads and writes.
        l2_bytes: size of the L2 cache.
        most_sets: limit by memory or time, at least 1.
    """
    touched = max(1, bytes_touched)
    wanted = 2 + COLD_FACTOR * l2_bytes // touched
    sets = max(1, min(wanted, most_sets, MAX_SETS))
    reuse = (sets - 1) * touched
    return Rotation(sets, reuse, reuse > COLD_FACTOR * l2_bytes)


def copy_bytes_for(moved: int) -> int:
    """Bytes to copy so that as many are moved: half of them, rounded up to what copies fast.

    On an H200 a device copy takes a slow path unless three times a power of two of some KiB divides
    its size: 738 MiB take 366 us, 740 MiB 572 us. Rounding adds under 0.6 % to a large copy; a
    small one is latency alone.
    """
    half = -(-moved // 2)
    unit = 48 if half < 1 << 15 else 3 << 12 if half < 1 << 25 else 3 << 16
    return max(1, -(-half // unit)) * unit


def launches(sets: int, launch_us: float) -> int:
    """Launches in one replay: whole turns through the sets that last about `REPLAY_US`."""
    turns = max(1, round(REPLAY_US / (sets * max(launch_us, 0.1))))
    return sets * turns


def order(names: Sequence[str], round_number: int) -> list[str]:
    """Who goes when in a round: everyone first once in turn, every other cycle backwards."""
    if not names:
        return []
    cycle, first = divmod(round_number, len(names))
    turned = [*names[first:], *names[:first]]
    return turned[::-1] if cycle % 2 else turned


def enough(rounds: int, elapsed_s: float, budget_s: float) -> bool:
    """Whether to stop: the time is spent and `MIN_ROUNDS` are done, or `MAX_ROUNDS` are; slow
    contenders that overrun the time ten-fold stop at `FEWEST_ROUNDS`."""
    if rounds >= MAX_ROUNDS:
        return True
    if rounds >= MIN_ROUNDS:
        return elapsed_s >= budget_s
    return rounds >= FEWEST_ROUNDS and elapsed_s >= 10 * budget_s


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of samples."""

    median: float
    q25: float
    q75: float

    @property
    def iqr(self) -> float:
        return self.q75 - self.q25


def spread(samples: Iterable[float]) -> Spread:
    """Raises ValueError on no samples."""
    values = np.fromiter(samples, float)
    if not values.size:
        raise ValueError("no samples")
    q25, median, q75 = np.percentile(values, [25, 50, 75])
    return Spread(float(median), float(q25), float(q75))


@dataclass(frozen=True)
class Limit:
    """The least time of a call, and which of "memory" and "compute" sets it."""

    us: float
    by: str


def limit(copy_us: float | None, flops: int, gemm_tflop_per_s: float | None) -> Limit | None:
    """The larger of two floors: a copy of as many bytes, and the FLOPs at the rate of a GEMM.

    None where a floor that counts was not measured.
    """
    if not copy_us or (flops and not gemm_tflop_per_s):
        return None
    compute_us = flops / gemm_tflop_per_s / 1e6 if flops else 0.0
    return Limit(compute_us, "compute") if compute_us > copy_us else Limit(copy_us, "memory")


def rates(
    median_us: float,
    copy_us: float | None,
    baseline_us: float | None,
    bytes_moved: int,
    flops: int,
    gemm_tflop_per_s: float | None = None,
) -> dict[str, float | str | None]:
    """What follows from a median: rates, shares of what the hardware can do, speed-up."""
    tflop_per_s = flops / median_us / 1e6 if flops else None
    floor = limit(copy_us, flops, gemm_tflop_per_s)
    return {
        "gb_per_s": bytes_moved / median_us / 1e3,
        "tflop_per_s": tflop_per_s,
        "percent_of_gemm": (
            100 * tflop_per_s / gemm_tflop_per_s if tflop_per_s and gemm_tflop_per_s else None
        ),
        "percent_of_copy": 100 * copy_us / median_us if copy_us else None,
        "copy_ratio": median_us / copy_us if copy_us else None,
        "limit_us": floor.us if floor else None,
        "limit_by": floor.by if floor else None,
        "percent_of_limit": 100 * floor.us / median_us if floor else None,
        "speedup": baseline_us / median_us if baseline_us else None,
    }


def ranks(rows: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Rank of each variant of one case by its GPU time; rows without one are not ranked.

    Only PASSED rows of the target `gpu` count. A row whose lower quartile is within the upper
    quartile of the first of a rank cannot be told apart from it and shares its rank.
    """
    timed = [
        row
        for row in rows
        if row["target"] == "gpu" and row["status"] == "PASSED" and row["median_us"] is not None
    ]
    timed.sort(key=lambda row: row["median_us"])
    found: dict[str, int] = {}
    leader: Mapping[str, Any] | None = None
    for place, row in enumerate(timed, 1):
        if leader is None or row["q25_us"] > leader["q75_us"]:
            leader = row
            found[row["variant"]] = place
        else:
            found[row["variant"]] = found[leader["variant"]]
    return found
