"""The moments that a robot policy is measured on: frames of its cameras, an instruction and the robot's state.

A file has one JSON object a line, with `cameras`, an object of paths by the names of the bundle's cameras, or a list
of paths in the order of the policy's training; `instruction`; and `state`, a list of numbers in the robot's units.
Paths are relative to the file, and null is a camera without a frame. The default of `id` is the line's number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from PIL import Image

from sinkprune.calibration.tasks import read_jsonl
from sinkprune.contract.errors import ImageError, TaskError
from sinkprune.contract.manifest import Manifest
from sinkprune.runtime.acting.observation import in_trained_order, observed
from sinkprune.runtime.media.images import read_image

_FIELDS = "cameras, instruction, state, id (optional)"


@dataclass(frozen=True)
class Moment:
    """A moment of a file, as `Item` is a question of one."""

    id: str
    cameras: tuple[Path | None, ...]
    prompt: str
    """The instruction."""
    state: tuple[float, ...]

    @property
    def picture(self) -> str:
        """The frames' names; moments with the same frames have the same."""
        return " ".join(map(str, self.cameras))

    @property
    def files(self) -> list[Path]:
        """The files of the frames."""
        return [path for path in self.cameras if path is not None]

    def load_images(self) -> list[Image.Image]:
        """Load the frames, RGB."""
        return [read_image(path) for path in self.files]

    def asked_as(self, other: Moment) -> Moment:
        """Return this moment with the instruction of another."""
        return replace(self, prompt=other.prompt)


def load_moments(manifest: Manifest, data: Path, limit: int | None = None) -> list[Moment]:
    """Return the first `limit` moments of a JSONL file, for the policy of `manifest`.

    Every moment and its frames are checked. Raises `TaskError` with the number of the first bad line.
    """
    if data.suffix.lower() != ".jsonl":
        raise TaskError(
            f"--data is '{data}', and the bundle is a robot policy: expected a file of moments that ends in .jsonl, "
            f"one JSON object a line: {_FIELDS}."
        )
    return list(islice(_read(manifest, data), limit))


def _read(manifest: Manifest, data: Path) -> Iterator[Moment]:
    known = set[Path]()

    def read(found: dict[str, Any], number: int) -> Moment:
        moment = _moment(manifest, found, data.parent, number)
        _check(manifest, moment)
        for path in set(moment.files) - known:
            read_image(path)
        known.update(moment.files)
        return moment

    return read_jsonl(data, "moments", _FIELDS, read)


def _moment(manifest: Manifest, found: dict[str, Any], folder: Path, number: int) -> Moment:
    if not {"cameras", "instruction", "state"} <= found.keys() <= {*_FIELDS.removesuffix(" (optional)").split(", ")}:
        raise TaskError(f"found {', '.join(found) or 'no field'}, expected an object with the fields {_FIELDS}.")
    cameras, instruction, state = (found[name] for name in ("cameras", "instruction", "state"))
    if isinstance(cameras, dict):
        cameras = in_trained_order(manifest.acting, cameras)
    if not isinstance(cameras, list) or not all(path is None or isinstance(path, str) for path in cameras):
        raise TaskError(f"'cameras' is {cameras!r}, expected a list of paths, and null for a camera without a frame.")
    if not _numbers(state):
        raise TaskError(f"'state' is {state!r}, expected a list of numbers.")
    if not isinstance(instruction, str):
        raise TaskError(f"'instruction' is {instruction!r}, expected words.")
    paths = tuple(None if path is None else folder / path for path in cameras)
    return Moment(str(found.get("id", number)), paths, instruction, tuple(map(float, state)))


def _numbers(value: Any) -> bool:
    # A JSON number may be an integer that no float holds.
    return isinstance(value, list) and all(type(one) in (int, float) and abs(one) < 1e30 for one in value)


def _check(manifest: Manifest, moment: Moment) -> None:
    """Check a moment as `Policy.act` does; raises `ImageError`, `PromptError` and `UsageError`."""
    missing = [path for path in moment.files if not path.is_file()]
    if missing:
        raise ImageError(f"'{missing[0]}' is no file, expected a frame. Paths are relative to the file of moments.")
    observed(manifest, moment.cameras, moment.prompt, moment.state)
