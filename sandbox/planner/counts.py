"""Numbers that count something, as a caller gives them."""

from __future__ import annotations

from typing import Any

import numpy as np


def positive(**counts: Any) -> None:
    """Each is a whole number of at least 1: TypeError or ValueError, with its name."""
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise TypeError(f"{name} is {type(value).__name__}, expected an integer")
        if value < 1:
            raise ValueError(f"{name} is {value}, expected at least 1")
