"""This project: every backend for CPUs, every form of weights, and every budget of the family."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

from peer_engines.checkpoint import random_picture
from peer_engines.engine import Answer, Form, Loaded, NotRunError, Question, Timing
from peer_engines.robot import CAMERAS, largest_change, moment
from sinkprune import Pipeline
from sinkprune.contract.budgets import FAMILIES, UNPRUNED
from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.errors import SinkpruneError
from sinkprune.contract.flops import decode_bytes
from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.checkpoint.folder import read_json
from sinkprune.export.source import ExportRequest
from sinkprune.policies.policy import Policy
from sinkprune.runtime.backends.known import KNOWN


@dataclass(frozen=True)
class _Way:
    """The export and the backend of a form."""

    bits: float
    weights: str
    """The weights of decoder, projector and head, as `sinkprune-export --weights` names them."""
    backend: str
    load: Mapping[str, Any] = field(default_factory=dict)
    """Other options of `Pipeline.load`."""


# int4 has the largest blocks: a scale for 128 inputs.
_BITS = {"fp32": 32.0, "bf16": 16.0, "int8": 8.0, "int4": 4.125}
_FORMS = {f"ort-cpu {name}": _Way(_BITS[name], name, "ort-cpu") for name in ("fp32", "int8", "int4")}
_FORMS["openvino fp32"] = _Way(_BITS["fp32"], "fp32", "openvino", {"compute": "fp32"})
_FORMS |= {f"ort-cpu+openvino {name}": _Way(_BITS[name], name, "ort-cpu+openvino") for name in ("int8", "int4")}
_FORMS |= {f"openvino {name}": _Way(_BITS[name], name, "openvino") for name in ("bf16", "int8", "int4")}
_FORMS["ort-cpu+openvino-prefill int4"] = _Way(_BITS["int4"], "int4", "ort-cpu+openvino-prefill")
_MERGING = {"llava": ("retain-64+tower",)}
"""Budgets with an option, besides those of the family, by `model_type`."""
_VISION = ("preprocess", "vision", "sanitizer", "projector")


def forms(config: Mapping[str, Any]) -> Sequence[Form]:
    """Return the forms whose backend this version has."""
    family = next((row for row in FAMILIES.values() if row.model_type == config["model_type"]), None)
    if family is None:
        raise NotRunError(f"it takes no model of type {config['model_type']}")
    ways = (UNPRUNED, *family.budgets, *_MERGING.get(family.model_type, ()))
    return [Form("sinkprune", name, way.bits, ways) for name, way in _FORMS.items() if way.backend in KNOWN]


def prepare(form: Form, place: Path) -> None:
    """Export the checkpoint; forms with the same weights share a bundle."""
    weights = _FORMS[form.name].weights
    settings: dict[str, Any] = {} if weights == "fp32" else {"weights": weights}
    config = read_json(place / "checkpoint", "config.json")
    settings["budgets"] = tuple(way for way in forms(config)[0].ways if way != UNPRUNED)
    if weights == "int4":
        settings["block_size"] = 128
    if config["model_type"] in CAMERAS:
        settings["max_images"] = CAMERAS[config["model_type"]]
    if not _bundle(form, place).exists():
        try:
            export_bundle(ExportRequest(str(place / "checkpoint"), **settings), _bundle(form, place))
        except SinkpruneError as error:
            raise NotRunError(str(error)) from error


def load(form: Form, place: Path, threads: int) -> Loaded:
    """Load the bundle on its backend; every budget runs on the same engines."""
    way = _FORMS[form.name]
    try:
        bundle = read_bundle(_bundle(form, place))
        kind = Pipeline if bundle.manifest.policy is None else Policy
        model = kind.load(bundle, backend=way.backend, threads=threads, check_sums=False, **way.load)
    except SinkpruneError as error:
        raise NotRunError(str(error)) from error
    answer = _acting(model) if isinstance(model, Policy) else _answering(model)
    versions = {"sinkprune": version("sinkprune"), "python": platform.python_version(), **model.backend.versions}
    if isinstance(model, Policy):
        size = bundle.manifest.weight_bytes("expert" if model.facts.expert else "action_head")
    else:
        size = decode_bytes(bundle.manifest, kv_bytes=0)
    return Loaded(answer, versions, size)


def _answering(pipeline: Pipeline) -> Answer:
    def answer(question: Question) -> Timing:
        count = question.new_tokens
        picture = random_picture(question.seed, question.side)
        answer = pipeline.generate(
            picture, question.text, budget=question.way, max_new_tokens=count, min_new_tokens=count
        )
        # The pipeline's clock also starts at the decoded picture and the words.
        ms = {part: value or 0.0 for part, value in answer.ms.items()}
        input_tokens = answer.prompt_tokens + answer.visual_tokens
        return Timing(ms["ttft"], ms["per_token"], input_tokens, answer.token_ids, _parts(ms))

    return answer


def _acting(policy: Policy) -> Answer:
    facts, cameras = policy.facts, policy.bundle.manifest.max_images

    def answer(question: Question) -> Timing:
        frames, state, noise = moment(question, cameras, facts.state_dim, (facts.chunk, facts.action_dim))
        # A head reads the actions from rows at once, without noise.
        steps = {"noise": noise, "steps": question.new_tokens} if facts.expert else {}
        chunk = policy.act(frames, question.text, state, budget=question.way, **steps)
        # The checkpoint has no statistics, so actions are in the units of the noise.
        changed = largest_change(chunk.actions, noise)
        input_tokens = chunk.prompt_tokens + chunk.visual_tokens
        return Timing(chunk.ms["latency"], fmean(chunk.step_ms), input_tokens, changed, _parts(chunk.ms))

    return answer


def _parts(ms: Mapping[str, float]) -> dict[str, float]:
    vision = sum(ms[part] for part in _VISION)
    return {"vision": vision, "prefill": ms["prefill"] - ms["select"], "select": ms["select"]}


def _bundle(form: Form, place: Path) -> Path:
    return place / f"sinkprune-{_FORMS[form.name].weights}"
