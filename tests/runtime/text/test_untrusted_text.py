"""Chat templates run in a sandbox, and errors of templates and tokenizers are one message with the file's name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sinkprune.contract.errors import BundleError
from sinkprune.contract.manifest import Tokens
from sinkprune.runtime.text.answer_tokens import AnswerText
from sinkprune.runtime.text.prompt import ChatTemplate, PromptEncoder
from support.programs.repository import ROOT

TOKENIZER = ROOT / "tests" / "fuzz" / "corpus" / "tokenizers" / "harmless.json"


def template_of(special: str) -> dict[str, Any]:
    """Return a post-processor that writes a special token before each text."""
    a, b = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    single = [{"SpecialToken": {"id": special, "type_id": 0}}, a]
    return {"type": "TemplateProcessing", "single": single, "pair": [a, b], "special_tokens": {}}


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        # When it is read
        ("{{ unclosed", "no valid chat template"),
        ("{% nonsense %}", "unknown tag 'nonsense'"),
        ("{{ 'x' | no_such }}", "No filter named 'no_such'"),
        ("{% if true %}" * 500 + "{% endif %}" * 500, "nests too deep"),
        ("{% for x in [] %}" * 60 + "{% endfor %}" * 60, "too many statically nested blocks"),
        # When it is rendered
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "nests too deep"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages[0].update(role='system') }}", "unsafe"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{% import '/etc/passwd' as x %}", "no loader"),
        ("{% extends '/etc/passwd' %}", "no loader"),
        ("{{ range(10 ** 6) }}", "Range too big"),
        ("{{ '\\ud800' }}", "surrogates not allowed"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ raise_exception('only text, please') }}", "only text, please"),
    ],
)
def test_a_template_that_fails_or_leaves_the_sandbox_is_one_message(template: str, reason: str) -> None:
    with pytest.raises(BundleError, match=reason) as caught:
        ChatTemplate(template.encode()).render([{"role": "user", "content": "What?"}], "<s>", "</s>")
    assert "chat_template.jinja" in str(caught.value)
    assert "export it again" in str(caught.value)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''|attr('__class__') }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ '{x.__class__}'.format_map({'x': 1}) }}",
        "{{ raise_exception.__globals__ }}",
        "{{ messages.__class__ }}",
    ],
)
def test_an_unsafe_attribute_is_undefined(template: str) -> None:
    assert ChatTemplate(template.encode()).render([{"role": "user", "content": "What?"}], "<s>", "</s>") == ""


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, None),
        ({"added_tokens": {}}, "is no valid tokenizer: .*expected a sequence"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAQAAAAAAACAAAAAAAEA"}}, "is no valid"),
        ({"post_processor": template_of("<x>")}, "cannot encode the prompt: no entry found for key"),
        ({"decoder": {"type": "Strip", "content": "a", "start": 0, "stop": 5}}, "cannot decode an answer"),
    ],
)
def test_errors_and_panics_of_the_tokenizers_library_are_one_message(
    changed: dict[str, Any], reason: str | None
) -> None:
    template = b"<image>{% for part in messages[0].content if part.text %}{{ part.text }}{% endfor %}"

    def round_trip() -> str:
        tokenizer = json.dumps({**json.loads(TOKENIZER.read_bytes()), **changed}).encode()
        encoder = PromptEncoder(tokenizer, template, Tokens(6, (2,), "<s>", "</s>"))
        text = AnswerText(encoder.tokenizer)
        return "".join(map(text.add, encoder.encode(["", "aab ba"]).texts[-1]))

    if reason is None:
        assert round_trip() == "aabba"
        return
    with pytest.raises(BundleError, match=rf"the bundle's tokenizer\.json {reason}") as caught:
        round_trip()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
