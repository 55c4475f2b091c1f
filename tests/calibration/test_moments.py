"""Files of a robot policy's moments: what they hold, and what is refused with its line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from sinkprune.calibration.tasks import Moment, load_moments
from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.errors import TaskError
from sinkprune.contract.manifest import Manifest
from support.models.manifests import name_cameras

STATE = [0.5, -1, 2, 0.25, 1e-3]
GOOD = {"cameras": ["a.png", None], "instruction": "pick up the cup", "state": STATE}


@pytest.fixture(scope="module")
def manifest(bundle: Callable[..., Path]) -> Manifest:
    """A small policy of two cameras, whose state has five numbers."""
    return read_bundle(bundle("pi0", budgets=("prune-77.8",), max_images=2)).manifest


@pytest.fixture
def write(tmp_path: Path, photo: Image.Image) -> Callable[..., Path]:
    """Write lines to a file next to two frames."""
    for name in ("a.png", "b.png"):
        photo.crop((0, 0, 60, 40)).save(tmp_path / name)

    def lines(*given: Any) -> Path:
        path = tmp_path / "moments.jsonl"
        path.write_text("\n".join(one if isinstance(one, str) else json.dumps(one) for one in given))
        return path

    return lines


def test_moments_are_read(manifest: Manifest, write: Callable[..., Path]) -> None:
    other = {**GOOD, "cameras": ["b.png", "a.png"], "id": "second", "instruction": "go"}
    path = write(GOOD, "", other)
    folder = path.parent
    first, second = load_moments(manifest, path)
    assert first == Moment("1", (folder / "a.png", None), "pick up the cup", tuple(map(float, STATE)))
    assert (second.id, second.files) == ("second", [folder / "b.png", folder / "a.png"])
    assert first.picture != second.picture and first.picture == first.asked_as(second).picture
    assert first.asked_as(second).prompt == "go" and first.asked_as(second).state == first.state
    assert [image.size for image in second.load_images()] == [(60, 40)] * 2
    # Lines after the limit are not read.
    assert load_moments(manifest, write(GOOD, "{"), 1) == [first]


def test_cameras_may_have_names(bundle: Callable[..., Path], write: Callable[..., Path], tmp_path: Path) -> None:
    plain = bundle("pi0", budgets=("prune-77.8",), max_images=2)
    named = read_bundle(name_cameras(plain, tmp_path / "named", "observation.images.top", "wrist")).manifest
    path = write({**GOOD, "cameras": {"wrist": "b.png", "top": "a.png"}})
    assert load_moments(named, path)[0].cameras == (tmp_path / "a.png", tmp_path / "b.png")
    with pytest.raises(TaskError, match=r"line 1: found the cameras top, side, expected top, wrist\."):
        load_moments(named, write({**GOOD, "cameras": {"top": "a.png", "side": "b.png"}}))
    with pytest.raises(TaskError, match=r"line 1: \$\.cameras\.wrist: found 3, expected"):
        load_moments(named, write({**GOOD, "cameras": {"top": "a.png", "wrist": 3}}))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ([1], "line 2: $: found [1], expected an object. The fields are cameras, instruction, state, id (optional)"),
        ({**GOOD, "answer": "yes"}, "line 2: $: unknown field 'answer'"),
        ({**GOOD, "cameras": "a.png"}, "line 2: $.cameras: found 'a.png', expected an object or a list"),
        ({**GOOD, "cameras": ["a.png"]}, "line 2: found 1 camera, and the policy was exported for 2 cameras"),
        ({**GOOD, "cameras": [None, None]}, "line 2: no camera has a frame"),
        ({**GOOD, "cameras": ["a.png", "nothing.png"]}, "nothing.png' is no file, expected a frame."),
        ({**GOOD, "state": [*STATE[1:], True]}, "$.state[4]: found True, expected a number"),
        ('{"cameras": ["a.png", null], "instruction": "go", "state": [1, 2, 3, 4, NaN]}', "line 2: "),
        ({**GOOD, "state": [10**400] * 5}, "$.state[0]: found a number of"),
        ({**GOOD, "state": STATE[1:]}, "line 2: the state has the shape [4], expected 5 numbers"),
    ],
)
def test_a_wrong_line_is_refused_with_its_number(
    line: Any, said: str, manifest: Manifest, write: Callable[..., Path]
) -> None:
    with pytest.raises(TaskError) as refusal:
        load_moments(manifest, write(GOOD, line))
    assert said in str(refusal.value) and "moments.jsonl', line 2: " in str(refusal.value)


def test_other_files_are_refused(manifest: Manifest, write: Callable[..., Path], tmp_path: Path) -> None:
    for data in (tmp_path / "scenes", tmp_path):
        with pytest.raises(TaskError, match=r"expected a file of moments that ends in \.jsonl"):
            load_moments(manifest, data)
    with pytest.raises(TaskError, match=r"nothing\.jsonl"):
        load_moments(manifest, tmp_path / "nothing.jsonl")
    with pytest.raises(TaskError, match=r"is empty, expected one JSON object a line: cameras, instruction, state"):
        load_moments(manifest, write(""))
