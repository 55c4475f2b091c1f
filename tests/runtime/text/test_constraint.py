"""Constraints: answers of random logits conform to their schema or regex, with tokenizers of each kind."""

from __future__ import annotations

import json
import re
from datetime import date, datetime, time
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sinkprune import UsageError
from sinkprune.contract.manifest import Tokens
from sinkprune.runtime.text.answer_form import checked_regex, checked_schema
from sinkprune.runtime.text.answer_tokens import Sampler
from sinkprune.runtime.text.prompt import PromptEncoder
from sinkprune.serving.forms import Grammars
from support.models.checkpoints import IMAGE_TOKEN, tokenizer
from support.references.prompt_encoders import STOP, VOCABULARY, answer_encoder, random_answer

Schema = dict[str, Any]
KINDS = ("pocket", "qwen", "llama")
ENCODERS = {kind: answer_encoder(kind) for kind in KINDS}
GRAMMARS = {kind: Grammars(ENCODERS[kind], STOP[kind]) for kind in KINDS}
MOST = 400


def answer(
    kind: str,
    schema: Schema | None = None,
    regex: str | None = None,
    seed: int | None = 0,
    least: int = 0,
    most: int = MOST,
) -> tuple[str, list[int], bool]:
    """Return the text of random logits, its tokens, and whether it ended; greedy without a `seed`."""
    constraint = GRAMMARS[kind].constraint(checked_schema(schema), checked_regex(regex), least)
    sampler = Sampler() if seed is None else Sampler(1.5, seed=seed)
    return random_answer(ENCODERS[kind], STOP[kind], constraint, sampler, seed, most)


TEXTS = st.text(st.sampled_from('ab "\\\n/{}é€😀'), max_size=6)
NUMBERS = st.integers(-(10**15), 10**15) | st.integers(-(10**9), 10**9).map(lambda thousandths: thousandths / 1000)
LEAVES: st.SearchStrategy[Schema] = st.one_of(
    st.sampled_from([{"type": "boolean"}, {"type": "null"}]),
    st.builds(lambda low: {"type": "integer", "minimum": low, "maximum": low + 50}, st.integers(0, 99)),
    st.builds(lambda low: {"type": "number", "exclusiveMinimum": low, "maximum": low + 7}, st.integers(-9, 9)),
    st.builds(lambda least: {"type": "string", "minLength": least, "maxLength": 9}, st.integers(0, 9)),
    st.builds(
        lambda pattern: {"type": "string", "pattern": pattern},
        st.sampled_from(["^[a-f]{2,5}$", "^(left|right)-[0-9]+$", "^é?x$"]),
    ),
    st.builds(lambda kind: {"type": "string", "format": kind}, st.sampled_from(["date", "time", "date-time"])),
    st.builds(lambda values: {"enum": values}, st.lists(TEXTS | NUMBERS | st.none(), min_size=1, max_size=4)),
    st.builds(lambda value: {"const": value}, TEXTS | st.booleans() | st.lists(NUMBERS, max_size=2)),
)


def an_object(properties: dict[str, Schema], required: int) -> Schema:
    names = sorted(properties)[:required]
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def an_array(items: Schema, least: int) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": 3}


def larger(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    properties = st.dictionaries(st.sampled_from("abcde") | TEXTS, inner, max_size=4)
    arrays = st.builds(an_array, inner, st.integers(0, 2))
    alternatives = st.builds(lambda each: {"anyOf": each}, st.lists(inner, min_size=1, max_size=3))
    return st.builds(an_object, properties, st.integers(0, 4)) | arrays | alternatives


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(schema=st.recursive(LEAVES, larger, max_leaves=6), seed=st.none() | st.integers(0, 2**32))
def test_every_answer_conforms_to_its_schema(kind: str, schema: Schema, seed: int | None) -> None:
    text, ids, ended = answer(kind, schema, seed=seed)
    assume(ended)
    jsonschema.validate(json.loads(text), schema)
    assert not set(ids) & (ENCODERS[kind].special_ids - {*STOP[kind]})
    # The style of json.dumps: no other white space between the parts.
    assert "\n" not in text and text == text.strip()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "regex",
    ["[a-z]{2,7}", "(left|right) of .{3}", "^é+/?$", " a?", "x?y?", "(?i)yes|no", r"\d{2}/[\d\n]", r"(\s|-){3}"],
)
def test_every_answer_matches_its_regex(kind: str, regex: str) -> None:
    for seed in range(8):
        text, _, ended = answer(kind, regex=regex, seed=seed, most=60)
        if ended:
            assert re.fullmatch(regex, text), repr(text)


TIMES = {
    "date": (date.fromisoformat, ["2024-02-29", "2000-02-29", "0001-01-01", "0004-02-29", "9999-12-31"]),
    "time": (time.fromisoformat, ["23:59:59Z", "00:00:00.123456789+05:30", "10:00:00-00:00"]),
    "date-time": (datetime.fromisoformat, ["2023-01-01T10:00:00Z", "2024-02-29T23:59:59.5-23:59"]),
}
NO_TIMES = {
    "date": [
        *("2023-02-29", "1900-02-29", "2023-04-31", "2023-13-01", "2023-00-10", "2023-01-00", "2023-01-32"),
        *("0000-01-01", "23-01-01", "2023-1-1", "2023-01-01T"),
    ],
    "time": ["24:00:00Z", "10:60:00Z", "10:00:60Z", "23:59:60Z", "10:00:00", "10:00Z", "10:00:00z", "10:00:00+24:00"],
    "date-time": [*("2023-02-29T10:00:00Z", "2023-01-01T23:59:60Z", "2023-01-01t10:00:00Z", "2023-01-01 10:00:00Z")],
}


@pytest.mark.parametrize("form", TIMES)
def test_dates_and_times_exist(form: str) -> None:
    read, texts = TIMES[form]
    for text in texts:
        read(text)
        for same in ({"const": text}, {"pattern": f"^{re.escape(text)}$"}, {"enum": [text]}):
            assert checked_schema({"type": "string", "format": form, **same})
    for text in NO_TIMES[form]:
        with pytest.raises(UsageError, match=r"Regex is empty|Unsatisfiable") as refused:
            checked_schema({"type": "string", "format": form, "const": text})
        assert "[0-9]" not in str(refused.value)
    for seed in range(20):
        text, _, ended = answer("pocket", {"type": "string", "format": form}, seed=seed)
        assert ended and read(json.loads(text))


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_starts_as_the_model_would_write_it(kind: str) -> None:
    """Where the decoder takes a space from the start, the answer has one more."""
    encoder, constraint = ENCODERS[kind], GRAMMARS[kind].constraint(None, "red", 0)
    ids = encoder.answer_ids("red")
    assert encoder.tokenizer.decode(ids) == "red"
    for token in ids:
        assert constraint.allowed(VOCABULARY)[token]  # type: ignore[index]
        constraint.accept(token)
    assert constraint.complete
    spaced = encoder.tokenizer.id_to_token(ids[0])[0] in "▁Ġ"
    assert spaced == (kind != "qwen")


def test_no_token_is_forced_that_the_form_forbids() -> None:
    for least in (0, 3, 9):
        text, ids, ended = answer("qwen", regex="a{2,5}", least=least)
        assert ended and 2 <= len(text) <= 5
        assert len(ids) >= min(least, 5)
    assert len(answer("qwen", regex="ab", least=5)[0]) == 2


def test_logits_may_be_of_more_or_fewer_tokens_than_the_tokenizer() -> None:
    stop, encoder = {*STOP["qwen"]}, ENCODERS["qwen"]
    for size in (300, 375, 380, 1000):
        mask = GRAMMARS["qwen"].constraint(None, ".*", 0).allowed(size)
        assert mask is not None and mask.shape == (size,) and mask.dtype == np.bool_
        allowed = {*np.flatnonzero(mask).tolist()}
        assert allowed & stop == {token for token in stop if token < size}
        assert not allowed & (encoder.special_ids - stop) and max(allowed) < encoder.tokenizer.get_vocab_size()


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_of_a_special_token_is_letters_or_refused(kind: str) -> None:
    encoder = ENCODERS[kind]
    typed = f"a{encoder.tokenizer.id_to_token(STOP[kind][0])}b"
    ids = encoder.answer_ids(typed)
    assert len(ids) > 4 and not encoder.special_ids & {*ids}
    with pytest.raises(UsageError, match="no text of its special tokens"):
        answer(kind, {"const": typed})
    text, ids, ended = answer(kind, regex="[</a-z>|_]{9}")
    assert ended and len(text) == 9 and not encoder.special_ids & {*ids}


def test_characters_that_the_tokenizer_lacks_are_refused() -> None:
    json_text = tokenizer().backend_tokenizer.to_str().encode()
    encoder = PromptEncoder(json_text, b"", Tokens(IMAGE_TOKEN, (2,), "<s>", "</s>"))
    constraint = Grammars(encoder, (2,)).constraint({"type": "object"}, None, 0)
    constraint.accept(encoder.tokenizer.token_to_id("▁"))
    with pytest.raises(UsageError, match="has no token that continues the answer in the given form"):
        constraint.allowed(VOCABULARY)
    with pytest.raises(UsageError, match="cannot write 'zebra' as an answer"):
        encoder.answer_ids("zebra")
    assert encoder.tokenizer.decode(encoder.answer_ids("the cup")) == "the cup"
