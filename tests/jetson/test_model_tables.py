"""The legend of doctor's tables."""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile
from types import SimpleNamespace
from typing import Any

from sinkprune.jetson.fit import ModelFit
from sinkprune.jetson.report import legend
from support.programs.doctor_runs import preset


def memory_lines(*models: ModelFit) -> list[str]:
    """The lines of the legend about the request that memory is for."""
    report: Any = SimpleNamespace(models=models, usable_bytes=1)
    return [*takewhile(lambda line: line.startswith("GB"), legend(report))]


def test_models_with_limits_of_their_own_have_a_line_each() -> None:
    whole = preset("llava-1.1b")
    limited = replace(whole, name="engines", prompt_tokens=8, new_tokens=1)
    alone = f"a prompt of {whole.prompt_tokens} tokens and {whole.new_tokens} new tokens."
    assert memory_lines(whole, whole) == [f"GB: memory for one picture, {alone}"]
    assert memory_lines(whole, limited) == [
        f"GB of {whole.name}: memory for one picture, {alone}",
        "GB of engines: memory for one picture, a prompt of 8 tokens and 1 new token.",
    ]
