"""Every construct that templates may use renders the same text as in transformers."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from sinkprune.runtime.text.chat_template import ChatTemplate

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
    "messages | length",
    "messages | tojson",
    "messages | tojson(indent=2)",
    "messages | tojson(ensure_ascii=true, sort_keys=true, separators=(',', ':'))",
    "messages | map(attribute='role') | join(', ')",
    "messages | map(attribute='role') | map('upper') | list",
    "messages | join('|', attribute='role')",
    "messages | selectattr('role', 'equalto', 'user') | list | length",
    "messages | rejectattr('role', 'in', ['user', 'tool']) | map(attribute='content') | first",
    "messages[-1]['role'] ~ messages[0].role ~ messages | length",
    "messages[::-1] | map(attribute='role') | list",
    "messages[1:]",
    "messages[0] | items | list",
    "messages[0].items() | list",
    "messages[0] | dictsort",
    "messages[0].get('x', 'none') + messages[0].get('role')",
    "messages[0].x is defined or messages[0].role is defined",
    "messages[0].content is string, messages[0].content is iterable, messages[0] is mapping, none is none",
    "'x' in messages[0], 'role' in messages[0], 'us' in messages[0].role, 3 not in [1, 2]",
    "(messages | map(attribute='role') | list) == ['user']",
    "1 < 2 < 3, 1 == 1.0, 'a' < 'b', [1] == [1], {'a': 1} == {'a': 1}",
    "7 // 2, 7 / 2, 7 % 4, 7 * 6, -7 + 1, 2 ** 10, 1 - 1.5",
    "'-' * 20 + 'x' * 0, [0] * 3, [1] + [2], (1,) + (2,)",
    "text | trim | upper | lower | capitalize | title",
    "text | trim | replace('i', 'I') | replace('', '-')",
    "text | escape, text | e | safe, '<' ~ (text | safe), '<' + (text | safe)",
    "text | indent(3), text | indent('> ', true, true)",
    "text | wordcount, text | string | length, text | list | last, text | reverse | first",
    "text.split(), text.split('<'), text.rsplit('<', 1), text.splitlines()",
    "text.strip().startswith('What'), text.rstrip('\\n ').endswith('}'), text.lstrip(' W')",
    "text.replace('b', 'c', 1), text.upper(), text.title(), text.count('i'), text.find('in')",
    "', '.join(['a', 'b']), text[2:9], text[-3:], text[::-1]",
    "'3' | int + 1, 'x' | int(5), 'ff' | int(0, 16), '2.5' | float, 2.567 | round(1), -3 | abs",
    "[3, 1, 2] | sort, [3, 1, 2] | sort(reverse=true), [3, 1, 2] | max, [3, 1, 2] | min",
    "range(3) | list, range(1, 9, 3) | list, range(3) | map('string') | join",
    "undefined_thing | default('d'), '' | default('d', true), undefined_thing",
    "bos_token + eos_token, 'a' if add_generation_prompt else 'b', ('c' if false)",
    "', '.join(messages | map(attribute='role')), 'user' in messages | map(attribute='role')",
    "dict(a=1, b=[2]), {'a': {'b': 2}}.a.b, namespace(x=3).x",
    "3 is odd, 4 is even, 9 is divisibleby(3), 3 is number, 'A' is upper, true is boolean, text is lower",
]
STATEMENTS = [
    "{% for m in messages %}{{ loop.index }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{% endfor %}",
    "{% for m in messages %}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.depth }}{% endfor %}",
    "{% for m in messages if m.role == 'user' %}{{ loop.index0 }}{{ loop.cycle('a', 'b') }}{% else %}no{% endfor %}",
    "{% for k, v in messages[0].items() %}{{ k }}{{ loop.previtem is defined }}{{ loop.changed(k) }}{% endfor %}",
    "{% for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}",
    "{% for x in range(9) %}{% if x == 2 %}{% continue %}{% elif x == 5 %}{% break %}{% endif %}{{ x }}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "{% set x = 1 %}{% for m in messages %}{% set x = 2 %}{% endfor %}{{ x }}",
    "{% set x %}  a{{ bos_token }}{% endset %}{{ x | trim }}{% set y | upper %}b{% endset %}{{ y }}",
    "{% macro f(a, b='-') %}{{ a }}{{ b }}{{ varargs }}{{ caller() if caller }}{% endmacro %}{{ f(1) ~ f(2, 'c') }}"
    "{% call f(3) %}in{% endcall %}{{ f(4, 5, 6) }}",
    "{% macro f(n) %}{{ n }}{% if n %}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(5) }}",
    "{% with a = 1 %}{{ a }}{% endwith %}{{ a }}{% filter upper %}x{{ bos_token }}{% endfilter %}",
    "{%- if messages | selectattr('role', 'equalto', 'nobody') %}a generator is true{% endif -%}",
    "{% set u = messages | selectattr('role', 'eq', 'user') %}{% if u is defined and u is iterable %}"
    "{% for m in u %}{{ m.role }}{% endfor %}{% endif %}",
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
