"""Chat templates that would take for ever, or all memory: each ends soon, small and with one message."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from sinkprune.contract.errors import BundleError
from sinkprune.contract.files.untrusted import TEMPLATE_BYTES
from sinkprune.runtime.text.chat_template import ChatTemplate
from support.programs.repository import ROOT

TEMPLATES = ROOT / "tests" / "fuzz" / "corpus" / "templates"
HARMLESS = {"nested_map"}
"""What takes little after all, and is rendered."""
CHILD = """
import json, resource, sys, time
from pathlib import Path
from sinkprune.contract.errors import BundleError
from sinkprune.runtime.text.chat_template import ChatTemplate

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10

resource.setrlimit(resource.RLIMIT_CPU, (120, 120))
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
for path in sorted(Path(sys.argv[1]).glob("*.jinja")):
    print(json.dumps(path.stem), flush=True)
    started, before = time.process_time(), peak()
    try:
        messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}]
        said = "rendered " + ChatTemplate(path.read_bytes()).render(messages, "<s>", "</s>", 5)
    except BundleError as error:
        said = str(error)
    print(json.dumps([time.process_time() - started, peak() - before, said]), flush=True)
"""


def test_every_template_of_the_corpus_ends_soon_and_small() -> None:
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(TEMPLATES)], capture_output=True, text=True, timeout=240, check=False
    )
    lines = [json.loads(line) for line in child.stdout.splitlines()]
    assert child.returncode == 0, (lines[-1], child.stderr)
    results = dict(zip(lines[::2], lines[1::2], strict=True))
    assert len(results) == len(list(TEMPLATES.glob("*.jinja"))) > 100
    for name, (seconds, megabytes, said) in results.items():
        assert seconds < 1.5, (name, seconds)
        assert megabytes < 100, (name, megabytes)
        assert said.startswith("rendered") == (name in HARMLESS), (name, said)
        assert "\n" not in said, name
        assert len(said) < 600, name


@pytest.mark.parametrize(
    ("template", "bound"),
    [
        (b"{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "more than 400080 steps"),
        (b"{{ 'x' * 10 ** 9 }}", "more than 4194624 characters"),
        (b"{% for i in range(9) %}{% set x = ('x' * 400000)[1:] %}{% endfor %}", "more than 4194624 characters"),
        (b"{{ range(10 ** 6) }}", "further than 100000"),
        (b"{{ 9 ** 9 ** 999 }}", "more than 1024 bits"),
        (b"{{ messages | tojson(indent=10 ** 9) }}", "an indent or separators of more than 32"),
        (b"{{ strftime_now('%9999d') }}", "with a width"),
        (b"{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself too deep"),
        (b"{{ 'x'.ljust(3) }}", "'ljust' of 'str' object is unsafe"),
        (b"{{ lipsum() }}", "'lipsum' is undefined"),
        (b"{{ '\\ud800' }}", "surrogates not allowed"),
    ],
)
def test_a_bound_is_named_when_the_template_is_rendered(template: bytes, bound: str) -> None:
    made = ChatTemplate(template)
    with pytest.raises(BundleError, match=bound):
        made.render([{"role": "user", "content": "What?"}], "<s>", "</s>", 5)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (b"{{ messages }}\xff", "is not UTF-8"),
        (b"{% if true %}" * 500 + b"{% endif %}" * 500, "nests too deep"),
        (b"{{ " + b"[" * 500 + b"]" * 500 + b" }}", "nests too deep"),
        (b"{{ " + b"1 + " * 500 + b"1 }}", "more than 100 deep"),
        (b"{{ x }}" * 5000, "more than 10000 words"),
        (b" " * (TEMPLATE_BYTES + 1), f"expected at most {TEMPLATE_BYTES}"),
        (b"{{ 'x' | center(10 ** 9) }}", "No filter named 'center'"),
        (b"{{ 'x' is odder }}", "No test named 'odder'"),
        (b"{% include 'x' %}", "have no 'include'"),
        (b"{% block x %}{% endblock %}", "have no 'block'"),
    ],
)
def test_what_is_no_chat_template_is_refused_when_it_is_read(template: bytes, reason: str) -> None:
    with pytest.raises(BundleError, match=reason) as caught:
        ChatTemplate(template)
    assert "chat_template.jinja" in str(caught.value)
    assert "export it again" in str(caught.value)


def test_a_filter_that_is_not_reached_may_be_unknown() -> None:
    template = b"{{ messages[0].content if true else messages | fromjson }}"
    assert ChatTemplate(template).render([{"role": "user", "content": "What?"}], "", "", 5) == "What?"


def test_a_long_prompt_may_take_more() -> None:
    template = b"{% for m in messages %}{% set x = m.content | trim | upper %}{{ x.split('.')[0] | lower ~ '!' }}"
    template += b"{% endfor %}"
    text = "A word. " * 25_000
    assert ChatTemplate(template).render([{"role": "user", "content": text}], "", "", len(text)) == "a word!"
    whole = "{{ messages[0].content }}" * 8
    assert ChatTemplate(whole.encode()).render([{"role": "user", "content": text}], "", "", len(text)) == text * 8


def test_renderings_do_not_share_what_they_may_take() -> None:
    template = ChatTemplate(b"{% for i in range(50000) %}{% endfor %}{{ messages[0].content }}")
    for _ in range(12):
        assert template.render([{"role": "user", "content": "What?"}], "", "", 5) == "What?"
