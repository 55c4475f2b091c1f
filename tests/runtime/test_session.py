"""Sessions: a second question about a picture gets the answer of a whole request, by less work."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sinkprune import Clip, Pipeline, Policy, Session
from sinkprune.runtime.backends import Engine
from sinkprune.serving import sessions as prefix_cache
from support.programs.slow_cases import each_once
from support.references.same_answers import kept_sets
from support.references.steps import Watched

Pipelines, Bundles = Callable[..., Pipeline], Callable[..., Path]
FIRST, SECOND = "What is on the table?", "Is the cup full, and where is it?"
NEW = {"max_new_tokens": 4, "min_new_tokens": 4}


def test_what_holds_engines_stays_in_its_process(pipeline: Pipelines, bundle: Bundles) -> None:
    pipe, policy = pipeline("gqa-112"), Policy.load(bundle("pi0", budgets=("prune-88.9",), max_images=2))
    for send in (pickle.dumps, ForkingPickler.dumps, copy.copy, copy.deepcopy):
        for name, held in (("Pipeline", pipe), ("Policy", policy), ("Session", Session(pipe))):
            with pytest.raises(TypeError, match=f"a {name} cannot be copied or sent .* Load the bundle in the"):
                send(held)


def answered(answering: Pipeline | Session, picture: object, question: object, **options: object) -> Watched:
    steps = Watched()
    answering.generate(picture, question, observer=steps, **{**NEW, **options})  # type: ignore[arg-type]
    return steps


def assert_same(found: Watched, expected: Watched, tolerance: float = 1e-3) -> None:
    assert kept_sets(found.answer) == kept_sets(expected.answer)
    assert found.answer.token_ids == expected.answer.token_ids
    assert found.answer.tokens_per_layer == expected.answer.tokens_per_layer
    assert found.answer.kv_bytes == expected.answer.kv_bytes
    for own, other in zip(found.logits, expected.logits, strict=True):
        np.testing.assert_allclose(own, other, atol=tolerance * np.abs(other).max())


def assert_as_alone(
    session: Session, picture: object, question: object, towers: bool = False, **options: object
) -> Watched:
    """Ask a session: the answer is that of the pipeline, and reuses the towers' output only with `towers`."""
    found = answered(session, picture, question, **options)
    assert_same(found, answered(session.pipeline, picture, question, **options))
    assert (found.answer.reused_towers > 0) == towers
    return found


def assert_whole(
    pipeline: Pipeline, picture: Any, questions: Sequence[object] = (FIRST, SECOND), **options: object
) -> None:
    """Ask in turn: each answer is that of the pipeline, and reuses the same picture, or the text before another."""
    session = Session(pipeline)
    for number, question in enumerate([*questions, *questions]):
        found = assert_as_alone(session, picture, question, towers=number > 0, **options)
        assert (found.answer.reused_rows >= found.rows.on_host.visual[-1]) == (number > 0)
    if isinstance(picture, Image.Image):
        session = Session(pipeline)
        for number, other in enumerate([picture, picture.rotate(180)]):
            found = assert_as_alone(session, other, FIRST, system="Answer in one word.", **options)
            assert found.answer.reused_rows == (text_before(found) if number else 0)


def reuses_pictures(found: Watched) -> bool:
    return found.answer.reused_rows > text_before(found)


def text_before(found: Watched) -> int:
    """Return the number of rows before the first picture."""
    return int(found.rows.on_host.visual[0])


@pytest.mark.parametrize(
    ("backend", "budget"),
    each_once(
        ["ort-cpu", "openvino", "ort-cpu+openvino", "ort-cpu+openvino-prefill", "ort-cpu of opset20"],
        ["none", "retain-64", "retain-64+compact"],
    ),
)
def test_a_second_question_on_every_backend(backend: str, budget: str, bundle: Bundles, photo: Image.Image) -> None:
    backend, _, dialect = backend.partition(" of ")
    path = bundle("gqa-112", "fp32", ("retain-64", "retain-64+compact"), dialect or "opset24")
    pipeline = Pipeline.load(path, backend=backend, compute="fp32")
    assert_whole(pipeline, photo, budget=budget)


def test_no_layer_runs_the_same_text_twice(bundle: Bundles, photo: Image.Image) -> None:
    ran: list[int] = []

    def wrap(graph: str, engine: Engine, _: object) -> Engine:
        def run(inputs: Mapping[str, Any]) -> dict[str, Any]:
            ran.append(inputs["hidden"].shape()[1])
            return engine(inputs)

        return run if graph.startswith("decoder_") else engine  # type: ignore[return-value]

    path = bundle("gqa-112", "fp32", ("retain-64", "retain-32"))
    session = Session(Pipeline.load(path, backend="ort-cpu", wrap=wrap))
    segments = len(session.pipeline.chain.segments)
    assert segments > 2
    for question, budget in ((FIRST, "retain-64"), (FIRST, "retain-32"), (SECOND, "retain-32"), (FIRST, "none")):
        ran.clear()
        found = answered(session, photo, question, budget=budget, max_new_tokens=1, min_new_tokens=1)
        layers = [layers.start for layers in session.pipeline.chain.segments]
        whole = [found.answer.tokens_per_layer[layer] + found.answer.prompt_tokens for layer in layers]
        # The first request has nothing to reuse, and unpruned engines are asked for other outputs.
        reused = 0 if (question, budget) in ((FIRST, "retain-64"), (FIRST, "none")) else text_before(found)
        own = [found.answer.reused_rows] + [reused] * (segments - 1)
        assert ran == [rows - known for rows, known in zip(whole, own, strict=True)], (question, budget)


@pytest.mark.parametrize(
    ("name", "budget"),
    [
        *each_once(["qwen-tied", "qwen2-vl", "qwen3-vl", "internvl"], ["none", "prune-66.7"]),
        *each_once(["next-mistral"], ["none", "retain-320"]),
    ],
)
def test_every_family(name: str, budget: str, pipeline: Pipelines, photo: Image.Image) -> None:
    budgets = ("retain-320",) if name.startswith("next") else ("prune-66.7",)
    assert_whole(pipeline(name, "fp32", budgets), photo.resize((300, 200)), budget=budget)


def test_clips_weights_and_several_pictures(pipeline: Pipelines, bundle: Bundles, photo: Image.Image) -> None:
    clip = Clip([photo.rotate(turn).resize((120, 90)) for turn in (0, 20, 40, 60)], fps=2)
    for name in ("qwen-tied", "qwen3-vl"):
        pipe = pipeline(name, "fp32", ("prune-66.7",), max_frames=8)
        assert_whole(pipe, clip, budget="prune-66.7")
    pipe = Pipeline.load(bundle("gqa-112", "fp32", ("retain-64",), weights="int4"))
    assert_whole(pipe, photo, budget="retain-64")
    pipe = pipeline("gqa-112", "fp32", ("retain-64",), max_images=3)
    questions = [["First:", "Second:", FIRST], ["First:", "Second:", SECOND]]
    assert_whole(pipe, [photo, photo.rotate(90)], questions, budget="retain-64")


@pytest.fixture(autouse=True)
def every_text_is_worth_storing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of tests are so small that theirs are not."""
    monkeypatch.setattr(prefix_cache, "WORTH_FLOPS", 0)


@pytest.fixture
def pipe(pipeline: Pipelines) -> Pipeline:
    return pipeline("gqa-112", "fp32", ("retain-64", "retain-192"))


def test_a_conversation_reuses_its_earlier_words(pipe: Pipeline, photo: Image.Image) -> None:
    session, history, reused = Session(pipe), list[tuple[str, str]](), list[int]()
    for question in (FIRST, SECOND, "And the spoon?"):
        options: Any = {"budget": "retain-64", "history": history}
        found = assert_as_alone(session, photo, question, towers=bool(history), **options)
        history += [("user", question), ("assistant", "A cup.")]
        reused.append(found.answer.reused_rows)
    # Each turn reuses the rows of the one before, but for the start of the answer.
    assert 0 == reused[0] < found.rows.on_host.visual[-1] < reused[1] < reused[2] < found.rows.length


def test_what_differs_before_the_question_is_computed_anew(pipe: Pipeline, photo: Image.Image) -> None:
    cases: list[tuple[dict[str, object], bool]] = [
        ({"budget": "retain-192"}, False),
        ({"budget": "none"}, False),
        ({"budget": "retain-64", "system": "Answer in one word."}, False),
        ({"budget": "retain-64", "temperature": 0.5, "seed": 3}, True),
    ]
    for options, rows in cases:
        session = Session(pipe)
        answered(session, photo, FIRST, budget="retain-64")
        found = assert_as_alone(session, photo, SECOND, towers=True, **options)
        assert reuses_pictures(found) == rows, options
    # The same question computes its last row.
    first, again = answered(session, photo, FIRST), answered(session, photo, FIRST)
    assert_same(again, first)
    assert again.answer.reused_rows == again.rows.length - 1


def test_answers_that_reuse_rows_do_not_correct_the_costs(bundle: Bundles, photo: Image.Image) -> None:
    pipeline = Pipeline.load(bundle("gqa-112", "fp32", ("retain-64",)))
    costs = pipeline.warm_up(photo, FIRST, seconds=0.2)
    session, corrections = Session(pipeline), []
    other = photo.rotate(90)
    # The third request is about another picture after the same text.
    for answering, picture in ((session, photo), (session, photo), (session, other), (pipeline, photo)):
        answered(answering, picture, SECOND, deadline_ms=60_000)
        corrections.append(len(pipeline._history_of(costs).recent.first))
    assert corrections == [1, 1, 2, 3]


def test_one_pixel_makes_another_picture(pipe: Pipeline, photo: Image.Image) -> None:
    session, other = Session(pipe), photo.copy()
    other.putpixel((0, 0), (1, 2, 3))
    # Later answers of the session have the same arrays.
    kept = answered(session, photo, FIRST).answer.kept
    for array in (kept.norms, kept.salience, kept.index):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0
    assert not reuses_pictures(assert_as_alone(session, other, FIRST))


def test_memory_is_bounded_and_the_oldest_goes_first(pipe: Pipeline, photo: Image.Image) -> None:
    pictures = [photo.rotate(turn) for turn in (0, 90, 180)]
    session = Session(pipe)
    sizes = [answered(session, picture, FIRST, budget="retain-64") and session.nbytes for picture in pictures]
    # The text before the pictures, and two and a half pictures.
    most = (sizes[1] + sizes[2]) // 2
    session = Session(pipe, max_bytes=most)
    reused = []
    for number in (0, 1, 0, 2, 0, 1):
        expected = len(reused) in (2, 4)
        found = assert_as_alone(session, pictures[number], FIRST, towers=expected, budget="retain-64")
        reused.append(reuses_pictures(found))
        assert 0 < session.nbytes <= most
    assert reused == [False, False, True, False, True, False]
    session = Session(pipe, max_bytes=0)
    for _ in range(2):
        found = answered(session, photo, FIRST)
        assert (found.answer.reused_towers, found.answer.reused_rows, session.nbytes) == (0, 0, 0)


@pytest.mark.parametrize("backend", ["ort-cpu", "openvino"])
def test_threads_that_share_a_session(backend: str, bundle: Bundles, photo: Image.Image) -> None:
    pipeline = Pipeline.load(bundle("gqa-112", "fp32", ("retain-64",)), backend=backend, compute="fp32", threads=1)
    session = Session(pipeline, max_bytes=1 << 20)
    pictures = [photo.rotate(turn).resize((100, 80)) for turn in range(0, 360, 60)]
    requests = [(picture, question) for picture in pictures for question in (FIRST, SECOND)]
    expected = [pipeline.generate(*request, budget="retain-64", **NEW).token_ids for request in requests]

    def ask(number: int) -> list[int]:
        return session.generate(*requests[number], budget="retain-64", **NEW).token_ids

    numbers = np.random.default_rng(0).integers(len(requests), size=60).tolist()
    with ThreadPoolExecutor(4) as threads:
        assert [*threads.map(ask, numbers)] == [expected[number] for number in numbers]


def test_an_answer_that_goes_on_leaves_the_memory_as_it_is(pipe: Pipeline, photo: Image.Image) -> None:
    """Its cache is a copy: tokens of one answer are no rows of another."""
    session = Session(pipe)
    long = session.stream(photo, FIRST, max_new_tokens=40, min_new_tokens=40)
    next(long)
    for question in (SECOND, FIRST):
        assert_as_alone(session, photo, question, towers=True)
    assert long.rest().token_ids == pipe.generate(photo, FIRST, max_new_tokens=40, min_new_tokens=40).token_ids
