"""Chat templates and tokenizers that would take for ever, or all memory: each ends soon, small, with one message."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from sinkprune.contract.errors import BundleError
from sinkprune.contract.files.untrusted import UnreadableError
from sinkprune.contract.text.tokenizer_json import check_tokenizer_json
from sinkprune.runtime.text.chat_template import ChatTemplate
from support.programs.repository import ROOT

CORPUS = ROOT / "tests" / "fuzz" / "corpus"
HARMLESS = {"strftime_width", "harmless", "harmless_padding", "harmless_truncation"}
"""What takes little after all, and is taken."""
CHILD = """
import json, resource, sys, time
from pathlib import Path
from sinkprune.contract.errors import BundleError
from sinkprune.contract.manifest import Tokens
from sinkprune.runtime.text.chat_template import ChatTemplate
from sinkprune.runtime.text.prompt import PromptEncoder

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10

def render(source):
    content = [{"type": "image"}, {"type": "text", "text": "What?"}]
    ChatTemplate(source).render([{"role": "user", "content": content}], "<s>", "</s>")

def encode(source):
    template = b"<image>{% for part in messages[0].content if part.text %}{{ part.text }}{% endfor %}"
    encoder = PromptEncoder(source, template, Tokens(6, (2,), "<s>", "</s>"))
    ids = encoder.encode(["", "aab" + "a" * 200 + " ba"]).texts[-1]
    assert len(ids) == len(encoder.tokenizer.decode(ids)) == 205

resource.setrlimit(resource.RLIMIT_CPU, (120, 120))
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
for path in sorted(Path(sys.argv[1]).glob("*.j*")):
    print(json.dumps(path.stem), flush=True)
    started, before, result = time.process_time(), peak(), "taken"
    try:
        (render if path.suffix == ".jinja" else encode)(path.read_bytes())
    except BundleError as error:
        result = str(error)
    print(json.dumps([time.process_time() - started, peak() - before, result]), flush=True)
"""


@pytest.mark.parametrize(("folder", "file"), [("templates", "chat_template.jinja"), ("tokenizers", "tokenizer.json")])
def test_all_of_the_corpus_ends_soon_small_and_without_noise(folder: str, file: str) -> None:
    command = [sys.executable, "-c", CHILD, str(CORPUS / folder)]
    child = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    lines = [json.loads(line) for line in child.stdout.splitlines()]
    assert (child.returncode, child.stderr) == (0, ""), lines[-1]
    results = dict(zip(lines[::2], lines[1::2], strict=True))
    assert len(results) > 50
    for name, (seconds, megabytes, result) in results.items():
        assert seconds < 1.5, name
        assert megabytes < 100, name
        assert (result == "taken") == (name in HARMLESS), (name, result)
        assert result == "taken" or (file in result and "export" in result.lower()), (name, result)
        assert "\n" not in result and len(result) < 600, name


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        # When it is read
        ("{{ unclosed", "no valid chat template"),
        ("{% nonsense %}", "have no 'nonsense'"),
        ("{% include 'x' %}", "have no 'include'"),
        ("{% block x %}{% endblock %}", "have no 'block'"),
        ("{{ 'x' | center(10 ** 9) }}", "No filter named 'center'"),
        ("{{ 'x' is odder }}", "No test named 'odder'"),
        ("{% if true %}" * 500 + "{% endif %}" * 500, "nests too deep"),
        ("{% for x in [] %}{{ " + "1 + " * 120 + "1 }}{% endfor %}", "more than 100 deep"),
        ("{{ x }}" * 5000, "more than 10000 words"),
        # When it is rendered
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "computes too much"),
        (
            "{% for i in range(99999) %}{% for j in range(99999) if j < 0 %}{% endfor %}{% endfor %}",
            "computes too much",
        ),
        ("{% for i in range(9) %}{% set x = ('x' * 400000)[1:] %}{% endfor %}", "computes too much"),
        ("{{ ('a' * 200000).rfind('ab' + 'a' * 90000) }}", "computes too much"),
        ("{{ ('a' * 1000) | replace(new='x' * 9000, old='a') }}", "computes too much"),
        (
            "{% set n = namespace(v='x' * 999) %}{% for i in range(15) %}{% set n.v = n.v ~ n.v %}{% endfor %}",
            "computes too much",
        ),
        ("{% set s = 'x' * 99999 %}{% for i in range(99) %}{% set x = s[1:] %}{% endfor %}", "computes too much"),
        ("{{ 'x' * 40000 }}", "makes 40000 characters"),
        ("{{ range(10 ** 6) }}", "Range too big"),
        ("{{ 9 ** 9 ** 999 }}", "more than 1024 bits"),
        ("{{ strftime_now('%c' * 99) }}", "a form of more than 100 characters"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "nests too deep"),
        ("{{ 'x'.ljust(3) }}", "'ljust' of 'str' object is unsafe"),
        ("{{ messages.append(1) }}", "'append' of 'list' object is unsafe"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ '{:9}'.format(1) }}", "'format' of 'str' object is unsafe"),
        ("{{ '%9d' % 1 }}", "'%' would format text"),
        ("{{ namespace(a=1)._Namespace__attrs.a }}", "unsafe"),
        ("{{ 'a' * ((namespace(__html__=strftime_now) | string | length) + 40000) }}", "makes 40011 characters"),
        ("{{ namespace(__html__=messages) | escape }}{{ namespace().a.b }}", "no attribute 'a'"),
        ("{{ lipsum() }}", "'lipsum' is undefined"),
        ("{{ '\\ud800' }}", "surrogates not allowed"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ raise_exception('only text, please') }}", "only text, please"),
    ],
)
def test_what_no_chat_template_needs_is_refused_in_one_message(template: str, reason: str) -> None:
    with pytest.raises(BundleError, match=reason) as caught:
        ChatTemplate(template.encode()).render([{"role": "user", "content": "What?"}], "<s>", "</s>")
    assert "chat_template.jinja" in str(caught.value)
    assert "export it again" in str(caught.value)


@pytest.mark.parametrize(
    ("place", "changed", "reason"),
    [
        ("model", {"type": "WordLevel"}, "a model of type 'WordLevel', expected BPE"),
        ("model", {"vocab": {"a": 1, "b": 1}}, "gives two tokens one id"),
        ("model", {"vocab": {"a" * 1001: 1}}, "a token of more than 1000 letters"),
        ("model", {"vocab": {"a": 1 << 20}}, "ids that are not between 0 and 1048576"),
        ("added_tokens", [{"content": "a" * 1000}] * 1049, "more than 1048576 letters"),
    ],
)
def test_what_no_tokenizer_needs_is_refused(place: str, changed: Any, reason: str) -> None:
    root = json.loads((CORPUS / "tokenizers" / "harmless.json").read_bytes())
    check_tokenizer_json(json.dumps(root).encode())
    root[place] = {**root[place], **changed} if isinstance(changed, dict) else changed
    with pytest.raises(UnreadableError, match=reason):
        check_tokenizer_json(json.dumps(root).encode())


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% set x = messages[0].content | trim | upper %}{{ x.split('.')[0] | lower ~ '!' }}", "a word!"),
        ("{{ messages[0].content }}" * 8, "A word. " * 200_000),
        ("{{ messages[0].content | replace('!', 'x' * 99) | length }}", "200000"),
    ],
)
def test_a_long_prompt_may_take_more(template: str, expected: str) -> None:
    messages = [{"role": "user", "content": "A word. " * 25_000}]
    assert ChatTemplate(template.encode()).render(messages, "", "") == expected


def test_renderings_do_not_share_what_they_may_take() -> None:
    template = ChatTemplate(b"{% for i in range(50000) %}{% endfor %}{{ messages[0].content }}")
    for _ in range(3):
        assert template.render([{"role": "user", "content": "What?"}], "", "") == "What?"
