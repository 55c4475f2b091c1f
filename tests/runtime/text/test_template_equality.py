"""Templates render the same text as in transformers: its filters, functions, tags and handling of white space."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from sinkprune.runtime.text.prompt import ChatTemplate

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
