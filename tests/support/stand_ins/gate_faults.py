"""Plants a fault into a folder of engines: builds one engine from an altered graph, and adapts the manifest."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
from onnx import TensorProto, numpy_helper

from sinkprune.contract.bundle import Bundle
from sinkprune.contract.engines_manifest import ENGINES, read_engines
from sinkprune.contract.errors import EnginesError
from sinkprune.contract.files.held_files import HeldFile
from sinkprune.contract.files.manifest_file import file_specs
from sinkprune.contract.manifest import TensorSpec
from sinkprune.engines.progress import SILENT
from sinkprune.engines.targets import BuildJob, new_builder
from sinkprune.runtime.backends.models import Model

Alter = Callable[[onnx.ModelProto], None]


def plant(bundle: Bundle, engines: Path, graph: str, alter: Alter, folder: Path) -> Path:
    """Return a copy of `engines` in `folder`, its engine of `graph` built from an altered copy of the graph."""
    root = Path(shutil.copytree(engines, folder / "planted"))
    manifest = read_engines(root).manifest
    file = root / manifest.engines[graph].file
    for old in (file, file.with_name(f"{file.name}.data"), file.with_suffix(".bin")):
        old.unlink(missing_ok=True)
    model = altered(Model.of_bundle(bundle, graph), alter, folder / "altered")
    builder = new_builder(manifest.target, None, folder / "timing-cache")
    builder.build(BuildJob(model, {}), file, SILENT)
    (root / ENGINES.name).unlink()
    ENGINES.write(root, replace(manifest, files=file_specs(root)))
    return root


def altered(model: Model, alter: Alter, folder: Path) -> Model:
    """Return an altered copy of an ONNX model, with its weights, in the new folder `folder`."""
    folder.mkdir()
    proto = onnx.load(model.file.path)
    alter(proto)
    onnx.save(proto, folder / "graph.onnx", save_as_external_data=True, location="graph.bin", size_threshold=1024)
    files = {path.name: HeldFile(path, EnginesError) for path in folder.iterdir()}
    return replace(model, name="graph.onnx", folder=files)


def one_weight(model: onnx.ModelProto) -> None:
    """Negate the largest weight of the largest matrix of floats."""

    def negate(values: np.ndarray) -> None:
        place = np.unravel_index(np.abs(values.astype(np.float32)).argmax(), values.shape)
        values[place] = -values[place]

    _change_largest(model, negate)


def scaled_weights(model: onnx.ModelProto) -> None:
    """Double half of the largest matrix of floats, or of the scales of one.

    A norm after the matrix could hide a change of all of it.
    """

    def double(values: np.ndarray) -> None:
        values[: max(1, len(values) // 2)] *= 2

    _change_largest(model, double)


def swapped(one: str, other: str) -> Alter:
    """Exchange the values of two outputs."""

    def alter(model: onnx.ModelProto) -> None:
        _replaced(model, one, f"x = Identity ({other}_was)")
        _replaced(model, other, f"x = Identity ({one}_was)")

    return alter


def scaled(output: str, factor: float) -> Alter:
    """Multiply an output of float32 by `factor`."""
    return lambda model: _replaced(
        model, output, f"x_factor = Constant <value_float = {float(factor)}> ()", "x = Mul (x_was, x_factor)"
    )


def overflowing(output: str, *, saturating: bool) -> Alter:
    """Convert a far larger multiple of an output to fp16, where it is infinite, or clipped at the largest number."""

    def alter(model: onnx.ModelProto) -> None:
        kind = next(value for value in model.graph.output if value.name == output).type.tensor_type.elem_type
        numbers = {"large": 1e6, "small": 1e-6, "least": -65504.0, "most": 65504.0}
        _replaced(
            model,
            output,
            *(f"x_{name} = Constant <value_float = {number}> ()" for name, number in numbers.items()),
            f"x_0 = Cast <to = {TensorProto.FLOAT}> (x_was)",
            "x_1 = Mul (x_0, x_large)",
            "x_2 = Clip (x_1, x_least, x_most)" if saturating else "x_2 = Identity (x_1)",
            f"x_3 = Cast <to = {TensorProto.FLOAT16}> (x_2)",
            f"x_4 = Cast <to = {TensorProto.FLOAT}> (x_3)",
            "x_5 = Mul (x_4, x_small)",
            f"x = Cast <to = {kind}> (x_5)",
        )

    return alter


def changed_indices(output: str, operator: str, operand: Sequence[int]) -> Alter:
    """Change the last two indices along the last axis: "Add" to them, or "Gather" them in another order."""
    numbers = {"cut": [-2], "zero": [0], "axis": [-1], "end": [1 << 40], "operand": operand}
    constants = [
        f"x_{name} = Constant <value_ints = [{', '.join(map(str, value))}]> ()" for name, value in numbers.items()
    ]
    axis = "<axis = -1>" if operator == "Gather" else ""
    return lambda model: _replaced(
        model,
        output,
        *constants,
        "x_head = Slice (x_was, x_zero, x_cut, x_axis)",
        "x_tail = Slice (x_was, x_cut, x_end, x_axis)",
        f"x_changed = {operator} {axis} (x_tail, x_operand)",
        "x = Concat <axis = -1> (x_head, x_changed)",
    )


def like_outputs(outputs: Sequence[TensorSpec]) -> tuple[str, str] | None:
    """Return the last two outputs of one type and shape, which differ in their values only."""
    pairs = [
        (one.name, other.name)
        for place, one in enumerate(outputs)
        for other in outputs[place + 1 :]
        if (one.dtype, one.shape) == (other.dtype, other.shape)
    ]
    return pairs[-1] if pairs else None


def _replaced(model: onnx.ModelProto, output: str, *lines: str) -> None:
    """Rename `output` to `output`_was, and compute `output` from it by `lines`, which call it x."""
    for node in model.graph.node:
        for names in (node.input, node.output):
            for place, name in enumerate(names):
                if name == output:
                    names[place] = f"{output}_was"
    model.graph.node.extend(onnx.parser.parse_node(re.sub(r"\bx(?=_|\b)", output, line)) for line in lines)


def _change_largest(model: onnx.ModelProto, change: Callable[[np.ndarray], None]) -> None:
    kinds = (TensorProto.FLOAT, TensorProto.FLOAT16)
    floats = [tensor for tensor in model.graph.initializer if tensor.data_type in kinds and len(tensor.dims) > 0]
    matrix = max(floats, key=lambda tensor: np.prod(tensor.dims))
    values = numpy_helper.to_array(matrix).copy()
    change(values)
    matrix.CopyFrom(numpy_helper.from_array(values, matrix.name))
