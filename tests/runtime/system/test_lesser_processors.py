"""With fewer instruction sets, answers in fp32 keep the same tokens and say the same.

oneDNN, with which OpenVINO computes, has a switch for it: ONEDNN_MAX_CPU_ISA. ONNX Runtime's own kernels have none.
OpenVINO reads some features from the processor itself, past the switch. Held below what the processor has, it may
refuse a graph; then the backend must raise an error, and never give another answer.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sinkprune import Pipeline
from sinkprune.runtime.backends.openvino.backend import import_openvino
from sinkprune.runtime.backends.openvino.graphs import reader_of
from support.references.same_answers import asked, kept_sets
from support.stand_ins.processor_features import instructions

BACKENDS = ("openvino", "ort-cpu+openvino")
BUDGETS = ("none", "retain-64")
# Prints what each backend answers, and the kernels that OpenVINO chose for the products of a graph.
PROGRAM = """
import json, sys
from pathlib import Path
from PIL import Image
from sinkprune.contract.errors import BackendError
from test_lesser_processors import answers, kernel
print(kernel())
try:
    print(json.dumps(answers(Path(sys.argv[1]), Image.open(sys.argv[2]))))
except BackendError as error:
    print(f"refused: {error}")
"""


def answers(root: Path, photo: Image.Image) -> dict[str, list[object]]:
    """Return kept sets, tokens and logits of every backend and budget."""
    found: dict[str, list[object]] = {}
    for backend in BACKENDS:
        pipeline = Pipeline.load(root, backend=backend, compute="fp32")
        for budget in BUDGETS:
            answer, logits = asked(pipeline, photo, budget=budget)
            kept = kept_sets(answer) if budget != "none" else []
            found[f"{backend} {budget}"] = [kept, answer.token_ids, np.array(logits).tolist()]
    return found


def kernel() -> str:
    """Return the name of the kernel with which OpenVINO multiplies matrices."""
    openvino = import_openvino("openvino")
    rows = openvino.opset15.parameter([-1, 64], np.float32)
    product = openvino.opset15.matmul(rows, np.ones((64, 64), np.float32), False, False)
    model = openvino.Model([product], [rows])
    compiled = reader_of(openvino).core.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    compiled.create_infer_request().infer([np.ones((3, 64), np.float32)])
    nodes = [node.get_rt_info() for node in compiled.get_runtime_model().get_ops()]
    products = [node for node in nodes if node["layerType"].astype(str) in ("FullyConnected", "MatMul")]
    return products[0]["primitiveType"].astype(str)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the switch is for x86-64 only")
@pytest.mark.parametrize(
    ("held", "withheld", "may_refuse"),
    [
        ("AVX2", ("avx512", "amx"), any(name.startswith("avx512") for name in instructions())),
        ("SSE41", ("avx",), True),
    ],
    ids=["AVX2", "SSE41"],
)
def test_answers_are_the_same_with_fewer_instruction_sets(
    held: str, withheld: tuple[str, ...], may_refuse: bool, bundle: Callable[..., Path], photo_file: Path
) -> None:
    root = bundle("gqa-112", budgets=("retain-64",))
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(root), str(photo_file)],
        env={**os.environ, "ONEDNN_MAX_CPU_ISA": held, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    chosen, found = done.stdout.splitlines()
    # Else the switch would have done nothing.
    assert not any(word in chosen for word in withheld), chosen
    if may_refuse and found.startswith("refused: "):
        assert "backend 'openvino' cannot load" in found
        return
    here, there = answers(root, Image.open(photo_file)), json.loads(found)
    assert there.keys() == here.keys()
    for case, (kept, tokens, logits) in here.items():
        assert there[case][:2] == [kept, tokens], case
        assert np.abs(np.array(there[case][2]) - logits).max() < 1e-3 * np.abs(logits).max(), case
