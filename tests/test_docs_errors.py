"""The page of exceptions and warnings has every one, with its base."""

from __future__ import annotations

import re
from pathlib import Path

import sinkprune

PAGE = Path(__file__).parents[1] / "docs" / "errors.md"


def test_every_exception_has_a_line_with_its_base() -> None:
    every = {name: getattr(sinkprune, name) for name in sinkprune.__all__}
    kinds = {name: kind for name, kind in every.items() if isinstance(kind, type) and issubclass(kind, Exception)}
    lines = dict(re.findall(r"^\| `(\w+)`(?: \((.*?)\))? \|", PAGE.read_text(), re.MULTILINE))
    assert {*lines} == {*kinds} - {"SinkpruneError"}
    for name, said in lines.items():
        bases = [base.__name__ for base in kinds[name].__bases__]
        if issubclass(kinds[name], Warning):
            continue
        named = re.findall(r"`(\w+)`", said)
        assert named == [base for base in bases if base != "SinkpruneError"], name
