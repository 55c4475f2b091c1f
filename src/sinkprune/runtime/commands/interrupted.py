"""Where the results of an interrupted command go."""

from __future__ import annotations

from itertools import chain, count
from pathlib import Path
from typing import Any, TypeVar

from sinkprune.contract.checks import escaped

Given = TypeVar("Given")


def beside_earlier(options: Given, *names: str) -> tuple[Given, str]:
    """Return a copy of `options` whose outputs `names` replace no file that is there, and a sentence about them.

    The results of an interrupted measurement go next to an earlier file: `x.interrupted.json` next to `x.json`, and
    `x.interrupted-2.json` next to both.
    """
    given: dict[str, Any] = {name: getattr(options, name) for name in names}
    moved: dict[str, Path] = {
        name: _free_name(path) for name, path in given.items() if path is not None and path.exists()
    }
    if not moved:
        return options, ""
    listed = ", ".join(f"'{escaped(str(path))}'" for path in moved.values())
    return type(options)(**{**vars(options), **moved}), f" Earlier files stay; these results are in {listed}."


def _free_name(path: Path) -> Path:
    endings = chain([""], (f"-{number}" for number in count(2)))
    names = (path.with_name(f"{path.stem}.interrupted{ending}{path.suffix}") for ending in endings)
    return next(name for name in names if not name.exists())
