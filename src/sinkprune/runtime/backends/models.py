"""A graph's file as a backend loads it: held open since it was checked, with weights in checked files only.

Uses protobuf alone: the package onnx is too large for a robot. The schema below is the part of onnx.proto3 that
matters here. Protobuf keeps fields that a schema does not name.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain
from math import prod
from mmap import mmap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sinkprune.contract.bundle import Bundle
from sinkprune.contract.errors import BackendError
from sinkprune.contract.files.held_files import HeldFile, any_is_mapped
from sinkprune.contract.manifest import GraphSpec, TensorSpec
from sinkprune.contract.precision import Array

_SCHEMA = {
    "Model": "ir_version 1 number, graph 7 Graph, opset_import 8 Opset*, functions 25 Function*",
    "Opset": "domain 1 text, version 2 number",
    "Graph": "node 1 Node*, name 2 text, initializer 5 Tensor*, input 11 Value*, output 12 Value*, "
    "sparse_initializer 15 SparseTensor*",
    "Value": "name 1 text, type 2 Type",
    "Type": "tensor_type 1 TensorType",
    "TensorType": "elem_type 1 number, shape 2 Shape",
    "Shape": "dim 1 Dim*",
    "Dim": "dim_value 1 number, dim_param 2 text",
    "Function": "name 1 text, input 4 text*, output 5 text*, node 7 Node*, domain 10 text, "
    "attribute_proto 11 Attribute*, overload 13 text",
    "Node": "input 1 text*, output 2 text*, name 3 text, op_type 4 text, attribute 5 Attribute*, domain 7 text, "
    "overload 8 text",
    "Attribute": "name 1 text, i 3 number, t 5 Tensor, g 6 Graph, ints 8 number*, tensors 10 Tensor*, "
    "graphs 11 Graph*, type 20 number, ref_attr_name 21 text, sparse_tensor 22 SparseTensor, "
    "sparse_tensors 23 SparseTensor*",
    "SparseTensor": "values 1 Tensor, indices 2 Tensor",
    "Tensor": "dims 1 number*, data_type 2 number, name 8 text, raw_data 9 bytes, external_data 13 Entry*",
    "Entry": "key 1 text, value 2 text",
}
"""Messages of onnx.proto3: the name, number and type of each field; a star marks a repeated field."""
_DTYPES = {1: "float32", 2: "uint8", 3: "int8", 7: "int64", 9: "bool", 10: "float16", 16: "bfloat16"}
_DTYPES |= {21: "uint4", 22: "int4"}
"""The types that sinkprune writes, by their numbers in onnx.proto3. ONNX Runtime packs codes into uint8."""
_MATRIX_BITS = {"bfloat16": 16, "uint4": 4, "int4": 4}
"""Bits of the types that numpy does not have. Only matrices have these types, and no matrix is read here."""
_MATRICES = {"MatMul": (1,), "FusedMatMul": (1,), "Gemm": (1,), "FusedGemm": (1,), "MatMulNBits": (1, 2, 3)}
"""By operator of ONNX or ONNX Runtime: the inputs that are a matrix, or its codes, scales and zero points."""
_PACKED = "prepacked"
"""How the keys begin under which ONNX Runtime stores a packed copy of a matrix."""
_MOST_NODES = 50_000
_MOST_AXES, _LONGEST_AXIS = 8, 1 << 40
_MOST_FUNCTIONS_DEEP = 32


class Weight(NamedTuple):
    """A tensor of a graph whose bytes lie in another file."""

    name: str
    location: str
    """The file, relative to the folder of the ONNX file."""
    offset: int
    """The first byte in that file."""
    shape: tuple[int, ...]
    dtype: str
    """The type of the values, by numpy's name."""
    multiplied: bool
    """Whether it is the matrix of a MatMul, or its codes or scales. Engine libraries repack those when they load."""
    packed: bool
    """Whether the file also holds it as ONNX Runtime packed it, to be mapped and used as it is."""

    @property
    def bytes(self) -> int:
        """The number of bytes."""
        bits = _MATRIX_BITS.get(self.dtype) or 8 * np.dtype(self.dtype).itemsize
        return (prod(self.shape) * bits + 7) // 8


def checked_weights(data: bytes, what: str) -> tuple[Weight, ...]:
    """Return the weights of an ONNX file that lie in other files, and reject what sinkprune never writes.

    Rejected are graphs within a node (Loop, If, Scan), because a loop need not end; functions that call themselves,
    or expand to more than 50,000 nodes; and values in other files that are no weights of the graph. Raises
    `BackendError`, whose message begins with `what`.
    """
    from google.protobuf.message import DecodeError

    try:
        model = message_class("Model").FromString(data)
    except DecodeError as error:
        raise BackendError(f"{what} is no ONNX model ({error}). Export or copy the bundle again.") from error
    if not model.HasField("graph"):
        raise BackendError(f"{what} is no ONNX model: it has no graph. Export or copy the bundle again.")
    _check_functions(model, what)
    _check_values(model, what)
    matrices = _matrices(model.graph)
    external = [tensor for tensor in model.graph.initializer if tensor.external_data]
    if len({tensor.name for tensor in external}) != len(external):
        raise BackendError(f"{what} has two weights of one name. Export or copy the bundle again.")
    return tuple(_weight(tensor, tensor.name in matrices, what) for tensor in external)


def _matrices(graph: Any) -> set[str]:
    """Return the names of all values that a product uses as its matrix, and of those they are dequantised from."""
    sources = {
        node.output[0]: node.input
        for node in graph.node
        if node.op_type in ("DequantizeLinear", "Cast") and len(node.output) == 1
    }
    found: set[str] = set()
    left = [
        node.input[place]
        for node in graph.node
        for place in _MATRICES.get(node.op_type, ())
        if place < len(node.input)
    ]
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += sources.get(name, ())
    return found


def _weight(tensor: Any, multiplied: bool, what: str) -> Weight:
    entries = [(entry.key, entry.value) for entry in tensor.external_data]
    place = dict(entries)
    offset, shape = place.get("offset", "0"), tuple(tensor.dims)
    fits = (
        len(place) == len(entries)
        # For ONNX Runtime, a location with a star is an address in memory.
        and "*" not in place.get("location", "*")
        and re.fullmatch("[0-9]{1,18}", offset)
        and (dtype := _DTYPES.get(tensor.data_type)) is not None
        and (multiplied or dtype not in _MATRIX_BITS)
        and len(shape) <= _MOST_AXES
        and all(0 <= size <= _LONGEST_AXIS for size in shape)
    )
    if not fits:
        raise BackendError(
            f"{what}: its weight {tensor.name!r} of type {tensor.data_type} and shape {list(shape)} lies at {place}, "
            "which sinkprune never writes. Export the bundle again."
        )
    packed = any(key.startswith(_PACKED) for key in place)
    return Weight(tensor.name, place["location"], int(offset), shape, str(dtype), multiplied, packed)


def _check_functions(model: Any, what: str) -> None:
    """Reject functions that would expand to a graph that is endless or too large."""
    bodies = {(domain_of(function), function.name, function.overload): function.node for function in model.functions}
    counted: dict[Any, tuple[int, int]] = {}

    def count(nodes: Any, depth: int) -> tuple[int, int]:
        """Return the expanded number of `nodes`, and how deep they call functions; they stand `depth` calls deep."""
        total, deepest = len(nodes), 0
        for node in nodes:
            called = (domain_of(node), node.op_type, node.overload)
            if called not in bodies:
                continue
            if called not in counted and depth < _MOST_FUNCTIONS_DEEP:
                counted[called] = count(bodies[called], depth + 1)
            inner, below = counted.get(called, (0, _MOST_FUNCTIONS_DEEP))
            total, deepest = total + inner, max(deepest, 1 + below)
        if depth + deepest > _MOST_FUNCTIONS_DEEP:
            raise BackendError(
                f"{what} has functions that call each other more than {_MOST_FUNCTIONS_DEEP} deep, or themselves. "
                "sinkprune writes no such bundle: export it again."
            )
        return total, deepest

    nodes, _ = count(model.graph.node, 0)
    if nodes > _MOST_NODES:
        raise BackendError(
            f"{what} has {nodes} nodes, those of its functions counted at every call, expected at most "
            f"{_MOST_NODES}. sinkprune writes no such bundle: export it again."
        )


def domain_of(named: Any) -> str:
    """Return the domain of a node or a function; ONNX's own domain has two names."""
    return "" if named.domain == "ai.onnx" else str(named.domain)


def _check_values(model: Any, what: str) -> None:
    """Reject graphs within a node, and values in files that are no initializers."""
    nodes = chain(model.graph.node, *(function.node for function in model.functions))
    named = [(node.op_type, attribute) for node in nodes for attribute in node.attribute]
    named += [(function.name, each) for function in model.functions for each in function.attribute_proto]
    dense, sparse = list[Any](), [*model.graph.sparse_initializer]
    for name, attribute in named:
        if attribute.HasField("g") or attribute.graphs:
            raise BackendError(
                f"{what}: its node {name!r} holds a graph, which may run without end. sinkprune writes no such "
                "bundle: export it again."
            )
        dense += [attribute.t, *attribute.tensors]
        sparse += [attribute.sparse_tensor, *attribute.sparse_tensors]
    dense += [part for tensor in sparse for part in (tensor.values, tensor.indices)]
    if any(tensor.external_data for tensor in dense):
        raise BackendError(
            f"{what} reads a value that is no weight from a file. sinkprune writes no such bundle: export it again."
        )


def message_class(name: str) -> Any:
    """Return the class of the schema's message `name`."""
    from google.protobuf import message_factory

    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"sinkprune.{name}"))


@cache
def _pool() -> Any:
    """Return the schema in a pool of its own."""
    from google.protobuf import descriptor_pb2, descriptor_pool

    field = descriptor_pb2.FieldDescriptorProto
    types = {"text": field.TYPE_STRING, "number": field.TYPE_INT64, "bytes": field.TYPE_BYTES}
    # The package is not named "onnx", because the library onnx registers messages of these names.
    file = descriptor_pb2.FileDescriptorProto(name="sinkprune_onnx.proto", package="sinkprune", syntax="proto3")
    for message, fields in _SCHEMA.items():
        described = file.message_type.add(name=message)
        for label, number, kind in map(str.split, fields.split(", ")):
            added = described.field.add(name=label, number=int(number))
            added.label = field.LABEL_REPEATED if kind.endswith("*") else field.LABEL_OPTIONAL
            kind = kind.removesuffix("*")
            added.type = types.get(kind, field.TYPE_MESSAGE)
            if kind not in types:
                added.type_name = f".sinkprune.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool


GRAPH_BYTES = 64 << 20
"""The largest ONNX file that is read; weights lie in other files."""


@dataclass(frozen=True)
class Model:
    """One graph of a bundle: its ONNX file, or the engine that was built from it."""

    graph: str
    """The graph's name in the bundle."""
    spec: GraphSpec
    """The graph's inputs and outputs, as the bundle lists them."""
    name: str
    """The file's name in its folder."""
    folder: Mapping[str, HeldFile]
    """Every file that the folder's manifest lists, by name."""
    weight_bytes: int
    """Bytes of the graph's weights in the bundle; 0 for graphs that select tokens."""
    built: bool = False
    """Whether it is an engine. Only engines may hold weights as a library packed them, which cannot be checked."""
    patches_per_token: int = 1
    """How many patches the vision tower merges into one visual token."""

    @classmethod
    def of_bundle(cls, bundle: Bundle, graph: str) -> Model:
        """Return the ONNX file of the bundle's graph of that name."""
        manifest = bundle.manifest
        spec, unit = manifest.graphs[graph], manifest.vision.patches_per_token
        return cls(graph, spec, spec.file, bundle.files, manifest.weight_bytes(graph), patches_per_token=unit)

    @property
    def file(self) -> HeldFile:
        """The file, held open."""
        return self.folder[self.name]

    @property
    def onnx(self) -> bytes:
        """The bytes of the ONNX file, which hold no weights; raises what `weights` raises."""
        return self._checked[0]

    @property
    def weights(self) -> tuple[Weight, ...]:
        """The weights that lie in other files of the folder.

        Raises `BackendError` for a weight in a file that the manifest does not list, and for a graph that might never
        end.
        """
        return self._checked[1]

    @cached_property
    def _checked(self) -> tuple[bytes, tuple[Weight, ...]]:
        data = self._read()
        weights = checked_weights(data, self._described)
        for weight in weights:
            if self._file_of(weight) not in self.folder:
                raise BackendError(
                    f"{self._described} reads the file '{weight.location}', which the manifest does not list. Export "
                    "or copy the bundle again."
                )
            if weight.packed and not self.built:
                raise BackendError(
                    f"{self._described} holds the weight '{weight.name}' as an engine library packed it, which only "
                    "engines do. sinkprune writes no such bundle: export it again."
                )
        return data, weights

    def _read(self) -> bytes:
        return self.file.read(GRAPH_BYTES)

    @property
    def _described(self) -> str:
        return f"graph '{self.graph}' in '{self.file.path}'"

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the file and of the files that hold its weights; raises what `weights` raises."""
        return tuple(dict.fromkeys([self.name, *map(self._file_of, self.weights)]))

    def weight(self, weight: Weight) -> Array:
        """Return the values of one of the weights, read into memory of their own."""
        data = self.folder[self._file_of(weight)].read_at(weight.offset, weight.bytes)
        return np.frombuffer(data, weight.dtype).reshape(weight.shape)

    @contextmanager
    def by_path(self) -> Iterator[Path]:
        """Yield the path of the file, for a library that opens the file and its weights itself.

        None of them may be altered before or within the block. Raises what a `HeldFile` raises.
        """
        with ExitStack() as stack:
            for name in self.names:
                stack.enter_context(self.folder[name].by_path())
            yield self.file.path

    @contextmanager
    def mapped_weights(self) -> Iterator[dict[str, mmap | bytes]]:
        """Yield the files that hold the weights, mapped, by the names that the ONNX file uses for them.

        Raises what `HeldFile.mapped` raises.
        """
        with ExitStack() as stack:
            named = {weight.location: self.folder[self._file_of(weight)] for weight in self.weights}
            yield {location: stack.enter_context(file.mapped()) for location, file in named.items()}

    def is_mapped(self) -> bool:
        """Return whether this process maps one of the files; False where the system lists no maps."""
        return any_is_mapped(self.folder[name] for name in self.names)

    def _file_of(self, weight: Weight) -> str:
        return posixpath.normpath(posixpath.join(posixpath.dirname(self.name), weight.location))

    def check_interface(self, inputs: list[TensorSpec], outputs: list[TensorSpec]) -> None:
        """Reject a model whose inputs or outputs differ from the bundle's list; raises `BackendError`.

        A size that is a text, on either side, matches any size.
        """
        for role, found, expected in (("input", inputs, self.spec.inputs), ("output", outputs, self.spec.outputs)):
            by_name = {tensor.name: tensor for tensor in found}
            if by_name.keys() != {spec.name for spec in expected} or not all(
                by_name[spec.name].dtype == spec.dtype and spec.takes(by_name[spec.name].shape) for spec in expected
            ):
                raise BackendError(
                    f"{self._described} has the {role}s {_listed(found)}, the bundle says {_listed(expected)}. "
                    "Export or copy the bundle again."
                )


def _listed(tensors: Iterable[TensorSpec]) -> str:
    return ", ".join(f"{tensor.name} {tensor.dtype}{list(tensor.shape)}" for tensor in tensors) or "none"
