"""Markers and the target that `-m gpu` adds."""

import os

import numpy as np
import pytest

os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", ".hypothesis")


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)
