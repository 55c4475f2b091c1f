"""The plugins in TensorRT's IPluginV3, and their registration.

An engine with these plugins needs this code when it is loaded. The classes are made for one library,
`tensorrt` or `tensorrt_rtx`, and derive from its binding classes. The ONNX parser of TensorRT-RTX 1.7 has created
them. They have never run in an engine.

Exceptions here do not reach the caller: the bindings print them to stderr and return an error code to TensorRT.

Source: NVIDIA/TensorRT, `samples/python/non_zero_plugin`, `python/src/infer/pyPlugin.cpp`; NvInferRuntime.h on
`IPluginV3OneBuild` and `IPluginV3OneRuntime`.

`register` is the entry point `tensorrt` of the group `sinkprune.tensorrt_plugins`. The runtime does not import this
folder, and finds the installed entry point. TensorRT's registry keeps the creators alive (`keep_alive` in
`python/src/infer/pyPlugin.cpp`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sinkprune.contract.errors import BackendError, EnginesError
from sinkprune.engines.plugins import launches as plugins
from sinkprune.engines.plugins.launches import NAMESPACE, PLUGINS, VERSION, KernelRunner, Launch, Plugin, Sizes


class PluginV3:
    """The methods of `IPluginV3` and its three capabilities for the plugin `description`, with its node's `fields`.

    A class of a library derives from this one and from the library's own four.
    """

    def __init__(self, library: Any, description: Plugin, fields: Mapping[str, int], runner: KernelRunner) -> None:
        for base in capabilities(library):
            base.__init__(self)
        self.plugin_name, self.plugin_version, self.plugin_namespace = description.name, VERSION, NAMESPACE
        self.num_outputs = len(description.outputs)
        self._library, self._description, self._fields, self._runner = library, description, dict(fields), runner
        # The bindings keep pointers into names and data, which must live as long as the plugin.
        self._serialized = _field_collection(library, self._fields)

    def get_capability_interface(self, type: Any) -> PluginV3:
        """Return the object with the capability `type`: this one has core, build and runtime."""
        return self

    def clone(self) -> PluginV3:
        """Return another plugin with the same fields and the same runner."""
        return type(self)(self._library, self._description, self._fields, self._runner)

    def get_fields_to_serialize(self) -> Any:
        """Return the node's fields. An engine stores them, and passes them to the creator when it is loaded."""
        return self._serialized[1]

    def get_output_data_types(self, input_types: Sequence[Any]) -> list[Any]:
        """Return the type of each output; a `tokens` output has the type of the tokens."""
        types = plugins.tensor_types(self._library, input_types[self._description.tokens])
        return [types[output.type] for output in self._description.outputs]

    def get_output_shapes(self, inputs: Sequence[Any], shape_inputs: Sequence[Any], expr_builder: Any) -> list[Any]:
        """Return the shape of each output, as expressions of the inputs' sizes.

        The expressions of a shape input are its values, not its shape (`IPluginV3OneBuild`).
        """
        described = self._description
        sizes = plugins.sizes_of(described.inputs, [[dims[axis] for axis in range(len(dims))] for dims in inputs])
        sizes.update({name: expr_builder.constant(value) for name, value in self._fields.items()})
        # Without shape inputs, every size is a field.
        sizes.update(
            {tensor.name: dims[0] for tensor, dims in zip(described.shape_inputs, shape_inputs, strict=False)}
        )
        shapes = []
        for output in described.outputs:
            shape = self._library.DimsExprs(len(output.shape))
            for axis, size in enumerate(output.shape):
                shape[axis] = sizes[size] if isinstance(size, str) else expr_builder.constant(size)
            shapes.append(shape)
        return shapes

    def supports_format_combination(self, pos: int, in_out: Sequence[Any], num_inputs: int) -> bool:
        """Return whether tensor `pos` is linear and has its described type; all `tokens` have one type."""
        described, found = self._description, in_out[pos].desc
        # By the documentation there are no shape inputs here; they would be the last inputs.
        inputs = (*described.inputs, *described.shape_inputs)
        tensor = inputs[pos] if pos < num_inputs else described.outputs[pos - num_inputs]
        if found.format != self._library.TensorFormat.LINEAR:
            return False
        if pos == described.tokens:
            return found.type in plugins.token_types(self._library)
        # The types of tensors after `pos` are not known yet.
        tokens = in_out[described.tokens].desc.type if tensor.type == "tokens" else None
        return bool(found.type == plugins.tensor_types(self._library, tokens)[tensor.type])

    def configure_plugin(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Do nothing: a plugin is the same for all shapes."""

    def get_workspace_size(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
        """Return the bytes of workspace for the largest shapes of an optimisation profile."""
        return self._description.workspace(self._sizes([t.max for t in inputs], [t.max for t in outputs]))

    def get_valid_tactics(self) -> list[int]:
        """Return no tactics: a plugin computes in one way only."""
        return []

    def set_tactic(self, tactic: int) -> None:
        """Do nothing: a plugin computes in one way only."""

    def attach_to_context(self, resource_context: Any) -> PluginV3:
        """Return the plugin of another execution context; both share the kernels."""
        return self.clone()

    def on_shape_change(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Load the kernels for these shapes, because the capture of a CUDA graph must not load any."""
        tensors = (*self._description.inputs, *self._description.outputs)
        self._runner.prepare(
            self._launches(inputs, outputs, dict.fromkeys([*(t.name for t in tensors), "workspace"], 0))
        )

    def enqueue(
        self,
        input_desc: Sequence[Any],
        output_desc: Sequence[Any],
        inputs: Sequence[int],
        outputs: Sequence[int],
        workspace: int,
        stream: int,
    ) -> None:
        """Enqueue the kernels on the handle `stream`; inputs, outputs and workspace are device addresses."""
        described = self._description
        names = [tensor.name for tensor in (*described.inputs, *described.outputs)]
        # Shape inputs may follow the inputs.
        addresses = dict(zip(names, [*inputs[: len(described.inputs)], *outputs], strict=True))
        addresses["workspace"] = workspace
        self._runner.run(self._launches(input_desc, output_desc, addresses), stream)

    def _launches(self, inputs: Sequence[Any], outputs: Sequence[Any], addresses: Mapping[str, int]) -> list[Launch]:
        dtype = plugins.token_types(self._library)[inputs[self._description.tokens].type]
        sizes = self._sizes([t.dims for t in inputs], [t.dims for t in outputs])
        return self._description.launches(addresses, sizes, dtype)

    def _sizes(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> Sizes:
        """Return the sizes from all shapes; the outputs have the value of a shape input."""
        described = self._description
        tensors = (*described.inputs, *described.outputs)
        return self._fields | plugins.sizes_of(tensors, [*inputs[: len(described.inputs)], *outputs])


class CreatorV3:
    """The methods of `IPluginCreatorV3One`; a class of a library derives from this one and from the library's own."""

    def __init__(self, library: Any, description: Plugin, runner: KernelRunner) -> None:
        library.IPluginCreatorV3One.__init__(self)
        self.name, self.plugin_version, self.plugin_namespace = description.name, VERSION, NAMESPACE
        # The parser makes a field of each attribute of the node that has a name here.
        self._declared = _field_collection(library, dict.fromkeys(description.fields, 0))
        self.field_names = self._declared[1]
        self._library, self._description, self._runner = library, description, runner
        self._plugin_class: Any = type("LibraryPlugin", (PluginV3, *capabilities(library)), {})

    def create_plugin(self, name: str, fields: Sequence[Any], phase: Any) -> PluginV3:
        """Return a plugin for the node `name` of a parsed graph or, with `phase` RUNTIME, of a loaded engine.

        The parser makes an INT attribute a field of one INT32 (onnx-tensorrt, `loadFields`). Raises `EnginesError`
        for a field that is missing, unknown or below 1.
        """
        described = self._description
        values = {field.name: int(field.data[0]) for field in fields}
        if not set(described.attributes) <= set(values) <= set(described.fields) or min(values.values()) < 1:
            raise EnginesError(
                f"the plugin {described.name} of node '{name}' was given {values or 'nothing'}, expected "
                f"{', '.join(described.attributes)}, each at least 1. Build the engines again with this sinkprune."
            )
        return self._plugin_class(self._library, described, values, self._runner)


def creator(library: Any, description: Plugin, runner: KernelRunner) -> Any:
    """Return the creator of the plugin `description`, for the plugin registry of `library`."""
    made: Any = type("LibraryCreator", (CreatorV3, library.IPluginCreatorV3One), {})
    return made(library, description, runner)


def capabilities(library: Any) -> tuple[Any, ...]:
    """Return the binding classes of `library` for a Python plugin; each must be initialised on its own."""
    return (library.IPluginV3, library.IPluginV3OneCore, library.IPluginV3OneBuild, library.IPluginV3OneRuntime)


def _field_collection(library: Any, values: Mapping[str, int]) -> tuple[list[Any], Any]:
    """Return the fields, which own the data of the collection, and the collection."""
    int32 = library.PluginFieldType.INT32
    fields = [library.PluginField(name, np.array([value], np.int32), int32) for name, value in values.items()]
    return fields, library.PluginFieldCollection(fields)


def register(library: Any) -> dict[str, str]:
    """Register the `IPluginV3` creators with `library`, `tensorrt` or `tensorrt_rtx`; a second call changes nothing.

    Returns the sha256 of each plugin's kernels by plugin name, as in `engines.json`. Needs no GPU: kernels are loaded
    before they first run. Raises `BackendError` if the library rejects a creator.
    """
    registry, runner = library.get_plugin_registry(), KernelRunner()
    for plugin in PLUGINS.values():
        known = registry.get_creator(plugin.name, VERSION, NAMESPACE) is not None
        if not known and not registry.register_creator(creator(library, plugin, runner), NAMESPACE):
            raise BackendError(
                f"{library.__name__} {library.__version__} does not register the plugin {plugin.name} of "
                f"{NAMESPACE}. End the program that holds another one of this name, and start again."
            )
    return {name: plugins.sha256(name) for name in PLUGINS}


def register_for_build(library: Any, sm: int) -> dict[str, str] | None:
    """Register the plugins for a build with `library` for `sm`; None if no kernels are shipped for such a GPU.

    Returns the plugins that engines need when they are loaded, as `register` does, and raises what `register` raises.
    """
    return None if sm < min(plugins.shipped_sms()) else register(library)
