"""Directives for the parts of pages that are made from the code and from kept measurements."""

import ast
import inspect
import json
import re
import sys
import textwrap
import types
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective

import sinkprune

ROOT = Path(__file__).parent.parent
OBJECTS = (
    "WeightForms",
    "Spread",
    "Mean",
    "Latency",
    "BudgetReport",
    "PolicyBudgetReport",
    "CombinationReport",
    "RunFigures",
    "ClockFrequency",
    "CaptureReport",
)
"""The objects that several keys hold. A table names them, and json.md has their keys."""
RECURRING = {
    "backend": "The backend that ran.",
    "budget": "The budget that ran.",
    "budgets": "By budget, its figures.",
    "kept_after_sanitizer": "Visual tokens that enter the LLM.",
    "machine": "The processor, or the GPU that computes, in words.",
    "mean_visual_tokens": "Visual tokens a layer, as mean over layers.",
    "method": "The method that ran.",
    "model": "The checkpoint.",
    "new_tokens": "Tokens of each answer.",
    "pictures": "Different pictures; of a policy, different sets of frames.",
    "questions": "Questions; of a policy, moments.",
    "task": "The name of the test set or file.",
    "text": "The answer.",
    "threads": "Threads of the processor.",
    "token_ids": "The ids of the answer's tokens.",
    "versions": "Versions of libraries, by name.",
    "visual_tokens": "Visual tokens before anything is dropped.",
}
"""The meaning of keys that many reports have, where a field has no docstring of its own."""


class Key(NamedTuple):
    """A key of a JSON object."""

    path: str
    type: str
    meaning: str


def meanings(kind: type) -> dict[str, str]:
    """Return the docstrings of the fields of a dataclass and of its bases."""
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        if not is_dataclass(each):
            continue
        [body] = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        assert isinstance(body, ast.ClassDef)
        for field, text in zip(body.body, body.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                found.pop(field.target.id, None)
                if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                    found[field.target.id] = " ".join(str(text.value.value).split())
    return found


def keys(kind: type, prefix: str = "") -> Iterator[Key]:
    """Yield the keys of a dataclass as JSON, in order, with those of nested objects that are not in `OBJECTS`."""
    hints, texts = get_type_hints(kind), meanings(kind)
    for field in fields(kind):
        path, hint = prefix + field.name, hints[field.name]
        nested = [(inner, star) for inner, star in dataclasses_in(hint) if inner.__name__ not in OBJECTS]
        meaning = texts.get(field.name) or RECURRING.get(field.name, "")
        if not meaning and nested:
            meaning = first_sentence(nested[0][0])
        yield Key(path, words(hint), re.sub(r"\bNone\b", "null", meaning))
        for inner, star in nested:
            yield from keys(inner, f"{path}{star}.")


def is_mapping(hint: Any) -> bool:
    origin = get_origin(hint)
    return isinstance(origin, type) and issubclass(origin, Mapping)


def dataclasses_in(hint: Any, star: str = "") -> Iterator[tuple[Any, str]]:
    """Yield the dataclasses in a type, each with `.*` for every mapping that holds it."""
    if is_dataclass(hint):
        yield hint, star
    for argument in get_args(hint):
        yield from dataclasses_in(argument, star + ".*" * is_mapping(hint))


def words(hint: Any) -> str:
    """Return the type of a value of JSON in words."""
    arguments = get_args(hint)
    if is_dataclass(hint):
        name = hint.__name__
        return f"[{name}](json.md#{name.lower()})" if name in OBJECTS else "object"
    if get_origin(hint) is Literal:
        return " or ".join(f"`{each}`" for each in arguments)
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(words(each) for each in arguments))
    if is_mapping(hint):
        return f"object of {words(arguments[1])}"
    if arguments:
        return f"array of {words(arguments[0])}"
    return {int: "integer", float: "number", bool: "boolean", str: "string", type(None): "null"}.get(hint, "string")


def first_sentence(kind: type) -> str:
    """Return the first paragraph of a class's docstring."""
    return " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split())


def class_named(name: str) -> type:
    """Return the class of that name, in whatever module of the package it is."""
    root = Path(sinkprune.__file__).parent
    found = [path for path in root.rglob("*.py") if re.search(rf"^class {name}\b", path.read_text("utf-8"), re.M)]
    if len(found) != 1:
        raise ExtensionError(f"found {len(found)} classes {name} in the package, expected one. Correct the page.")
    [path] = found
    return getattr(import_module(".".join(path.relative_to(root.parent).with_suffix("").parts)), name)  # type: ignore[no-any-return]


class JsonKeys(SphinxDirective):
    """A table of the keys that a dataclass has as JSON: `:::{json-keys} Class`."""

    required_arguments = 1
    option_spec = {"without": directives.unchanged, "prefix": directives.unchanged}  # noqa: RUF012

    def run(self) -> list[nodes.Node]:
        left_out = self.options.get("without", "").split()
        rows = [
            f"| `{key.path}` | {key.type} | {key.meaning.replace('|', '/')} |"
            for key in keys(class_named(self.arguments[0]), self.options.get("prefix", ""))
            if key.path.removeprefix(self.options.get("prefix", "")).split(".")[0] not in left_out
        ]
        return self.parse_text_to_nodes("\n".join(["| key | type | meaning |", "|---|---|---|", *rows]))


def directive(value: Any, kind: str) -> str | None:
    """Return autodoc's directive of a public name, if the name is of a kind that api.md has a section for."""
    if not isinstance(value, type):
        return "autofunction" if kind == "functions" else None
    if not issubclass(value, Exception):
        return "autoclass" if kind == "classes" else None
    return "autoexception" if kind == ("warnings" if issubclass(value, Warning) else "exceptions") else None


class PublicNames(SphinxDirective):
    """The docstrings of the public names of one kind: `:::{public-names} classes`."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        lines = ["```{eval-rst}"]
        for name in sinkprune.__all__:
            if found := directive(getattr(sinkprune, name), self.arguments[0]):
                option = {"autoclass": ":members:", "autoexception": ":show-inheritance:"}.get(found, "")
                lines += [f".. {found}:: sinkprune.{name}", f"   {option}", ""]
        return self.parse_text_to_nodes("\n".join([*lines, "```"]))


class FiguresTable(SphinxDirective):
    """A table of `benchmarks/figures.py`, of the kept measurement: `:::{figures-table} methods-versus`."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        sys.path.append(str(ROOT / "benchmarks"))
        name, parts = self.arguments[0], import_module("figure_parts").PARTS
        [part] = (part for part in parts if name in parts[part].tables)
        kept = ROOT / "docs/measurements/figures" / f"{part}.json"
        self.env.note_dependency(str(kept))
        report = json.loads(kept.read_text("utf-8"))
        return self.parse_text_to_nodes(parts[part].tables[name](report))


def mark_examples(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Mark the indented lines of a docstring as code: our docstrings have no `::` before them."""
    for number in reversed(range(1, len(lines))):
        before = next((line for line in reversed(lines[: number - 1]) if line), "    ")
        if not lines[number - 1] and lines[number].startswith("    ") and not before.startswith(" "):
            lines[number:number] = ["::", ""]


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", mark_examples)
    app.add_directive("json-keys", JsonKeys)
    app.add_directive("public-names", PublicNames)
    app.add_directive("figures-table", FiguresTable)
    return {"parallel_read_safe": True}
