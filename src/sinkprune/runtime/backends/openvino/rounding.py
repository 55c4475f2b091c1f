"""In what groups OpenVINO rounds rows to int8, by how the matrices that they meet are quantised."""

from __future__ import annotations

from math import prod
from typing import Any

from sinkprune.runtime.backends.openvino.layers import quantised_layers

_LARGEST_GROUP = 128


def group_in_int8(read: Any) -> int:
    """How many values of a row may share a scale when they are rounded to int8 for a model's int8 or 4-bit weights.

    Larger groups are faster; one larger than a block of the weights, and OpenVINO would not round at all. 0 is none.
    """
    blocks = []
    for _, constants in quantised_layers(read):
        codes, *_, scales = (prod(constant.get_output_shape(0)) for constant in constants)
        blocks.append(codes // scales)
    return min(_LARGEST_GROUP, *blocks) if blocks else 0
