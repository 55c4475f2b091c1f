"""Another package adds a family, a method, a backend, a command and an option, without a change to this one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sinkprune import Pipeline

_FAMILY = '''
"""Viola: a LLaVA-1.5 by another name, which transformers does not know."""

from sinkprune.contract.budgets import LLAVA_BUDGETS
from sinkprune.contract.budgets import FamilyRow

ROW = FamilyRow(
    "viola",
    "ViolaForConditionalGeneration",
    export="viola.export:Viola",
    runtime="sinkprune.runtime.families.llava:Llava",
    budgets=LLAVA_BUDGETS,
)
'''
_EXPORT = """
from sinkprune.export.families.llava import Llava


class Viola(Llava):
    name = "viola"
    configured_as = "llava"
"""
_METHOD = """
from functools import partial

from sinkprune.export.methods.before_llm import build_before, fastervlm

build = partial(build_before, fastervlm, "reserve")
"""
_BACKEND = '''
"""A backend that wraps ort-cpu."""

import sys
from dataclasses import replace

from sinkprune.runtime.backends.known import ORT_ON_CPU
from sinkprune.runtime.backends.onnxruntime.backend import OrtBackend, opened

SPEC = replace(ORT_ON_CPU, opened_by="viola.backend:open_backend")


class LoggingBackend(OrtBackend):
    """Decoder segments are loaded by `load_decoder`, and other graphs by `load`."""

    def load_decoder(self, model, form, wrap):
        def logged(engine):
            def call(inputs):
                sys.stderr.write(f"calls {model.graph}\\n")
                return engine(inputs)

            return wrap(call)

        return super().load_decoder(model, form, logged)

    def load(self, model):
        sys.stderr.write(f"loads {model.graph}\\n")
        return super().load(model)


def open_backend(name, threads, compute, built):
    return opened(LoggingBackend, name, threads, compute, built)
'''
_OPTION = """
from sinkprune.runtime.commands.run import RunExtension


class Capitals(RunExtension):
    @staticmethod
    def add_options(parser):
        parser.add_argument("--capitals", action="store_true")

    def shown(self, piece):
        return piece.upper() if self.options.capitals else piece
"""
_COMMAND = """
from sinkprune.contract.command_line.options import Verb

HELLO = Verb("viola.command", "say hello")


def main(arguments=None):
    print("hello", *arguments)
    return 0
"""
_ENTRY_POINTS = """
[sinkprune.families]
viola = viola.family:ROW
[sinkprune.methods]
salient = viola.method:build
[sinkprune.backends]
a-logging = viola.backend:SPEC
ort-logging = viola.backend:SPEC
[sinkprune.run]
capitals = viola.option:Capitals
[sinkprune.commands]
hello = viola.command:HELLO
"""
_FILES = {
    "viola/__init__.py": "",
    "viola/family.py": _FAMILY,
    "viola/export.py": _EXPORT,
    "viola/method.py": _METHOD,
    "viola/backend.py": _BACKEND,
    "viola/command.py": _COMMAND,
    "viola/option.py": _OPTION,
    "viola-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: viola\nVersion: 1.0\n",
    "viola-1.0.dist-info/entry_points.txt": _ENTRY_POINTS,
}
QUESTION = "Which colour is the cup on the table?"


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a package as pip installs it from a wheel."""
    folder = tmp_path_factory.mktemp("site-packages")
    for name, text in _FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


def sinkprune(package: Path, *words: object) -> subprocess.CompletedProcess[str]:
    command, environment = [sys.executable, "-m", "sinkprune", *map(str, words)], {"PYTHONPATH": str(package)}
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)


def answer(package: Path, *words: object) -> dict[str, Any]:
    done = sinkprune(package, "run", *words)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_another_package_adds_family_method_backend_and_command(
    package: Path,
    checkpoint: Callable[[str], Path],
    pipeline: Callable[..., Pipeline],
    photo_file: Path,
    tmp_path: Path,
) -> None:
    viola = Path(shutil.copytree(checkpoint("gqa-112"), tmp_path / "viola"))
    config = json.loads((viola / "config.json").read_text())
    config |= {"model_type": "viola", "architectures": ["ViolaForConditionalGeneration"]}
    (viola / "config.json").write_text(json.dumps(config))
    out = tmp_path / "bundle"
    options = ("--budgets", "retain-64", "--methods", "salient,fastervlm")
    exported = sinkprune(package, "export", viola, "-o", out, *options)
    assert exported.returncode == 0, exported.stderr

    asked = ("--image", photo_file, "--prompt", QUESTION, "--max-new-tokens", 6, "--threads", 1, "--json")
    pruned = ("--method", "salient", "--budget", "retain-64", "--backend", "ort-logging")
    done = sinkprune(package, "run", out, *asked, *pruned)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert "loads vision\n" in done.stderr and "calls decoder_0\n" in done.stderr
    assert (found["backend"], found["method"]) == ("ort-logging", "salient")
    # `salient` is fastervlm by another name, and viola a LLaVA.
    expected = answer(package, out, *asked, "--method", "fastervlm", "--budget", "retain-64")
    assert found["token_ids"] == expected["token_ids"]
    assert found["tokens_per_layer"] == expected["tokens_per_layer"]
    assert set(found["tokens_per_layer"]) != {found["visual_tokens"]}
    whole = answer(package, out, *asked, "--method", "salient", "--budget", "none")
    code = "from sinkprune.runtime.backends.known import backend_of; print(backend_of('onnxruntime'))"
    environment = {**os.environ, "PYTHONPATH": str(package)}
    assert subprocess.check_output([sys.executable, "-c", code], env=environment, text=True) == "ort-cpu\n"
    own = pipeline("gqa-112").generate(photo_file, QUESTION, max_new_tokens=6)
    assert whole["token_ids"] == own.token_ids

    shown = sinkprune(package, "run", out, *asked[:-1], *pruned, "--capitals")
    assert found["text"].upper() in shown.stdout

    assert sinkprune(package, "hello", "there").stdout == "hello there\n"
    assert "say hello" in sinkprune(package, "--help").stdout


def test_a_name_of_two_packages_and_a_wrong_option_are_rejected(package: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(package, tmp_path / "other"))
    option = other / "viola/option.py"
    option.write_text(option.read_text().replace('"--capitals"', '"--budget"'))
    done = sinkprune(other, "run", "--help")
    assert done.returncode == 2
    assert "the extension 'capitals' (viola.option) adds an option that the command has" in done.stderr
    option.unlink()
    done = sinkprune(other, "run", "--help")
    assert done.returncode == 2
    assert "'capitals' of the group 'sinkprune.run' is viola.option:Capitals, and its import failed" in done.stderr
    facts = (other / "viola-1.0.dist-info").rename(other / "tuba-1.0.dist-info")
    for file in facts.iterdir():
        file.write_text(file.read_text().replace("viola.", "tuba.").replace("Name: viola", "Name: tuba"))
    done = sinkprune(Path(f"{package}:{other}"), "hello")
    assert done.returncode == 2
    assert "two packages register 'hello'" in done.stderr
