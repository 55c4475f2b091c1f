"""No page has a word in capitals in place of a figure, e.g. SUITE or FLAT16 in a sentence about times."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.programs.repository import ROOT

PAGES = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")] + sorted(ROOT.glob("docs/**/*.md"))
CODE = re.compile(r"^```.*?^```|`[^`\n]*`|\]\([^)\n]*\)", re.DOTALL | re.MULTILINE)
CAPITALS = re.compile(r"(?<![\w-])[A-Z][A-Z0-9_]{2,}(?!\w|\.\w)")
# Placeholders for text that is still missing, also in commands and examples.
NOTES = re.compile(r"\b(?:TODO|TBD|TBA|FIXME|X{2,}|N{2,})\b|\?{3,}")
# Names that pages also write in lower case, as an extra, a marker or an ordinary word.
NAMES = {"API", "CLIP", "CPU", "CUDA", "FILE", "GPU", "JSON", "LLM", "LOW", "ONNX", "PATH"}
# Three letters or more with a number, e.g. FLAT16, are a placeholder, except for these.
NUMBERED = {"AVX2", "AVX512", "SSE41", "SSE42", "UTF8"}


def placeholders(text: str, words: set[str]) -> Iterator[str]:
    """Yield each placeholder of a page. `words` are those that pages write in lower case.

    Abbreviations are never in lower case, so a word in both cases is a placeholder.
    """
    yield from (found.group() for found in NOTES.finditer(text))
    for found in CAPITALS.finditer(CODE.sub(" ", text)):
        parts = re.split(r"[\d_]+", found.group().lower())
        written_small = found.group() not in NAMES and any(len(part) > 2 and part in words for part in parts)
        if written_small or (re.fullmatch(r"[A-Z]{3,}\d+", found.group()) and found.group() not in NUMBERED):
            yield found.group()


def ordinary_words(texts: list[str]) -> set[str]:
    return {word for text in texts for word in re.findall(r"(?<![\w`.-])[a-z]{3,}(?![\w`])", CODE.sub(" ", text))}


@pytest.fixture(scope="module")
def words() -> set[str]:
    return ordinary_words([page.read_text() for page in PAGES])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_holds_a_placeholder(page: Path, words: set[str]) -> None:
    assert list(placeholders(page.read_text(), words)) == []


@pytest.mark.parametrize(
    ("sentence", "found"),
    [
        ("The suite of TESTS tests takes SUITE.", ["TESTS", "SUITE"]),
        ("| flat, 16 requests | FLAT16 | 3.1 |", ["FLAT16"]),
        ("It takes MEDIAN_A ms.", ["MEDIAN_A"]),
        ("It saves XX % of `??? ms` (TBD).", ["XX", "???", "TBD"]),
        ("An ONNX graph on a GPU with 80 GB runs `sinkprune-run BUNDLE` ([CHANGELOG.md](CHANGELOG.md)).", []),
    ],
)
def test_a_placeholder_is_found(sentence: str, found: list[str], words: set[str]) -> None:
    assert list(placeholders(sentence, words | {"median"})) == found
