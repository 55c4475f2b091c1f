"""A graph's file as a backend loads it: held open since it was checked, with weights in checked files only."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from mmap import mmap
from pathlib import Path

import numpy as np

from sinkprune.contract.bundle import Bundle
from sinkprune.contract.errors import BackendError
from sinkprune.contract.files.held_files import HeldFile, any_is_mapped
from sinkprune.contract.manifest import GraphSpec, TensorSpec
from sinkprune.contract.precision import Array
from sinkprune.runtime.backends.onnx_file import OnnxFile, Weight, inlined, read_onnx_file

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
        return self._parsed.data

    @property
    def inlined(self) -> bytes:
        """The same with functions inlined, for libraries without functions; raises what `weights` raises."""
        return inlined(self._parsed.message) if self._parsed.message.functions else self._parsed.data

    @property
    def weights(self) -> tuple[Weight, ...]:
        """The weights that lie in other files of the folder.

        Raises `BackendError` for a weight in a file that the manifest does not list, and for a graph that might never
        end.
        """
        return self._parsed.weights

    @cached_property
    def _parsed(self) -> OnnxFile:
        parsed = read_onnx_file(self.file.read(GRAPH_BYTES), self._described)
        for weight in parsed.weights:
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
        return parsed

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
                _fits(by_name[spec.name], spec) for spec in expected
            ):
                raise BackendError(
                    f"{self._described} has the {role}s {_listed(found)}, the bundle says {_listed(expected)}. "
                    "Export or copy the bundle again."
                )


def _fits(found: TensorSpec, expected: TensorSpec) -> bool:
    return (
        found.dtype == expected.dtype
        and len(found.shape) == len(expected.shape)
        and all(
            size == wanted or isinstance(size, str) or isinstance(wanted, str)
            for size, wanted in zip(found.shape, expected.shape, strict=True)
        )
    )


def _listed(tensors: Iterable[TensorSpec]) -> str:
    return ", ".join(f"{tensor.name} {tensor.dtype}{list(tensor.shape)}" for tensor in tensors) or "none"
