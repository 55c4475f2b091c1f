"""`sinkprune-export`: the keys of its JSON, its progress, the extra that it needs, and its memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sinkprune.contract.bundle import read_bundle
from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.source import ExportRequest
from support.models.heads_of_64 import CONFIG
from support.models.peer_shapes import sizes
from support.programs.commands import own_process, succeed


@pytest.mark.parametrize("dialect", ["opset20", "opset24"])
def test_the_summary_names_what_was_written(dialect: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    options = ("--budgets", "retain-64", "--methods", "sinkpruner,fastervlm", "--dialect", dialect, "--json")
    summary = json.loads(succeed("sinkprune-export", checkpoint("gqa-112"), "-o", tmp_path / "out", *options).stdout)
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


_WITHOUT = """
import sys
sys.modules["torch"] = None
package, *arguments = sys.argv[1:]
sys.modules[package] = None
from sinkprune.export.command import main
raise SystemExit(main(arguments))
"""


@pytest.mark.parametrize(
    ("package", "source"), [("onnx", "llava-1.1b"), ("transformers", "llava-1.1b"), ("huggingface_hub", "some/model")]
)
def test_a_missing_package_is_named_with_its_extra(package: str, source: str, tmp_path: Path) -> None:
    """Whenever it is first imported."""
    command = [sys.executable, "-c", _WITHOUT, package, source, "-o", str(tmp_path / "out")]
    command += ["--random-weights"] if "/" not in source else []
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"error: exporting needs the package '{package}', which is not installed. Install")
    assert "pip install --editable '.[export]'" in done.stderr
    assert list(tmp_path.iterdir()) == []


# Run in a process of its own, whose children's peak is then the export's.
_MEASURE = "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL); \
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)"


def peak_bytes(config: dict[str, Any], folder: Path) -> int:
    """The peak resident memory of exporting `config` with random weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    command = own_process(
        "sinkprune-export", folder, "--random-weights", "-o", folder / "out", "--budgets", "retain-64"
    )
    measure = [sys.executable, "-c", _MEASURE, *command]
    done = subprocess.run(measure, capture_output=True, text=True, check=True, timeout=120, cwd=folder)
    return int(done.stdout)


def llava(layers: int, width: int) -> dict[str, Any]:
    """A LLaVA whose decoder is nearly all of it."""
    text = {**CONFIG["text_config"], **sizes(width, 4 * width, layers, 8, 8)}
    return {**CONFIG, "text_config": text}


@pytest.mark.slow
def test_export_holds_a_fraction_of_a_segment(tmp_path: Path) -> None:
    small = peak_bytes(llava(layers=4, width=64), tmp_path / "small")
    large = peak_bytes(llava(layers=12, width=448), tmp_path / "large")
    # decoder_2 is layers 7 to 11, 16 d^2 weights each, fp32
    largest_segment = 5 * 16 * 448**2 * 4
    assert large - small < 0.5 * largest_segment
