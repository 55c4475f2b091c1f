"""Writes durations.json, by which `make test` chooses its tests: python tests/durations.py build/tests.xml"""

from __future__ import annotations

import json
import re
import sys
import xml.etree.ElementTree as tree
from collections import defaultdict
from pathlib import Path

FILE = Path(__file__).with_suffix(".json")


def write(report: Path) -> None:
    """Write the seconds of each test function in a JUnit `report`, all its cases together."""
    seconds = defaultdict[str, float](float)
    for case in tree.parse(report).iter("testcase"):
        module, name = case.attrib["classname"], case.attrib["name"].partition("[")[0]
        seconds[f"{module.replace('.', '/')}.py::{name}"] += float(case.attrib["time"])
    found = {name: round(took, 1) for name, took in sorted(seconds.items())}
    FILE.write_text(json.dumps(found, indent=0) + "\n", encoding="utf-8")


def long_tests(seconds: dict[str, float], most: float, page: str) -> set[str]:
    """Return the test functions that take more than `most` seconds.

    Of each line of the `page` of guarantees whose tests all take longer, the quickest stays.
    """
    found = {name for name, took in seconds.items() if took > most}
    for line in page.splitlines():
        places = tuple(re.findall(r"`(tests/[\w/]+(?:\.py|/))`", line))
        own = [name for name in seconds if name.startswith(places)] if places else []
        if own and found.issuperset(own):
            found.discard(min(own, key=lambda name: seconds[name]))
    return found


if __name__ == "__main__":
    write(Path(sys.argv[1]))
