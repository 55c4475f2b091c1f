"""Stable interfaces of `sinkprune-export`: the keys of its JSON, and former names of options."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sinkprune.contract.bundle import read_bundle
from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.source import ExportRequest
from support.programs.commands import assert_refused, run
from support.programs.repository import ROOT


@pytest.mark.parametrize("dialect", ["opset20", "opset24"])
def test_the_summary_names_what_was_written(
    dialect: str, checkpoint: Callable[[str], Path], photo_file: Path, tmp_path: Path
) -> None:
    options = ("--budgets", "retain-64", "--methods", "sinkpruner,fastervlm", "--dialect", dialect, "--json")
    outcome = run("sinkprune-export", checkpoint("gqa-112"), "-o", tmp_path / "out", *options)
    assert outcome.code == 0, outcome.stderr
    summary = json.loads(outcome.stdout)
    size, digest = summary.pop("bytes"), summary.pop("sha256")
    assert digest == read_bundle(tmp_path / "out").sha256
    assert summary == {
        "bundle": str(tmp_path / "out"),
        "budgets": ["retain-64"],
        "methods": ["sinkpruner", "fastervlm"],
        "unreachable": [],
        "cut_after": [1, 4],
        "precision": "fp32",
        "weights": "fp32",
        "vision_weights": "fp32",
        "block_size": None,
        "requantised": None,
        "repetition_penalty": None,
        "unused_settings": {},
        "dialect": dialect,
        "in_robots_units": None,
        "max_pixels": None,
    }
    manifest = read_bundle(tmp_path / "out").manifest
    assert manifest.dialect == dialect
    assert size == sum(spec.size for spec in manifest.files.values())
    ask = ("--image", photo_file, "--prompt", "Which cup?", "--budget", "retain-64", "--max-new-tokens", 4, "--json")
    answered = run("sinkprune-run", tmp_path / "out", *ask)
    assert answered.code == 0, answered.stderr
    assert json.loads(answered.stdout)["budget"] == "retain-64"


@pytest.mark.parametrize(
    ("name", "request_of"), [("mha-336", {}), ("gqa-112", {"weights": "int4"}), ("pi0", {"budgets": ("prune-88.9",)})]
)
def test_the_progress_of_an_export_ends_with_all_weights(
    name: str, request_of: dict[str, Any], checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    last: dict[str, tuple[float, float, str]] = {}
    # The bias of the policy's four actions is read several times: its last layer of keys and values is 5 %.
    most = 1e-4 if name == "pi0" else 1e-9

    def progress(what: str, done: float, total: float, unit: str) -> None:
        assert last.get(what, (0.0,))[0] <= done <= total * (1 + most)
        last[what] = done, total, unit

    export_bundle(ExportRequest(str(checkpoint(name)), **request_of), tmp_path / "out", progress=progress)
    size = sum(spec.size for spec in read_bundle(tmp_path / "out").manifest.files.values())
    exported, summed = last["exporting"], last["checking sums"]
    assert exported[0] == pytest.approx(exported[1], rel=max(most, 1e-6)) and exported[2] == "M weights"
    assert summed == (pytest.approx(size / 1e9), pytest.approx(size / 1e9), "GB")
    last.clear()
    read_bundle(tmp_path / "out").verify(progress)
    assert last == {"checking sums": summed}


def test_an_export_or_engines_within_a_bundle_are_refused(bundle: Callable[..., Path], tmp_path: Path) -> None:
    own = Path(shutil.copytree(bundle("gqa-112"), tmp_path / "bundle"))
    second = run("sinkprune-export", ROOT / "demo" / "pocket", "-o", own / "second")
    assert_refused(second, "whose bundle.json lists all its files")
    built = run("sinkprune-build", bundle("gqa-112"), "-o", own / "engines", "--target", "onnxruntime")
    assert_refused(built, "whose bundle.json lists all its files")
    read_bundle(own).verify()


_WITHOUT = """
import sys
sys.modules["torch"] = None
package, *arguments = sys.argv[1:]
sys.modules[package] = None
from sinkprune.export.command import main
raise SystemExit(main(arguments))
"""


@pytest.mark.parametrize(
    ("package", "source"),
    [
        *((package, "llava-1.1b") for package in ("onnx", "transformers", "sinkprune.export.models.llama")),
        ("huggingface_hub", "some/model"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(package: str, source: str, tmp_path: Path) -> None:
    """Whenever it is first imported."""
    command = [sys.executable, "-c", _WITHOUT, package, source, "-o", str(tmp_path / "out")]
    command += ["--random-weights"] if "/" not in source else []
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    if package.startswith("sinkprune"):
        # That it is missing is our bug.
        assert done.returncode == 1 and "ModuleNotFoundError" in done.stderr
        return
    assert done.returncode == 2, done.stderr
    assert done.stderr == (
        f"error: exporting needs the package '{package}', which is not installed. "
        "Install it with Python 3.11 or later: pip install --editable '.[export]' (in the clone).\n"
    )
    assert list(tmp_path.iterdir()) == []
