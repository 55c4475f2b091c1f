"""Ctrl-C in the midst of a profile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sinkprune import Answer
from sinkprune.runtime.pipeline import Pipeline


@pytest.fixture
def interrupt_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Presses Ctrl-C after so many answers."""
    generate = Pipeline.generate

    def prepare(answers: int) -> None:
        left = iter(range(answers))

        def interrupted(*arguments: Any, **options: Any) -> Answer:
            if next(left, None) is None:
                raise KeyboardInterrupt
            return generate(*arguments, **options)

        monkeypatch.setattr(Pipeline, "generate", interrupted)

    return prepare
