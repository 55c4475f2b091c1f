"""One chunk of actions, step by step: tower, budget, prefix, denoising."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from sinkprune.contract.layout import VisualLayout
from sinkprune.contract.manifest import PolicyFacts
from sinkprune.contract.schedule import Schedule, schedule
from sinkprune.runtime.acting.denoising import denoise
from sinkprune.runtime.acting.observation import Observation, robot_actions
from sinkprune.runtime.acting.report import ActionReport, by_part, chunk_flops
from sinkprune.runtime.acting.step_times import StepTimes
from sinkprune.runtime.device.stopwatch import Stopwatch
from sinkprune.runtime.families import TowerInput
from sinkprune.runtime.media.picture_warnings import facts_of
from sinkprune.runtime.steps.context_length import check_prompt_length
from sinkprune.runtime.steps.decoding import prefill
from sinkprune.runtime.steps.encoding import encode, of_each_group, run_tower
from sinkprune.runtime.steps.kept import kept_tokens
from sinkprune.runtime.steps.loaded_model import LoadedModel
from sinkprune.runtime.steps.observer import Observer
from sinkprune.runtime.steps.pictures import decoded, joined_inputs
from sinkprune.runtime.steps.prompt_rows import lay_out
from sinkprune.runtime.text.prompt import Prompt


class BudgetAndSteps(NamedTuple):
    """What a chunk runs at."""

    budget: str
    steps: int
    """Denoising steps."""


Choose = Callable[[int], BudgetAndSteps]
"""Called when the vision tower is done, with the text tokens of the prompt."""


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
    manifest, family, chain, backend = model.manifest, model.family, model.chain, model.chain.backend
    embedding, clock = model.embedding, Stopwatch(backend, observer.during)
    pictures = [decoded(frame, family) for frame in observation.cameras]
    with clock.measure("latency"):
        with clock.measure("preprocess"):
            inputs, layouts = [*map(family.inputs, pictures)], [*map(family.layout, pictures)]
            prompt = _encoded(model, observation, layouts)
        files = [*map(facts_of, pictures)]
        observer.seen([*map(TowerInput, inputs, layouts, files)])
        model.warnings.warn(layouts, files)
        # Freeing a large picture takes milliseconds, which costs after the tower do not include.
        del pictures
        with backend.turn:
            # One call for all cameras.
            tower = run_tower(chain, joined_inputs(inputs), clock)
            budget, steps = choose(prompt.text_tokens)
            own = replace(observation, steps=steps)
            plan, planned = manifest.plan(method, budget), _planned(model, prompt, layouts, method, budget)
            chain.load_plan(plan)
            asked = model.prompts.question_ids([observation.instruction]) if manifest.reads_question(plan) else []
            words = backend.tensor(embedding(asked)) if asked else None
            towers = of_each_group(backend, tower)
            encoded = [encode(chain, plan, each, clock, words) for each in towers]
            norms = towers[0].device_norms
            del tower, towers
            observer.encoded(encoded)
            between, pruned = family.between_rows, plan is not None
            rows = lay_out(backend, embedding, between, prompt.texts, layouts, encoded, pruned=pruned)
            observer.laid_out(rows)
            prefix = prefill(chain, planned, rows, clock, norms)
            actions = denoise(chain, policy, times, own, prefix, rows.positions.next, clock)
    observer.prefilled(prefix)
    observer.acted(actions)
    with backend.turn:
        kept = kept_tokens(backend, layouts, encoded, rows, prefix)
    ms = clock.ms()
    visual = prefix.schedule.per_layer(manifest.language_model.num_layers)
    rows_per_layer = [prompt.text_tokens + count for count in visual]
    step_ms = [ms[f"step_{number}"] for number in range(steps)]
    return ActionReport(
        actions=robot_actions(policy, actions),
        in_robots_units=policy.in_robots_units,
        method=method,
        budget=budget,
        steps=steps,
        prompt_tokens=prompt.text_tokens,
        visual_tokens=sum(layout.all_tokens for layout in layouts),
        tokens_per_layer=visual,
        ms=by_part(ms, sum(step_ms)),
        step_ms=step_ms,
        flops=chunk_flops(manifest, steps, prefix.schedule.rows, layouts, rows_per_layer),
        images=kept,
        camera_names=observation.camera_names,
    )


def layouts_of(model: LoadedModel, observation: Observation) -> list[VisualLayout]:
    """Return the layouts of the cameras' frames; raises `ImageError`."""
    return [model.family.layout(decoded(frame, model.family)) for frame in observation.cameras]


def check_chunk(model: LoadedModel, observation: Observation, method: str, budget: str) -> None:
    """Check that a chunk can run at a budget, without running the model; raises `ImageError` and `PromptError`."""
    layouts = layouts_of(model, observation)
    _planned(model, _encoded(model, observation, layouts), layouts, method, budget)


def _encoded(model: LoadedModel, observation: Observation, layouts: Sequence[VisualLayout]) -> Prompt:
    model.prompts.check_length([observation.prompt], model.manifest.language_model.max_positions)
    texts = (*[""] * len(layouts), observation.prompt)
    return model.prompts.encode(texts, [layout.texts for layout in layouts])


def _planned(
    model: LoadedModel, prompt: Prompt, layouts: Sequence[VisualLayout], method: str, budget: str
) -> Schedule:
    """Return what a budget drops; raises `PromptError` if the prompt is too long."""
    planned = schedule(model.manifest, method, budget, layouts)
    check_prompt_length(model.manifest, model.limits, prompt.text_tokens, planned.rows)
    return planned
