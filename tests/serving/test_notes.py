"""The sentences in `notes` of an answer: about pictures, and about fields that change nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.serving.test_server import address, asked, pipe, post

__all__ = ["address", "pipe"]


@pytest.mark.filterwarnings("ignore::sinkprune.contract.errors.PictureWarning")
def test_a_picture_of_16_bits_is_noted(address: str) -> None:
    depth = Image.fromarray(np.full((60, 80), 2570, np.uint16))
    part = "the model sees 75 % of the picture (the middle 60x60 of 80x60). --fit pad shows it all"
    dark = "largest value is now 10 of 255"
    for picture, notes in ((depth, [dark, part]), (Image.new("RGB", (80, 60)), [part])):
        details = post(address, messages=asked(picture), max_tokens=1).json()["sinkprune"]
        assert len(details["notes"]) == len(notes)
        assert all(said in note for said, note in zip(notes, details["notes"], strict=True))


def test_fields_that_change_nothing_are_noted(address: str, photo: Image.Image) -> None:
    def notes(**fields: Any) -> list[str]:
        square = photo.resize((64, 64))
        found: list[str] = post(address, messages=asked(square), max_tokens=1, **fields).json()["sinkprune"]["notes"]
        return found

    assert notes(top_p=0.5, seed=3) == [
        "top_p and seed changed nothing, because this answer is greedy. Add a temperature above 0."
    ]
    assert notes(guided_choice=["What", "is"], min_tokens=1) == [
        "max_tokens and min_tokens changed nothing: the texts of a closed list are scored whole."
    ]
    assert notes(top_p=1, seed=None) == notes(seed=3, temperature=0.5) == []
