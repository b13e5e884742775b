"""The ops that a user calls."""

from sandbox.kernels.gather import gather
from sandbox.kernels.op import OPS, Unavailable

__all__ = ["OPS", "Unavailable", "gather"]
