"""This project: every backend that computes on the CPU, every form of weights, and every budget of the family."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from peer_engines.checkpoint import random_picture
from peer_engines.engine import Form, Loaded, Question, Timing
from sinkprune.contract.budgets import UNPRUNED
from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.families import FAMILIES
from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.presets import PRESETS
from sinkprune.export.source import ExportRequest
from sinkprune.runtime.backends import BACKENDS
from sinkprune.runtime.pipeline import Pipeline


@dataclass(frozen=True)
class _Way:
    """How a form is exported, and what it runs in."""

    bits: float
    backend: str
    export: dict[str, Any] = field(default_factory=dict)

    @property
    def bundle(self) -> str:
        """Forms that are exported alike share a bundle."""
        return "-".join(["sinkprune", *map(str, self.export.values())])


_FP32 = {"precision": "fp32"}
_FORMS = {"ort-cpu fp32": _Way(32, "ort-cpu", _FP32)}
_VISION = ("preprocess", "vision", "sanitizer", "projector")


def forms(model: str) -> Sequence[Form]:
    """Those whose backend this version has."""
    family = next(row for row in FAMILIES.values() if row.model_type == PRESETS[model]["model_type"])
    ways = (UNPRUNED, *family.budgets)
    return [Form("sinkprune", name, way.bits, ways) for name, way in _FORMS.items() if way.backend in BACKENDS]


def prepare(form: Form, place: Path) -> None:
    """Export the checkpoint."""
    way = _FORMS[form.name]
    if not (place / way.bundle).exists():
        export_bundle(ExportRequest(str(place / "checkpoint"), **way.export), place / way.bundle)


def load(form: Form, place: Path, threads: int) -> Loaded:
    """The bundle on its backend; every budget runs on the same engines."""
    way = _FORMS[form.name]
    bundle = read_bundle(place / way.bundle)
    pipeline = Pipeline.load(bundle, backend=way.backend, threads=threads, check_sums=False)

    def answer(question: Question) -> Timing:
        count = question.new_tokens
        picture = random_picture(question.seed, question.side)
        answer = pipeline.generate(
            picture, question.text, budget=question.way, max_new_tokens=count, min_new_tokens=count
        )
        # The decoded picture and the words are where its own clock starts, as everybody's does.
        ms = {part: value or 0.0 for part, value in answer.ms.items()}
        parts = {
            "vision": sum(ms[part] for part in _VISION),
            "prefill": ms["prefill"] - ms["select"],
            "select": ms["select"],
        }
        input_tokens = answer.prompt_tokens + answer.visual_tokens
        return Timing(ms["ttft"], ms["per_token"], input_tokens, answer.token_ids, parts)

    manifest = bundle.manifest
    decoder = {graph for graph in manifest.graphs if graph.startswith("decoder_") or graph == "head"}
    sizes = [spec.size for name, spec in manifest.files.items() if Path(name).stem in decoder]
    versions = {"sinkprune": version("sinkprune"), "python": platform.python_version(), **pipeline.backend.versions}
    return Loaded(answer, versions, sum(sizes))
