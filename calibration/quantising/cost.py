"""What calibrating takes, told before it begins: memory and time."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from sinkprune.calibration.quantising.products import MOST_BYTES
from sinkprune.contract.memory_need import TooLittleMemoryError, gigabytes
from sinkprune.contract.system_memory import available_bytes

_LOOKED_AT, _FLOAT = 4, 4
"""How often a prompt runs through a graph: tapped, with floats, with codes of both roundings; bytes of an fp32."""
_ROUNDING_PRODUCTS, _ROUNDING_BYTES = 18, 40
"""Products of the errors with X^T X that rounding a matrix comes to, and bytes it takes beside for each value of
X^T X."""
_SAMPLE, _TRIES = 512, 3


class Layer(NamedTuple):
    """A linear layer that will be rounded."""

    inputs: int
    outputs: int


class Cost(NamedTuple):
    """What it takes, by and large."""

    bytes: int
    seconds: float


def estimate(graphs: Mapping[str, list[Layer]], rows: Mapping[str, int], states: int) -> Cost:
    """What it costs to round the layers of `graphs`, which are given so many `rows`, beside `states` bytes.

    The time is of this machine, which multiplies a small matrix for it.
    """
    most, operations = 0.0, 0.0
    for name, layers in graphs.items():
        weights = sum(layer.inputs * layer.outputs for layer in layers)
        squares = [layer.inputs**2 for layer in layers]
        # Products, as many as may be held; and beside them the graph with its floats, once mapped and once packed, or
        # what rounding the largest takes.
        held = max(_FLOAT * max(squares, default=0), min(_FLOAT * sum(squares), MOST_BYTES))
        most = max(most, held + max(2 * _FLOAT * weights, _ROUNDING_BYTES * max(squares, default=0)))
        operations += 2.0 * _LOOKED_AT * weights * rows[name] + 2.0 * sum(squares) * rows[name]
        operations += 2.0 * _ROUNDING_PRODUCTS * sum(layer.inputs**2 * layer.outputs for layer in layers)
    return Cost(round(most) + states, operations / _operations_a_second())


def check_memory(cost: Cost) -> None:
    """Refuse what does not fit the memory that is free; raises `TooLittleMemoryError`."""
    free = available_bytes()
    if 0 < free < cost.bytes:
        raise TooLittleMemoryError(
            f"not enough memory: calibrating needs about {gigabytes(cost.bytes)}, {gigabytes(free)} are free. End "
            "other programs, take fewer --pictures, or use a larger machine: the bundle can run on this one."
        )


def _operations_a_second() -> float:
    """Additions and multiplications of fp32 a second, in products of matrices."""
    sample, seconds = np.ones((_SAMPLE, _SAMPLE), np.float32), []
    for _ in range(_TRIES):
        began = time.perf_counter()
        sample @ sample
        seconds.append(time.perf_counter() - began)
    return 2.0 * _SAMPLE**3 / min(seconds)
