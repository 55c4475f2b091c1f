"""Chat templates: rendered as by transformers, with its first tokens and system messages, and kept in a sandbox."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast, ProcessorMixin
from transformers.utils.chat_template_utils import render_jinja_template

from sinkprune import PromptError
from sinkprune.contract.errors import BundleError
from sinkprune.contract.manifest import Tokens
from sinkprune.runtime.text.answer_tokens import AnswerText
from sinkprune.runtime.text.prompt import ChatTemplate, PromptEncoder
from support.models.checkpoints import TEMPLATE
from support.programs.repository import ROOT
from support.references.prompt_encoders import SPECIALS, TOKENIZERS, Pairs, encoder, llama

TEXT = "  What's <b>in</b> the “picture”?\n\nGröße & 🙂 {{ 7 }}  "
PARTS = [{"type": "image"}, {"type": "text", "text": TEXT}, {"type": "image"}, {"type": "text", "text": "One, two"}]
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": PARTS}],
    [{"role": "user", "content": TEXT}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": PARTS[:2]},
        {"role": "assistant", "content": "<think>\nHm.</think>Yes.", "n": [3, 1.5, True, None]},
        {"role": "user", "content": []},
    ],
]
EXPRESSIONS = [
    "messages | tojson",
    "messages | tojson(indent=2)",
    "messages | tojson(ensure_ascii=true, sort_keys=true, separators=(',', ':'))",
    "messages[0] | items | list",
    "messages[0].x is defined or messages[0].role is defined",
    "text | trim | replace('i', 'I'), text | escape, text.split('<'), text[::-1]",
    "undefined_thing | default('d'), '' | default('d', true), undefined_thing",
    "bos_token + eos_token, 'a' if add_generation_prompt else 'b', ('c' if false)",
]
STATEMENTS = [
    "{% for x in range(9) %}{% if x == 2 %}{% continue %}{% elif x == 5 %}{% break %}{% endif %}{{ x }}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "{% macro f(a, b='-') %}{{ a }}{{ b }}{{ caller() if caller }}{% endmacro %}{% call f(3) %}in{% endcall %}",
    "{% for m in messages %}{{ loop.index }}{{ loop.cycle('a', 'b') }}{% endfor %}",
    "  {% if true %}\n  x  \n  {%- endif +%}\r\n{# y #}\n{% raw %}{{ z }}{% endraw %}\n",
    "{% generation %}{{ bos_token }}{% endgeneration %}{{ strftime_now('%Y') }}{{ strftime_now('%-d %B') }}",
]


@pytest.mark.parametrize("template", [*(f"{{{{ [{one}] }}}}" for one in EXPRESSIONS), *STATEMENTS], ids=ascii)
def test_templates_render_as_in_transformers(template: str) -> None:
    source = "{% set text = messages[-1].content | string %}" + template
    texts, _ = render_jinja_template(
        CONVERSATIONS, chat_template=source, add_generation_prompt=True, bos_token="<s>", eos_token="</s>"
    )
    ours = ChatTemplate(source.encode())
    assert [ours.render(conversation, "<s>", "</s>") for conversation in CONVERSATIONS] == texts


SYSTEM, QUESTION = "  Answer in one word, as a robot.\nBe brief. ", "What is on the table?"
WITHOUT = {
    "left out": TEMPLATE.replace(
        "{% for message in messages %}", "{% for message in messages if message.role == 'user' %}"
    ),
    "refused": "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    + TEMPLATE,
}


@pytest.mark.parametrize("template", WITHOUT)
def test_a_template_without_a_place_for_it_is_an_error(template: str, both: Pairs) -> None:
    encoder = both("trained llama", WITHOUT[template]).ours
    assert encoder.encode(["", QUESTION]).text_tokens > 0
    with pytest.raises(PromptError, match="chat template has no place for a system message"):
        encoder.encode(["", QUESTION], system=SYSTEM)


@pytest.mark.parametrize("system", [SYSTEM, "'quoted'"])
def test_a_system_message_is_a_str_where_parts_would_be_written_as_a_list(system: str, both: Pairs) -> None:
    written = "{% if messages[0].role == 'system' %}[SYS]{{ messages[0].content | trim }}[/SYS]{% endif %}"
    encoder = both("byte-level", written + TEMPLATE).ours
    prompt = encoder.encode(["", QUESTION], system=system)
    assert f"[SYS]{system.strip()}[/SYS]" in encoder.tokenizer.decode(prompt.texts[0])


class TextProcessor(ProcessorMixin):
    """A processor of transformers' that has a tokenizer only."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, chat_template: str | None = None) -> None:
        super().__init__(tokenizer, chat_template=chat_template)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize(
    "first", ["", "<s>", "{{ bos_token }}", "<s><s>", "<s><s><s>", "</s></s>", "<pad><pad>", " <s>", "x<s>", "<unk>"]
)
def test_special_tokens_of_a_template_are_those_of_transformers(name: str, first: str, both: Pairs) -> None:
    pair = both(name, first + TEMPLATE + "</s><pad>{{ eos_token }}")
    content = [{"type": "image"}, {"type": "text", "text": "What is this?"}]
    processor = TextProcessor(pair.theirs, chat_template=pair.template)
    expected = processor.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=True, add_generation_prompt=True, return_dict=True
    )["input_ids"]
    assert pair.found("What is this?") == (expected[0] if isinstance(expected[0], list) else expected)


def test_a_tokenizer_that_adds_no_first_token_keeps_two_of_the_template(tokenizer_folder: Path) -> None:
    backend = llama()
    backend.post_processor = None
    backend.save(str(tokenizer_folder / "tokenizer.json"))
    for first, ids in (("<s><s>", [1, 1]), ("<pad><pad>", [SPECIALS["<pad>"]] * 2), ("<s>", [1])):
        found = encoder(tokenizer_folder, first + "U" + TEMPLATE).encode(["", "What?"]).texts[0]
        assert [token for token in found if token in SPECIALS.values()] == ids


@pytest.mark.parametrize(("written", "count"), [("", 0), ("<image> and <image>\n", 2)])
def test_a_template_must_write_one_image(written: str, count: int, both: Pairs) -> None:
    ours = both("llama", TEMPLATE.replace("<image>\n", written)).ours
    with pytest.raises(BundleError, match=f"chat template writes {count} images"):
        ours.encode(["", "What is this?"])


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
        # When it is rendered
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "nests too deep"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages[0].update(role='system') }}", "unsafe"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ range(10 ** 6) }}", "Range too big"),
        ("{{ '\\ud800' }}", "surrogates not allowed"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ raise_exception('only text, please') }}", "only text, please"),
    ],
)
def test_a_template_that_fails_or_leaves_the_sandbox_is_one_message(template: str, reason: str) -> None:
    with pytest.raises(BundleError, match=rf"chat_template\.jinja .*{reason}.* export it again"):
        ChatTemplate(template.encode()).render([{"role": "user", "content": "What?"}], "<s>", "</s>")


def test_an_unsafe_attribute_is_undefined() -> None:
    for template in (
        "{{ ''|attr('__class__') }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ '{x.__class__}'.format_map({'x': 1}) }}",
        "{{ raise_exception.__globals__ }}",
        "{{ messages.__class__ }}",
    ):
        rendered = ChatTemplate(template.encode()).render([{"role": "user", "content": "What?"}], "<s>", "</s>")
        assert rendered == "", template


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
def test_errors_and_panics_of_tokenizers_are_one_message(changed: dict[str, Any], reason: str | None) -> None:
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
