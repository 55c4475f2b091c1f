"""Backends on openvino against ort-cpu: the same kept sets and logits in fp32, and what faster types change.

Tests of openvino-gpu need a GPU of Intel, or its stand-in.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino.properties.device
import pytest
from onnx.reference import ReferenceEvaluator
from PIL import Image

from sinkprune import Pipeline
from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.child_processes import python_command
from sinkprune.contract.errors import BackendError, EnginesError
from sinkprune.contract.memory import available_bytes
from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.methods import METHODS
from sinkprune.export.source import ExportRequest
from sinkprune.runtime.backends import load_backend
from sinkprune.runtime.backends.known import COMPUTES, KNOWN, Compute
from sinkprune.runtime.backends.kv_cache import ROOM
from sinkprune.runtime.backends.models import Model
from sinkprune.runtime.backends.openvino.backend import Cpu, Gpu, OpenVinoBackend
from sinkprune.runtime.steps.decoding import KVCache, decode_one_token
from sinkprune.runtime.steps.scored_rows import logits_of_rows
from sinkprune.runtime.system import trim_heap
from support.models.qwen_checkpoints import QwenShape, make_qwen_checkpoint
from support.models.small_models import INTERNVL_SHAPES, NEXT_SHAPES, QWEN_SHAPES, SHAPES
from support.programs.commands import run, succeed
from support.programs.slow_cases import slow_except
from support.references.reference_methods import CANNOT_REACH_ALL
from support.references.same_answers import asked, assert_alike, assert_equal, assert_equal_at_both_ends, options_of
from support.references.steps import QUESTION, watched
from support.stand_ins.processor_features import computes_in_bf16, fastest_floats

NAMES = [*SHAPES, *QWEN_SHAPES, *NEXT_SHAPES]
GPU, BOTH, PREFILL = "openvino-gpu", "ort-cpu+openvino", "ort-cpu+openvino-prefill"


class CoreStandIn:
    """What openvino reports of a processor without bf16, or of a GPU of a `kind`; without a name there is none."""

    available_devices = ("CPU",)

    def __init__(self, name: str | None = None, kind: str = "INTEGRATED") -> None:
        self.name, self.kind = name, getattr(openvino.properties.device.Type, kind)

    def get_property(self, device: str, name: str) -> Any:
        if self.name is None:
            raise RuntimeError("Cannot load library libopenvino_intel_gpu_plugin.so: libOpenCL.so.1")
        kinds = {"OPTIMIZATION_CAPABILITIES": ["FP32", "INT8"], "DEVICE_TYPE": self.kind}
        return {**kinds, "FULL_DEVICE_NAME": self.name}[name]


@pytest.fixture(autouse=True)
def parted_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the stand-in of a GPU attention is not one kernel: that of fp16 comes to no end there."""
    if "INTEL_GPU_STAND_IN" in os.environ:
        asked_for = Gpu.properties
        parted = {"GPU_ENABLE_SDPA_OPTIMIZATION": False}
        monkeypatch.setattr(Gpu, "properties", lambda *args, **options: asked_for(*args, **options) | parted)


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        # The others have the same operators, at other sizes.
        *slow_except({("openvino", "gqa-112")}, product(["openvino"], [*NAMES, *INTERNVL_SHAPES])),
        *(pytest.param(GPU, name, marks=pytest.mark.intel_gpu) for name in NAMES),
        *product([BOTH], ["gqa-112 of opset20", "qwen"]),
        *product([BOTH, PREFILL], ["gqa-112", "next", "qwen3-vl", "internvl", "paligemma"]),
    ],
)
def test_in_fp32_it_keeps_and_answers_what_onnxruntime_does(
    backend: str, name: str, bundle: Callable[..., Path], pipeline: Callable[..., Pipeline], photo: Image.Image
) -> None:
    name, _, dialect = name.partition(" of ")
    options = {"dialect": dialect} if dialect else {}
    theirs, ours = pipeline(name, **options), Pipeline.load(bundle(name, **options), backend=backend, compute="fp32")
    budgets = list(theirs.bundle.manifest.budgets)
    # Of the budgets between, graphs differ from these in numbers alone.
    for budget in ("none", *(budgets if (backend, name) == ("openvino", "gqa-112") else budgets[-1:])):
        assert_equal(ours, theirs, photo, budget=budget)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "budget"), [("gqa-112", "retain-192+compact"), ("gqa-112", "retain-64"), ("qwen3-vl", "prune-66.7")]
)
def test_every_method_keeps_the_same(
    name: str, budget: str, checkpoint: Callable[[str], Path], photo: Image.Image, tmp_path: Path
) -> None:
    """With options that change a plan's graphs, and the functions that they call."""
    # On this small decoder some methods reach large budgets only.
    methods = tuple(one for one in METHODS if budget != "retain-64" or one not in CANNOT_REACH_ALL)
    export_bundle(ExportRequest(str(checkpoint(name)), (budget,), methods), tmp_path / "bundle")
    theirs = Pipeline.load(tmp_path / "bundle")
    ours = Pipeline.load(tmp_path / "bundle", backend="openvino", compute="fp32")
    for method, plans in theirs.bundle.manifest.plans.items():
        for budget in plans:
            assert_equal(ours, theirs, photo, method=method, budget=budget)


@pytest.mark.parametrize("merge", slow_except({3}, [3, 5]))
def test_other_numbers_of_patches_join_to_a_token(merge: int, photo: Image.Image, tmp_path: Path) -> None:
    """Other ones than in published towers."""
    shape = QwenShape(depth=2, full_attention_blocks=(1,), merge_size=merge, most_tokens=30)
    checkpoint = make_qwen_checkpoint(tmp_path / "checkpoint", shape)
    export_bundle(ExportRequest(str(checkpoint), budgets=("prune-66.7",)), tmp_path / "bundle")
    theirs = Pipeline.load(tmp_path / "bundle")
    ours = Pipeline.load(tmp_path / "bundle", backend="openvino", compute="fp32")
    assert ours.bundle.manifest.vision.patches_per_token == merge**2
    assert_equal_at_both_ends(ours, theirs, photo)
    if merge == 3:
        run("sinkprune-build", tmp_path / "bundle", "-o", tmp_path / "engines", "--target", "openvino")
        assert_equal(Pipeline.load(tmp_path / "engines", compute="fp32"), theirs, photo, budget="prune-66.7")


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


def test_devices_compute_in_what_they_have_and_the_errors_name_what_is_missing() -> None:
    old = CoreStandIn("an old one")
    assert Cpu(old, "openvino", None, "fastest").cache == "fp32"
    with pytest.raises(BackendError, match=r"this processor lacks: an old one\. Leave --compute out"):
        Cpu(old, "openvino", None, "bf16")
    with pytest.raises(BackendError, match=r"finds none here, only CPU\. Install .* intel-opencl-icd"):
        Gpu(CoreStandIn(), GPU, None, "fastest")
    # Selection is in fp32. Rows rounded to int8 are not fp32.
    hint, group = "INFERENCE_PRECISION_HINT", "DYNAMIC_QUANTIZATION_GROUP_SIZE"
    for compute, weights, expected in (
        ("fastest", True, ("f16", None)),
        ("fastest", False, ("f32", None)),
        ("fp32", True, ("f32", 0)),
    ):
        found = Gpu(CoreStandIn("Arc"), GPU, None, compute).properties(None, weights=weights)
        assert (found[hint], found.get(group)) == expected
    # A GPU within the processor takes the machine's memory.
    for kind, free in (("INTEGRATED", available_bytes()), ("DISCRETE", 0)):
        gpu = Gpu(CoreStandIn("Arc", kind), GPU, None, "fastest")
        assert gpu.free_bytes() == pytest.approx(free, rel=0.2)


@pytest.mark.intel_gpu
@pytest.mark.parametrize("form", ["fp32", "fp16", "bf16", "int8", "int4"])
def test_what_fp16_changes_is_little(form: str, bundle: Callable[..., Path], photo: Image.Image) -> None:
    precision, weights = options_of(form)
    root = bundle("gqa-112", precision, ("retain-64",), weights=weights)
    exact, fast = Pipeline.load(root, backend="openvino", compute="fp32"), Pipeline.load(root, backend=GPU)
    assert_alike(fast, exact, photo)


@pytest.mark.intel_gpu
def test_engines_pass_the_gate(bundle: Callable[..., Path], photo_file: Path, tmp_path: Path) -> None:
    root, engines = bundle("gqa-112", budgets=("retain-64",)), tmp_path / "engines"
    succeed("sinkprune-build", root, "-o", engines, "--target", "openvino")
    ask = ("--image", photo_file, "--backend", GPU, "--compute", "fp32")
    succeed("sinkprune-check", root, engines, *ask)


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
pipe, seen = Pipeline.load(sys.argv[1], backend="openvino", threads=1), set()
caller = threading.get_native_id()
def watch():
    while True:
        seen.add(len(os.sched_getaffinity(caller)))
threading.Thread(target=watch, daemon=True).start()
for _ in range(3):
    pipe.generate(Image.new("RGB", (64, 64)), "What is this?", budget="none", max_new_tokens=8)
print(*list(seen), len(os.sched_getaffinity(0)))
"""


def test_programs_of_few_threads_do_not_share_the_first_core(bundle: Callable[..., Path]) -> None:
    """By default OpenVINO binds the calling thread to a core while it computes."""
    words = [sys.executable, "-c", UNPINNED, str(bundle("gqa-112"))]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert len(set(done.stdout.split())) == 1 and not done.returncode, (done.stdout, done.stderr)


@pytest.mark.parametrize(
    "form", ["fp32", *(pytest.param(form, marks=pytest.mark.slow) for form in ("fp16", "int8")), "int4"]
)
def test_the_tower_is_openvino_s_to_the_bit_and_the_rest_nearby(
    form: str, bundle: Callable[..., Path], photo: Image.Image
) -> None:
    precision, weights = options_of(form)
    root = bundle("gqa-112", precision, ("retain-64",), weights=weights)
    ours, towers, decoders, both = (
        Pipeline.load(root, backend=name) for name in (BOTH, "openvino", "ort-cpu", PREFILL)
    )
    (answer, _), (expected, _) = (asked(pipe, photo, budget="none") for pipe in (ours, towers))
    np.testing.assert_array_equal(answer.kept.norms, expected.kept.norms)
    np.testing.assert_array_equal(answer.kept.salience, expected.kept.salience)
    assert_alike(ours, decoders, photo)
    assert_alike(both, decoders, photo)


def test_each_library_loads_its_graphs(bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, shown = list[str](), list[tuple[int, int]]()
    compiled = OpenVinoBackend._compiled
    monkeypatch.setattr(
        OpenVinoBackend, "_compiled", lambda self, model: (loaded.append(model.graph), compiled(self, model))[1]
    )
    Pipeline.load(bundle("gqa-112"), backend=BOTH)
    assert loaded == ["vision"]
    loaded.clear()

    @contextmanager
    def during(part: str) -> Iterator[Any]:
        yield lambda part, done, total, unit: shown.append((done, total)) if unit == "engines" else None

    pipeline = Pipeline.load(bundle("gqa-112"), backend=PREFILL, during=during)
    segments = len(pipeline.chain.segments)
    assert loaded == ["vision", "projector", *(f"decoder_{segment}" for segment in reversed(range(segments)))]
    assert "; tokens in the graphs' types" in pipeline.backend.compute
    # With the head, and the engine of all segments and the head.
    assert shown == [(done, segments + 4) for done in range(segments + 4)]
    shown.clear()
    Pipeline.load(bundle("qwen"), backend="ort-cpu", during=during)
    assert shown[-1] == (len(shown) - 1, len(shown))


def stepped(pipe: Pipeline, cache: KVCache, token: int) -> Any:
    return pipe.backend.numpy(decode_one_token(pipe.chain, cache, pipe.embedding([token])[0]))


@pytest.mark.parametrize("budget", ["retain-64+compact", "none"])
def test_tokens_and_rows_after_them_have_the_logits_of_onnxruntime(
    budget: str, bundle: Callable[..., Path], photo: Image.Image
) -> None:
    """Of the graph `tokens`, where caches of segments grow at different tokens, and positions differ."""
    root, ran = bundle("gqa-112", "fp32", ("retain-64+compact",)), list[str]()

    def wrap(graph: str, engine: Any, backend: Any) -> Any:
        return lambda inputs: (ran.append(graph), engine(inputs))[1]

    names = PREFILL, "ort-cpu"
    pipes = [Pipeline.load(root, backend=name, compute="fp32", check_sums=False, wrap=wrap) for name in names]
    caches = [watched(pipe, photo, QUESTION, budget=budget, max_new_tokens=1).prefill.cache for pipe in pipes]

    def compare(logits: Callable[[Pipeline, KVCache], Any]) -> None:
        own, expected = map(logits, pipes, caches)
        np.testing.assert_allclose(own, expected, rtol=1e-3, atol=1e-4)

    ran.clear()
    for number in range(ROOM + 1):
        compare(lambda pipe, cache, token=3 + number % 20: stepped(pipe, cache, token))  # type: ignore[misc]
    assert ran.count("tokens") == ROOM + 1 and ran.count("decoder_0") == ROOM + 1
    compare(lambda pipe, cache: list(logits_of_rows(pipe.chain, cache, pipe.embedding([5, 6, 9]))))
    compare(lambda pipe, cache: stepped(pipe, cache, 7))
    assert caches[0].next_positions == caches[1].next_positions


def test_what_openvino_or_the_prefill_does_not_take_is_refused(bundle: Callable[..., Path], tmp_path: Path) -> None:
    loaded = list[str]()

    def noted(graph: str, engine: Any, backend: Any) -> Any:
        loaded.append(graph)
        return engine

    for backend in ("openvino", PREFILL):
        with pytest.raises(BackendError, match=rf"'{re.escape(backend)}' takes.* again with --dialect opset24"):
            Pipeline.load(bundle("gqa-112", dialect="opset20"), backend=backend, wrap=noted)
    assert loaded == 2 * ["vision", "projector"]
    root, engines = bundle("gqa-112", budgets=("retain-64",)), tmp_path / "engines"
    succeed("sinkprune-build", root, "-o", engines, "--target", "onnxruntime+openvino")
    with pytest.raises(EnginesError, match=r"hold one form of each decoder segment.* --backend ort-cpu\+openvino\.$"):
        Pipeline.load(engines, backend=PREFILL)


def test_both_forms_count_as_memory() -> None:
    both, first, second = (KNOWN[name].memory for name in (PREFILL, "openvino", "ort-cpu"))
    assert both and first and second
    for form, copies in both.decoder.copies.items():
        one, other = first.decoder.copies[form], second.decoder.copies[form]
        assert copies.held == one.held + other.held
        assert copies.loading == max(one.loading, other.loading)
