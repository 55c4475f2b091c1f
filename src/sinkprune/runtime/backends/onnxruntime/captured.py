"""Repeated calls of one graph from a CUDA graph, which ONNX Runtime captures: one launch instead of hundreds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from weakref import ref

import numpy as np

from sinkprune.runtime.backends.models import Model
from sinkprune.runtime.backends.onnxruntime.buffers import Provider, small_session
from sinkprune.runtime.backends.onnxruntime.device_graphs import Kind, copies_graph
from sinkprune.runtime.backends.onnxruntime.library import failing_in

MOST = 16
"""Sets of input shapes whose calls are captured: ONNX Runtime frees a captured graph with its session only.

At pi0's true shapes each has 15 MB of inputs. Calls with further shapes run kernel by kernel.
"""
_NOT_CAPTURED = -1
"""ONNX Runtime's number of a call that launches kernel by kernel."""

Shapes = tuple[tuple[int, ...], ...]
"""The shapes of all inputs."""


class CapturedEngine:
    """One session, whose calls are captured once for each set of input shapes and replayed from then on.

    A CUDA graph reads and writes the addresses that it was captured with. So inputs are copied into tensors of its
    own, and outputs out of them. An input that the last call had too is not copied again: nothing may write to it
    in between. Source: ONNX Runtime's documentation of the CUDA provider, `enable_cuda_graph`.
    """

    def __init__(self, onnxruntime: Any, model: Model, session: Any, provider: Provider, device: str) -> None:
        """Call `session`, of `model`, whose outputs have fixed sizes. `provider` copies tensors on `device`."""
        self._ort, self._model, self._session, self._device = onnxruntime, model, session, device
        self._inputs = [value.name for value in session.get_inputs()]
        self._copies = lru_cache(lambda *kinds: small_session(onnxruntime, copies_graph(kinds), provider))
        self._calls: dict[Shapes, _Call] = {}

    def __call__(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return all outputs by name, from all inputs by name; called in a `turn`."""
        with failing_in(self._model.graph, inputs):
            call = self._call_of(inputs)
            changed = [name for name in self._inputs if inputs[name] is not call.copied_from(name)]
            # After an error in between, nothing counts as copied.
            call.copied = {}
            self._copy([inputs[name] for name in changed], [call.inputs[name] for name in changed])
            self._session.run_with_iobinding(call.binding, call.options)
            call.copied = {name: ref(value) for name, value in inputs.items()}
            return dict(zip(call.outputs, self._copy(list(call.outputs.values())), strict=True))

    def _call_of(self, inputs: Mapping[str, Any]) -> _Call:
        """Return the call for the shapes of `inputs`."""
        shapes = tuple(tuple(inputs[name].shape()) for name in self._inputs)
        if shapes in self._calls:
            return self._calls[shapes]
        if len(self._calls) > MOST:
            # The last one, which is not captured.
            self._calls.popitem()
        captured = len(self._calls) < MOST
        options = self._ort.RunOptions()
        options.add_run_config_entry("gpu_graph_id", str(len(self._calls) + 1 if captured else _NOT_CAPTURED))
        # Not in the memory of the session, which a captured graph reuses.
        own = {name: self._empty(inputs[name].shape(), inputs[name].element_type()) for name in self._inputs}
        outputs = {spec.name: self._empty(spec.shape, np.dtype(spec.dtype)) for spec in self._model.spec.outputs}
        binding = self._session.io_binding()
        for name, value in own.items():
            binding.bind_ortvalue_input(name, value)
        for name, value in outputs.items():
            binding.bind_ortvalue_output(name, value)
        self._calls[shapes] = _Call(binding, options, own, outputs)
        return self._calls[shapes]

    def _empty(self, shape: Sequence[Any], element_type: Any) -> Any:
        return self._ort.OrtValue.ortvalue_from_shape_and_type(list(shape), element_type, self._device, 0)

    def _copy(self, sources: Sequence[Any], targets: Sequence[Any] | None = None) -> list[Any]:
        """Copy tensors on the device, all in one call, to `targets` or into new memory; returns the copies."""
        if not sources:
            return []
        kinds: list[Kind] = [(value.element_type(), len(value.shape())) for value in sources]
        session = self._copies(*kinds)
        binding = session.io_binding()
        for number, source in enumerate(sources):
            binding.bind_ortvalue_input(f"source_{number}", source)
            if targets is None:
                binding.bind_output(f"copy_{number}", self._device)
            else:
                binding.bind_ortvalue_output(f"copy_{number}", targets[number])
        session.run_with_iobinding(binding)
        return binding.get_outputs()


@dataclass
class _Call:
    """A call with inputs of certain shapes: its tensors, at the addresses of its CUDA graph."""

    binding: Any
    options: Any
    inputs: dict[str, Any]
    outputs: dict[str, Any]
    copied: dict[str, ref[Any]] = field(default_factory=dict)
    """The tensors whose values `inputs` has, by name."""

    def copied_from(self, name: str) -> Any:
        """Return the tensor whose values the input `name` has; None if there is none, or nobody holds it any more."""
        return self.copied[name]() if name in self.copied else None
