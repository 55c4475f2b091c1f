"""The plugins of domain `sinkprune`: their tensors, attributes and kernel launches.

`plugin_v3.py` wraps these descriptions for TensorRT. `plugin_graph.py` adapts graphs to them.
The function bodies of `sinkprune.export.pruning.functions` define the semantics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sinkprune.engines.plugins.launches import Launch, diversity_launches, diversity_workspace, top_rho_launches

DOMAIN = "sinkprune"
"""The ONNX domain of the nodes that plugins replace."""
# TensorRT finds a plugin by name, version and namespace.
NAMESPACE = "sinkprune"
VERSION = "1"

Sizes = Mapping[str, int]
"""The sizes of a call by name: G groups of N tokens of width D, R reserved tokens, and the plugin's attributes."""
TensorType = Literal["tokens", "float32", "int64", "mask"]
"""The element type of a plugin's tensor. `tokens` is float32, float16 or bfloat16. A `mask` is BOOL in the graph and
INT32 at the plugin: TensorRT's plugins take no BOOL (NvInferRuntimePlugin.h, `PluginTensorDesc::type`)."""


def token_types(library: Any) -> dict[Any, str]:
    """Return the types of tokens as in `Launch.dtype`, by the member of `DataType` of `library`."""
    types = library.DataType
    return {types.FLOAT: "float32", types.HALF: "float16", types.BF16: "bfloat16"}


def tensor_types(library: Any, tokens: Any) -> dict[TensorType, Any]:
    """Return the member of `DataType` of `library` for each type of tensor, with `tokens` for that of the tokens."""
    types = library.DataType
    return {"tokens": tokens, "float32": types.FLOAT, "int64": types.INT64, "mask": types.INT32}


@dataclass(frozen=True)
class PluginTensor:
    """An input or output of a plugin."""

    name: str
    type: TensorType
    shape: tuple[str | int, ...]
    """The size of each dimension, fixed or by its name in `Sizes`."""


@dataclass(frozen=True)
class Plugin:
    """The inputs, outputs and launches of a plugin."""

    name: str
    """The name of the plugin, and the operator of the ONNX nodes that it replaces."""
    inputs: tuple[PluginTensor, ...]
    shape_inputs: tuple[PluginTensor, ...]
    """Inputs after `inputs` whose values are sizes. A constant one is an attribute of the same name instead."""
    outputs: tuple[PluginTensor, ...]
    attributes: tuple[str, ...]
    """The names of the integers that every node has as attributes."""
    workspace: Callable[[Sizes], int]
    """Bytes that `launches` needs in addition to its tensors; they grow with every size."""
    launches: Callable[[Mapping[str, int], Sizes, str], list[Launch]]
    """Its kernels in order, from device addresses (by tensor name, and `workspace`), sizes, and the tokens' type as
    `Launch.dtype` names it."""

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of all integers that a node may have as attributes: `attributes`, and constant shape inputs."""
        return (*self.attributes, *(tensor.name for tensor in self.shape_inputs))

    @property
    def tokens(self) -> int:
        """The number of the input with the tokens, counted from 0."""
        return [tensor.type for tensor in self.inputs].index("tokens")


def sizes_of(tensors: Sequence[PluginTensor], shapes: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Return the sizes of `tensors` by name, from their `shapes`, one shape for each tensor."""
    return {
        name: size
        for tensor, shape in zip(tensors, shapes, strict=True)
        for name, size in zip(tensor.shape, shape, strict=True)
        if isinstance(name, str)
    }


def _top_rho(addresses: Mapping[str, int], sizes: Sizes, dtype: str) -> list[Launch]:
    count = max(1, -(-sizes["N"] * sizes["per_mille"] // 1000))
    return top_rho_launches(addresses, {**sizes, "count": count}, dtype)


PLUGINS = (
    Plugin(
        name="TopRho",
        inputs=(PluginTensor("norms", "float32", ("G", "N")), PluginTensor("tokens", "tokens", ("G", "N", "D"))),
        shape_inputs=(),
        outputs=(PluginTensor("sink", "tokens", ("G", 1, "D")), PluginTensor("outlier", "mask", ("G", "N"))),
        attributes=("per_mille",),
        workspace=lambda sizes: 0,
        launches=_top_rho,
    ),
    Plugin(
        name="DiversitySelect",
        inputs=(
            PluginTensor("tokens", "tokens", ("G", "N", "D")),
            PluginTensor("candidate", "mask", ("G", "N")),
            PluginTensor("reserved", "int64", ("G", "R")),
        ),
        shape_inputs=(PluginTensor("count", "int64", (1,)),),
        outputs=(PluginTensor("chosen", "int64", ("G", "count")),),
        attributes=("rounds",),
        workspace=lambda sizes: diversity_workspace(sizes["G"], sizes["N"]),
        launches=diversity_launches,
    ),
)
"""The plugins of domain `sinkprune`, one for each operator."""
