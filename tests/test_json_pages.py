"""The pages about JSON name every key that a command writes, and no other."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest

from sinkprune.calibration.attention.report import AttentionReport, LayerFigures, RunFigures
from sinkprune.calibration.evaluation.intervals import Mean
from sinkprune.calibration.evaluation.report import CombinationReport, EvaluationReport, KindReport
from sinkprune.calibration.norms import NormReport
from sinkprune.calibration.quantising.report import LayerError, LogitError, QuantisationReport
from sinkprune.calibration.scheduling.report import Candidate, ScheduleReport
from sinkprune.contract.budgets import Budget, Share
from sinkprune.contract.costs.model import Curve
from sinkprune.contract.precision import WeightForms
from sinkprune.contract.reports.policy_report import PARTS as POLICY_PARTS
from sinkprune.contract.reports.policy_report import PolicyBudgetReport, PolicyReport
from sinkprune.contract.reports.rate_report import Latency, RateReport
from sinkprune.contract.reports.report import PARTS, BudgetReport, ProfileReport, Spread
from sinkprune.engines.gate.report import GateReport
from sinkprune.jetson.commands.replay import ReplayReport
from sinkprune.jetson.host.power_mode import ClockFrequency
from sinkprune.jetson.report import DoctorReport
from sinkprune.runtime.acting.report import PARTS as ACTION_PARTS
from sinkprune.runtime.acting.report import ActionDeadline
from sinkprune.runtime.steps.answer import DeadlineReport
from sinkprune.runtime.token_map import TokenClass, TokenMap
from support.programs.commands import run
from support.programs.repository import ROOT

OBJECTS: dict[str, type] = {
    "weights": WeightForms,
    "spread": Spread,
    "latency": Latency,
    "token map": TokenMap,
    "token class": TokenClass,
    "result": CombinationReport,
    "kind": KindReport,
    "curve": Curve,
    "candidate": Candidate,
    "definition": Budget,
    "share": Share,
    "mean": Mean,
    "figures": RunFigures,
    "layer figures": LayerFigures,
    "layer error": LayerError,
    "logit error": LogitError,
    "clock": ClockFrequency,
}
"""The objects that several keys hold, by their name on the pages."""
REPORTS: dict[str, tuple[type, ...]] = {
    "sinkprune-profile": (ProfileReport, RateReport),
    "sinkprune-profile of a policy": (PolicyReport,),
    "sinkprune-check": (GateReport,),
    "sinkprune-evaluate": (EvaluationReport,),
    "sinkprune-calibrate schedule": (ScheduleReport,),
    "sinkprune-calibrate quantize": (QuantisationReport,),
    "sinkprune-calibrate attention": (AttentionReport,),
    "sinkprune-calibrate norms": (NormReport,),
    "sinkprune-doctor": (DoctorReport,),
    "sinkprune-replay": (ReplayReport,),
}
"""The dataclasses that commands write, by the heading of the section."""
INTERRUPTED = (
    "profile",
    "profile of a policy",
    "evaluate",
    "calibrate norms",
    "calibrate attention",
)
ADDED = {f"sinkprune-{name}": {"interrupted", "notes"} for name in INTERRUPTED} | {
    f"sinkprune-calibrate {verb}": {"sha256", "notes"} for verb in ("schedule", "quantize")
}
"""The keys that a command adds to its report."""
QUESTION = ("--prompt", "What is this?", "--budget", "retain-64", "--max-new-tokens", "2")


def paths(kind: Any, prefix: str = "") -> Iterator[str]:
    """Yield the path of every value of `kind` as JSON. Objects of `OBJECTS` are one value."""
    arguments = [argument for argument in get_args(kind) if argument is not type(None)]
    if prefix == "baselines.*.*" and kind in (BudgetReport, PolicyBudgetReport):
        # The same object as `budgets.*`.
        yield prefix
    elif is_dataclass(kind) and (not prefix or kind not in OBJECTS.values()):
        hints = get_type_hints(kind)
        for field in fields(kind):
            yield from paths(hints[field.name], f"{prefix}.{field.name}" if prefix else field.name)
    elif get_origin(kind) is dict:
        yield from paths(arguments[1], f"{prefix}.*")
    elif get_origin(kind) in (list, tuple) or (arguments and any(map(has_keys, arguments))):
        yield from {path for argument in arguments if argument is not ... for path in paths(argument, prefix)}
    else:
        yield prefix


def has_keys(kind: Any) -> bool:
    """Return whether `kind` is an object or contains one."""
    return is_dataclass(kind) or get_origin(kind) is dict or any(map(has_keys, get_args(kind)))


def paths_in(value: Any, prefix: str = "") -> Iterator[str]:
    """Yield the path of every value of parsed JSON. Names below a `*` of the page are not replaced."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from paths_in(item, f"{prefix}.{key}" if prefix else key)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        yield from paths_in(value[0], prefix)
    else:
        yield prefix


def sections() -> dict[str, str]:
    """Return the sections of the pages by heading; those of one page's own topics belong to its first command."""
    found: dict[str, str] = {}
    for page in sorted((ROOT / "docs").glob("json*.md")):
        command = ""
        for part in re.split(r"^##+ ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
            heading, _, body = part.partition("\n")
            command = heading if heading.startswith("sinkprune-") else command
            found[command] = found.get(command, "") + body
    return found


def documented(text: str) -> set[str]:
    """Return the paths in the first column of a section's tables of keys."""
    found: set[str] = set()
    for table in text.split("\n\n"):
        if not table.lstrip().startswith("| key | meaning |"):
            continue
        for line in table.strip().splitlines()[2:]:
            last = ""
            for name in re.findall(r"`([^`]+)`", line.split(" | ")[0]):
                last = last.rpartition(".")[0] + name if name.startswith(".") else name
                found.add(last)
    return found


@pytest.mark.parametrize("command", REPORTS)
def test_a_report_s_keys_are_those_of_its_section(command: str) -> None:
    written = {path for report in REPORTS[command] for path in paths(report)} | ADDED.get(command, set())
    found = documented(sections()[command])
    assert found - written == set(), "named, and not written"
    assert written - found == set(), "written, and not named"


def test_every_object_s_keys_are_named() -> None:
    rows: dict[str, str] = {}
    for page in sorted((ROOT / "docs").glob("json*.md")):
        for table in page.read_text(encoding="utf-8").split("\n\n"):
            if table.startswith("| object | keys |"):
                rows |= {line.split(" | ")[0].strip("| "): line for line in table.strip().splitlines()[2:]}
    assert set(rows) == set(OBJECTS)
    for name, kind in OBJECTS.items():
        for field in fields(kind):
            assert f"`{field.name}`" in rows[name], f"{name}: {field.name}"


def test_parts_are_named() -> None:
    table = sections()["sinkprune-run"].split("| part | what it is |")[1]
    assert {name for line in table.splitlines() for name in re.findall(r"`(\w+)`", line.split(" | ")[0])} == {*PARTS}


def test_an_answer_s_keys_are_named(bundle: Callable[..., Path], photo_file: Path) -> None:
    outcome = run("sinkprune-run", bundle("gqa-112"), "--image", photo_file, *QUESTION, "--json")
    written = {re.sub(r"^ms\..*", "ms.*", path) for path in paths_in(json.loads(outcome.stdout))} - {"deadline"}
    written |= {f"deadline.{field.name}" for field in fields(DeadlineReport)}
    assert written == documented(sections()["sinkprune-run"])


def test_a_chunk_s_keys_are_named(bundle: Callable[..., Path], photo_file: Path) -> None:
    policy = bundle("pi0", budgets=("prune-77.8",), max_images=1)
    go = ("--instruction", "go", "--state", "1,2,3,4,5", "--budget", "prune-77.8", "--steps", "1")
    outcome = run("sinkprune-act", policy, "--camera", photo_file, *go, "--json")
    parts = r"^(chunks\.ms|chunks\.kept\.after_stage)\..*"
    written = {re.sub(parts, r"\1.*", path) for path in paths_in(json.loads(outcome.stdout))} - {"chunks.deadline"}
    written |= {f"chunks.deadline.{field.name}" for field in fields(ActionDeadline)}
    assert written == documented(sections()["sinkprune-act"])


def test_parts_of_a_chunk_are_named() -> None:
    table = sections()["sinkprune-act"].split("| part | what it is |")[1]
    named = {name for line in table.splitlines() for name in re.findall(r"`(\w+)`", line.split(" | ")[0])}
    assert named == {*ACTION_PARTS}
    assert {*POLICY_PARTS} - {"step"} < named


def test_keys_of_an_export_and_a_build_are_named(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    bundle, engines = tmp_path / "bundle", tmp_path / "engines"
    # fastv cannot reach retain-32, so `unreachable` has an entry.
    methods = ("--methods", "sinkpruner,fastv", "--budgets", "retain-192,retain-32")
    exported = run("sinkprune-export", checkpoint("gqa-112"), "-o", bundle, *methods, "--json")
    built = run("sinkprune-build", bundle, "-o", engines, "--target", "onnxruntime", "--json")
    found = documented(sections()["sinkprune-export"])
    assert {path for path in found if not path.startswith("requantised.")} | {"requantised"} == {
        *paths_in(json.loads(exported.stdout))
    }
    named = documented(sections()["sinkprune-build"])
    names = {path.split(".")[0] for path in named}
    assert names == {*json.loads(built.stdout)}
    assert {f"limits.{name}" for name in json.loads(built.stdout)["limits"]} <= named
