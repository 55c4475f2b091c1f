"""The parts of a loaded bundle that a request runs on."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sinkprune.contract.budgets import UNPRUNED, Plan
from sinkprune.contract.manifest import Manifest
from sinkprune.contract.precision import Array
from sinkprune.contract.progress import OnProgress
from sinkprune.contract.schedule import VisualLayout
from sinkprune.runtime.families import Family
from sinkprune.runtime.media.frame import Frame, Picture, SampledFrames
from sinkprune.runtime.media.images import check_array
from sinkprune.runtime.media.picture_warnings import PictureWarnings
from sinkprune.runtime.steps.chain import Chain
from sinkprune.runtime.steps.pictures import PictureLike, pixels_of
from sinkprune.runtime.steps.prompt_rows import Embedding
from sinkprune.runtime.steps.request import Request
from sinkprune.runtime.text.answer_tokens import Sampler
from sinkprune.runtime.text.prompt import Prompt, PromptEncoder

if TYPE_CHECKING:
    from sinkprune.contract.engines_manifest import Limits
    from sinkprune.runtime.frames import FrameGraph, FrameInputs

_LOADING_PLANS = "loading the budgets' graphs"


class LoadedModel(NamedTuple):
    """A bundle on a backend: what preprocesses, tokenizes, embeds and computes."""

    manifest: Manifest
    limits: Limits | None
    """Limits of the engines; None for graphs, which have none."""
    family: Family
    prompts: PromptEncoder
    embedding: Embedding
    chain: Chain
    warnings: PictureWarnings
    frames: FrameGraph | None = None
    """The graph that prepares frames where the tower runs; None where the host does."""

    def for_plan(self, plan: Plan | None) -> LoadedModel:
        """Return the model that sees pictures in the size of a `plan`, and counts the FLOPs of its tower."""
        if plan is not None and plan.tower is not None:
            return self._replace(family=self.family.for_tower(plan.tower))
        share = plan.picture_share if plan is not None else None
        return self if share is None else self._replace(family=self.family.smaller(share))

    def picture_of(self, source: PictureLike) -> Picture:
        """Return what `pixels_of` does, and an array as it is where a graph prepares frames; raises `ImageError`."""
        if self.frames is not None and isinstance(source, np.ndarray):
            check_array(source)
            return Frame.of_array(source)
        return pixels_of(source, self.family)

    def tower_inputs(self, picture: Picture) -> dict[str, Array] | FrameInputs:
        """Return `Family.inputs`, or what the device computes them from; raises `ImageError`."""
        if self.frames is not None and not isinstance(picture, SampledFrames):
            frame = picture if isinstance(picture, Frame) else Frame(np.asarray(picture))
            plans, tables = self.family.frame_plans(frame.size), self.family.tables(frame)
            inputs = self.frames.planned(frame, plans, tables)
            if inputs is not None:
                return inputs
        return self.family.inputs(picture)

    def load_plans(self, method: str, progress: OnProgress) -> None:
        """Load the pruning graphs of all budgets of a method, so that no request waits for them.

        `progress` is called before and after each budget. Raises `BudgetError` for a method that the bundle does not
        have.
        """
        self.manifest.plan(method, UNPRUNED)
        plans = self.manifest.plans[method]
        for done, plan in enumerate(plans.values()):
            progress(_LOADING_PLANS, done, len(plans), "budgets")
            self.chain.load_plan(plan)
        progress(_LOADING_PLANS, len(plans), len(plans), "budgets")

    def check_text_length(self, request: Request) -> None:
        """Raise `PromptError` for texts that cannot fit into the context; called before they are tokenized."""
        turns = [request.texts, *(turn.texts for turn in request.history), (request.system or "",)]
        calls = [json.dumps(dict(call.arguments)) for turn in request.history for call in turn.tool_calls]
        texts = itertools.chain(*turns, calls)
        self.prompts.check_length(texts, self.manifest.language_model.max_positions)

    def encode_prompt(self, request: Request, layouts: Sequence[VisualLayout]) -> Prompt:
        """Return the tokens of a request with pictures of these `layouts`; raises `PromptError`."""
        visual = [layout.texts for layout in layouts]
        return self.prompts.encode(
            request.texts, visual, request.system, request.history, request.tools, request.tool_call_id
        )

    def new_sampler(self, request: Request, prompt: Prompt, layouts: Sequence[VisualLayout]) -> Sampler:
        """Return the sampler of an answer to `prompt`, with the checkpoint's own penalty unless `request` has one."""
        tokens = self.manifest.tokens
        # In transformers' prompts, these tokens stand in the places of visual tokens.
        visual = [tokens.image if tokens.video is None or not one.frame_indices else tokens.video for one in layouts]
        return request.new_sampler(itertools.chain(visual, *prompt.texts), self.manifest.repetition_penalty)

    def question_ids(self, request: Request, prompt: Prompt, plan: Plan | None) -> list[int]:
        """Return the token ids of what the sanitizer of `plan` reads: the words of the user's last turn, if any.

        They are those of the user alone, not of the template, which is the same for all questions. A turn without
        words stands for all text after the pictures.
        """
        if not self.manifest.reads_question(plan):
            return []
        asked = [turn.texts for turn in request.history if turn.role == "user"]
        asked += [request.texts] if request.tool_call_id is None else []
        return self.prompts.question_ids(asked[-1] if asked else ()) or prompt.texts[-1]
