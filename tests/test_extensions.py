"""New code in a copy of the package: a backend is a module and a row, a family the files of docs/new-family.md."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from sinkprune import Pipeline
from support.programs.repository import ROOT

Change = Callable[[str], str]
"""Takes the text of a file, which is empty for a new file, and returns its new text."""


def run_changed(
    changes: Mapping[str, Change], folder: Path, *words: object
) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Run Python with a copy of the package that has `changes`; return the ended process and the copy."""
    package = folder / "src/sinkprune"
    shutil.copytree(ROOT / "src/sinkprune", package, ignore=shutil.ignore_patterns("__pycache__", "demo"))
    for name, change in changes.items():
        path = package / name
        path.write_text(change(path.read_text() if path.exists() else ""))
    environment = {**os.environ, "PYTHONPATH": str(package.parent)}
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done, package


_BACKEND = """
import sys

from sinkprune.runtime.backends.onnxruntime.backend import OrtBackend, opened


class LoggingBackend(OrtBackend):
    def load(self, model):
        sys.stderr.write(f"loads {model.graph}\\n")
        return super().load(model)


def open_backend(name, threads, compute, built):
    return opened(LoggingBackend, name, "CPUExecutionProvider", threads, compute, built)
"""
_BACKEND_ROW = """    "ort-logging": BackendSpec(
        "logging_backend", "onnxruntime", ("onnxruntime",), ("fastest", "fp32"), memory=BackendMemory(ORT_CPU)
    ),
"""
_NEXT_ROW = '    "tensorrt": BackendSpec'


def test_a_backend_is_a_module_and_a_row(bundle: Callable[..., Path], photo_file: Path, tmp_path: Path) -> None:
    changes: dict[str, Change] = {
        "runtime/backends/logging_backend.py": lambda nothing: _BACKEND,
        "runtime/backends/known.py": lambda table: table.replace(_NEXT_ROW, _BACKEND_ROW + _NEXT_ROW),
    }
    root, question = bundle("gqa-112"), ("--prompt", "What is this?", "--budget", "retain-64", "--max-new-tokens", 6)
    words = ("-m", "sinkprune", "run", root, "--image", photo_file, *question)
    done, _ = run_changed(changes, tmp_path, *words, "--backend", "ort-logging", "--threads", 1, "--json")
    found, plain = json.loads(done.stdout), Pipeline.load(root, threads=1)
    expected = plain.generate(photo_file, "What is this?", budget="retain-64", max_new_tokens=6)
    assert (found["backend"], found["token_ids"]) == ("ort-logging", expected.token_ids)
    assert "loads vision\n" in done.stderr


_EXPORT = '''
"""Viola: a LLaVA-1.5 by another name, which transformers does not know."""

from sinkprune.export.families.llava import Llava


class Viola(Llava):
    name = "viola"
    configured_as = "llava"


FAMILY = Viola
'''
_RUNTIME = '''
"""Viola: a LLaVA-1.5 by another name."""

from sinkprune.runtime.families.llava import Llava


class Viola(Llava):
    pass


FAMILY = Viola
'''
_FAMILIES = "FAMILIES: dict[str, FamilyRow] = {\n"
_FAMILY_ROW = '    "viola": FamilyRow("viola", "ViolaForConditionalGeneration", "viola", LLAVA_BUDGETS),\n'
FAMILY_FILES: dict[str, Change] = {
    "export/families/<name>.py": lambda nothing: _EXPORT,
    "runtime/families/<name>.py": lambda nothing: _RUNTIME,
    "contract/families.py": lambda table: table.replace(_FAMILIES, _FAMILIES + _FAMILY_ROW),
}
QUESTION = "Which colour is the cup on the table?"
_PROGRAM = """
import json, sys
sys.modules["torch"] = None
import sinkprune
from sinkprune.export.command import main
checkpoint, bundle, photo, question = sys.argv[1:]
assert main([checkpoint, "-o", bundle, "--budgets", "retain-64"]) == 0
pipeline = sinkprune.Pipeline.load(bundle)
answer = pipeline.generate(photo, question, budget="retain-64", max_new_tokens=12, min_new_tokens=12)
print(json.dumps([sinkprune.__file__, pipeline.bundle.manifest.family, answer.token_ids, answer.tokens_per_layer]))
"""


def test_a_family_is_the_files_of_the_page(
    checkpoint: Callable[[str], Path], pipeline: Callable[..., Pipeline], photo_file: Path, tmp_path: Path
) -> None:
    page = (ROOT / "docs/new-family.md").read_text(encoding="utf-8")
    section = page.split("## The files\n")[1].split("\n## ")[0]
    named = re.findall(r"^\| `([^`]+)`", section, re.MULTILINE)
    assert sorted(named) == sorted(FAMILY_FILES)
    assert all((ROOT / "src/sinkprune" / name).exists() for name in named if "<name>" not in name)

    viola = Path(shutil.copytree(checkpoint("gqa-112"), tmp_path / "viola"))
    config = json.loads((viola / "config.json").read_text())
    config |= {"model_type": "viola", "architectures": ["ViolaForConditionalGeneration"]}
    (viola / "config.json").write_text(json.dumps(config))

    changes = {name.replace("<name>", "viola"): change for name, change in FAMILY_FILES.items()}
    words = ("-c", _PROGRAM, viola, tmp_path / "bundle", photo_file, QUESTION)
    done, package = run_changed(changes, tmp_path, *words)
    file, family, token_ids, tokens_per_layer = json.loads(done.stdout.splitlines()[-1])
    assert Path(file).is_relative_to(package)
    assert family == "viola"
    expected = pipeline("gqa-112").generate(
        photo_file, QUESTION, budget="retain-64", max_new_tokens=12, min_new_tokens=12
    )
    assert (token_ids, tokens_per_layer) == (expected.token_ids, expected.tokens_per_layer)
