"""Backend openvino against ort-cpu: the same kept sets and logits in fp32, and what its faster types change."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from onnx.reference import ReferenceEvaluator
from PIL import Image

from sinkprune import Pipeline
from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.child_processes import python_command
from sinkprune.contract.errors import BackendError
from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.methods import METHODS
from sinkprune.export.source import ExportRequest
from sinkprune.runtime.backends import load_backend
from sinkprune.runtime.backends.known import COMPUTES, Compute
from sinkprune.runtime.backends.models import Model
from sinkprune.runtime.backends.openvino.backend import Cpu, OpenVinoBackend
from sinkprune.runtime.system import trim_heap
from support.models.small_models import INTERNVL_SHAPES, NEXT_SHAPES, QWEN_SHAPES, SHAPES
from support.programs.slow_cases import slow_except
from support.references.reference_methods import CANNOT_REACH_ALL
from support.references.same_answers import assert_alike, assert_equal, options_of
from support.stand_ins.processor_features import computes_in_bf16, fastest_floats


@pytest.mark.parametrize(
    "name",
    # The others have the same operators, at other sizes.
    slow_except({"gqa-112"}, (*SHAPES, *QWEN_SHAPES, *NEXT_SHAPES, *INTERNVL_SHAPES)),
)
def test_in_fp32_it_keeps_and_answers_what_onnxruntime_does(
    name: str, bundle: Callable[..., Path], pipeline: Callable[..., Pipeline], photo: Image.Image
) -> None:
    theirs, ours = pipeline(name), Pipeline.load(bundle(name), backend="openvino", compute="fp32")
    budgets = list(theirs.bundle.manifest.budgets)
    # Of the budgets between, graphs differ from these in numbers alone.
    for budget in ("none", *(budgets if name == "gqa-112" else budgets[-1:])):
        assert_equal(ours, theirs, photo, budget=budget)


@pytest.mark.parametrize(
    ("name", "budgets"),
    [
        pytest.param("gqa-112", ("retain-192+compact",), marks=pytest.mark.slow),
        pytest.param("gqa-112", ("retain-64",), marks=pytest.mark.slow),
        pytest.param("qwen3-vl", ("prune-66.7",), marks=pytest.mark.slow),
    ],
)
def test_every_method_keeps_the_same(
    name: str, budgets: tuple[str, ...], checkpoint: Callable[[str], Path], photo: Image.Image, tmp_path: Path
) -> None:
    """With options that change a plan's graphs, and the functions that they call."""
    # On this small decoder some methods reach large budgets only.
    methods = tuple(one for one in METHODS if budgets != ("retain-64",) or one not in CANNOT_REACH_ALL)
    request = ExportRequest(str(checkpoint(name)), budgets, methods)
    export_bundle(request, tmp_path / "bundle")
    theirs = Pipeline.load(tmp_path / "bundle")
    ours = Pipeline.load(tmp_path / "bundle", backend="openvino", compute="fp32")
    for method, plans in theirs.bundle.manifest.plans.items():
        for budget in plans:
            assert_equal(ours, theirs, photo, method=method, budget=budget)


@pytest.mark.parametrize("weights", ["int8", "int4", "bf16"])
def test_stored_weights_are_multiplied_as_they_are_in_fp32(weights: str, bundle: Callable[..., Path]) -> None:
    opened = read_bundle(bundle("gqa-112", budgets=("retain-64",), weights=weights))
    head = Model.of_bundle(opened, "head")
    hidden = np.random.default_rng(0).standard_normal((1, 3, opened.manifest.language_model.hidden_size), np.float32)
    (expected,) = ReferenceEvaluator(str(head.file.path)).run(None, {"hidden": hidden})
    errors = {}
    for compute in ("fp32", "fastest"):
        logits = load_backend("openvino", compute=compute).load(head)({"hidden": hidden})["logits"]
        errors[compute] = np.linalg.norm(logits - expected) / np.linalg.norm(expected)
    assert errors["fp32"] < 1e-5
    assert errors["fastest"] < 0.05


def test_selection_is_in_fp32_whatever_all_else_is_in(bundle: Callable[..., Path]) -> None:
    opened = read_bundle(bundle("gqa-112"))
    graph = next(graph for graph in opened.manifest.graphs if graph.endswith("sanitizer"))
    model, draw = Model.of_bundle(opened, graph), np.random.default_rng(0)
    # In bf16 they would all be 1.
    inputs = {
        tensor.name: 1
        + draw.random([1 if isinstance(size, str) else size for size in tensor.shape], np.float32) / 1000
        for tensor in model.spec.inputs
    }
    exact, fast = (load_backend("openvino", compute=compute).load(model)(inputs) for compute in ("fp32", "fastest"))
    for name, values in exact.items():
        np.testing.assert_array_equal(fast[name], values)


@pytest.mark.parametrize(
    ("form", "compute"),
    slow_except(
        {("fp32", "bf16"), ("int4", "fastest")},
        product(("fp32", "fp16", "bf16", "int4"), [compute for compute in COMPUTES if compute != "fp32"]),
    ),
)
def test_what_faster_types_change_is_little(
    form: str, compute: Compute, bundle: Callable[..., Path], photo: Image.Image
) -> None:
    precision, weights = options_of(form)
    root = bundle("gqa-112", precision, ("retain-64",), weights=weights)
    exact = Pipeline.load(root, backend="openvino", compute="fp32")
    try:
        fast = Pipeline.load(root, backend="openvino", compute=compute)
    except BackendError as error:
        assert compute == "bf16"
        assert not computes_in_bf16()
        assert "in bf16, which this processor lacks" in str(error)
        return
    assert compute != "bf16" or computes_in_bf16() is not False
    assert fast.backend.compute.partition(",")[0] in fastest_floats()
    assert fast.backend.compute != exact.backend.compute
    assert_alike(fast, exact, photo)


def test_a_processor_without_bf16_computes_in_fp32_and_rejects_bf16() -> None:
    class CoreStandIn:
        def get_property(self, device: str, name: str) -> object:
            return {"OPTIMIZATION_CAPABILITIES": ["FP32", "INT8"], "FULL_DEVICE_NAME": "an old one"}[name]

    assert Cpu(CoreStandIn(), "openvino", None, "fastest").cache == "fp32"
    with pytest.raises(BackendError, match=r"this processor lacks: an old one\. Leave --compute out"):
        Cpu(CoreStandIn(), "openvino", None, "bf16")


def test_graphs_of_jetpack_6_are_refused(bundle: Callable[..., Path]) -> None:
    root = bundle("gqa-112", budgets=("retain-64",), dialect="opset20")
    with pytest.raises(BackendError, match="Export the bundle again with --dialect opset24"):
        Pipeline.load(root, backend="openvino")


SIZES = 150
MOST_BYTES = 60e6
"""After half of the sizes it grows by some MB; where OpenVINO keeps what it does by itself, by 200."""


def resident_bytes() -> int:
    trim_heap()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_prompts_of_many_lengths_leave_little_behind(bundle: Callable[..., Path]) -> None:
    opened = read_bundle(bundle("gqa-112"))
    model = Model.of_bundle(opened, "decoder_0")
    segment = OpenVinoBackend("openvino", 1, "fastest").load_decoder(model, opened.manifest.cache, lambda own: own)

    def ask(rows: int) -> None:
        inputs = {tensor.name: [1, rows, tensor.shape[2]] for tensor in model.spec.inputs if len(tensor.shape) == 3}
        segment({name: np.zeros(shape, np.float32) for name, shape in inputs.items()}, segment.new_cache())

    lengths = np.random.default_rng(0).permutation(np.arange(1, 2 * SIZES)).tolist()
    ask(2 * SIZES)
    for rows in lengths[:SIZES]:
        ask(rows)
    before = resident_bytes()
    for rows in lengths[SIZES:]:
        ask(rows)
    grown = resident_bytes() - before
    assert grown < MOST_BYTES, grown


def test_a_decoder_that_nobody_holds_is_freed(bundle: Callable[..., Path]) -> None:
    backend = OpenVinoBackend("openvino", 1, "fastest")
    model = Model.of_bundle(read_bundle(bundle("gqa-112")), "decoder_0")
    decoder = backend.load_decoder(model, "in-place", lambda own: own)
    held = [weakref.ref(each) for each in (backend, decoder)]
    del backend, decoder
    # At once, not when Python collects garbage: a robot may have no memory for two models.
    assert [each() for each in held] == [None, None]


def test_a_signal_after_two_pipelines_are_gone_is_handled(bundle: Callable[..., Path]) -> None:
    """OpenVINO's plugin has a stack for signals of its own, and restores the one that it found."""
    program = (
        "import os, signal, sys; from sinkprune import Pipeline; "
        "first, second = (Pipeline.load(sys.argv[1], backend='openvino') for _ in range(2)); "
        "signal.signal(signal.SIGINT, lambda *given: print('handled')); "
        "del first; del second; os.kill(os.getpid(), signal.SIGINT)"
    )
    command = python_command(program, str(bundle("gqa-112")))
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "handled\n"), done.stderr


UNPINNED = """
import os, sys, threading
# Workers of pytest-xdist are bound to a core.
os.sched_setaffinity(0, range(os.cpu_count()))
from PIL import Image
from sinkprune import Pipeline
pipe, seen, done = Pipeline.load(sys.argv[1], backend="openvino", threads=1), set(), threading.Event()
caller = threading.get_native_id()
def watch():
    while not done.is_set():
        seen.add(len(os.sched_getaffinity(caller)))
watcher = threading.Thread(target=watch)
watcher.start()
for _ in range(3):
    pipe.generate(Image.new("RGB", (64, 64)), "What is this?", budget="none", max_new_tokens=8)
done.set()
watcher.join()
print(*seen, len(os.sched_getaffinity(0)))
"""


def test_programs_of_few_threads_do_not_share_the_first_core(bundle: Callable[..., Path]) -> None:
    """By default OpenVINO binds the calling thread to a core while it computes."""
    words = [sys.executable, "-c", UNPINNED, str(bundle("gqa-112"))]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert len(set(done.stdout.split())) == 1 and not done.returncode, (done.stdout, done.stderr)
