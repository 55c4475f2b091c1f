"""One chunk of actions, step by step: tower, budget, prefix, denoising."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from sinkprune.contract.layout import VisualLayout
from sinkprune.contract.manifest import PolicyFacts
from sinkprune.contract.plans import Plan
from sinkprune.contract.schedule import Schedule, schedule
from sinkprune.runtime.acting.denoising import denoise
from sinkprune.runtime.acting.observation import Observation, robot_actions
from sinkprune.runtime.acting.report import ActionReport, by_part, chunk_flops
from sinkprune.runtime.acting.step_times import StepTimes
from sinkprune.runtime.device.stopwatch import Stopwatch
from sinkprune.runtime.families import TowerInput
from sinkprune.runtime.hooks import Budgets, Rows
from sinkprune.runtime.recipe import look, run_prompt
from sinkprune.runtime.steps.chain import Chain
from sinkprune.runtime.steps.context_length import check_prompt_length
from sinkprune.runtime.steps.encoding import TowerOutput, of_each_group, run_tower
from sinkprune.runtime.steps.loaded_model import LoadedModel
from sinkprune.runtime.steps.observer import Observer
from sinkprune.runtime.steps.pictures import decoded, joined_inputs
from sinkprune.runtime.text.prompt import Prompt


class BudgetAndSteps(NamedTuple):
    """What a chunk runs at."""

    budget: str
    steps: int
    """Denoising steps."""


Choose = Callable[[int], BudgetAndSteps]
"""Called when the vision tower is done, with the text tokens of the prompt."""


class _ChunkBudgets(Budgets):
    """Runs the budget that `choose` returns, and holds its steps."""

    steps: int
    """After `choose`."""

    def __init__(self, model: LoadedModel, method: str, layouts: Sequence[VisualLayout], choose: Choose) -> None:
        self._model, self._method, self._layouts, self._choose = model, method, layouts, choose

    def choose(self, possible: Sequence[Schedule], text: int) -> Schedule:
        budget, self.steps = self._choose(text)
        planned = _planned(self._model, text, self._layouts, self._method, budget)
        self._model.chain.load_plan(planned.plan)
        return planned


class _AllCameras(Rows):
    """One call of the tower for all cameras."""

    def towers(self, chain: Chain, pictures: Sequence[TowerInput], clock: Stopwatch) -> list[TowerOutput]:
        tower = run_tower(chain, joined_inputs([picture.inputs for picture in pictures]), clock)
        return of_each_group(chain.backend, tower)


def run_chunk(
    model: LoadedModel,
    policy: PolicyFacts,
    times: StepTimes,
    observation: Observation,
    method: str,
    choose: Choose,
    observer: Observer,
) -> ActionReport:
    """Run the steps of a chunk, in order; raises what `Policy.act` raises."""
    manifest, chain, clock = model.manifest, model.chain, Stopwatch(model.chain.backend, observer.during)
    rows = _AllCameras()
    encode_prompt = partial(_encoded, model, observation)
    looked = look(model, observation.cameras, encode_prompt, None, rows, observer, clock, "latency")
    budgets = _ChunkBudgets(model, method, looked.layouts, choose)

    def question_of(plan: Plan | None) -> list[int]:
        return model.prompts.question_ids([observation.instruction]) if manifest.reads_question(plan) else []

    with clock.measure("latency"), chain.backend.turn:
        run = run_prompt(model, looked, (), question_of, budgets, rows, observer, clock)
        own = replace(observation, steps=budgets.steps)
        actions = denoise(chain, policy, times, own, run.prefilled, run.rows.positions.next, clock)
    observer.prefilled(run.prefilled)
    observer.acted(actions)
    with chain.backend.turn:
        report = run.report(chain)
    ms, text = clock.ms(), run.prompt.text_tokens
    rows_per_layer = [text + count for count in report.tokens_per_layer]
    step_ms = [ms[f"step_{number}"] for number in range(budgets.steps)]
    return ActionReport(
        actions=robot_actions(policy, actions),
        in_robots_units=policy.in_robots_units,
        method=method,
        budget=report.budget,
        steps=budgets.steps,
        prompt_tokens=text,
        visual_tokens=sum(layout.all_tokens for layout in run.layouts),
        tokens_per_layer=report.tokens_per_layer,
        ms=by_part(ms, sum(step_ms)),
        step_ms=step_ms,
        flops=chunk_flops(manifest, budgets.steps, run.prefilled.schedule.rows, run.layouts, rows_per_layer),
        images=report.images,
        camera_names=observation.camera_names,
    )


def layouts_of(model: LoadedModel, observation: Observation) -> list[VisualLayout]:
    """Return the layouts of the cameras' frames; raises `ImageError`."""
    return [model.family.layout(decoded(frame, model.family)) for frame in observation.cameras]


def check_chunk(model: LoadedModel, observation: Observation, method: str, budget: str) -> None:
    """Check that a chunk can run at a budget, without running the model; raises `ImageError` and `PromptError`."""
    layouts = layouts_of(model, observation)
    _planned(model, _encoded(model, observation, layouts).text_tokens, layouts, method, budget)


def _encoded(model: LoadedModel, observation: Observation, layouts: Sequence[VisualLayout]) -> Prompt:
    model.prompts.check_length([observation.prompt], model.manifest.language_model.max_positions)
    texts = (*[""] * len(layouts), observation.prompt)
    return model.prompts.encode(texts, [layout.texts for layout in layouts])


def _planned(model: LoadedModel, text: int, layouts: Sequence[VisualLayout], method: str, budget: str) -> Schedule:
    """Return what a budget drops; raises `PromptError` if a prompt of `text` tokens of text is too long."""
    planned = schedule(model.manifest, method, budget, layouts)
    check_prompt_length(model.manifest, model.limits, text, planned.rows)
    return planned
