"""Checkpoints, bundles and photos, made once a session.

What is slow to import is imported by the fixture that needs it: a process that only hands out tests needs none of it.
"""

from __future__ import annotations

import fcntl
import gc
import hashlib
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from functools import cache, partial, wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from PIL import Image

import durations
from sinkprune import Pipeline
from sinkprune.contract.manifest import DialectName
from sinkprune.runtime.backends import known
from sinkprune.runtime.backends.models import Model
from sinkprune.runtime.backends.onnxruntime.backend import OrtBackend

# No test reads or writes costs in the user's cache folder; matplotlib's list of fonts may stay where it is.
os.environ.setdefault("MPLCONFIGDIR", str(Path.home() / ".cache" / "matplotlib"))
os.environ["XDG_CACHE_HOME"] = "/dev/null/no-cache"
# Tests that import ONNX Runtime themselves report to nobody either.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"
# A core to each worker of pytest-xdist: programs of many threads that share cores wait for each other.
worker, cores = os.environ.get("PYTEST_XDIST_WORKER"), sorted(os.sched_getaffinity(0))
if worker is not None:
    os.sched_setaffinity(0, [cores[int(worker.removeprefix("gw")) % len(cores)]])
# PyTorch and transformers are a million objects, which each collection walks through: a sixth of an export's time.
gc.set_threshold(50_000, 20, 20)
# On a busy machine a draw that takes milliseconds may take a second.
hypothesis.settings.register_profile(
    "busy machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("busy machine")
# A shell's background jobs ignore Ctrl-C, and `nohup`'s the end of a terminal. So would the commands under test.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

_MOST_SECONDS = 0.5
"""`make test` leaves out the test functions whose cases take longer together; `make test-all` runs every one."""

# Python 3.10 runs bundles only.
EXPORTS = find_spec("onnx") is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what takes long, but for a test of each line of the page of guarantees."""
    page = Path(__file__).parents[1] / "docs/guarantees.md"
    seconds = json.loads(durations.FILE.read_text(encoding="utf-8"))
    long = durations.long_tests(seconds, _MOST_SECONDS, page.read_text(encoding="utf-8"))
    for item in items:
        if item.nodeid.partition("[")[0] in long:
            item.add_marker("long")


@pytest.fixture(autouse=True, scope="session")
def quick_exports() -> None:
    """Exports infer the shapes of alike nodes once."""
    if not EXPORTS:
        return
    from support.references.operator_signatures import keep_inferred_shapes, keep_signatures

    keep_signatures()
    keep_inferred_shapes()


@pytest.fixture(autouse=True, scope="session")
def quick_loads_and_writes() -> Iterator[None]:
    """Loads look once for the files that sessions of alike graphs read; freed memory and written files stay cached.

    After some thousand loads a process has a heap in so many pieces that looking takes 10 ms, and trimming as long.
    """
    reads_files, known = OrtBackend._reads_files, dict[object, bool]()

    @wraps(reads_files)
    def kept(backend: OrtBackend, model: Model) -> bool:
        key = backend.name, backend.compute, model.onnx
        if key not in known:
            known[key] = reads_files(backend, model)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OrtBackend, "_reads_files", kept)
        patch.setattr(os, "fsync", lambda descriptor: None)
        targets = ("engines.targets.onnxruntime", "engines.targets.openvino") if EXPORTS else ()
        for module in ("runtime.backends.onnxruntime.backend", *targets):
            patch.setattr(f"sinkprune.{module}.trim_heap", lambda: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def ort_cpu_where_no_backend_is_named() -> Iterator[None]:
    """Tests compare exact values in threads at the same time, so no test runs on what else is installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(known, "is_installed", lambda module: module == "onnxruntime")
        yield


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that all workers of this run share; with `SINKPRUNE_TEST_BUNDLES`, all runs of one tree."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "shared"
    folder = Path(os.environ.get("SINKPRUNE_TEST_BUNDLES", folder))
    folder.mkdir(exist_ok=True)
    return folder


def make_once(folder: Path, make: Callable[[Path], object]) -> Path:
    """Return `folder`. The first worker that needs the folder makes it, and the others wait for that."""
    with Path(f"{folder}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            unfinished = Path(f"{folder}.unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            make(unfinished)
            unfinished.rename(folder)
    return folder


@pytest.fixture(scope="session")
def checkpoint(shared_folder: Path) -> Callable[[str], Path]:
    """The folder of a small checkpoint, by its name in one of the tables above. Tests must not write into it."""

    def get(name: str) -> Path:
        if find_spec("torch") is None:
            pytest.skip("the checkpoint is made with PyTorch")
        from support.models.small_models import make_small_model

        return make_once(shared_folder / name, partial(make_small_model, name))

    return get


@pytest.fixture(scope="session")
def bundle(checkpoint: Callable[[str], Path], shared_folder: Path) -> Callable[..., Path]:
    """The bundle of a small checkpoint, with all budgets or the given ones. Tests must not write into it."""

    def get(
        name: str,
        precision: str = "fp32",
        budgets: tuple[str, ...] | None = None,
        dialect: DialectName = "opset24",
        max_images: int = 1,
        **options: Any,
    ) -> Path:
        made = checkpoint(name)
        from sinkprune.export.bundle_writer import export_bundle
        from sinkprune.export.source import ExportRequest

        options |= {"precision": precision, "dialect": dialect, "max_images": max_images}
        request = ExportRequest(str(made), budgets=budgets, **options)
        digest = hashlib.sha256(repr(request).encode()).hexdigest()[:16]
        return make_once(
            shared_folder / f"{name}-{precision}-{dialect}-{digest}", lambda folder: export_bundle(request, folder)
        )

    return get


@pytest.fixture(scope="session")
def pipeline(bundle: Callable[..., Path]) -> Callable[..., Pipeline]:
    """A loaded small bundle."""
    load = cache(Pipeline.load)
    return lambda *arguments, **options: load(bundle(*arguments, **options))


@pytest.fixture(scope="session")
def model(checkpoint: Callable[[str], Path]) -> Callable[[str], Any]:
    """A small checkpoint in transformers, with eager attention."""

    @cache
    def get(name: str) -> Any:
        import torch
        from transformers import AutoModelForImageTextToText

        options = {"dtype": torch.float32, "attn_implementation": "eager"}
        return AutoModelForImageTextToText.from_pretrained(checkpoint(name), **options).eval()

    return get


@pytest.fixture(scope="session")
def photo() -> Image.Image:
    """A real photo: a cup of coffee on a table, 600x400."""
    from skimage import data

    return Image.fromarray(data.coffee())


@pytest.fixture(scope="session")
def photo_file(photo: Image.Image, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The photo as a JPEG."""
    path = tmp_path_factory.mktemp("photo") / "coffee.jpg"
    photo.save(path, quality=95)
    return path


@pytest.fixture(autouse=True)
def same_scheduling() -> Iterator[None]:
    """Fail a test that changes the scheduling policy: with real-time priority a worker starves its children."""
    before = os.sched_getscheduler(0)
    yield
    assert os.sched_getscheduler(0) == before
