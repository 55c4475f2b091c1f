"""Writes durations.json, by which `make test` chooses its tests: python tests/durations.py build/tests.xml"""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as tree
from collections import defaultdict
from pathlib import Path

FILE = Path(__file__).with_suffix(".json")
_LEAST = 0.5


def write(report: Path) -> None:
    """Write the seconds of each test function in a JUnit `report`, all its cases together, from half a second on."""
    seconds = defaultdict[str, float](float)
    for case in tree.parse(report).iter("testcase"):
        module, name = case.attrib["classname"], case.attrib["name"].partition("[")[0]
        seconds[f"{module.replace('.', '/')}.py::{name}"] += float(case.attrib["time"])
    found = {name: round(took, 1) for name, took in sorted(seconds.items()) if took >= _LEAST}
    FILE.write_text(json.dumps(found, indent=0) + "\n", encoding="utf-8")


def long_tests(most: float, canaries: str) -> set[str]:
    """Return the test functions that take more than `most` seconds.

    Of a file that the text `canaries` names, the quickest stays if all of its tests take longer.
    """
    seconds: dict[str, float] = json.loads(FILE.read_text(encoding="utf-8"))
    found = {name for name, took in seconds.items() if took > most}
    for file in {name.partition("::")[0] for name in found}:
        own = {name: took for name, took in seconds.items() if name.startswith(f"{file}::")}
        if file in canaries and own.keys() <= found and not _others(file, own):
            found.discard(min(own, key=lambda name: own[name]))
    return found


def _others(file: str, timed: dict[str, float]) -> bool:
    """Return whether a test file has functions that take less than half a second."""
    text = (FILE.parents[1] / file).read_text(encoding="utf-8")
    names = {line[4:].partition("(")[0] for line in text.splitlines() if line.startswith("def test_")}
    return bool(names - {name.partition("::")[2] for name in timed})


if __name__ == "__main__":
    write(Path(sys.argv[1]))
