"""The pages about JSON name every key that a command writes, and no other.

Tables of dataclasses are made from the code when the site is built. `generated.keys` are their rows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from support.programs.commands import run
from support.programs.repository import ROOT

QUESTION = ("--prompt", "What is this?", "--budget", "retain-64", "--max-new-tokens", "2")


@pytest.fixture(scope="module")
def generated() -> Any:
    """Return the module of the site's directives."""
    pytest.importorskip("sphinx", reason="the site needs extra docs")
    spec = spec_from_file_location("generated", ROOT / "docs/generated.py")
    assert spec and spec.loader
    spec.loader.exec_module(module := module_from_spec(spec))
    return module


def paths_in(value: Any, prefix: str = "") -> Iterator[str]:
    """Yield the path of every key of parsed JSON."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield (path := f"{prefix}.{key}".lstrip("."))
            yield from paths_in(item, path)
    elif isinstance(value, list) and value:
        yield from paths_in(value[0], prefix)


def documented(generated: Any, page: str, heading: str) -> set[str]:
    """Return the paths in the tables of keys of a section, and those of its directives."""
    found: set[str] = set()
    section = (ROOT / "docs" / page).read_text("utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    for line in re.findall(r"^\| (`[^|]+) \|", section, re.MULTILINE):
        last = ""
        for name in re.findall(r"`([^`]+)`", line):
            last = last.rpartition(".")[0] + name if name.startswith(".") else name
            found.add(last)
    for kind, options in re.findall(r"^:::\{json-keys\} (\w+)\n((?::\w.*\n)*):::", section, re.MULTILINE):
        given = dict(re.findall(r"^:(\w+): (.+)$", options, re.MULTILINE))
        left_out, prefix = given.get("without", "").split(), given.get("prefix", "")
        rows = {key.path for key in generated.keys(generated.class_named(kind))}
        found |= {prefix + path for path in rows if path.split(".")[0] not in left_out}
    return found


def parents(paths: set[str]) -> set[str]:
    """Return the paths, and those of the objects that hold them."""
    return {".".join(path.split(".")[: count + 1]) for path in paths for count in range(path.count(".") + 1)}


def test_an_answer_s_keys_are_named(generated: Any, bundle: Callable[..., Path], photo_file: Path) -> None:
    outcome = run("sinkprune-run", bundle("gqa-112"), "--image", photo_file, *QUESTION, "--json")
    written = {path for path in paths_in(json.loads(outcome.stdout)) if not path.startswith("ms.")}
    found = documented(generated, "json.md", "sinkprune-run")
    parts = {"preprocess", "vision", "sanitizer", "projector", "prefill", "select", "rest"}
    parts |= {"ttft", "per_token", "latency"}
    assert parts <= found
    assert written - parents(found) == set()
    assert {path for path in found - parts if not path.startswith(("deadline.", "tried."))} - written == set()


def test_a_chunk_s_keys_are_named(generated: Any, bundle: Callable[..., Path], photo_file: Path) -> None:
    policy = bundle("pi0", budgets=("prune-77.8",), max_images=1)
    go = ("--instruction", "go", "--state", "1,2,3,4,5", "--budget", "prune-77.8", "--steps", "1")
    outcome = run("sinkprune-act", policy, "--camera", photo_file, *go, "--json")
    parts = r"^(chunks\.ms|chunks\.kept\.after_stage)\..*"
    written = {re.sub(parts, r"\1", path) for path in paths_in(json.loads(outcome.stdout))}
    found = {path.removesuffix(".*") for path in documented(generated, "json-act.md", "sinkprune-act")}
    assert written - parents(found) == set()
    assert {
        path for path in found if "." in path and not path.startswith(("chunks.deadline.", "loop."))
    } - written == set()


def test_keys_of_an_export_and_a_build_are_named(
    generated: Any, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    bundle, engines = tmp_path / "bundle", tmp_path / "engines"
    # fastv cannot reach retain-32, so `unreachable` has an entry.
    methods = ("--methods", "sinkpruner,fastv", "--budgets", "retain-192,retain-32")
    exported = json.loads(run("sinkprune-export", checkpoint("gqa-112"), "-o", bundle, *methods, "--json").stdout)
    built = json.loads(run("sinkprune-build", bundle, "-o", engines, "--target", "onnxruntime", "--json").stdout)
    found = documented(generated, "json-build.md", "sinkprune-export")
    assert {*paths_in(exported)} == {path for path in parents(found) if not path.startswith("requantised.")}
    named = documented(generated, "json-build.md", "sinkprune-build")
    assert {path.split(".")[0] for path in named} == {*built}
    assert {f"limits.{name}" for name in built["limits"]} <= named


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("json*.md")), ids=lambda page: page.name)
def test_every_named_class_has_keys(generated: Any, page: Path) -> None:
    for kind in re.findall(r"^:::\{json-keys\} (\w+)$", page.read_text("utf-8"), re.MULTILINE):
        rows = [*generated.keys(generated.class_named(kind))]
        assert rows and len({row.path for row in rows}) == len(rows), kind
