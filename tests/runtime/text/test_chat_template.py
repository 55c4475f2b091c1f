"""Chat templates, a checkpoint's own programs: rendered as transformers does, and refused where they fail."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast, ProcessorMixin

from sinkprune.contract.errors import BundleError
from support.models.checkpoints import TEMPLATE
from support.references.prompt_encoders import (
    SPECIALS,
    TOKENIZERS,
    Pairs,
    assert_typed_text_stays_text,
    encoder,
    llama,
)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("first", ["<s>", "{{ bos_token }}"])
def test_a_template_that_writes_the_first_token_itself_does_not_give_two(name: str, first: str, both: Pairs) -> None:
    pair = both(name, first + TEMPLATE)
    for text in ("What is this?", "<s> What is <s>?"):
        assert pair.found(text).count(1) == 1
    assert pair.found("What is this?") == pair.expected("What is this?", bos=False)


class TextProcessor(ProcessorMixin):
    """A processor of transformers' that has a tokenizer only."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, chat_template: str | None = None) -> None:
        super().__init__(tokenizer, chat_template=chat_template)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize(
    "first",
    ["", "<s>", "{{ bos_token }}", "<s><s>", "<s><s><s>", "</s></s>", "<pad><pad>", " <s>", "x<s>", "<unk>"],
)
def test_first_tokens_are_those_of_transformers_processors(name: str, first: str, both: Pairs) -> None:
    pair = both(name, first + TEMPLATE)
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


def test_a_typed_first_token_at_the_start_of_a_template_is_no_first_token(tokenizer_folder: Path) -> None:
    llama().save(str(tokenizer_folder / "tokenizer.json"))
    texts = encoder(tokenizer_folder, "{{ messages[0].content[1].text }}<image>").encode(["", "<s> What?"]).texts
    assert texts[0].count(1) == 1 and len(texts[0]) > 3


def test_a_template_may_write_special_tokens_of_its_own(both: Pairs) -> None:
    pair = both("llama", TEMPLATE + "</s><pad>{{ eos_token }}")
    found = pair.found("What is this?")
    assert found == pair.expected("What is this?")
    assert found[-3:] == [2, SPECIALS["<pad>"], 2]


def test_a_template_may_mark_what_is_generated_as_llavas_own_does(both: Pairs) -> None:
    template = (
        "{% for message in messages %}{{ message['role'].upper() + ': ' }}"
        "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
        "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}"
        "{% if message['role'] == 'assistant' %}{% generation %}{{ part['text'] }}{% endgeneration %}"
        "{% else %}{{ part['text'] + ' ' }}{% endif %}{% endfor %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
    )
    pair = both("llama", template)
    assert pair.found("What is this?") == pair.expected("What is this?")


def test_a_template_may_span_lines_and_trim_as_transformers_does(both: Pairs) -> None:
    template = (
        "  {% for message in messages %}\r\n"
        "{% for part in message['content'] %}\n"
        "    {% if part.type == 'image' %}\n<image>\n    {% continue %}\n    {% endif %}\n"
        "{{ part.text | trim }}\n"
        "{% endfor %}\n{% endfor %}\nASSISTANT:\n"
    )
    pair = both("llama", template)
    assert pair.found("  What is this?  ") == pair.expected("  What is this?  ")


@pytest.mark.parametrize(("written", "count"), [("", 0), ("<image><image>", 2), ("<image> and <image>\n", 2)])
def test_a_template_must_write_one_image(written: str, count: int, tokenizer_folder: Path) -> None:
    ours = encoder(tokenizer_folder, TEMPLATE.replace("<image>\n", written))
    with pytest.raises(BundleError, match=f"writes {count} images") as caught:
        ours.encode(["", "What is this?"])
    assert "chat template" in str(caught.value)


@pytest.mark.parametrize("template", ["{% for %}", "{{ unclosed", "{% if x %}", "{% nonsense %}", "{{ a b }}"])
def test_a_template_that_does_not_parse_is_refused_with_its_file(template: str, tokenizer_folder: Path) -> None:
    with pytest.raises(BundleError, match=r"chat_template\.jinja"):
        encoder(tokenizer_folder, template)


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('images are not supported') }}",
        "{{ messages[0].content.strip() }}",
        "{{ messages[3]['role'] }}",
        "{{ 'USER: ' + messages[0]['content'] }}",
        "{{ 1 / 0 }}",
        "{{ messages[0]['content'] | join('') | int + 'x' }}",
        "{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ range(10 ** 9) | list }}",
    ],
)
def test_a_template_that_fails_is_refused(template: str, tokenizer_folder: Path) -> None:
    ours = encoder(tokenizer_folder, template)
    with pytest.raises(BundleError, match="chat template"):
        ours.encode(["", "What is this?"])


def test_the_reason_a_template_gives_is_in_the_message(tokenizer_folder: Path) -> None:
    ours = encoder(tokenizer_folder, "{{ raise_exception('only text, please') }}")
    with pytest.raises(BundleError, match="only text, please"):
        ours.encode(["", "What is this?"])


def test_a_template_cannot_be_rendered_into_the_conversation_by_the_user(both: Pairs) -> None:
    pair = both("llama")
    text = "{{ 7 * 7 }}{% for m in messages %}<image>{% endfor %}"
    assert_typed_text_stays_text(pair, text)
