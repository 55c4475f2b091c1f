"""What calibrating takes, told before it begins: memory and time."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from sinkprune.calibration.quantising.products import Layer
from sinkprune.contract.system.memory_need import TooLittleMemoryError, gigabytes
from sinkprune.contract.system.system_memory import available_bytes

_LOOKED_AT, _FLOAT = 3, 4
"""How often a prompt runs through a graph: with floats, and with codes of both roundings; bytes of an fp32."""
_FIXED_BYTES = 600 << 20
"""Python, its libraries, and what they keep of memory that was given back."""
_PACKED = 2
"""How often a float is held by the engine: read, and packed."""
_ROUNDING_PRODUCTS, _ROUNDING_OUTPUTS, _ROUNDING_BYTES = 12, 10 * 2048, 28
"""Products of the errors with X^T X that rounding a matrix takes as long as: eight, and all else; floats that it
takes for each input; and bytes beside for each value of X^T X, while that is inverted."""
_SAMPLE, _TRIES = 1024, 8


class Cost(NamedTuple):
    """What it takes, by and large."""

    bytes: int
    seconds: float
    weights: int
    """How many weights are rounded."""


def estimate(graphs: Mapping[str, Sequence[Sequence[Layer]]], rows: Mapping[str, int], states: int) -> Cost:
    """What it costs to round the layers of `graphs`, of which those of a stretch are in memory together.

    Each graph is given so many `rows`, and `states` bytes take what is kept of them between stretches and what is
    computed within. The time is of this machine, which multiplies matrices for it.
    """
    most, operations = 0.0, 0.0
    for name, stretches in graphs.items():
        for layers in stretches:
            weights = sum(layer.inputs * layer.outputs for layer in layers)
            squares = {layer.value: layer.inputs**2 for layer in layers}
            widest = max((layer.inputs for layer in layers), default=0)
            running = _PACKED * _FLOAT * weights
            rounding = _ROUNDING_BYTES * widest**2 + _FLOAT * _ROUNDING_OUTPUTS * widest
            most = max(most, _FLOAT * sum(squares.values()) + max(running, rounding))
            operations += 2.0 * (_LOOKED_AT * weights + sum(squares.values())) * rows[name]
            operations += 2.0 * _ROUNDING_PRODUCTS * sum(layer.inputs**2 * layer.outputs for layer in layers)
    rounded = sum(
        layer.inputs * layer.outputs for stretches in graphs.values() for layers in stretches for layer in layers
    )
    return Cost(round(most) + states + _FIXED_BYTES, operations / _operations_a_second(), rounded)


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
