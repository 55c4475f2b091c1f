"""System messages become the ids that transformers' templates give them."""

from __future__ import annotations

from typing import Any

import pytest

from sinkprune import PromptError
from support.models.checkpoints import IMAGE_TOKEN, TEMPLATE
from support.references.prompt_encoders import Pairs

SYSTEM, QUESTION = "  Answer in one word, as a robot.\nBe brief. ", "What is on the table?"
WRITES = (
    "{% for m in messages %}{% if m.role == 'system' %}[SYS]{{ m['content'] | trim }}[/SYS]{% else %}"
    "{% for c in m.content %}{% if c.type == 'image' %}<image>{% else %}{{ c.text }}{% endif %}{% endfor %}"
    "{% endif %}{% endfor %}ASSISTANT:"
)
"""Its system message is a str, and would be written as Python writes a list."""
WITHOUT = {
    "left out": TEMPLATE.replace(
        "{% for message in messages %}", "{% for message in messages if message.role == 'user' %}"
    ),
    "refused": "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    + TEMPLATE,
}


@pytest.mark.parametrize(
    ("source", "in_parts", "tokenizer"), [(TEMPLATE, True, "trained llama"), (WRITES, False, "byte-level")]
)
@pytest.mark.parametrize("system", [SYSTEM, "", "'quoted'"])
def test_a_system_message_is_written_as_by_transformers(
    source: str, in_parts: bool, tokenizer: str, system: str, both: Pairs
) -> None:
    pair = both(tokenizer, source)
    content: Any = [{"type": "text", "text": system}] if in_parts else system
    user = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    rendered = pair.theirs.apply_chat_template(
        [{"role": "system", "content": content}, {"role": "user", "content": user}],
        chat_template=source,
        tokenize=False,
        add_generation_prompt=True,
    )
    assert system.strip() in rendered
    prompt = pair.ours.encode(["", QUESTION], system=system)
    assert [*prompt.texts[0], IMAGE_TOKEN, *prompt.texts[1]] == pair.theirs(rendered)["input_ids"]


@pytest.mark.parametrize("template", WITHOUT)
def test_a_template_without_a_place_for_it_is_an_error(template: str, both: Pairs) -> None:
    encoder = both("trained llama", WITHOUT[template]).ours
    assert encoder.encode(["", QUESTION]).text_tokens > 0
    with pytest.raises(PromptError, match="chat template has no place for a system message"):
        encoder.encode(["", QUESTION], system=SYSTEM)
