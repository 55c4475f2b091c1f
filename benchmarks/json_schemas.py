"""Checks answers by the schemas of a test suite: complete ones conform, and no forbidden value can be written.

    git clone https://github.com/json-schema-org/JSON-Schema-Test-Suite
    python benchmarks/json_schemas.py JSON-Schema-Test-Suite/tests --bundle demo-output/bundle --count 500 --seed 0

Each JSON file of the folder has a case or a list of cases, with `schema` and `tests`: values with `data` and `valid`.
The files in `maskbench/data` of guidance-ai/jsonschemabench have the same form. Cases come in random order until
`--count` schemas were accepted. An answer to each is sampled, and compared with its schema by the package jsonschema.
An answer that `--max-new-tokens` cut gets an end first. Formats and encoded content do not count, as in the
specification. Schemas without `$schema` get that of a folder such as `draft7`.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
from jsonschema_specifications import REGISTRY
from PIL import Image

from sinkprune import Pipeline, UsageError
from sinkprune.contract.command_line.command import entry_point
from sinkprune.contract.command_line.options import json_outputs, write_json
from sinkprune.contract.files.output_files import check_outputs
from sinkprune.runtime.hooks import Tokens
from sinkprune.runtime.text.answer_form import checked_schema
from sinkprune.serving.forms import Grammars

_DRAFTS = {
    "draft3": "http://json-schema.org/draft-03/schema#",
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
}
_ENDS = {True: "conforming", False: "violations", None: "not compared"}
_MOST_TOKENS = 2000
_PROMPT = "Describe the picture."


@dataclass(frozen=True)
class Case:
    """A schema of a suite, and values that it allows or forbids."""

    name: str
    schema: Any
    values: list[tuple[Any, bool]]


def cases(folder: Path) -> Iterator[Case]:
    """Yield the cases in the files of a folder and its folders."""
    for path in sorted(folder.rglob("*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        for case in found if isinstance(found, list) else [found]:
            schema, draft = case["schema"], next((_DRAFTS[part] for part in path.parts if part in _DRAFTS), None)
            if isinstance(schema, dict) and draft is not None:
                schema = {"$schema": draft, **schema}
            values = [(value["data"], value["valid"]) for value in case.get("tests", [])]
            yield Case(f"{path.relative_to(folder)}: {case['description']}", schema, values)


def conforms(text: str, schema: dict[str, Any]) -> bool | None:
    """Return whether a text is JSON that conforms; None where a pattern is no regular expression of Python."""

    def matches(validator: Any, pattern: str, value: Any, part: Any) -> Iterator[jsonschema.ValidationError]:
        # \d and \w are ASCII, as in ECMA-262; \s is Unicode's white space, as in Rust and in Python.
        if isinstance(value, str) and not (re.search(pattern, value, re.ASCII) or re.search(pattern, value)):
            yield jsonschema.ValidationError(f"{value!r} does not match {pattern!r}")

    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    checked = jsonschema.validators.extend(kind, {"pattern": matches})
    try:
        return bool(checked(schema, registry=REGISTRY).is_valid(json.loads(text)))
    except json.JSONDecodeError:
        return False
    except re.error:
        return None


class Writer:
    """Writes answers without the model, as a pipeline's tokenizer and a schema allow."""

    def __init__(self, pipeline: Pipeline) -> None:
        """Use the tokenizer of `pipeline`."""
        self._prompts, self._stop = pipeline.prompts, [*pipeline.bundle.manifest.tokens.stop]
        self._tokenizer = pipeline.prompts.tokenizer
        self._size = max(self._tokenizer.get_vocab_size(), *(token + 1 for token in self._stop))
        self._grammars = Grammars(self._prompts, self._stop)
        self._ends = [token for token in range(self._size) if self._tokenizer.id_to_token(token) in ('"', "]", "}")]

    def can_write(self, schema: dict[str, Any], value: Any) -> bool | None:
        """Return whether a complete answer may be this value.

        None where the tokenizer has not all of its characters, or the schema is too complex for this value.
        """
        try:
            ids = self._prompts.answer_ids(json.dumps(value, ensure_ascii=False))
            constraint = self._grammars.constraint(schema, None, 0)
            for token in ids:
                if constraint.complete or not self._allowed(constraint)[token]:
                    return False
                constraint.accept(token)
            return constraint.complete or bool(self._allowed(constraint)[self._stop].any())
        except UsageError:
            return None

    def completed(self, schema: dict[str, Any], ids: Sequence[int]) -> str | None:
        """Return the text of an answer that was cut, with an end. None if that takes too many tokens."""
        constraint, ids, random_numbers = self._grammars.constraint(schema, None, 0), [*ids], np.random.default_rng(0)
        for token in ids:
            constraint.accept(token)
        for _ in range(_MOST_TOKENS):
            if constraint.complete or (allowed := self._allowed(constraint))[self._stop].any():
                return str(self._tokenizer.decode(ids))
            likely = random_numbers.random(self._size)
            likely[self._ends] += 1
            ids.append(int(np.where(allowed, likely, -1).argmax()))
            constraint.accept(ids[-1])
        return None

    def _allowed(self, constraint: Tokens) -> Any:
        return constraint.allowed(self._size)


def measure(pipeline: Pipeline, drawn: Iterator[Case], count: int, budget: str, tokens: int) -> dict[str, Any]:
    """Return how often each outcome came, and the names of the violations."""
    writer = Writer(pipeline)
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    ends, values, reasons, violations = Counter[str](), Counter[str](), Counter[str](), list[str]()
    for case in drawn:
        if ends["accepted"] == count:
            break
        options: dict[str, Any] = {"temperature": 1.0, "seed": ends["accepted"], "max_new_tokens": tokens}
        try:
            schema = checked_schema(case.schema)
            if schema is None:
                raise UsageError("schema is None")
            answer = pipeline.generate(picture, _PROMPT, budget=budget, schema=schema, **options)
        except UsageError as error:
            ends["rejected"] += 1
            cause = re.sub(" at '[^']*'", "", str(error).split(". ")[0])
            reasons[re.sub(r"'[^']*'|/.*/|[-+.e0-9]*[0-9]", "...", cause)] += 1
            if "\n" in str(error):
                violations.append(f"{case.name}: the error has several lines")
            continue
        ends["accepted"] += 1
        text: str | None = answer.text
        if answer.finish != "stop":
            ends["cut off"] += 1
            text = writer.completed(schema, answer.token_ids)
        end = "no end" if text is None else _ENDS[conforms(text, schema)]
        ends[end] += 1
        violations += [f"{case.name}: {json.dumps(schema)}: {text}"] if end == "violations" else []
        for value, valid in case.values:
            written = writer.can_write(schema, value)
            values["valid" if valid else "invalid"] += written is not None
            if written and valid:
                values["valid, allowed"] += 1
            elif written and conforms(json.dumps(value), schema):
                values["invalid by its format or content, allowed"] += 1
            elif written:
                values["invalid, allowed"] += 1
                violations.append(f"{case.name}: {json.dumps(schema)} allows {json.dumps(value)}")
    return {"schemas": ends, "values": values, "reasons": reasons, "violations": violations}


@entry_point
def main(arguments: Sequence[str] | None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--budget", default="retain-64")
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-new-tokens", type=int, default=200)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    check_outputs(json_outputs(options.json), [])
    drawn = [*cases(options.folder)]
    random.Random(options.seed).shuffle(drawn)
    pipeline = Pipeline.load(options.bundle, backend="ort-cpu")
    began = time.perf_counter()
    found = measure(pipeline, iter(drawn), options.count, options.budget, options.max_new_tokens)
    found["seconds"] = time.perf_counter() - began
    for part in ("schemas", "values", "reasons"):
        for name, number in found[part].most_common(20):
            sys.stdout.write(f"{part}: {number} {name}\n")
    for violation in found["violations"]:
        sys.stdout.write(f"violation: {violation}\n")
    sys.stdout.write(f"{found['seconds']:.0f} s\n")
    write_json(options.json, found)


if __name__ == "__main__":
    sys.exit(main())
