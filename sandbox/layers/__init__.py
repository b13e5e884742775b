"""The MLA layer: projections, rotation, prefill with chunked context, latent decode, output."""

from sandbox.layers.collectives import Alone, Collective, InProcess
from sandbox.layers.decode_steps import DecodeSteps
from sandbox.layers.mla import MLALayer
from sandbox.layers.model_config import dims_of, rope_of
from sandbox.layers.output import Quantized
from sandbox.layers.prepare import prepare
from sandbox.layers.rope import Rope
from sandbox.layers.step import Step
from sandbox.layers.weights import MLAWeights, random_weights
from sandbox.layers.workspace import Workspace

__all__ = [
    "Alone",
    "Collective",
    "DecodeSteps",
    "InProcess",
    "MLALayer",
    "MLAWeights",
    "Quantized",
    "Rope",
    "Step",
    "Workspace",
    "dims_of",
    "prepare",
    "random_weights",
    "rope_of",
]
