"""A watch: one instruction for every frame of a camera, with bounded memory of earlier frames."""

from __future__ import annotations

import re
import time
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sinkprune import FrameAnswer, ImageError, OptionError, Pipeline, UsageError, WatchSettings
from sinkprune.contract.schedule import schedule
from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.source import ExportRequest
from support.references.steps import Watched

INSTRUCTION = "Is the cup full, and where is it?"
NEW = {"max_new_tokens": 3, "min_new_tokens": 3}
ALL = WatchSettings(capacity=None)
Array = np.ndarray[Any, Any]


def frames(photo: Image.Image, count: int = 1000, size: tuple[int, int] = (120, 80)) -> Iterator[Image.Image]:
    """A static photo, in which a bright square moves."""
    still = photo.resize(size)
    for number in range(count):
        frame = still.copy()
        frame.paste((250, 240, 10), (8 * number % size[0], 20, 8 * number % size[0] + 24, 44))
        yield frame


@pytest.fixture
def pipe(pipeline: Callable[..., Pipeline]) -> Pipeline:
    return pipeline("gqa-112", "fp32", ("retain-64", "retain-192"))


@pytest.mark.parametrize(
    ("name", "budget", "images", "backend"),
    [
        ("gqa-112", "retain-64", 1, "openvino"),
        ("gqa-112", "retain-64+compact", 3, "ort-cpu"),
        ("gqa-112", "retain-64+drop-sink", 1, "ort-cpu"),
        ("next-mistral", "retain-320", 1, "ort-cpu"),
        ("qwen-tied", "prune-66.7", 1, "ort-cpu"),
        ("qwen3-vl", "prune-66.7", 1, "ort-cpu+openvino"),
    ],
)
def test_the_first_frame_is_answered_as_a_picture(
    name: str, budget: str, images: int, backend: str, bundle: Callable[..., Path], photo: Image.Image
) -> None:
    path = bundle(name, "fp32", (budget,), max_images=images)
    pipe = Pipeline.load(path, backend=backend, compute="fp32")
    picture, own, alone = photo.resize((120, 80)), Watched(), Watched()
    first = next(pipe.watch([picture], INSTRUCTION, settings=ALL, observer=own, budget=budget, **NEW))
    answer = pipe.generate(picture, INSTRUCTION, observer=alone, budget=budget, **NEW)
    assert (first.key, first.text, first.token_ids) == (True, answer.text, answer.token_ids)
    assert first.tokens_per_layer == answer.tokens_per_layer
    np.testing.assert_array_equal(own.rows.positions.rows, alone.rows.positions.rows)
    for found, expected in zip(own.logits, alone.logits, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())
    kept = answer.kept
    sources = (kept.index + kept.norms.shape[1] * np.arange(len(kept.index))[:, None]).ravel()
    assert first.tokens.tolist() == [[0, token] for token in sources]
    assert {layer: left.tolist() for layer, left in first.after_stage.items()} == {
        layer: left.tolist() for layer, left in kept.after_stage.items()
    }


@pytest.mark.parametrize("name", ["gqa-112", "qwen3-vl"])
def test_later_frames_add_their_own_rows(name: str, pipeline: Callable[..., Pipeline], photo: Image.Image) -> None:
    """The rows of a later frame are those of its tower, in the places that the answer reports."""
    budget = "retain-64" if name == "gqa-112" else "prune-66.7"
    pipe, steps, later, keys = pipeline(name, "fp32", (budget,)), Watched(), 0, set()
    shown, settings = [*frames(photo, 6, (240, 160))], WatchSettings(capacity=None, novelty=0.05)
    whole = [pipe.backend.numpy(pipe.encode(frame).embeddings) for frame in shown]
    whole = [rows.reshape(-1, rows.shape[-1]) for rows in whole]
    for answer in pipe.watch(shown, INSTRUCTION, settings=settings, observer=steps, budget=budget, **NEW):
        hidden = pipe.backend.numpy(steps.rows.hidden)[0][steps.rows.visual]
        keys |= {answer.number} if answer.key else set()
        # The first row of the last key frame is a sink, a mean of tokens.
        sink = int(np.argmax(answer.tokens[:, 0] == max(keys)))
        for number, (frame, token) in enumerate(answer.tokens):
            if number != sink:
                expected = whole[frame][token]
                np.testing.assert_allclose(hidden[number], expected, atol=1e-4 * np.abs(whole[frame]).max())
        later += answer.new_rows * (not answer.key)
    assert later > 0


def test_no_answer_depends_on_a_later_frame(pipe: Pipeline, photo: Image.Image) -> None:
    settings = WatchSettings(capacity=16, key_every=4, novelty=0.01, recent=1)

    def watched(shown: list[Image.Image]) -> list[tuple[object, ...]]:
        answers = pipe.watch(shown, INSTRUCTION, settings=settings, budget="retain-64", **NEW)
        return [(a.token_ids, a.tokens.tolist(), a.evicted) for a in answers]

    shown = [*frames(photo, 8)]
    assert watched(shown[:5]) == watched([*shown[:5], photo.resize((120, 80)).rotate(180), *shown[6:]])[:5]


def test_no_capacity_is_advised_where_none_fits(pipe: Pipeline, photo: Image.Image) -> None:
    """Of a few positions, many recent frames take more than all."""
    for capacity in (16, 256, 4096):
        settings = WatchSettings(capacity=capacity, recent=10_000)
        with pytest.raises(
            UsageError, match=r"take at most \d+ rows .* need \d+\. Give smaller frames, .* capacity=None"
        ):
            next(pipe.watch([photo], INSTRUCTION, settings=settings, budget="retain-64", **NEW))


def test_a_memory_without_a_capacity_ends_at_the_models_positions(pipe: Pipeline, photo: Image.Image) -> None:
    settings = WatchSettings(capacity=None, key_every=1, novelty=0.0)
    shown = (photo.rotate(7 * number) for number in range(200))
    answered, most = 0, pipe.bundle.manifest.language_model.max_positions
    with pytest.raises(UsageError, match=rf"need \d+ positions; the model has {most}\. Give a capacity"):
        for _ in pipe.watch(shown, INSTRUCTION, settings=settings, budget="retain-192", **NEW):
            answered += 1
    assert answered > 1


@pytest.mark.parametrize("images", [1, 3])
def test_memory_stays_within_the_capacity(images: int, pipeline: Callable[..., Pipeline], photo: Image.Image) -> None:
    pipe = pipeline("gqa-112", "fp32", ("retain-64",), max_images=images)
    of_frame = schedule(pipe.bundle.manifest, "sinkpruner", "retain-64", [_layout(pipe, photo)]).rows
    settings = WatchSettings(capacity=2 * of_frame + 3, key_every=5, novelty=0.0, recent=1)
    evicted = 0
    for answer in pipe.watch(frames(photo, 12), INSTRUCTION, settings=settings, budget="retain-64", **NEW):
        assert len(answer.tokens) <= 3 * of_frame + 3
        newest = answer.tokens[:, 0] == answer.number
        assert newest.sum() == answer.new_rows <= of_frame
        evicted += answer.evicted
        assert answer.tokens_per_layer[-1] == schedule(
            pipe.bundle.manifest, "sinkpruner", "retain-64", [_layout(pipe, photo)]
        ).reaching(len(answer.tokens_per_layer) - 1)
    assert evicted > 0


def test_a_still_scene_adds_no_rows(pipe: Pipeline, photo: Image.Image) -> None:
    picture = photo.resize((120, 80))
    settings = WatchSettings(key_every=4, capacity=None)
    found = [*pipe.watch([picture] * 6, INSTRUCTION, settings=settings, budget="retain-64", **NEW)]
    assert [answer.key for answer in found] == [True, False, False, False, True, False]
    rows = found[0].new_rows
    assert [answer.new_rows for answer in found] == [rows, 0, 0, 0, rows, 0]
    # The second key frame shows what the first did, and takes its place.
    assert [len(answer.tokens) for answer in found] == [rows] * 6
    assert len({tuple(answer.token_ids) for answer in found}) == 1


def test_what_was_added_once_is_not_new_again(pipe: Pipeline, photo: Image.Image) -> None:
    still, moved, *_ = frames(photo)
    settings = WatchSettings(capacity=None, novelty=0.01)
    found = [*pipe.watch([still, *[moved] * 9], INSTRUCTION, settings=settings, budget="retain-64", **NEW)]
    added = [answer.new_rows for answer in found]
    assert added[1] > 0
    assert added[-1] == 0


def test_another_scene_is_a_key_frame(pipe: Pipeline, photo: Image.Image) -> None:
    scenes = [photo.resize((120, 80)), Image.effect_noise((120, 80), 200).convert("RGB")]
    found = [*pipe.watch(scenes, INSTRUCTION, settings=ALL, budget="retain-64", **NEW)]
    assert [answer.key for answer in found] == [True, True]
    # The sink of the first scene went.
    assert len(found[1].tokens) == 2 * found[0].new_rows - 1
    assert set(found[1].tokens[:, 0]) == {0, 1}


@pytest.mark.parametrize(
    "choice",
    [["What", "is"], [f"{first} {last}" for first in ("What", "is", "a", "the", "Is") for last in ("is", "a")]],
)
def test_a_closed_list_is_scored(choice: list[str], pipe: Pipeline, photo: Image.Image) -> None:
    picture = photo.resize((120, 80))
    first = next(pipe.watch([picture], INSTRUCTION, budget="retain-64", choice=choice, settings=ALL))
    alone = pipe.generate(picture, INSTRUCTION, budget="retain-64", choice=choice)
    assert (first.text, first.finish) == (alone.text, alone.finish) == (alone.text, "stop")
    assert first.confidence == pytest.approx(alone.confidence)
    assert first.choices == pytest.approx(alone.choices)


def test_two_watches_and_a_question_do_not_mix(pipe: Pipeline, photo: Image.Image) -> None:
    alone = [a.token_ids for a in pipe.watch(frames(photo, 4), INSTRUCTION, budget="retain-64", settings=ALL, **NEW)]
    one, two = (pipe.watch(frames(photo, 4), INSTRUCTION, budget="retain-64", settings=ALL, **NEW) for _ in range(2))
    for number in range(4):
        assert next(one).token_ids == alone[number]
        pipe.generate(photo, "What is it?", budget="retain-192", max_new_tokens=2)
        assert next(two).token_ids == alone[number]


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"budget": "none"}, UsageError, "prunes inside the decoder"),
        ({"budget": "retain-64", "deadline_ms": 100}, UsageError, "no deadline"),
        ({"budget": "retain-64", "surprise": 1}, OptionError, r"surprise(?!.*deadline_ms)"),
        ({"budget": "retain-64", "setting": None}, OptionError, "'setting'; did you mean 'settings'.* observer"),
        ({"budget": "retain-64", "settings": {"capacity": 3}}, TypeError, "WatchSettings"),
        ({"budget": "retain-64", "max_new_tokens": 0}, UsageError, "max_new_tokens"),
    ],
)
def test_what_cannot_watch_is_rejected_at_once(
    options: dict[str, Any], error: type[Exception], said: str, pipe: Pipeline
) -> None:
    with pytest.raises(error, match=said):
        pipe.watch([], INSTRUCTION, **options)


def test_a_method_without_stages_is_rejected(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    request = ExportRequest(str(checkpoint("gqa-112")), budgets=("retain-64",), methods=("fastervlm",))
    export_bundle(request, tmp_path / "bundle")
    with pytest.raises(UsageError, match="prunes inside the decoder"):
        Pipeline.load(tmp_path / "bundle").watch([], INSTRUCTION, budget="retain-64", method="fastervlm")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"capacity": 0}, "capacity"),
        ({"key_every": 0}, "key_every"),
        ({"novelty": 2.5}, "novelty"),
        ({"decay": float("nan")}, "decay"),
        ({"recent": 0}, "recent"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        WatchSettings(**settings)


def test_small_numbers_of_numpy_are_counted_with_exactly() -> None:
    made = WatchSettings(capacity=np.uint8(200), key_every=np.int8(100), recent=np.int8(1), decay=np.float16(0.5))  # type: ignore[arg-type]
    found = [made.capacity, made.key_every, made.recent, made.decay]
    assert found == [200, 100, 1, 0.5] and {*map(type, found)} == {int, float}


@pytest.mark.parametrize("frames", ["camera.mp4", Path("scene.png"), np.zeros((8, 8, 3), np.uint8), 3, None])
def test_what_is_one_picture_or_none_cannot_be_watched(frames: Any, pipe: Pipeline) -> None:
    with pytest.raises(TypeError, match="expected pictures one after the other"):
        pipe.watch(frames, INSTRUCTION, budget="retain-64")


def test_frames_in_one_array(pipe: Pipeline) -> None:
    frames = np.zeros((2, 8, 8, 3), np.uint8)
    assert [answer.number for answer in pipe.watch(frames, INSTRUCTION, budget="retain-64", max_new_tokens=1)] == [
        0,
        1,
    ]


def test_a_frame_of_another_size_is_rejected(pipeline: Callable[..., Pipeline], photo: Image.Image) -> None:
    pipe = pipeline("qwen-tied", "fp32", ("prune-66.7",))
    watch = pipe.watch(
        [photo.resize((120, 80)), photo.resize((80, 120))], INSTRUCTION, budget="prune-66.7", settings=ALL, **NEW
    )
    next(watch)
    with pytest.raises(ImageError, match="frame 1 has 80x120 pixels, expected 120x80"):
        next(watch)


def test_a_capacity_below_the_recent_frames_is_rejected(pipe: Pipeline, photo: Image.Image) -> None:
    with pytest.raises(UsageError, match="capacity is 3, expected at least"):
        next(pipe.watch([photo], INSTRUCTION, settings=WatchSettings(capacity=3), budget="retain-64"))


def test_a_capacity_that_positions_cannot_hold_is_rejected(pipe: Pipeline, photo: Image.Image) -> None:
    most = pipe.bundle.manifest.language_model.max_positions
    with pytest.raises(UsageError, match=f"^capacity is {most}, expected at most [0-9]+ rows.* {most} positions"):
        next(pipe.watch([photo], INSTRUCTION, settings=WatchSettings(capacity=most), budget="retain-64"))


def test_the_largest_capacity_is_the_one_that_the_error_names(
    pipeline: Callable[..., Pipeline], photo: Image.Image
) -> None:
    """Also where each frame takes more positions than one of its rows."""
    pipe = pipeline("qwen-tied", "fp32", ("prune-66.7",))

    def first(capacity: int) -> FrameAnswer:
        settings = WatchSettings(capacity=capacity, recent=1)
        return next(pipe.watch([photo.resize((120, 80))], INSTRUCTION, settings=settings, budget="prune-66.7", **NEW))

    with pytest.raises(UsageError, match=r"expected at most \d+ rows") as refused:
        first(10**6)
    most = int(re.findall(r"at most (\d+)", str(refused.value))[0])
    # In the worst case each row in memory is of another frame, and the new frame comes on top.
    alone = pipe.generate(photo.resize((120, 80)), INSTRUCTION, budget="prune-66.7", **NEW)
    room = pipe.bundle.manifest.language_model.max_positions - alone.prompt_tokens - NEW["max_new_tokens"]
    extent = alone.kept.layout.extent
    assert (most + 1) * extent <= room < (most + 2) * extent
    assert first(most).number == 0
    with pytest.raises(UsageError, match=f"expected at most {most} rows"):
        first(most + 1)


def test_engines_of_fixed_ranges_are_rejected(bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = Pipeline.load(bundle("gqa-112", "fp32", ("retain-64", "retain-192")))
    monkeypatch.setattr(pipe.backend, "any_length", False, raising=False)
    with pytest.raises(UsageError, match="fixed ranges"):
        pipe.watch([], INSTRUCTION, budget="retain-64")


@pytest.mark.slow
def test_ten_thousand_frames_in_constant_memory_and_time(pipe: Pipeline, photo: Image.Image) -> None:
    shown, settings = [*frames(photo, 97)], WatchSettings(capacity=32, key_every=50, novelty=0.01, recent=1)

    def endless() -> Iterator[Image.Image]:
        while True:
            yield from shown

    memory, medians, began = [], [], time.perf_counter()
    watch = pipe.watch(endless(), INSTRUCTION, settings=settings, budget="retain-64", max_new_tokens=1)
    tracemalloc.start()
    for _ in range(10):
        times = []
        for answer in islice(watch, 1000):
            assert len(answer.tokens) <= 48
            times.append(time.perf_counter() - began)
            began = time.perf_counter()
        memory.append(tracemalloc.get_traced_memory()[0])
        medians.append(float(np.median(times)))
    tracemalloc.stop()
    assert memory[-1] < memory[1] + 200_000
    assert max(medians[2:]) < 3 * min(medians)


def _layout(pipe: Pipeline, photo: Image.Image) -> Any:
    return pipe.family.layout(photo.resize((120, 80)))
