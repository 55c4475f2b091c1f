"""An export that is killed leaves the old bundle or the new one, and nothing that the next does not remove."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sinkprune.contract.bundle import read_bundle
from support.programs.commands import kill_when, left, run

Checkpoints = Callable[[str], Path]


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param(".out.partial/new/graphs/weights/*.bin", marks=pytest.mark.slow),
        ".out.partial/new/bundle.json",
        pytest.param(".out.partial/old", marks=pytest.mark.slow),
    ],
)
def test_a_kill_leaves_a_whole_bundle(moment: str, checkpoint: Checkpoints, tmp_path: Path) -> None:
    output, source = tmp_path / "out", checkpoint("gqa-112")
    assert run("sinkprune-export", source, "-o", output, "--budgets", "retain-64").code == 0
    again = (source, "-o", output, "--budgets", "retain-32", "--force")
    kill_when(moment, tmp_path, "sinkprune-export", *again)
    found = read_bundle(output)
    found.verify()
    assert list(found.manifest.budgets) in (["retain-64"], ["retain-32"])
    assert run("sinkprune-export", *again).code == 0
    read_bundle(output).verify()
    assert left(output) == []
