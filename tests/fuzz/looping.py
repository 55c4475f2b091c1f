"""ONNX graphs with the inputs and outputs of the bundle's, but with endless loops or false declarations."""

from __future__ import annotations

from random import Random

import onnx
from onnx import ModelProto, TensorProto, helper

_LONG = 2**62
KINDS = ("loop", "growing loop", "other name", "other type", "huge constant", "external")


def strange(data: bytes, kind: str, random: Random) -> bytes:
    """Return the ONNX graph `data` with a fault of one of `KINDS`."""
    model = onnx.load_model_from_string(data)
    graph = model.graph
    match kind:
        case "loop" | "growing loop":
            _append_loop(model, growing=kind == "growing loop")
        case "other name":
            random.choice([*graph.input, *graph.output]).name = "other"
        case "other type":
            value = random.choice([*graph.input, *graph.output])
            value.type.tensor_type.elem_type = random.choice(
                (TensorProto.STRING, TensorProto.INT8, TensorProto.DOUBLE)
            )
        case "huge constant":
            shape = helper.make_tensor("shape", TensorProto.INT64, [2], [10**5, 10**5])
            graph.initializer.append(shape)
            graph.node.append(helper.make_node("ConstantOfShape", ["shape"], ["huge"]))
            graph.node.append(helper.make_node("ReduceSum", ["huge"], ["sum"]))
            graph.output.append(helper.make_tensor_value_info("sum", TensorProto.FLOAT, None))
        case "external":
            tensor = graph.initializer.add()
            tensor.name, tensor.data_type, tensor.data_location = "stolen", TensorProto.FLOAT, TensorProto.EXTERNAL
            tensor.dims.append(4)
            place = random.choice(("/etc/passwd", "../../../../etc/passwd", "/dev/zero", "", "missing.bin", "."))
            for key, value in (("location", place), ("offset", "0"), ("length", "16")):
                entry = tensor.external_data.add()
                entry.key, entry.value = key, value
            graph.node.append(helper.make_node("Identity", ["stolen"], ["shown"]))
        case other:
            raise ValueError(f"kind '{other}', expected one of {', '.join(KINDS)}")
    return model.SerializeToString()


def _append_loop(model: ModelProto, *, growing: bool) -> None:
    """Insert an endless Loop before the first output, so that the output waits for the loop."""
    graph, output = model.graph, _renamed_output(model)
    grow, turn = helper.make_node("Concat", ["x", "x"], ["y"], axis=0), helper.make_node("Neg", ["x"], ["y"])
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["go_on"]), grow if growing else turn],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("x", TensorProto.FLOAT, None),
        ],
        [
            helper.make_tensor_value_info("go_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("y", TensorProto.FLOAT, None),
        ],
    )
    graph.initializer.append(helper.make_tensor("times", TensorProto.INT64, [], [_LONG]))
    graph.initializer.append(helper.make_tensor("forever", TensorProto.BOOL, [], [True]))
    graph.node.append(helper.make_node("Loop", ["times", "forever", f"{output}_before"], [output], body=body))


def _renamed_output(model: ModelProto) -> str:
    """Append "_before" to the name of the first output in the nodes that compute it, and return the name."""
    output = model.graph.output[0].name
    for node in model.graph.node:
        for place, name in enumerate(node.output):
            node.output[place] = f"{output}_before" if name == output else name
    return output
