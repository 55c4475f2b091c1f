"""Warnings name the line of the user's program."""

from __future__ import annotations

import pytest

from sinkprune.runtime.steps.request import new_request


@pytest.mark.parametrize("options", [{"order": "bgr"}, {"seed": 1}])
def test_a_warning_names_the_line_that_called(options: dict[str, object], recwarn: pytest.WarningsRecorder) -> None:
    new_request("cup.png", "What?", **options)  # type: ignore[arg-type]
    assert [warning.filename for warning in recwarn.list] == [__file__]
