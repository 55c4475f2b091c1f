"""An estimate of the memory and the time that calibrating weights takes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from sinkprune.calibration.quantising.products import Layer
from sinkprune.contract.errors import TooLittleMemoryError
from sinkprune.contract.system.memory_need import gigabytes
from sinkprune.contract.system.system_memory import available_bytes

_RUNS, _FLOAT = 3, 4
"""Runs of a prompt through a graph (floats, and both roundings); bytes of an fp32."""
_FIXED_BYTES = 600 << 20
"""Python, its libraries, and freed memory that they retain."""
_PACKED = 2
"""Copies of a float in the engine: as read, and packed."""
_ROUNDING_PRODUCTS, _ROUNDING_OUTPUTS, _ROUNDING_BYTES = 12, 10 * 2048, 28
"""Rounding a matrix takes the time of 12 products of its errors with X^T X, these floats for each input, and these
bytes for each value of X^T X while it is inverted."""
_SAMPLE, _TRIES = 1024, 8


class CalibrationCost(NamedTuple):
    """Approximate memory and time."""

    bytes: int
    seconds: float
    weights: int
    """How many weights are rounded."""


def estimate(
    graphs: Mapping[str, Sequence[Sequence[Layer]]], rows: Mapping[str, int], states: int
) -> CalibrationCost:
    """Estimate the cost of rounding the layers of `graphs`; the layers of one subgraph are in memory together.

    `rows` is the number of each graph's input rows. `states` is the bytes of the states between subgraphs and within
    them. The time is for this machine, by a short benchmark of matrix products.
    """
    most, operations = 0.0, 0.0
    for name, subgraphs in graphs.items():
        for layers in subgraphs:
            weights = sum(layer.inputs * layer.outputs for layer in layers)
            squares = {layer.value: layer.inputs**2 for layer in layers}
            widest = max((layer.inputs for layer in layers), default=0)
            running = _PACKED * _FLOAT * weights
            rounding = _ROUNDING_BYTES * widest**2 + _FLOAT * _ROUNDING_OUTPUTS * widest
            most = max(most, _FLOAT * sum(squares.values()) + max(running, rounding))
            operations += 2.0 * (_RUNS * weights + sum(squares.values())) * rows[name]
            operations += 2.0 * _ROUNDING_PRODUCTS * sum(layer.inputs**2 * layer.outputs for layer in layers)
    rounded = sum(
        layer.inputs * layer.outputs for subgraphs in graphs.values() for layers in subgraphs for layer in layers
    )
    return CalibrationCost(round(most) + states + _FIXED_BYTES, operations / _operations_a_second(), rounded)


def check_memory(cost: CalibrationCost) -> None:
    """Raise `TooLittleMemoryError` if the cost exceeds the free memory."""
    free = available_bytes()
    if 0 < free < cost.bytes:
        raise TooLittleMemoryError(
            f"not enough memory: calibrating needs about {gigabytes(cost.bytes)}, {gigabytes(free)} are free. End "
            "other programs, take a smaller --limit, or use a larger machine: the bundle can run on this one."
        )


def _operations_a_second() -> float:
    """Measure the fp32 additions and multiplications a second in matrix products."""
    sample, seconds = np.ones((_SAMPLE, _SAMPLE), np.float32), []
    for _ in range(_TRIES):
        start = time.perf_counter()
        sample @ sample
        seconds.append(time.perf_counter() - start)
    return 2.0 * _SAMPLE**3 / min(seconds)
