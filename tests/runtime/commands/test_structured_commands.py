"""`sinkprune-run --schema`, `--regex` and `--choice`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from support.programs.commands import assert_refused, run

Bundles = Callable[..., Path]
ASK = ("--prompt", "What is in the picture?", "--max-new-tokens", 60)


def test_the_answer_conforms_to_a_schema_in_a_file(bundle: Bundles, photo_file: Path, tmp_path: Path) -> None:
    schema = tmp_path / "cup.json"
    schema.write_text(
        '{"type": "object", "properties": {"full": {"type": "boolean"}}, "required": ["full"], '
        '"additionalProperties": false}'
    )
    done = run("sinkprune-run", bundle("qwen-tied"), "--image", photo_file, *ASK, "--schema", schema, "--json")
    found = json.loads(done.stdout)
    assert json.loads(found["text"]) in ({"full": True}, {"full": False})
    assert (found["confidence"], found["choices"], found["finish"]) == (None, {}, "stop")


def test_an_answer_that_is_cut_off_is_noted(bundle: Bundles, photo_file: Path, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object", "properties": {"colour": {"type": "string"}}, "required": ["colour"]}')
    asked = ("--image", photo_file, "--prompt", "What?", "--schema", schema, "--max-new-tokens", 2)
    done = run("sinkprune-run", bundle("qwen-tied"), *asked)
    assert done.code == 0, done.stderr
    assert "the answer was cut off after 2 tokens, so it may not have the form" in done.stderr
    assert "; cut off after 2 tokens (--max-new-tokens)" in done.stdout


def test_the_answer_matches_a_regex(bundle: Bundles, photo_file: Path) -> None:
    done = run("sinkprune-run", bundle("qwen-tied"), "--image", photo_file, *ASK, "--regex", "[0-9]{3} cm")
    assert re.fullmatch("[0-9]{3} cm", done.stdout.splitlines()[0])


def test_the_answer_is_one_of_the_choices(bundle: Bundles, photo_file: Path, tmp_path: Path) -> None:
    choices = ("--choice", "the cup", "--choice", "the table")
    arguments = (bundle("gqa-112"), "--image", photo_file, *ASK, *choices, "--json", tmp_path / "answer.json")
    done = run("sinkprune-run", *arguments)
    found = json.loads((tmp_path / "answer.json").read_text())
    assert [*found["choices"]] == ["the cup", "the table"]
    assert sum(found["choices"].values()) == pytest.approx(1)
    assert found["confidence"] == found["choices"][found["text"]] == max(found["choices"].values())
    text, _, _, *shares = done.stdout.splitlines()
    assert text == found["text"]
    assert shares == [f"{share:.3f} {name}" for name, share in found["choices"].items()]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--choice", "yes"), "choice has 1 different text of 1, expected 2 to 256"),
        (("--choice", "yes", "--choice", "no", "--regex", "a"), "regex and choice were given"),
        (("--choice", "yes", "--choice", "no", "--stop", "n"), "choice and stop were given"),
        (("--regex", "("), "regex cannot be used: unclosed group"),
        (("--schema", "missing.json"), "the schema 'missing.json' is missing. Give a JSON file"),
        (("--schema", "broken.json"), "the schema 'broken.json' is not JSON: "),
        (("--schema", "list.json"), "schema is [1], expected a JSON schema as a dict"),
        (("--schema", "list.json", "--json", "list.json"), "list.json"),
    ],
)
def test_wrong_forms_are_refused_before_anything_is_loaded(
    options: tuple[str, ...], said: str, photo_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.json").write_text("{")
    Path("list.json").write_text("[1]")
    assert_refused(run("sinkprune-run", "no-bundle", "--image", photo_file, *ASK, *options), said)
