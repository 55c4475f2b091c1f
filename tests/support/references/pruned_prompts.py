"""The rows of a prompt about one picture, with the tokens that a reference keeps, for every family."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import torch

from sinkprune import Pipeline
from sinkprune.contract.budgets import parse_budget
from sinkprune.runtime.media.frame import Picture, SampledFrames
from support.models.qwen_checkpoints import VIDEO_TOKEN
from support.references.masking import Array, Sequence, embedded
from support.references.reference import beside_kept, sanitize_at
from support.references.steps import deepstack_output, patch_grid, tower_output


def sanitized(pipe: Pipeline, picture: Picture, budget: str) -> tuple[Array, list[list[int]], Array | None]:
    """Return the tokens that the reference's sanitizer keeps, their sources by group, and DeepStack features."""
    options = parse_budget(pipe.bundle.manifest.family, budget)
    features, deepstack = [*tower_output(pipe, picture)], deepstack_output(pipe, picture)
    as_one = pipe.bundle.manifest.any_resolution and options.frames == "together"
    if isinstance(picture, SampledFrames) and options.sanitizer and as_one:
        features = [x.reshape(1, -1, *x.shape[2:]) for x in features]
        deepstack = None if deepstack is None else deepstack.reshape(len(deepstack), 1, -1, deepstack.shape[-1])
    kept, indices, beside = [], [], []
    for group, (tokens, norms, salience) in enumerate(zip(*features, strict=True)):
        rows, index = sanitize_at(options, tokens, norms, salience)
        kept.append(rows)
        indices.append(index)
        if deepstack is not None:
            sink = options.sanitizer and options.remove_outliers
            beside.append(beside_kept(deepstack[:, group], norms, index, sink=sink))
    return np.concatenate(kept), indices, np.concatenate(beside, axis=1) if beside else None


@torch.no_grad()
def prompt_rows(
    model: Any,
    pipe: Pipeline,
    picture: Picture,
    question: str,
    kept: Array,
    indices: list[list[int]],
    beside: Array | None,
) -> Sequence:
    """Return the prompt with the tokens `kept` [V,D] of a picture, projected and placed by transformers.

    `indices` are their sources in each group, and `beside` [sets,V,d] their DeepStack features. `visual` has the
    rows in the order of `kept`.
    """
    layout, family = pipe.family.layout(picture), pipe.bundle.manifest.family
    texts = pipe.prompts.encode(["", question], [layout.texts]).texts
    if pipe.chain.projector is not None:
        kept = model.model.multi_modal_projector(torch.from_numpy(kept)[None])[0].numpy()
    tokens = layout.groups * layout.tokens
    # A clip of Qwen3-VL stands at several places of the prompt, with text between them.
    run_length = tokens // (len(texts) - 1)
    sources = np.concatenate([g * (tokens // len(indices)) + np.array(index) for g, index in enumerate(indices)])
    rows, places, visual = [], [], np.zeros(len(sources), int)
    place = 0
    for run, text in enumerate(texts):
        rows += [*embedded(model, text)]
        places += range(place, place + len(text))
        place += len(text)
        for i in np.flatnonzero(sources // run_length == run):
            visual[i] = len(rows)
            rows.append(kept[i])
            places.append(place + int(sources[i]) - run * run_length)
        place += run_length
    positions, both_ways = None, bool(pipe.bundle.manifest.both_ways)
    if layout.places is not None:
        positions = np.array(places)
    if family.startswith("qwen"):
        positions = _positions(model, pipe, picture, texts, run_length)[:, places]
    asking = list(range(len(rows) - len(texts[-1]), len(rows)))
    return Sequence(np.stack(rows), visual.tolist(), asking, positions, family, both_ways=both_ways, deepstack=beside)


def _positions(model: Any, pipe: Pipeline, picture: Picture, texts: list[list[int]], run_length: int) -> Array:
    """[3,S] the positions of the unpruned prompt, by transformers."""
    clip = isinstance(picture, SampledFrames)
    token = VIDEO_TOKEN if clip else model.config.image_token_id
    ids = torch.tensor([[*texts[0], *chain.from_iterable([*[token] * run_length, *text] for text in texts[1:])]])
    grid = torch.tensor([patch_grid(pipe, picture)])
    options = {"video_grid_thw" if clip else "image_grid_thw": grid, **seconds_per_patch(model, picture)}
    return model.model.get_rope_index(ids, (1 + clip) * (ids == token).int(), **options)[0][:, 0].numpy()


def seconds_per_patch(model: Any, picture: Picture) -> dict[str, torch.Tensor]:
    """Return the option about time that Qwen2.5-VL takes with a clip; the others count frames or read the time."""
    if not isinstance(picture, SampledFrames) or model.config.model_type != "qwen2_5_vl":
        return {}
    return {"second_per_grid_ts": torch.tensor([2 / picture.size.fps])}
