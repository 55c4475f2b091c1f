"""One chunk of actions, step by step: tower, budget, prefix, and what makes actions of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Tokenizer

from sinkprune.contract.budgets import Plan
from sinkprune.contract.engines_manifest import Limits
from sinkprune.contract.errors import NumericsError, PromptError
from sinkprune.contract.manifest import PLACEHOLDER_ROW, STATE_ROW, STOP_ROW, Manifest
from sinkprune.contract.policy_facts import (
    MODULATION,
    STATE_PROJECTOR,
    ActionRows,
    ActionTokens,
    FastTokens,
    PolicyFacts,
)
from sinkprune.contract.precision import Array
from sinkprune.contract.schedule import Schedule, VisualLayout, schedule
from sinkprune.policies.observation import Observation, robot_actions
from sinkprune.policies.report import ActionReport, by_part, chunk_flops
from sinkprune.runtime.backends import Backend, Tensor
from sinkprune.runtime.device.stopwatch import Stopwatch
from sinkprune.runtime.families import TowerInput
from sinkprune.runtime.hooks import Budgets, Observer, Rows
from sinkprune.runtime.loading import LoadedModel
from sinkprune.runtime.recipe import look, run_prompt
from sinkprune.runtime.steps.chain import Chain, TowerOutput, run_tower
from sinkprune.runtime.steps.decoding import PromptRun, decode_one_token
from sinkprune.runtime.steps.pictures import layout_of, pixels_of
from sinkprune.runtime.steps.too_long import build_again
from sinkprune.runtime.text.answer_tokens import not_finite
from sinkprune.runtime.text.prompt import Prompt

if TYPE_CHECKING:
    from sinkprune.runtime.frames import FrameInputs

_NOT_FINITE = (
    "the policy gave actions that are not finite. If the bundle is fp16, its values may exceed that type: export it "
    "with --precision fp32. If not, the checkpoint's weights are damaged."
)
_MOST = 100
"""How many times are remembered, of about half a megabyte each for pi0.5's true shapes."""
_OTHER_INPUTS = "Give a frame and an instruction like those of its training, or a larger budget."


class StepTimes:
    """The inputs of the expert that depend on the time of a step alone.

    The scales, shifts and gates of pi0.5's norms are such inputs: a quarter of the weights of a step. They are
    computed at the first use of a time, and remembered. Threads may share an instance.
    """

    def __init__(self, chain: Chain, policy: PolicyFacts) -> None:
        self._chain, self._policy = chain, policy
        self._known: dict[float, Tensor] = {}

    def inputs(self, steps: int) -> Iterator[dict[str, Tensor]]:
        """Yield the inputs of each of `steps` equal steps, from time 1 (noise) to 0; called in a `turn`.

        One by one, so that the steps have the same addresses on a device.
        """
        times = 1.0 - np.arange(steps) / steps
        for time, row in zip(times, time_embeddings(self._policy, times), strict=True):
            yield self._of(float(time), row[None, None])

    def inputs_of_held(self, held: int) -> dict[str, Tensor]:
        """Return what a policy that was trained with held actions takes: `held` have time 0. Called in a `turn`."""
        if not self._policy.most_held:
            return {}
        own = self._of(0.0, time_embeddings(self._policy, np.zeros(1))[None])[MODULATION]
        return {"modulation_held": own, "held": self._chain.backend.tensor(np.array([held], np.int64))}

    def load(self, most: int) -> None:
        """Compute the inputs of any number of steps up to `most`, as far as they are remembered; in a `turn`."""
        for steps in range(most if self._policy.expert else 0, 0, -1):
            if len(self._known) + steps <= _MOST:
                deque(self.inputs(steps), 0)

    def _of(self, time: float, embedded: Array) -> dict[str, Tensor]:
        backend, engine = self._chain.backend, self._chain.of_policy.get(MODULATION)
        if engine is None:
            return {"time_embedding": backend.tensor(embedded)}
        found = self._known.get(time)
        if found is None:
            if len(self._known) >= _MOST:
                self._known.clear()
            made = engine({"time_embedding": backend.tensor(embedded)})[MODULATION]
            # Where the host does not wait, a tensor's memory is its own. Elsewhere engines may reuse that of outputs.
            found = made if backend.enqueues else backend.tensor(np.array(backend.numpy(made)))
            self._known[time] = found
        return {MODULATION: found}


def time_embeddings(policy: PolicyFacts, times: Array) -> Array:
    """Return [steps,d] fp32: the sines and cosines of `times` [steps] at the expert's frequencies, in radians.

    In fp64, of times in fp32, as LeRobot and openpi's PyTorch code compute them; transformers' fp32 differs by up to
    2e-4. They are no part of the graph: angles reach 1600 radians, and libraries that compute in bf16 or fp16 round
    them by several radians.
    """
    shortest, longest = policy.min_period or 1.0, policy.max_period or 1.0
    share = np.linspace(0.0, 1.0, policy.denoiser.hidden_size // 2)
    periods = shortest * (longest / shortest) ** share
    angles = times.astype(np.float32).astype(np.float64)[:, None] * (2 * np.pi / periods)
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)


def denoise(
    chain: Chain, policy: PolicyFacts, times: StepTimes, observation: Observation, run: PromptRun, clock: Stopwatch
) -> Array:
    """Return the expert's actions [1,chunk,action_dim] fp32, over the caches of the prompt's `run`.

    The expert's rows continue at its next position. Time runs from 1 (noise) to 0 in equal steps, by Euler's method,
    as in transformers' `PI0ForConditionalGeneration.sample_actions`. Held actions have their noised values in each
    step: `time * noise + (1 - time) * action` (arXiv 2506.07339, without its gradient). Their time is 0 in a policy
    that was trained with held actions. The caches do not move between steps.
    """
    backend, rows, position = chain.backend, policy.expert_rows, run.rows.next_position
    cos, sin = (backend.tensor(table) for table in chain.rotary.tables(np.arange(position, position + rows)))
    fixed = {"cos": cos, "sin": sin, "step": backend.tensor(np.array([-1.0 / observation.steps], np.float32))}
    if not policy.state_in_prompt:
        fixed["state"] = backend.tensor(observation.state)
    for segment, (decoder, cache) in enumerate(zip(chain.decoders, run.prefilled.cache.segments, strict=True)):
        fixed[f"length_{segment}"] = backend.tensor(np.array([cache.length], np.int64))
        fixed |= decoder.keys_and_values(cache)
    actions, held = backend.tensor(observation.noise), observation.held.shape[1]
    fixed |= times.inputs_of_held(held)
    # The held actions, then the rows after them.
    order = np.concatenate([np.arange(held), held + np.arange(held, policy.chunk)])

    def with_held(actions: Tensor, time: float) -> Tensor:
        """Return [1,chunk,action_dim]: the first rows are the held actions at this `time`."""
        noised = np.float32(time) * observation.noise[:, :held] + np.float32(1 - time) * observation.held
        return backend.join([backend.tensor(noised), actions], order)

    for number, own in enumerate(times.inputs(observation.steps)):
        with clock.measure(f"step_{number}"):
            if held:
                actions = with_held(actions, 0 if policy.most_held else 1 - number / observation.steps)
            actions = chain.last({**fixed, **own, "actions": actions})["actions_out"]
    found = np.array(backend.numpy(actions))
    found[:, :held] = observation.held
    return found


def own_rows(model: LoadedModel, rows: ActionRows, state: Array) -> dict[int, Array]:
    """Return the rows [d] of a prompt that are no text, with the normalised `state` [1,1,state_dim]."""
    chain, stop = model.chain, model.embedding([rows.stop])[0]
    found = {PLACEHOLDER_ROW: np.zeros_like(stop), STOP_ROW: stop}
    if (projector := chain.of_policy.get(STATE_PROJECTOR)) is not None:
        projected = projector({"state": chain.backend.tensor(state)})["state_row"]
        found[STATE_ROW] = np.array(chain.backend.numpy(projected))[0, 0]
    return found


def read_rows(chain: Chain, run: PromptRun, clock: Stopwatch) -> Array:
    """Return the actions [1,chunk,action_dim] fp32 of a policy without an expert, from the prompt's last rows."""
    with clock.measure("step_0"):
        actions = chain.last({"hidden": run.prefilled.hidden})["actions_out"]
    return np.array(chain.backend.numpy(actions))


def greedy_tokens(model: LoadedModel, run: PromptRun) -> Iterator[int]:
    """Yield the likeliest tokens after a prompt, each when it is asked for; raises `NumericsError`."""
    chain = model.chain
    logits = chain.last({"hidden": run.prefilled.hidden})["logits"]
    while True:
        token, finite = chain.backend.best(logits)
        if not finite:
            raise not_finite()
        yield token
        logits = decode_one_token(chain, run.prefilled.cache, model.embedding([token])[0])


def decode_actions(model: LoadedModel, kind: ActionTokens, numbers: int, run: PromptRun, clock: Stopwatch) -> Array:
    """Return an action [1,1,numbers] fp32 of greedy tokens. A higher token is a lower value, and others are ends.

    Raises `NumericsError` for a token that ends the answer before the action is complete.
    """
    tokens = list[int]()
    with clock.measure("step_0"):
        for token in islice(greedy_tokens(model, run), numbers):
            if token == kind.stop:
                raise NumericsError(
                    f"the policy ended its answer after {len(tokens)} of {numbers} tokens of an action, so there is "
                    f"no action. {_OTHER_INPUTS}"
                )
            tokens.append(token)
    edges = np.linspace(-1, 1, kind.edges)
    centres = (edges[:-1] + edges[1:]) / 2
    return centres[np.clip(kind.end - np.array(tokens) - 1, 0, len(centres) - 1)].astype(np.float32)[None, None]


def actions_of(tokens: Iterable[int], policy: PolicyFacts, tokenizer: Tokenizer) -> tuple[Array, int]:
    """Return a chunk [1,chunk,action_dim] fp32 of pi0-FAST's first `tokens`, and how many they are.

    The inverse of FAST (arXiv 2501.09747), as LeRobot computes it. `tokenizer` is that of the decoder. Raises
    `NumericsError` for tokens that are no actions. LeRobot gives a chunk of zeros for some of them, and skips others.
    """
    fast, end, found = policy.fast, tokenizer.token_to_id("|"), list[int]()
    assert fast is not None
    for token in islice(tokens, fast.most):
        found.append(token)
        if token == end:
            break
    begin = tokenizer.encode("Action: ", add_special_tokens=False).ids
    if fast.begins and found[:2] != begin[:2]:
        raise NumericsError(f"the policy's answer does not begin with 'Action:', so it is no action. {_OTHER_INPUTS}")
    first = tokenizer.get_vocab_size(with_added_tokens=False) - 1 - fast.skip
    own = [first - token for token in _without([token for token in found if token != end], begin)]
    coefficients = _coefficients(fast, own, policy.chunk * policy.action_dim)
    return inverse_dct(coefficients.reshape(policy.chunk, policy.action_dim) / fast.scale)[None], len(found)


def inverse_dct(coefficients: Array) -> Array:
    """Return [n,width] fp32: the inverse of an orthogonal DCT of type 2 along the first axis."""
    count = len(coefficients)
    places, frequencies = np.arange(count)[:, None], np.arange(count)
    waves = np.cos(np.pi * (2 * places + 1) * frequencies / (2 * count)) * np.sqrt(2 / count)
    waves[:, 0] = np.sqrt(1 / count)
    actions: Array = (waves @ coefficients).astype(np.float32)
    return actions


def _without(tokens: Sequence[int], part: Sequence[int]) -> list[int]:
    """Return the `tokens` without each `part` of them."""
    left, place = [*tokens], 0
    while part and place <= len(left) - len(part):
        if left[place : place + len(part)] == [*part]:
            del left[place : place + len(part)]
        else:
            place += 1
    return left


def _coefficients(fast: FastTokens, tokens: Sequence[int], wanted: int) -> Array:
    """Return [wanted] fp64: the coefficients of FAST's `tokens`, cut or filled with zeros."""
    if not fast.pieces:
        return np.zeros(wanted)
    for token in tokens:
        if not 0 <= token < len(fast.pieces):
            raise NumericsError(
                f"the policy gave the token {token} as one of FAST, which has {len(fast.pieces)}, so there are no "
                f"actions. {_OTHER_INPUTS}"
            )
    # Bytes of a character may lie in several tokens.
    text = bytes.fromhex("".join(fast.pieces[token] for token in tokens)).decode("utf-8", "replace")
    given = np.array([*map(ord, text[:wanted])], np.float64) + fast.min_token
    return np.concatenate([given, np.zeros(wanted - len(given))])


Choose = Callable[[int], tuple[str, int]]
"""Returns the budget and the denoising steps of a chunk from the text tokens of its prompt, when the vision tower is
done."""


@dataclass
class _ChunkBudgets(Budgets):
    """Runs the budget that `pick` returns, and holds its steps."""

    model: LoadedModel
    method: str
    plan: Plan | None
    layouts: Sequence[VisualLayout]
    pick: Choose
    timed: bool
    steps: int = 0
    """After `choose`."""

    def choose(self, possible: Sequence[Schedule], text: int) -> Schedule:
        budget, self.steps = self.pick(text)
        planned = _planned(self.model, text, self.layouts, self.method, budget)
        self.model.chain.load_plan(planned.plan)
        return planned


class _AllCameras(Rows):
    """One call of the tower for all cameras, or for each where they differ in tokens."""

    def towers(
        self, chain: Chain, plan: Plan | None, pictures: Sequence[TowerInput], clock: Stopwatch
    ) -> list[TowerOutput]:
        if len({picture.layout.tokens for picture in pictures}) > 1:
            return super().towers(chain, plan, pictures, clock)
        tower = run_tower(chain, joined_inputs([picture.inputs for picture in pictures]), clock, plan)
        return of_each_group(chain.backend, tower)


def joined_inputs(inputs: Sequence[dict[str, Array] | FrameInputs]) -> dict[str, Array] | FrameInputs:
    """Return the vision tower's inputs for several pictures in one call, joined along the axis of groups."""
    prepared = [one for one in inputs if isinstance(one, dict)]
    if len(prepared) < len(inputs):
        from sinkprune.runtime.frames import joined

        return joined(inputs)
    return {name: np.concatenate([one[name] for one in prepared]) for name in prepared[0]}


def of_each_group(backend: Backend, tower: TowerOutput) -> list[TowerOutput]:
    """Return the `tower`'s output on G pictures of one group each, by picture."""
    if tower.shape[0] == 1:
        return [tower]
    whole = {"tokens": tower.tokens, "norms": tower.device_norms, "salience": tower.device_salience}
    whole |= {"deepstack": tower.deepstack} if tower.deepstack is not None else {}
    whole |= {"merged": tower.device_merged} if tower.device_merged is not None else {}
    groups = zip(*map(backend.split, whole.values()), strict=True)
    return [TowerOutput.of(backend, dict(zip(whole, own, strict=True)), tower.scores.damaged) for own in groups]


def check_prompt_length(manifest: Manifest, limits: Limits | None, text: int, visual: int) -> None:
    """Reject a policy's prompt with too many tokens of `text` and `visual` rows; raises `PromptError`."""
    trained = manifest.policy.most_prompt_tokens if manifest.policy else None
    if trained is not None and text > trained:
        raise PromptError(
            f"{text} text tokens in the prompt are more than the {trained} of the policy's training. Give a shorter "
            "instruction."
        )
    if limits is not None and text > limits.prompt_tokens:
        raise PromptError(
            f"{text} text tokens in the prompt are more than the {limits.prompt_tokens} the engines were built for. "
            f"Give a shorter instruction, or {build_again(manifest, limits, prompt_tokens=text)}."
        )
    most = manifest.language_model.max_positions
    if text + visual > most:
        raise PromptError(
            f"the prompt is too long: {text} text tokens and {visual} visual tokens exceed the model's {most} "
            "positions. Give a shorter instruction."
        )


def run_chunk(
    model: LoadedModel,
    times: StepTimes,
    observation: Observation,
    method: str,
    plan: Plan | None,
    choose: Choose,
    observer: Observer,
    *,
    timed: bool,
) -> ActionReport:
    """Run the steps of a chunk, in order; raises what `Policy.act` raises.

    The tower is that of `plan`, and `choose` returns its budget, or another with the same tower. `timed` is whether
    `choose` reads the clock, and must be called when the tower is done.
    """
    model = model.for_plan(plan)
    manifest, chain, clock = model.manifest, model.chain, Stopwatch(model.chain.backend, observer.during)
    policy = manifest.acting
    rows = _AllCameras()
    encode_prompt = partial(_encoded, model, observation)
    looked = look(model, observation.cameras, encode_prompt, None, rows, observer, clock, "latency")
    budgets = _ChunkBudgets(model, method, plan, looked.layouts, choose, timed)

    def question_of(plan: Plan | None) -> list[int]:
        return model.prompts.question_ids([observation.instruction]) if manifest.reads_question(plan) else []

    new_tokens: int | None = None
    with clock.measure("latency"), chain.backend.turn:
        if policy.rows is not None:
            model = model._replace(
                embedding=model.embedding.with_rows(own_rows(model, policy.rows, observation.state))
            )
        run = run_prompt(model, looked, (), question_of, budgets, rows, observer, clock, policy.new_tokens)
        if policy.fast is not None:
            with clock.measure("step_0"):
                actions, new_tokens = actions_of(greedy_tokens(model, run), policy, model.prompts.tokenizer)
        elif policy.tokens is not None:
            actions = decode_actions(model, policy.tokens, policy.action_dim, run, clock)
        elif policy.expert is None:
            actions = read_rows(chain, run, clock)
        else:
            actions = denoise(chain, policy, times, replace(observation, steps=budgets.steps), run, clock)
        # The tower's error comes first.
        run.check()
        if not np.isfinite(actions).all():
            raise NumericsError(_NOT_FINITE)
    observer.prefilled(run.prefilled)
    observer.acted(actions)
    with chain.backend.turn:
        images = run.kept(chain.backend)
    ms, text, result = clock.ms(), run.prompt.text_tokens, run.prefilled
    rows_per_layer = [text + count for count in result.tokens_per_layer]
    step_ms = [ms[f"step_{number}"] for number in range(budgets.steps)]
    return ActionReport(
        actions=robot_actions(policy, actions, observation.measured),
        in_robots_units=policy.in_robots_units,
        method=method,
        budget=result.schedule.budget,
        steps=budgets.steps,
        prompt_tokens=text,
        visual_tokens=sum(layout.all_tokens for layout in run.layouts),
        tokens_per_layer=result.tokens_per_layer,
        ms=by_part(ms, sum(step_ms)),
        step_ms=step_ms,
        flops=chunk_flops(manifest, budgets.steps, result.schedule.rows, run.layouts, rows_per_layer, new_tokens),
        images=images,
        camera_names=observation.camera_names,
    )


def layouts_of(model: LoadedModel, observation: Observation) -> list[VisualLayout]:
    """Return the layouts of the cameras' frames; raises `ImageError`."""
    family = model.family
    return [layout_of(pixels_of(frame, family), frame, family) for frame in observation.cameras]


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
