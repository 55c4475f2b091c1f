"""ONNX graphs as OpenVINO models: functions inlined, attention as one operator, caches as states of the model.

OpenVINO's CPU plugin updates a cache in place if the cache is a state that is gathered by beam, gets new rows
appended, and is read by a ScaledDotProductAttention. OpenVINO's own conversion of ONNX's Attention does not lead to
that: it copies keys for every query head, and checks for rows that attend to nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sinkprune.contract.manifest import TensorSpec
from sinkprune.runtime.backends.kv_cache import cache_names
from sinkprune.runtime.backends.models import Model

WEIGHTS = ".bin"
"""The suffix of an engine's file of weights."""
BEAM = "beam_idx"
"""The input that the gather of states needs. It is always 0, because there is one answer."""
_DTYPES = {"f32": "float32", "f16": "float16", "i64": "int64", "boolean": "bool"}
_STORED_SMALLER = ("decompression_0", "disabled_constant_folding_0")
"""The marks of a Convert of weights that are stored in a smaller type than that of the computation."""
_AXIS_OF_ROWS = 2


class GraphReader:
    """Reads the ONNX files of a bundle into OpenVINO models."""

    def __init__(self, openvino: Any, core: Any) -> None:
        self._ov, self._ops = openvino, openvino.opset15
        self._core = core
        extension = openvino.frontend.onnx.ConversionExtension
        # Held here, because the core does not keep them alive. As they hold it too, no core is ever freed. That takes
        # some MB, and is needed: when a CPU plugin is freed after an older one, it restores that one's stack for
        # signals, which is gone. The next Ctrl-C would end the process (openvino 2026.4).
        self._extensions = [extension("Attention", self._attention), extension("TensorScatter", self._appended)]
        for added in self._extensions:
            core.add_extension(added)

    def read(self, model: Model) -> Any:
        """Return the graph of `model`, with its caches as states; `BEAM` is an input where there are any.

        A bundle's graph is an ONNX file. A graph without weights is read from memory, because it may be loaded after
        its file was replaced. An engine is in openvino's own format. Raises `BackendError`, and openvino's
        `RuntimeError`.
        """
        read = self._engine(model) if model.built else self._of_bundle(model)
        for node in read.get_ops():
            if node.get_type_name() == "Convert" and _is_constant(node.input_value(0).get_node(), "bf16", "f16"):
                # Without the marks, OpenVINO holds the matrix in fp32 too.
                for mark in _STORED_SMALLER:
                    node.get_rt_info()[mark] = True
        return read

    def _engine(self, model: Model) -> Any:
        with paths(model) as path:
            read = self._core.read_model(path, path.with_suffix(WEIGHTS))
        states = cache_names(model.spec)
        kept = replace(
            model.spec,
            inputs=tuple(tensor for tensor in model.spec.inputs if tensor.name not in states.values()),
            outputs=tuple(tensor for tensor in model.spec.outputs if tensor.name not in states),
        )
        taken = [tensor for tensor in _specs(read.inputs) if tensor.name != BEAM]
        replace(model, spec=kept).check_interface(taken, _specs(read.outputs))
        return read

    def _of_bundle(self, model: Model) -> Any:
        with paths(model) as path:
            read = self._core.read_model(path if model.weights else model.inlined)
        model.check_interface(_specs(read.inputs), _specs(read.outputs))
        self._keep_caches(read, cache_names(model.spec))
        return read

    def _keep_caches(self, read: Any, caches: Mapping[str, str]) -> None:
        """Turn `caches`, given as inputs by their outputs, from inputs and outputs into states of the model."""
        if not caches:
            return
        beam = self._ops.parameter([-1], np.int32, name=BEAM)
        beam.output(0).get_tensor().set_names({BEAM})
        read.add_parameters([beam])
        sinks = []
        for name, past_name in caches.items():
            past, grown = read.input(past_name), read.output(name)
            info = self._ov.op.util.VariableInfo()
            info.data_shape, info.data_type, info.variable_id = past.partial_shape, past.element_type, name
            state = self._ov.op.util.Variable(info)
            empty = [size.get_length() if size.is_static else 0 for size in past.partial_shape]
            start = self._ops.constant(np.zeros(empty, past.element_type.to_dtype()))
            before = self._ops.read_value(start, state)
            rows = self._ops.gather(before, beam, np.int64(0))
            for target in past.get_target_inputs():
                appended = target.get_node().get_type_name() == "Concat"
                target.replace_source_output((rows if appended else before).output(0))
            sinks.append(self._ops.assign(grown.get_node().input_value(0).get_node(), state))
            read.remove_result(grown.get_node())
            read.remove_parameter(past.get_node())
        read.add_sinks(sinks)
        read.validate_nodes_and_infer_types()

    def _attention(self, node: Any) -> Any:
        """Convert ONNX's Attention on [B,H,S,h], [B,Hkv,T,h] and an optional mask, as our graphs have it."""
        query, key, value = (node.get_input(place) for place in range(3))
        masks = [node.get_input(place) for place in range(3, node.get_input_size())]
        masks = [mask for mask in masks if mask.get_node().get_type_name() != "NullNode"]
        heads, kv_heads = (tensor.partial_shape[1].get_length() for tensor in (query, key))
        if heads != kv_heads:
            key, value = (self._for_heads(tensor, heads // kv_heads) for tensor in (key, value))
        scale = None
        if node.has_attribute("scale"):
            scale = np.array(node.get_attribute("scale", 0.0), query.element_type.to_dtype())
        mask = masks[0] if masks else None
        return self._ops.scaled_dot_product_attention(query, key, value, mask, scale).outputs()

    def _for_heads(self, tensor: Any, group: int) -> Any:
        """Repeat keys or values [B,Hkv,T,h] for the `group` query heads that share them: [B,Hkv*group,T,h]."""
        _, kv_heads, _, width = tensor.partial_shape
        apart = self._ops.unsqueeze(tensor, np.int64(2))
        shape = np.array([1, 1, group, 1, 1], np.int64)
        repeated = self._ops.broadcast(apart, shape, broadcast_spec="BIDIRECTIONAL")
        joined = np.array([0, kv_heads.get_length() * group, -1, width.get_length()], np.int64)
        return self._ops.reshape(repeated, joined, True)

    def _appended(self, node: Any) -> Any:
        """Convert TensorScatter to a Concat, because a state has no unused rows."""
        return self._ops.concat([node.get_input(0), node.get_input(1)], _AXIS_OF_ROWS).outputs()


def _is_constant(node: Any, *types: str) -> bool:
    """Return whether `node` is a constant of one of these types, by OpenVINO's names."""
    return node.get_type_name() == "Constant" and node.get_element_type().get_type_name() in types


@contextmanager
def paths(model: Model) -> Iterator[Path]:
    """Yield the path of a model's file, checked together with its weights; raises what `Model.by_path` raises.

    Without weights nothing is checked, and the path may lead to another file.
    """
    with ExitStack() as stack:
        if model.built:
            for name in (model.name, str(Path(model.name).with_suffix(WEIGHTS))):
                stack.enter_context(model.folder[name].by_path())
        elif model.weights:
            stack.enter_context(model.by_path())
        yield model.file.path


def _specs(ports: Any) -> list[TensorSpec]:
    """Return the inputs or outputs of a model; an unknown size is a text."""
    return [
        TensorSpec(
            port.any_name,
            _DTYPES.get(port.element_type.get_type_name(), port.element_type.get_type_name()),
            tuple(size.get_length() if size.is_static else str(size) for size in port.partial_shape),
        )
        for port in ports
    ]
