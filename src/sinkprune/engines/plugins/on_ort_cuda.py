"""Sanitizers on `ort-cuda` with the plugins' kernels in the place of function bodies.

ONNX Runtime takes no operator of ours from Python. So the graph is cut at its nodes of domain `sinkprune`: parts in
standard operators run in sessions of their own, and kernels run between them, on the same stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from sinkprune.contract.manifest import Dtype
from sinkprune.engines.plugins.launches import DOMAIN, KERNELS, PLUGINS, KernelRunner, Launch, Plugin, sizes_of
from sinkprune.runtime.backends import Engine
from sinkprune.runtime.backends.device_memory import DeviceTensor, Shapes
from sinkprune.runtime.backends.models import Model, message_class
from sinkprune.runtime.backends.onnxruntime.cuda import CudaEngine, OrtCudaBackend
from sinkprune.runtime.backends.onnxruntime.sizes_on_device import sizes_of_graph
from sinkprune.runtime.backends.small_graphs import ELEMENT_TYPES, add_value
from sinkprune.runtime.device.captures import captured_on_stream

_MASK = "{}_as_int32"
"""The name of a mask as kernels take it."""
_DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "int64": np.dtype(np.int64),
    "mask": np.dtype(np.int32),
}

Values = dict[str, DeviceTensor]


def load(backend: OrtCudaBackend, model: Model, runner: KernelRunner | None = None) -> Engine | None:
    """Return the engine of a graph with nodes of domain `sinkprune`; None for other graphs.

    Raises `BackendError` where no kernels are shipped for this GPU.
    """
    parsed = message_class("Model").FromString(model.onnx)
    graph, nodes = parsed.graph, [node for node in parsed.graph.node if node.domain == DOMAIN]
    known = {tensor.name for tensor in (*model.spec.inputs, *model.spec.outputs)}
    if not nodes or known != {value.name for value in (*graph.input, *graph.output)}:
        return None
    runner = runner or KernelRunner()
    # Makes the device's context current, which kernels are loaded in.
    backend.gpu.memory()
    dtype = _tokens_dtype(model)
    for node in nodes:
        runner.prepare([Launch(kernel, dtype, (1, 1, 1), ()) for kernel in KERNELS[node.op_type]])
    return _SplitEngine(backend, model, parsed, runner)


def _tokens_dtype(model: Model) -> Dtype:
    """Return the type of a sanitizer's tokens. A kernel may take them joined with other features."""
    return next(tensor.dtype for tensor in model.spec.inputs if tensor.name == "tokens")


class _Kernel(NamedTuple):
    """A node of domain `sinkprune`."""

    name: str
    plugin: Plugin
    inputs: list[str]
    outputs: list[str]
    attributes: dict[str, int]
    counts: dict[str, str | int]
    """The value of each shape input, or the name of the tensor that has it."""


class _Cut:
    """A graph, cut at its kernels. Level 0 is what needs no kernel, level 1 what needs the first, and so on."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._constants = {tensor.name: tensor for tensor in model.graph.initializer}
        self._makers = {output: node for node in model.graph.node for output in node.output}
        self._level: dict[str, int] = {}
        # Sizes and constants are computed where they are used: no size crosses to another part.
        self._sizes = sizes_of_graph(model.graph)
        self.kernels: dict[int, list[_Kernel]] = {}
        for node in model.graph.node:
            given = [name for name in node.input if name]
            level = max((self._level.get(name, 0) for name in given), default=0)
            if node.domain == DOMAIN:
                self.kernels.setdefault(level, []).append(self._kernel(node))
                level += 1
            self._level.update(dict.fromkeys(node.output, level))

    def _kernel(self, node: Any) -> _Kernel:
        plugin = PLUGINS[node.op_type]
        count = len(plugin.inputs)
        counts: dict[str, str | int] = {}
        for tensor, name in zip(plugin.shape_inputs, node.input[count:], strict=True):
            constant = self._constants.get(name)
            counts[tensor.name] = name if constant is None else int(np.frombuffer(constant.raw_data, np.int64)[0])
        attributes = {attribute.name: attribute.i for attribute in node.attribute}
        return _Kernel(node.name, plugin, [*node.input[:count]], [*node.output], attributes, counts)

    def parts(self) -> list[tuple[list[Any], list[str], list[str]]]:
        """Return the nodes, inputs and outputs of the part of each level."""
        given = {value.name for value in self._model.graph.input}
        wanted = {value.name: None for value in self._model.graph.output}
        for kernel in (kernel for own in self.kernels.values() for kernel in own):
            wanted |= dict.fromkeys(
                [*kernel.inputs, *(name for name in kernel.counts.values() if name in self._level)]
            )
        parts = []
        for level in range(max(self.kernels) + 1, -1, -1):
            outputs = [name for name in wanted if self._is_of(name, level)]
            chosen, inputs = self._needed(outputs, level)
            wanted |= {name: None for name in inputs if name not in given}
            nodes = [node for node in self._model.graph.node if any(name in chosen for name in node.output)]
            parts.append((nodes, sorted(inputs), outputs))
        return parts[::-1]

    def _is_of(self, name: str, level: int) -> bool:
        maker = self._makers.get(name)
        return maker is not None and maker.domain != DOMAIN and self._level[name] == level

    def _needed(self, outputs: Iterable[str], level: int) -> tuple[set[str], set[str]]:
        """Return the values that a part computes for its `outputs`, and those that it takes."""
        chosen, taken, left = set[str](), set[str](), [*outputs]
        while left:
            name = left.pop()
            if name in chosen or name in self._constants:
                continue
            if self._is_of(name, level) or (name in self._sizes and name in self._makers):
                chosen.add(name)
                left += [given for given in self._makers[name].input if given]
            else:
                taken.add(name)
        return chosen, taken


class _SplitEngine:
    """A sanitizer: parts of standard operators, and kernels after each."""

    def __init__(self, backend: OrtCudaBackend, model: Model, parsed: Any, runner: KernelRunner) -> None:
        self._backend, self._graph, self._runner = backend, model.graph, runner
        self._inputs = [tensor.name for tensor in model.spec.inputs]
        self._outputs = [tensor.name for tensor in model.spec.outputs]
        cut = _Cut(parsed)
        self._kernels, self._counts = cut.kernels, dict[tuple[str, str, Shapes], int]()
        self._parts: list[tuple[list[str], CudaEngine | None]] = []
        tokens = _tokens_dtype(model)
        types = dict[str, tuple[int, list[int | str]]]()
        for value in parsed.graph.input:
            # The graph's own names of sizes: equal sizes have one.
            dims = value.type.tensor_type.shape.dim
            types[value.name] = value.type.tensor_type.elem_type, [one.dim_param or one.dim_value for one in dims]
        masks = set[str]()
        for kernel in (kernel for own in cut.kernels.values() for kernel in own):
            for tensor, name in zip(kernel.plugin.outputs, kernel.outputs, strict=False):
                kind = ELEMENT_TYPES[{"tokens": tokens, "mask": "int32"}.get(tensor.type, tensor.type)]
                types[name] = kind, [_named(name, axis, size) for axis, size in enumerate(tensor.shape)]
                masks |= {name} if tensor.type == "mask" else set()
            masks |= {
                name
                for tensor, name in zip(kernel.plugin.inputs, kernel.inputs, strict=True)
                if tensor.type == "mask"
            }
        for number, (nodes, inputs, outputs) in enumerate(cut.parts()):
            if not outputs:
                self._parts.append(([], None))
                continue
            data = _part_of(parsed, nodes, inputs, outputs, types, masks)
            engine = backend.small_engine(f"{model.graph}, part {number + 1}", data, own_sessions=True)
            for name, dtype, found in engine.given:
                types[name] = ELEMENT_TYPES[dtype], [_named(name, axis, size) for axis, size in enumerate(found)]
            self._parts.append(([_MASK.format(name) if name in masks else name for name in inputs], engine))

    def __call__(self, inputs: Mapping[str, DeviceTensor]) -> Values:
        """Return all outputs by name, which may not be computed yet; raises `BackendError`."""
        values = dict(inputs)
        shapes = tuple(inputs[name].shape for name in self._inputs)
        for level, (taken, part) in enumerate(self._parts):
            if part is not None:
                values |= part({name: values[name] for name in taken})
            for kernel in self._kernels.get(level, ()):
                values |= self._run(kernel, values, shapes)
        return {name: values[name] for name in self._outputs}

    def _run(self, kernel: _Kernel, values: Mapping[str, DeviceTensor], shapes: Shapes) -> Values:
        backend, plugin = self._backend, kernel.plugin
        given = {
            tensor.name: values[_MASK.format(name) if tensor.type == "mask" else name]
            for tensor, name in zip(plugin.inputs, kernel.inputs, strict=True)
        }
        sizes = sizes_of(plugin.inputs, [given[tensor.name].shape for tensor in plugin.inputs])
        sizes |= kernel.attributes
        for name, value in kernel.counts.items():
            sizes[name] = value if isinstance(value, int) else self._count(kernel, value, values, shapes)
        tokens = given[plugin.inputs[plugin.tokens].name].dtype
        results = {}
        for tensor in plugin.outputs:
            shape = tuple(size if isinstance(size, int) else sizes[size] for size in tensor.shape)
            results[tensor.name] = backend.empty(shape, tokens if tensor.type == "tokens" else _DTYPES[tensor.type])
        workspace = backend.pool.allocate(plugin.workspace(sizes))
        addresses = {name: tensor.address for name, tensor in (given | results).items()}
        launches = plugin.launches(addresses | {"workspace": workspace.address}, sizes, tokens.name)

        def enqueue() -> None:
            self._runner.run(launches, backend.gpu.stream)

        key = (tuple(sizes.items()), tuple(addresses.values()), workspace.address)
        backend.captures.run(
            f"{self._graph}, {kernel.name}", key, enqueue, lambda: captured_on_stream(backend.gpu, enqueue)
        )
        named = zip(plugin.outputs, kernel.outputs, strict=False)
        return {_MASK.format(name) if out.type == "mask" else name: results[out.name] for out, name in named if name}

    def _count(self, kernel: _Kernel, name: str, values: Mapping[str, DeviceTensor], shapes: Shapes) -> int:
        """Return a size that the graph computes from shapes: read from the device once for each set of shapes."""
        key = kernel.name, name, shapes
        if key not in self._counts:
            if len(self._counts) >= 4096:
                self._counts.clear()
            self._counts[key] = int(self._backend.numpy(values[name])[0])
        return self._counts[key]


def _part_of(
    model: Any,
    nodes: Iterable[Any],
    inputs: Iterable[str],
    outputs: Iterable[str],
    types: Mapping[str, tuple[int, list[int | str]]],
    masks: set[str],
) -> bytes:
    """Return the ONNX file of some `nodes` of `model`. `masks` are booleans here, and int32 outside."""
    part = message_class("Model")()
    part.CopyFrom(model)
    del part.graph.node[:], part.graph.input[:], part.graph.output[:], part.functions[:]
    part.functions.extend(function for function in model.functions if function.domain != DOMAIN)
    for name in inputs:
        kind, shape = types[name]
        if name in masks:
            add_value(part.graph.input, _MASK.format(name), ELEMENT_TYPES["int32"], tuple(shape))
            _add_cast(part.graph, _MASK.format(name), name, "bool")
        else:
            add_value(part.graph.input, name, kind, tuple(shape))
    part.graph.node.extend(nodes)
    for name in outputs:
        if name in masks:
            _add_cast(part.graph, name, _MASK.format(name), "int32")
        # The library infers the type.
        part.graph.output.add(name=_MASK.format(name) if name in masks else name)
    used = {name for node in part.graph.node for name in node.input}
    kept = [tensor for tensor in part.graph.initializer if tensor.name in used]
    del part.graph.initializer[:]
    part.graph.initializer.extend(kept)
    return bytes(part.SerializeToString())


def _add_cast(graph: Any, source: str, target: str, to: str) -> None:
    node = graph.node.add(op_type="Cast", input=[source], output=[target], name=f"{target}_cast")
    node.attribute.add(name="to", type=2, i=ELEMENT_TYPES[to])


def _named(name: str, axis: int, size: Any) -> int | str:
    return size if isinstance(size, int) else f"{name}_{axis}"
