"""Tokenizers that would end the process, or take for ever: each is refused soon, with one message and no noise."""

from __future__ import annotations

import json
import subprocess
import sys

from support.programs.repository import ROOT

TOKENIZERS = ROOT / "tests" / "fuzz" / "corpus" / "tokenizers"
CHILD = """
import json, resource, sys, time
from pathlib import Path
from sinkprune.contract.errors import BundleError
from sinkprune.contract.manifest import Tokens
from sinkprune.runtime.text.prompt import PromptEncoder

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10

template = b"<image>{% for part in messages[0].content if part.text %}{{ part.text }}{% endfor %}"
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
for path in sorted(Path(sys.argv[1]).glob("*.json")):
    print(json.dumps(path.stem), flush=True)
    started, before = time.process_time(), peak()
    try:
        encoder = PromptEncoder(path.read_bytes(), template, Tokens(6, (2,), "<s>", "</s>"))
        ids = encoder.encode(["", "aab" + "a" * 200 + " ba"]).texts[-1]
        said = f"encoded {len(ids)} {len(encoder.tokenizer.decode(ids))}"
    except BundleError as error:
        said = str(error)
    print(json.dumps([time.process_time() - started, peak() - before, said]), flush=True)
"""


def test_every_tokenizer_of_the_corpus_is_refused_soon_and_without_noise() -> None:
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(TOKENIZERS)], capture_output=True, text=True, timeout=120, check=False
    )
    lines = [json.loads(line) for line in child.stdout.splitlines()]
    assert child.returncode == 0, (lines[-1], child.stderr)
    assert child.stderr == ""
    results = dict(zip(lines[::2], lines[1::2], strict=True))
    assert len(results) == len(list(TOKENIZERS.glob("*.json"))) > 40
    for name, (seconds, megabytes, said) in results.items():
        assert seconds < 1.5, (name, seconds)
        assert megabytes < 100, (name, megabytes)
        if name.startswith("harmless"):
            assert said == "encoded 205 205", name
        else:
            assert "tokenizer.json" in said, name
            assert "Export the checkpoint again" in said, name
