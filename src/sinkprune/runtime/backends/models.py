"""A graph's file as a backend loads it: held since it was checked, and reaching for nothing that was not."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping
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
from sinkprune.runtime.backends.onnx_file import Weight, read_onnx_file

GRAPH_BYTES = 64 << 20
"""The most an ONNX file may have; weights lie in files beside it."""


@dataclass(frozen=True)
class Model:
    """One graph of a bundle: its ONNX file, or the engine built of it."""

    graph: str
    """The graph's name in the bundle."""
    spec: GraphSpec
    """What it takes and gives, by the bundle."""
    name: str
    """Its file's name in its folder."""
    folder: Mapping[str, HeldFile]
    """Every file that its folder's manifest lists, by name."""
    weight_bytes: int
    """How many bytes its weights have in the bundle; graphs that select have none."""
    built: bool = False
    """Whether it is an engine: only there weights may lie as a library packed them, which nobody can check."""
    patches_per_token: int = 1
    """How many patches the bundle's vision tower joins to a visual token."""

    @classmethod
    def of_bundle(cls, bundle: Bundle, graph: str) -> Model:
        """The ONNX file of the graph of that name."""
        manifest = bundle.manifest
        spec, unit = manifest.graphs[graph], manifest.vision.patches_per_token
        return cls(graph, spec, spec.file, bundle.files, manifest.weight_bytes(graph), patches_per_token=unit)

    @property
    def file(self) -> HeldFile:
        """Its file, held open."""
        return self.folder[self.name]

    @property
    def onnx(self) -> bytes:
        """The bytes of its ONNX file, which hold no weights; raises what `weights` raises."""
        return self._read[0]

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Its weights that lie in other files of the folder.

        Raises `BackendError` for one in a file that the manifest does not list, and for a graph that might never end.
        """
        return self._read[1]

    @cached_property
    def _read(self) -> tuple[bytes, tuple[Weight, ...]]:
        data = self.file.read(GRAPH_BYTES)
        weights = read_onnx_file(data, f"graph '{self.graph}' in '{self.file.path}'")
        for weight in weights:
            if self._file_of(weight) not in self.folder:
                raise BackendError(
                    f"graph '{self.graph}' in '{self.file.path}' reads the file '{weight.location}', which the "
                    "manifest does not list. Export or copy the bundle again."
                )
            if weight.packed and not self.built:
                raise BackendError(
                    f"graph '{self.graph}' in '{self.file.path}' holds the weight '{weight.name}' as an engine "
                    "library packed it, which only engines do. sinkprune writes no such bundle: export it again."
                )
        return data, tuple(weights)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its file and of those that its weights lie in; raises what `weights` raises."""
        return tuple(dict.fromkeys([self.name, *map(self._file_of, self.weights)]))

    def weight(self, weight: Weight) -> Array:
        """The values of one of its weights, read into memory of their own."""
        data = self.folder[self._file_of(weight)].read_at(weight.offset, weight.bytes)
        return np.frombuffer(data, weight.dtype).reshape(weight.shape)

    @contextmanager
    def by_path(self) -> Iterator[Path]:
        """Its file's path, where its weights lie beside it, for a library that opens them itself.

        All of them must be unaltered before the block and after it. Raises what a `HeldFile` raises.
        """
        with ExitStack() as stack:
            for name in self.names:
                stack.enter_context(self.folder[name].by_path())
            yield self.file.path

    @contextmanager
    def mapped_weights(self) -> Iterator[dict[str, mmap | bytes]]:
        """The files that its weights lie in, by the names that the ONNX file has for them, while the block runs.

        Raises what `HeldFile.mapped` raises.
        """
        with ExitStack() as stack:
            named = {weight.location: self.folder[self._file_of(weight)] for weight in self.weights}
            yield {location: stack.enter_context(file.mapped()) for location, file in named.items()}

    def is_mapped(self) -> bool:
        """Whether one of its files is mapped into this process; False where no Linux lists what is."""
        return any_is_mapped(self.folder[name] for name in self.names)

    def _file_of(self, weight: Weight) -> str:
        """The name in the folder of the file that a weight lies in."""
        return posixpath.normpath(posixpath.join(posixpath.dirname(self.name), weight.location))

    def check_interface(self, inputs: list[TensorSpec], outputs: list[TensorSpec]) -> None:
        """Refuse a model that takes or gives something else than the bundle says; raises `BackendError`.

        A size that is a text, on either side, may be any.
        """
        for role, found, expected in (
            ("input", inputs, self.spec.inputs),
            ("output", outputs, self.spec.outputs),
        ):
            by_name = {tensor.name: tensor for tensor in found}
            if len(by_name) != len(expected) or not all(_fits(by_name.get(spec.name), spec) for spec in expected):
                told = [
                    ", ".join(f"{tensor.name} {tensor.dtype}{list(tensor.shape)}" for tensor in tensors) or "none"
                    for tensors in (found, expected)
                ]
                raise BackendError(
                    f"graph '{self.graph}' in '{self.file.path}' has the {role}s {told[0]}, the bundle says "
                    f"{told[1]}. Export or copy the bundle again."
                )


def _fits(found: TensorSpec | None, expected: TensorSpec) -> bool:
    return (
        found is not None
        and found.dtype == expected.dtype
        and len(found.shape) == len(expected.shape)
        and all(
            size == wanted or isinstance(size, str) or isinstance(wanted, str)
            for size, wanted in zip(found.shape, expected.shape, strict=True)
        )
    )
