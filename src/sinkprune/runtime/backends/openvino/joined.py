"""All decoder segments and the head of a bundle as one ONNX file, which computes new tokens.

Every session of ONNX Runtime wakes its threads anew, which takes 0.2 ms. With one in the place of four, a token of a
1.1B model takes 0.91 of the time on two cores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from sinkprune.contract.manifest import GraphSpec
from sinkprune.runtime.backends.kv_cache import cache_names
from sinkprune.runtime.backends.models import Model, message_class
from sinkprune.runtime.backends.openvino.graphs import inlined


@dataclass(frozen=True)
class JoinedModel(Model):
    """Graphs of a bundle, each of which takes the `hidden_out` of the one before as its `hidden`.

    Caches and the last graph's outputs keep their names. All other names begin with that of their graph.
    """

    parts: tuple[Model, ...] = ()

    @classmethod
    def of(cls, name: str, parts: Sequence[Model]) -> JoinedModel:
        """Return `parts` as one graph of this `name`."""
        first, last = parts[0], parts[-1]
        inputs = [
            replace(tensor, name=own(tensor.name))
            for part, own in _renamed(parts)
            for tensor in part.spec.inputs
            if part is first or tensor.name != "hidden"
        ]
        caches = [tensor for part in parts for tensor in part.spec.outputs if tensor.name in cache_names(part.spec)]
        spec = GraphSpec(first.spec.file, tuple(inputs), (*caches, *last.spec.outputs))
        weight_bytes = sum(part.weight_bytes for part in parts)
        return cls(name, spec, first.name, first.folder, weight_bytes, parts=tuple(parts))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for part in self.parts for name in part.names))

    @cached_property
    def inputs_of(self) -> list[dict[str, str]]:
        """The inputs of each part, by their own names: their names here."""
        return [{tensor.name: own(tensor.name) for tensor in part.spec.inputs} for part, own in _renamed(self.parts)]

    def _read(self) -> bytes:
        whole = message_class("Model")()
        names = [{tensor.name for tensor in tensors} for tensors in (self.spec.inputs, self.spec.outputs)]
        for part, own in _renamed(self.parts):
            model = message_class("Model").FromString(inlined(part.onnx))
            graph = model.graph
            for node in graph.node:
                node.name = own(node.name)
                node.input[:] = map(own, node.input)
                node.output[:] = map(own, node.output)
            for named in (*graph.initializer, *graph.input, *graph.output):
                named.name = own(named.name)
            for value in (*graph.input, *graph.output):
                for size in value.type.tensor_type.shape.dim:
                    if size.dim_param:
                        # Segments have caches of different lengths.
                        size.dim_param = own(size.dim_param)
            whole.graph.node.extend(graph.node)
            whole.graph.initializer.extend(graph.initializer)
            whole.graph.input.extend(value for value in graph.input if value.name in names[0])
            whole.graph.output.extend(value for value in graph.output if value.name in names[1])
        whole.graph.name, whole.ir_version = self.graph, model.ir_version
        whole.opset_import.extend(model.opset_import)
        return bytes(whole.SerializeToString())


def _renamed(parts: Sequence[Model]) -> Iterator[tuple[Model, Callable[[str], str]]]:
    """Yield each part with a function from names in its graph to names in the whole."""
    hidden = "hidden"
    for part in parts:
        kept = {name for pair in cache_names(part.spec).items() for name in pair}
        if part is parts[-1]:
            kept.update(tensor.name for tensor in part.spec.outputs)
        yield part, partial(_new_name, part.graph, kept, hidden)
        hidden = f"{part.graph}/hidden_out"


def _new_name(graph: str, kept: set[str], hidden: str, name: str) -> str:
    if name == "hidden":
        return hidden
    # An input that an operator does without has no name.
    return name if name in kept or not name else f"{graph}/{name}"
