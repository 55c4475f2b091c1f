"""A build that is killed leaves the old engines or the new ones, and nothing that the next does not remove."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from commands import run
from killed_commands import kill_when, left
from sinkprune.contract.engines_manifest import read_engines

Bundles = Callable[..., Path]


@pytest.mark.parametrize("moment", [".out.*.partial/new/engines/*", ".out.*.partial/old"])
def test_a_kill_leaves_whole_engines(moment: str, bundle: Bundles, tmp_path: Path) -> None:
    output = tmp_path / "out"
    command = (bundle("gqa-112"), "-o", output, "--target", "onnxruntime", "--force")
    assert run("sinkprune-build", *command, "--max-prompt", 10).code == 0
    kill_when(moment, tmp_path, "sinkprune-build", *command, "--max-prompt", 11)
    found = read_engines(output)
    found.verify()
    assert found.manifest.limits.prompt_tokens in (10, 11)
    assert run("sinkprune-build", *command).code == 0
    read_engines(output).verify()
    assert left(output) == []
