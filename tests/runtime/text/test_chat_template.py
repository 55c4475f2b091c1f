"""Special tokens and images that chat templates write become the ids that transformers gives them."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast, ProcessorMixin

from sinkprune.contract.errors import BundleError
from support.models.checkpoints import TEMPLATE
from support.references.prompt_encoders import SPECIALS, TOKENIZERS, Pairs, encoder, llama


class TextProcessor(ProcessorMixin):
    """A processor of transformers' that has a tokenizer only."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, chat_template: str | None = None) -> None:
        super().__init__(tokenizer, chat_template=chat_template)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize(
    "first", ["", "<s>", "{{ bos_token }}", "<s><s>", "<s><s><s>", "</s></s>", "<pad><pad>", " <s>", "x<s>", "<unk>"]
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


def test_a_template_may_write_special_tokens_of_its_own(both: Pairs) -> None:
    pair = both("llama", TEMPLATE + "</s><pad>{{ eos_token }}")
    found = pair.found("What is this?")
    assert found == pair.expected("What is this?")
    assert found[-3:] == [2, SPECIALS["<pad>"], 2]


@pytest.mark.parametrize(("written", "count"), [("", 0), ("<image><image>", 2), ("<image> and <image>\n", 2)])
def test_a_template_must_write_one_image(written: str, count: int, tokenizer_folder: Path) -> None:
    ours = encoder(tokenizer_folder, TEMPLATE.replace("<image>\n", written))
    with pytest.raises(BundleError, match=f"writes {count} images") as caught:
        ours.encode(["", "What is this?"])
    assert "chat template" in str(caught.value)
