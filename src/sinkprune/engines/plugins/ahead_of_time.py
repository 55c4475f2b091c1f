"""The ahead-of-time plugins, for TensorRT 10.9 and later. The engine holds the kernels and needs none of this code.

Each node is one kernel, which the engine gets as PTX when it is built. Its parameters are the inputs, int32 sizes and
the outputs. There is no workspace, so `DiversitySelect` has one more output, which nothing reads. Sizes cannot come
from a tensor, because `tensorrt.plugin` rejects shape inputs.

Never run: TensorRT-RTX has no `tensorrt.plugin`. The code follows `tensorrt/plugin/_lib.py`, `_plugin_class.py` and
`_validate.py` of NVIDIA/TensorRT (release 11.1). Those files ran on it over stand-ins for their C++ classes.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature
from types import GenericAlias
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sinkprune.contract.errors import EnginesError
from sinkprune.engines.plugins.binaries import ptx
from sinkprune.engines.plugins.descriptions import (
    AHEAD_OF_TIME_NAMESPACE,
    Plugin,
    sizes_of,
    tensor_types,
    token_types,
)


def register_ahead_of_time(library: Any, plugins: Any, description: Plugin, sm: int) -> None:
    """Register `description` with `plugins`, the module `tensorrt.plugin` of `library`, for GPUs of `sm`, e.g. 87.

    A second registration in a process does nothing. During the build of an engine, the plugin raises `BackendError`
    if no kernel is shipped for `sm`, and `EnginesError` if the width of the tokens is not fixed.
    """
    if hasattr(getattr(plugins.op, AHEAD_OF_TIME_NAMESPACE, None), description.name):
        return
    identity = f"{AHEAD_OF_TIME_NAMESPACE}::{description.name}"
    outputs = (*description.outputs, *description.single.scratch)
    tensors = [
        Parameter(t.name, Parameter.POSITIONAL_OR_KEYWORD, annotation=plugins.TensorDesc) for t in description.inputs
    ]
    # An array, as the field holds one: numpy rejects more and more conversions of a plain int.
    integers = [
        Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, annotation=NDArray[np.int32]) for name in description.fields
    ]
    rest = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in ("outputs", "tactic")]
    described = GenericAlias(tuple, (plugins.TensorDesc,) * len(outputs))
    kernel = GenericAlias(tuple, (str, bytes, plugins.KernelLaunchParams, plugins.SymIntExprs))

    def output_descriptions(*inputs: Any, **fields: Any) -> Any:
        sizes = _sizes(description, inputs, [fields[name] for name in description.fields])
        types = tensor_types(library, inputs[description.tokens].dtype)
        return tuple(
            plugins.from_shape_expr(tuple(sizes.get(size, size) for size in output.shape), types[output.type])
            for output in outputs
        )

    def kernel_launch(*arguments: Any) -> Any:
        count = len(description.inputs)
        inputs, fields = arguments[:count], arguments[count : count + len(description.fields)]
        sizes = _sizes(description, inputs, fields)
        if not sizes["D"].is_constant:
            raise EnginesError(
                f"the tokens of the plugin {description.name} have a dynamic width, and a kernel is compiled for one "
                "alignment. Export the bundle again with this sinkprune."
            )
        single, width = description.single, int(sizes["D"].constant_value())
        code = ptx(single.kernel(width), token_types(library)[inputs[description.tokens].dtype], sm)
        launch = plugins.KernelLaunchParams()
        launch.grid_x, launch.grid_y, launch.grid_z = single.grid(sizes["G"], width)
        launch.block_x, launch.shared_mem = code.threads, code.shared_bytes
        values = [plugins.SymInt32(value) for value in single.integers(sizes, plugins)]
        return code.entry, code.image, launch, plugins.SymIntExprs.from_tuple(values)

    plugins.register(identity)(_signed(output_descriptions, [*tensors, *integers], described))
    plugins.aot_impl(identity)(_signed(kernel_launch, [*tensors, *integers, *rest], kernel))


def _signed(function: Callable[..., Any], parameters: list[Parameter], returns: Any) -> Callable[..., Any]:
    """Set the signature of `function`, from which `tensorrt.plugin` reads inputs, attributes and outputs."""
    function.__signature__ = Signature(parameters, return_annotation=returns)  # type: ignore[attr-defined]
    return function


def _sizes(description: Plugin, inputs: Any, fields: Any) -> dict[Any, Any]:
    """Return the sizes by name: symbolic ones from shapes, integers from the node's attributes."""
    sizes = sizes_of(description.inputs, [tensor.shape_expr for tensor in inputs])
    return sizes | {name: int(value[0]) for name, value in zip(description.fields, fields, strict=True)}
