"""The blocks of code and the commands of the README and the docs."""

from __future__ import annotations

import re
from typing import NamedTuple

from support.programs.repository import ROOT

PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs/measurements").glob("*.md")),
]
OUTPUT = (
    "image ->",
    "cameras ->",
    "noise, state ->",
    "prompt -> ",
    "4\n[none]",
    "llava-1.5-7b fits: ",
    "stop: ",
    "1  H ",
    "p_j = ",
)
"""The first words of blocks that show output of a program, or a formula."""


class Block(NamedTuple):
    page: str
    line: int
    language: str
    text: str


def blocks() -> list[Block]:
    """Return all fenced blocks of the pages."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            line = text.count("\n", 0, match.start()) + 2
            found.append(Block(page.name, line, match[1], match[2]))
    return found


def commands() -> list[tuple[str, str]]:
    """Return the place of each command, and its words without the remark."""
    found = []
    for block in blocks():
        if block.language or block.text.startswith(OUTPUT):
            continue
        joined = block.text.replace("\\\n", "")
        for number, line in enumerate(joined.splitlines()):
            for part in re.split(r" && ", re.split(r"\s+#\s", line)[0]):
                if part.strip():
                    found.append((f"{block.page}:{block.line + number}", part.strip()))
    return found


ALL = commands()


def most_images(bundle: str) -> int:
    """Return the most images of a prompt, by the first printed export of that name; 1 if there is none."""
    first = next((text for _, text in ALL if text.startswith("sinkprune-export ") and f" -o {bundle} " in text), "")
    given = re.search(r"--max-images (\d+)", first)
    return int(given[1]) if given else 1
