"""The first line of a report in words: commands name a bundle's precision and weights alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from support.models.tasks import write_task
from support.programs.commands import run

COMMANDS = {
    "evaluate": ("sinkprune-evaluate", "--data"),
    "attention": ("sinkprune-calibrate", "attention", "--data"),
    "profile": ("sinkprune-profile", "--repeat", 1, "--prompt", "What is this?", "--image"),
    "rate": ("sinkprune-profile", "--rate", 50, "--duration", 1, "--prompt", "What is this?", "--image"),
}


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A question about each of two photos, whose answer is "a cup"."""
    return write_task(tmp_path_factory.mktemp("questions"), [("a.png", "What is this?"), ("b.png", "What is this?")])


@pytest.mark.parametrize(("name", "weights"), [("profile", None), *((name, "int8") for name in COMMANDS)])
def test_the_heading_has_precision_and_weights(
    name: str, weights: str | None, bundle: Callable[..., Path], questions: Path
) -> None:
    said = f"fp32, weights {weights}, " if weights else "fp32, "
    command, *words = COMMANDS[name]
    data = questions if words[-1] == "--data" else questions.parent / "a.png"
    outcome = run(command, *words, data, bundle("gqa-112", "fp32", ("retain-64",), weights=weights))
    assert outcome.code == 0, outcome.stderr
    assert f", {said}ort-cpu" in outcome.stdout.splitlines()[0]
