"""A backend is a module and a row, as CONTRIBUTING.md says: here one that wraps ONNX Runtime."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from sinkprune import Pipeline
from support.programs.repository import ROOT

_MODULE = """
import sys

from sinkprune.runtime.backends.onnxruntime.backend import OrtBackend, opened


class LoggingBackend(OrtBackend):
    def load(self, model):
        sys.stderr.write(f"loads {model.graph}\\n")
        return super().load(model)


def open_backend(name, threads, compute, built):
    return opened(LoggingBackend, name, "CPUExecutionProvider", threads, compute, built)
"""
_ROW = """    "ort-logging": BackendSpec(
        "logging_backend", "onnxruntime", ("onnxruntime",), ("fastest", "fp32"), memory=BackendMemory(ORT_CPU)
    ),
"""
_BEHIND_IT = '    "tensorrt": BackendSpec'


def test_a_backend_is_a_module_and_a_row(bundle: Callable[..., Path], photo_file: Path, tmp_path: Path) -> None:
    package = tmp_path / "src/sinkprune"
    shutil.copytree(ROOT / "src/sinkprune", package, ignore=shutil.ignore_patterns("__pycache__", "demo"))
    backends = package / "runtime/backends"
    (backends / "logging_backend.py").write_text(_MODULE)
    table = (backends / "known.py").read_text()
    (backends / "known.py").write_text(table.replace(_BEHIND_IT, _ROW + _BEHIND_IT))
    root, words = bundle("gqa-112"), ("--prompt", "What is this?", "--budget", "retain-64", "--max-new-tokens", "6")
    chosen = ("--backend", "ort-logging", "--threads", "1", "--json")
    done = subprocess.run(
        [sys.executable, "-m", "sinkprune", "run", root, "--image", photo_file, *words, *chosen],
        env={**os.environ, "PYTHONPATH": str(package.parent)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    told, ordinary = json.loads(done.stdout), Pipeline.load(root, threads=1)
    expected = ordinary.generate(photo_file, "What is this?", budget="retain-64", max_new_tokens=6)
    assert (told["backend"], told["token_ids"]) == ("ort-logging", expected.token_ids)
    assert "loads vision\n" in done.stderr
