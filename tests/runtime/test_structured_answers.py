"""Answers in a given form: schemas, regular expressions and closed lists, of pipelines and of `sinkprune-run`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from PIL import Image

from sinkprune import Pipeline, PruningError, Session, UsageError
from support.programs.commands import assert_refused, run, succeed

Bundles, Pipelines = Callable[..., Path], Callable[..., Pipeline]
COLOURS = ["red", "green", "blue", "yellow", "orange", "purple"]
SCENE = {
    "type": "object",
    "properties": {
        "count": {"type": "integer", "minimum": 0, "maximum": 12},
        "colour": {"enum": COLOURS},
        "objects": {"type": "array", "items": {"type": "string", "maxLength": 5}, "maxItems": 2},
    },
    "required": ["count", "colour", "objects"],
    "additionalProperties": False,
}
QUESTION = "What is in the picture?"
ASK = ("--prompt", QUESTION)


@pytest.mark.parametrize("backend", ["ort-cpu", "openvino"])
def test_answers_of_random_weights_conform(backend: str, bundle: Bundles, photo: Image.Image) -> None:
    path, small = bundle("qwen-tied", budgets=("prune-66.7",)), photo.resize((90, 60))
    pipe = Pipeline.load(path, backend=backend, compute="fp32", threads=1)
    for temperature, budget in ((0.0, "none"), (0.0, "prune-66.7"), (1.0, "none"), (1.0, "prune-66.7")):
        options = {"temperature": temperature, "budget": budget, "max_new_tokens": 120}
        options |= {"seed": 3} if temperature else {}
        answer = pipe.generate(small, QUESTION, schema=SCENE, **options)
        assert answer.finish == "stop" and answer.confidence is None and answer.choices == {}
        jsonschema.validate(json.loads(answer.text), SCENE)
        answer = pipe.generate(small, QUESTION, regex="(left|right) [0-9]{2} cm", **options)
        assert re.fullmatch("(left|right) [0-9]{2} cm", answer.text) and answer.finish == "stop"


@pytest.fixture
def pipe(pipeline: Pipelines) -> Pipeline:
    return pipeline("qwen-tied", budgets=("prune-66.7",))


def test_pieces_of_a_stream_are_the_answer(pipe: Pipeline, photo: Image.Image) -> None:
    for options in ({"schema": SCENE}, {"choice": ["yes", "no"]}):
        stream = pipe.stream(photo, QUESTION, max_new_tokens=100, **options)
        pieces = [*stream]
        assert "".join(pieces) == stream.answer.text
        assert (len(pieces) > 5) == ("schema" in options)
        assert Session(pipe).generate(photo, QUESTION, max_new_tokens=100, **options).text == stream.answer.text


def test_an_answer_that_is_cut_has_the_reason_and_the_beginning(pipe: Pipeline, photo: Image.Image) -> None:
    whole = pipe.generate(photo, QUESTION, schema=SCENE, max_new_tokens=100)
    for most in (1, 5, len(whole.token_ids) - 1):
        cut = pipe.generate(photo, QUESTION, schema=SCENE, max_new_tokens=most)
        assert cut.finish == "length" and cut.token_ids == whole.token_ids[:most]
        assert whole.text.startswith(cut.text)
    exact = pipe.generate(photo, QUESTION, schema=SCENE, max_new_tokens=len(whole.token_ids))
    assert (exact.text, exact.finish) == (whole.text, "stop")
    stream = pipe.stream(photo, QUESTION, schema=SCENE, max_new_tokens=100)
    next(stream)
    stream.cancel()
    assert stream.rest().finish == "cancelled"


def test_a_closed_list_has_no_minimum_of_tokens_and_pruning_needs_a_picture(
    pipe: Pipeline, photo: Image.Image
) -> None:
    answer = pipe.generate(photo, "Is it on?", choice=["a", "b"], min_new_tokens=4, max_new_tokens=50)
    assert answer.text in ("a", "b")
    with pytest.raises(PruningError, match="the request has no picture"):
        pipe.generate((), "Is it on?", budget="prune-66.7")
    with pytest.raises(UsageError, match="costs are those of pictures"):
        pipe.warm_up((), "Is it on?")


def asked(bundle: Path, photo_file: Path, *options: object) -> tuple[dict[str, Any], str, str]:
    """Return the JSON of `sinkprune-run`, the answer's lines, and the notes."""
    done = succeed("sinkprune-run", bundle, "--image", photo_file, *ASK, *options, "--json", "answer.json")
    return json.loads(Path("answer.json").read_text()), done.stdout, done.stderr


def test_the_command_has_every_form(
    bundle: Bundles, photo_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    schema = {"type": "object", "properties": {"full": {"type": "boolean"}}, "required": ["full"]}
    Path("cup.json").write_text(json.dumps({**schema, "additionalProperties": False}))
    qwen, llava = bundle("qwen-tied"), bundle("gqa-112")
    found, _, _ = asked(qwen, photo_file, "--schema", "cup.json", "--max-new-tokens", 60)
    assert json.loads(found["text"]) in ({"full": True}, {"full": False})
    assert (found["confidence"], found["choices"], found["finish"]) == (None, {}, "stop")
    _, stdout, stderr = asked(qwen, photo_file, "--schema", "cup.json", "--max-new-tokens", 2)
    assert "the answer was cut off after 2 tokens, so it may not have the form" in stderr
    assert "; cut off after 2 tokens (--max-new-tokens)" in stdout
    _, stdout, _ = asked(qwen, photo_file, "--regex", "[0-9]{3} cm", "--max-new-tokens", 60)
    assert re.fullmatch("[0-9]{3} cm", stdout.splitlines()[0])
    found, stdout, _ = asked(llava, photo_file, "--choice", "the cup", "--choice", "the table")
    assert [*found["choices"]] == ["the cup", "the table"] and sum(found["choices"].values()) == pytest.approx(1)
    assert found["confidence"] == found["choices"][found["text"]] == max(found["choices"].values())
    text, _, _, *shares = stdout.splitlines()
    assert text == found["text"]
    assert shares == [f"{share:.3f} {name}" for name, share in found["choices"].items()]


def test_wrong_forms_are_refused_before_anything_is_loaded(
    photo_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.json").write_text("{")
    Path("list.json").write_text("[1]")
    for options, said in (
        (("--choice", "yes", "--choice", "no", "--regex", "a"), "regex and choice were given"),
        (("--schema", "missing.json"), "the schema 'missing.json' is missing. Give a JSON file"),
        (("--schema", "broken.json"), "the schema 'broken.json' is not JSON: "),
        (("--schema", "list.json"), "schema is [1], expected a JSON schema as a dict"),
        (("--schema", "list.json", "--json", "list.json"), "list.json"),
    ):
        assert_refused(run("sinkprune-run", "no-bundle", "--image", photo_file, *ASK, *options), said)
