"""`sinkprune-doctor --picture`: the tokens of a picture, and what the model does not see of it."""

from __future__ import annotations

import pytest

from support.programs.doctor_runs import doctor, told

FIT = "sinkprune-run --fit pad shows it all (docs/pictures.md)"
PIXELS = "for small things export with a larger --max-pixels (docs/pictures.md)"


def test_the_picture_makes_a_difference_where_models_see_all_of_it() -> None:
    small, large = (
        told("--board", "agx-orin-64gb", "qwen2.5-vl-7b", "--picture", size)["models"][0]
        for size in ("320x240", "1280x720")
    )
    assert small["visual_tokens"] < large["visual_tokens"] == 46 * 26
    assert small["rows"]["none"]["prefill_flops"] < large["rows"]["none"]["prefill_flops"]


@pytest.mark.parametrize(
    ("model", "picture", "share", "size", "note", "do"),
    [
        ("llava-1.5-7b", "1280x720", 720 / 1280, None, "56 % of the picture (the middle 720x720 of 1280x720)", FIT),
        ("llava-1.5-7b", "480x480", 1, None, None, None),
        ("qwen2.5-vl-7b", "1280x720", 1, [1288, 728], None, None),
        (
            "qwen2.5-vl-7b",
            "4000x3000",
            1,
            [1148, 840],
            "the 4000x3000 picture at 1148x840 pixels, the bundle's limit",
            PIXELS,
        ),
    ],
)
def test_what_is_not_seen_is_noted(
    model: str, picture: str, share: float, size: list[int] | None, note: str | None, do: str | None
) -> None:
    words = ("--board", "agx-orin-64gb", model, "--picture", picture)
    (found,) = told(*words)["models"]
    assert found["seen_share"] == pytest.approx(share, abs=1e-3) and found["seen_size"] == size
    assert (found["seen_part"] or found["seen_smaller"]) == (note and f"the model sees {note}")
    text = doctor(*words).stdout
    assert (
        text.count("the model sees") == (note is not None) == text.count(f"note: the model sees {note}\n      {do}\n")
    )
