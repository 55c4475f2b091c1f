"""Export without a package of its extra: one message, whenever the package is first imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_PROGRAM = """
import sys
sys.modules["torch"] = None
package, *arguments = sys.argv[1:]
sys.modules[package] = None
from sinkprune.export.command import main
raise SystemExit(main(arguments))
"""


def export(without: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """The command, in a process that cannot import the package `without`."""
    command = [sys.executable, "-c", _PROGRAM, without, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize(
    ("package", "source"),
    [("onnx", "llava-1.1b"), ("transformers", "llava-1.1b"), ("huggingface_hub", "someone/model")],
)
def test_a_missing_package_is_named_with_its_extra(package: str, source: str, tmp_path: Path) -> None:
    random = ["--random-weights"] if "/" not in source else []
    done = export(package, source, "-o", tmp_path / "out", *random)
    assert done.returncode == 2, done.stderr
    assert done.stderr == (
        f"error: exporting needs the package '{package}', which is not installed. "
        "Install it with Python 3.11 or later: pip install --editable '.[export]' (in the clone).\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_module_of_ours_that_is_missing_is_our_bug(tmp_path: Path) -> None:
    done = export("sinkprune.export.models.llama", "llava-1.1b", "-o", tmp_path / "out", "--random-weights")
    assert done.returncode == 1
    assert "ModuleNotFoundError" in done.stderr
