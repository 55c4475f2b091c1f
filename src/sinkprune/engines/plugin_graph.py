"""Graphs for TensorRT, with selection as plugins.

In the file, `TopRho` and `DiversitySelect` are nodes of domain `sinkprune` with function bodies. TensorRT takes a
registered plugin of a node's name. Before 10.7 it prefers the function, which must then be removed.
Source: onnx-tensorrt, `docs/Changelog.md` (10.1: shape inputs; 10.7: plugins before functions) and `parseNode`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import helper, numpy_helper

from sinkprune.contract.engines_manifest import Realisation
from sinkprune.contract.errors import EnginesError
from sinkprune.engines.plugins.launches import DOMAIN, NAMESPACE, PLUGINS, VERSION, Plugin
from sinkprune.runtime.backends.models import Model

PLUGINS_FIRST = (10, 7)
"""The first TensorRT that prefers a plugin to a function of the same name."""

_SHAPE_INPUTS = "tensorrt_plugin_shape_input_indices"


def read_model(model: Model) -> onnx.ModelProto:
    """Return the ONNX model of a graph, without its weights; raises `EnginesError` if its file holds none."""
    try:
        return onnx.load_model_from_string(model.onnx)
    except DecodeError as error:
        raise EnginesError(f"'{model.file.path}' holds no ONNX model ({error}). Export the bundle again.") from error


def custom_nodes(model: onnx.ModelProto) -> dict[str, onnx.NodeProto]:
    """Return the nodes of domain `sinkprune`, by name; raises `EnginesError` if a name is missing or repeated."""
    nodes = [node for node in model.graph.node if node.domain == DOMAIN]
    found = {node.name: node for node in nodes}
    if len(found) < len(nodes) or "" in found:
        raise EnginesError(
            f"graph '{model.graph.name}' has {len(nodes)} nodes of domain {DOMAIN} and {len(found)} names for "
            "them; each needs its own. Export the bundle again with this sinkprune."
        )
    return found


def for_plugins(model: onnx.ModelProto, version: tuple[int, ...]) -> onnx.ModelProto:
    """Return a copy of `model` for a build of TensorRT `version` with plugins.

    Each node of domain `sinkprune` names its plugin. Its masks are INT32, with casts from and to BOOL. A constant
    shape input becomes an attribute, which all versions accept. A computed one is marked as a shape input (10.1 and
    later). Functions that TensorRT would prefer are removed. Raises `EnginesError` for a node
    without a plugin.
    """
    fitted = deepcopy(model)
    known = constants(fitted.graph)
    for node in custom_nodes(fitted).values():
        plugin = PLUGINS.get(node.op_type)
        if plugin is None:
            raise EnginesError(
                f"no plugin is known for node '{node.name}', {node.op_type} of domain {DOMAIN}; there are "
                f"{', '.join(PLUGINS)}. Build with a newer sinkprune."
            )
        # The parser finds a plugin by these; since 10.10 also by the domain (`FallbackPluginImporter`).
        for name, value in (("plugin_namespace", NAMESPACE), ("plugin_version", VERSION)):
            node.attribute.append(helper.make_attribute(name, value))
        _fold_shape_inputs(node, plugin, known)
        _cast_masks(fitted.graph, node, plugin)
    if version < PLUGINS_FIRST:
        kept = [function for function in fitted.functions if function.domain != DOMAIN]
        del fitted.functions[:]
        fitted.functions.extend(kept)
    return fitted


def realisations(model: onnx.ModelProto, network: Any, library: Any) -> dict[str, Realisation]:
    """Return what each node of domain `sinkprune` became, by name, from the layers of `network`.

    The parser of `library` (`tensorrt` or `tensorrt_rtx`) parsed `model` into `network`. A plugin's layer has its
    node's name. A function's layers name the node in their metadata (before 10.6 only the operator). Raises
    `EnginesError` for a node without a layer.
    """
    functions = {function.name for function in model.functions if function.domain == DOMAIN}
    found = list(layers(network))
    realised: dict[str, Realisation] = {}
    for name, node in custom_nodes(model).items():
        calls = (f"| {name} ({node.op_type})", f"Local Function: {node.op_type}]")
        if any(layer.type == library.LayerType.PLUGIN_V3 and layer.name == name for layer in found):
            realised[name] = "plugin" if node.op_type in functions else "stripped"
        elif any(call in layer.metadata for layer in found for call in calls):
            realised[name] = "function"
        else:
            raise EnginesError(
                f"graph '{model.graph.name}': no layer of TensorRT's network stands for node '{name}', neither a "
                f"plugin nor its function. Please report this with the library's version."
            )
    return realised


def layers(network: Any) -> Iterator[Any]:
    """Yield every layer of a network of TensorRT."""
    return (network.get_layer(number) for number in range(network.num_layers))


def constants(graph: onnx.GraphProto) -> dict[str, Any]:
    """Return the constants of `graph` by name: initializers, and the values of `Constant` nodes."""
    known: dict[str, Any] = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant":
            known[node.output[0]] = helper.get_attribute_value(node.attribute[0])
    return known


def as_array(constant: Any) -> np.ndarray[Any, Any]:
    """Return a value of `constants` as an array. The data of a tensor must be in the graph."""
    return numpy_helper.to_array(constant) if isinstance(constant, onnx.TensorProto) else np.asarray(constant)


def _fold_shape_inputs(node: onnx.NodeProto, plugin: Plugin, known: Mapping[str, Any]) -> None:
    kept, marked = list(node.input[: len(plugin.inputs)]), []
    for tensor, value in zip(plugin.shape_inputs, node.input[len(plugin.inputs) :], strict=True):
        if value in known:
            node.attribute.append(helper.make_attribute(tensor.name, int(as_array(known[value]).item())))
        else:
            marked.append(len(kept))
            kept.append(value)
    del node.input[:]
    node.input.extend(kept)
    if marked:
        node.attribute.append(helper.make_attribute(_SHAPE_INPUTS, marked))


def _cast_masks(graph: onnx.GraphProto, node: onnx.NodeProto, plugin: Plugin) -> None:
    for number, tensor in enumerate(plugin.inputs):
        if tensor.type == "mask":
            source, node.input[number] = node.input[number], f"{node.name}_{tensor.name}"
            _insert_cast(graph, _place(graph, node), source, node.input[number], onnx.TensorProto.INT32)
    for number, tensor in enumerate(plugin.outputs):
        if tensor.type == "mask" and number < len(node.output) and node.output[number]:
            target, node.output[number] = node.output[number], f"{node.name}_{tensor.name}"
            _insert_cast(graph, _place(graph, node) + 1, node.output[number], target, onnx.TensorProto.BOOL)


def _place(graph: onnx.GraphProto, node: onnx.NodeProto) -> int:
    return next(place for place, other in enumerate(graph.node) if other.name == node.name)


def _insert_cast(graph: onnx.GraphProto, place: int, source: str, target: str, to: int) -> None:
    graph.node.insert(place, helper.make_node("Cast", [source], [target], name=f"{target}_cast", to=to))
