"""The files that README and docs name are read by the commands that they are named for."""

from __future__ import annotations

from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from sinkprune.calibration.tasks import load_task
from sinkprune.demo.write_examples import FPS, FRAMES, QUESTIONS, VIEWS, write_examples
from sinkprune.runtime.images import read_image


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("examples")
    write_examples(made)
    return made


def test_pictures_are_views_of_one_photo(folder: Path) -> None:
    kitchen, a, b = (read_image(folder / name) for name in ("kitchen.jpg", "a.jpg", "b.jpg"))
    assert kitchen.size == (480, 320) and a.size == b.size == (360, 240)
    assert np.abs(np.asarray(a, np.int16) - np.asarray(b, np.int16)).mean() > 10


def test_questions_are_a_task(folder: Path) -> None:
    items = load_task(str(folder / "kitchen.jsonl"))
    assert len(items) == VIEWS * len(QUESTIONS) and len({item.picture for item in items}) == VIEWS
    assert {item.question.kind for item in items} == set(QUESTIONS)
    assert isinstance(items[0].load_image(), Image.Image)


def test_the_clip_takes_two_seconds(folder: Path) -> None:
    with av.open(str(folder / "clip.mp4")) as container:
        stream = container.streams.video[0]
        assert float(stream.average_rate) == FPS
        assert sum(1 for _ in container.decode(stream)) == FRAMES
