"""Graphs for TensorRT: selection as plugins, and weights that are aligned.

ONNX Runtime writes prepacked matrices without gaps and maps them in the file. Its kernels expect the parts of a
matrix at multiples of 64 bytes: in a matrix that begins elsewhere they read other bytes, without an error. Its
documentation does not describe the entries that name prepacked matrices. So only those of tried versions are edited.

In the file, `TopRho` and `DiversitySelect` are nodes of domain `sinkprune` with function bodies. TensorRT takes a
registered plugin of a node's name. Before 10.7 it prefers the function, which must then be removed.
Source: onnx-tensorrt, `docs/Changelog.md` (10.1: shape inputs; 10.7: plugins before functions) and `parseNode`.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import helper, numpy_helper

from sinkprune.contract.bundle import Realisation
from sinkprune.contract.errors import EnginesError
from sinkprune.engines.plugins.descriptions import DOMAIN, NAMESPACE, PLUGINS, VERSION, Plugin
from sinkprune.runtime.backends.models import Model

PREPACKED_IN = ((1, 31), (1, 32))
"""The versions of ONNX Runtime, major and minor, whose prepacked matrices were read, moved and computed with. Other
versions build engines without them."""

_PAGE = 4096
_PLAIN = {"location", "offset", "length", "checksum"}
_KEY = re.compile(r"prepacked_[0-9]+")
# ONNX Runtime writes 0 as the checksum, and compares none.
_FORM = re.compile(r"[^|;]+(?:\|[0-9]+;[0-9]+;0)+")
_PIECE = re.compile(r"(?<=\|)([0-9]+);([0-9]+)(?=;)")


def takes_prepacked(version: str) -> bool:
    """Return whether `version` of ONNX Runtime is one of `PREPACKED_IN`."""
    found = re.match(r"([0-9]+)\.([0-9]+)\.", version)
    return found is not None and (int(found[1]), int(found[2])) in PREPACKED_IN


def align_weights(file: Path) -> None:
    """Move every weight of the ONNX model `file` that is in a separate file, prepacked or not, to a page.

    Raises `EnginesError` if the model names prepacked matrices in another form than those of `PREPACKED_IN`.
    """
    model = onnx.load(file, load_external_data=False)
    external = [tensor for tensor in model.graph.initializer if tensor.external_data]
    if not external:
        return
    beside = file.with_name(f"{file.name}.data")
    _check(external, file, beside.stat().st_size)
    moved = beside.with_name(f"{beside.name}.new")
    with (
        beside.open("rb") as source,
        moved.open("wb") as target,
        mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        for tensor in external:
            _move(tensor, data, target)
    moved.replace(beside)
    file.write_bytes(model.SerializeToString())


def _check(external: list[onnx.TensorProto], file: Path, size: int) -> None:
    """Raise `EnginesError` for external data of an unknown form, or beyond the `size` of its file."""
    for tensor in external:
        for entry in tensor.external_data:
            if entry.key in _PLAIN:
                continue
            pieces = [(int(start), int(length)) for start, length in _PIECE.findall(entry.value)]
            known = _KEY.fullmatch(entry.key) and _FORM.fullmatch(entry.value)
            if not known or any(start + length > size for start, length in pieces):
                raise EnginesError(
                    f"onnxruntime wrote the prepacked weight '{tensor.name}' of '{file.name}' in an unknown form: "
                    f"{entry.key} = {entry.value!r}, expected NAME|OFFSET;LENGTH;0 within {size} bytes. Run the "
                    f"bundle without engines, or install onnxruntime {'.'.join(map(str, PREPACKED_IN[-1]))}."
                )


def _move(tensor: onnx.TensorProto, data: mmap.mmap, target: BinaryIO) -> None:
    """Copy a tensor's bytes and those of its prepacked forms to `target`, and update their offsets."""
    entries = {entry.key: entry for entry in tensor.external_data}
    entries["offset"].value = str(_copied(data, int(entries["offset"].value), int(entries["length"].value), target))
    for key, entry in entries.items():
        if key not in _PLAIN:
            entry.value = _PIECE.sub(
                lambda piece: f"{_copied(data, int(piece[1]), int(piece[2]), target)};{piece[2]}", entry.value
            )


def _copied(data: mmap.mmap, offset: int, length: int, target: BinaryIO) -> int:
    """Append `length` bytes from `offset` on to `target`, at a page, and return their place."""
    target.write(bytes(-target.tell() % _PAGE))
    place = target.tell()
    with memoryview(data) as view:
        target.write(view[offset : offset + length])
    return place


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
        plugin = _plugin(node)
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


def _plugin(node: onnx.NodeProto) -> Plugin:
    for plugin in PLUGINS:
        if plugin.name == node.op_type:
            return plugin
    raise EnginesError(
        f"no plugin is known for node '{node.name}', {node.op_type} of domain {DOMAIN}; there are "
        f"{', '.join(plugin.name for plugin in PLUGINS)}. Build with a newer sinkprune."
    )


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
