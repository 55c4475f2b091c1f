"""The plugins of domain `sinkprune`: their tensors, attributes and kernel launches.

`plugin_v3.py` and `ahead_of_time.py` wrap these descriptions for TensorRT. `plugin_graph.py` adapts graphs to them.
The function bodies of `sinkprune.export.pruning.functions` define the semantics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sinkprune.engines.plugins.launches import (
    SCRATCH_ROWS,
    Launch,
    diversity_launches,
    diversity_phases,
    diversity_workspace,
    top_rho_grid,
    top_rho_launches,
    variant,
)

DOMAIN = "sinkprune"
"""The ONNX domain of the nodes that plugins replace."""
# TensorRT finds a plugin by name, version and namespace. Both kinds of plugin may be registered at once.
NAMESPACE = "sinkprune"
"""The namespace of plugins that are Python classes (`plugin_v3.py`)."""
AHEAD_OF_TIME_NAMESPACE = "sinkprune_ahead_of_time"
"""The namespace of plugins that are compiled into an engine (`ahead_of_time.py`)."""
VERSION = "1"
"""The version of every plugin; TensorRT gives ahead-of-time plugins version 1."""

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
    """An input or output of a plugin, or an output in place of a workspace."""

    name: str
    type: TensorType
    shape: tuple[str | int, ...]
    """The size of each dimension, fixed or by its name in `Sizes`."""


@dataclass(frozen=True)
class SingleKernel:
    """A whole node as one kernel without workspace, for an ahead-of-time plugin.

    The kernel's parameters are the inputs, the integers, the outputs and `scratch`, in this order.
    """

    kernel: Callable[[int], str]
    """From a width D, the kernel's name in `binaries.py`."""
    integers: Callable[[Mapping[str, Any], Any], Sequence[Any]]
    """The kernel's integers from sizes, which may be symbolic, and `tensorrt.plugin`, which calculates with them."""
    grid: Callable[[Any, int], tuple[Any, ...]]
    """The blocks along three axes, from G, which may be symbolic, and D."""
    scratch: tuple[PluginTensor, ...] = ()
    """Outputs in place of a workspace, which nothing reads."""


@dataclass(frozen=True)
class Plugin:
    """The inputs, outputs and launches of a plugin, for both kinds of TensorRT plugins."""

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
    single: SingleKernel
    """The same work as `launches`, as one kernel."""

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


def _diversity_integers(sizes: Mapping[str, Any], symbolic: Any) -> Sequence[Any]:
    count, batch = sizes["count"], sizes["batch"]
    return (sizes["N"], sizes["D"], sizes["R"], count, batch, 0, diversity_phases(count, batch))


PLUGINS = (
    Plugin(
        name="TopRho",
        inputs=(PluginTensor("norms", "float32", ("G", "N")), PluginTensor("tokens", "tokens", ("G", "N", "D"))),
        shape_inputs=(),
        outputs=(PluginTensor("sink", "tokens", ("G", 1, "D")), PluginTensor("outlier", "mask", ("G", "N"))),
        attributes=("per_mille",),
        workspace=lambda sizes: 0,
        launches=_top_rho,
        single=SingleKernel(
            kernel=lambda width: "top_rho",
            integers=lambda sizes, symbolic: (
                sizes["N"],
                sizes["D"],
                symbolic.max(symbolic.cdiv(sizes["N"] * sizes["per_mille"], 1000), 1),
            ),
            grid=top_rho_grid,
        ),
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
        attributes=("batch",),
        workspace=lambda sizes: diversity_workspace(sizes["G"], sizes["N"]),
        launches=diversity_launches,
        single=SingleKernel(
            kernel=lambda width: variant("diversity_select", width),
            integers=_diversity_integers,
            # The second axis is the group, which has one block.
            grid=lambda groups, width: (1, groups, 1),
            scratch=(PluginTensor("scratch", "float32", ("G", SCRATCH_ROWS, "N")),),
        ),
    ),
)
"""The plugins of domain `sinkprune`, one for each operator."""
