"""Measures what requests cost on this machine: whole ones at each budget, and the decoder by itself."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple

import numpy as np

from sinkprune.contract.costs import COSTS_VERSION, Costs, Place, fit_measured
from sinkprune.contract.engines_manifest import Limits
from sinkprune.contract.manifest import Manifest
from sinkprune.contract.report import PARTS
from sinkprune.runtime.answer import Answer
from sinkprune.runtime.backends import Backend
from sinkprune.runtime.chain import Chain
from sinkprune.runtime.choices import choices, up_to
from sinkprune.runtime.decoder_times import DecoderTimes, rounds
from sinkprune.runtime.embedding import Embedding
from sinkprune.runtime.families import Family
from sinkprune.runtime.pictures import decoded, see
from sinkprune.runtime.processor import processor_name
from sinkprune.runtime.prompt import PromptEncoder
from sinkprune.runtime.request import Request

SECONDS = 2.0
"""For about how long each half is measured where a request waits for it; a large model takes longer."""
_COUNTS = 8
_FAR_ABOVE = 2.0

Ask = Callable[[Request], Generator[str, None, Answer]]
"""Answers a request."""


class Measured(NamedTuple):
    """Of a pipeline: what is measured."""

    manifest: Manifest
    chain: Chain
    embedding: Embedding
    family: Family
    prompts: PromptEncoder
    limits: Limits | None
    ask: Ask


def measure_costs(measured: Measured, request: Request, seconds: float = SECONDS) -> Costs:
    """The costs of requests like this one, as medians: whole ones are run for some `seconds`, and the decoder.

    Budgets are tried from the smallest on, and none above the first that takes far longer to its first token than the
    request's deadline. The decoder runs on some numbers of rows between those of the smallest budget and those of the
    largest that was tried. Raises what a request raises.
    """
    manifest, chain = measured.manifest, measured.chain
    pictures = tuple(decoded(source, measured.family) for source in request.pictures)
    layouts = [see(picture, picture, measured.family, manifest).layout for picture in pictures]
    text = measured.prompts.encode(request.texts).text_tokens
    plain = replace(request, pictures=pictures, deadline_ms=None, max_new_tokens=1, temperature=0.0)
    budgets = up_to(manifest, request.method, request.budget, layouts)
    possible = choices(manifest, measured.limits, plain, budgets, text, layouts)
    requests = [replace(plain, budget=choice.budget) for choice in reversed(possible)]
    found = _parts(measured.ask, requests, request.deadline_ms or float("inf"), seconds)
    planned = [choice.schedule for choice in reversed(possible)][: len(found)]

    least = min(one.reaching(manifest.language_model.num_layers) for one in planned)
    most = max(one.rows for one in planned)
    counts = {round(count) for count in np.geomspace(text + least, text + most, _COUNTS)}
    decoder = DecoderTimes(chain, measured.embedding, sorted(counts), seconds)
    points: dict[str, list[tuple[float, float]]] = {"sanitizer": [], "projector": [], "select": []}
    each = len(pictures)
    for one, ms in zip(planned, found, strict=True):
        points["sanitizer"].append((one.rows / each, ms["sanitizer"] / each))
        points["projector"].append((one.rows / each, ms["projector"] / each))
        if one.plan is not None and one.plan.cuts:
            asked = text + sum(map(one.reaching, one.plan.cuts)) / len(one.plan.cuts)
            points["select"].append((asked, ms["select"] / len(one.plan.cuts)))
    tokens = sum(layout.all_tokens for layout in layouts) / each
    tower = median(ms["preprocess"] + ms["vision"] for ms in found) / each
    return Costs(
        costs_version=COSTS_VERSION,
        place=place_of(manifest, chain.backend),
        tower=fit_measured([(tokens, tower)]),
        sanitizer=fit_measured(points["sanitizer"]),
        projector=fit_measured(points["projector"]),
        decoders=decoder.segments,
        select=fit_measured(points["select"]),
        rest=median(ms["rest"] for ms in found) + decoder.head,
        token=decoder.token,
    )


def place_of(manifest: Manifest, backend: Backend) -> Place:
    """What costs of this bundle on this backend hold for."""
    return Place(
        config_sha256=manifest.checkpoint.config_sha256,
        cut_after=manifest.cut_after,
        precision=manifest.precision,
        weights=manifest.weights.name,
        backend=backend.name,
        compute=backend.compute,
        threads=backend.threads,
        machine=processor_name(),
    )


def _parts(ask: Ask, requests: Sequence[Request], most_ms: float, seconds: float) -> list[Mapping[str, float]]:
    """Median milliseconds of each part of `requests`, the fastest first; those far above `most_ms` are left out."""
    runs: list[list[Mapping[str, float | None]]] = []
    for request in requests:
        runs.append([])
        if (_answered(ask, request).ms["ttft"] or 0.0) > _FAR_ABOVE * most_ms:
            break
    for counted in rounds(seconds):
        for request, own in zip(requests, runs, strict=False):
            ms = _answered(ask, request).ms
            if counted:
                own.append(ms)
    return [{part: median(ms[part] or 0.0 for ms in own) for part in PARTS} for own in runs]


def _answered(ask: Ask, request: Request) -> Answer:
    pieces = ask(request)
    while True:
        try:
            next(pieces)
        except StopIteration as done:
            answer: Answer = done.value
            return answer
