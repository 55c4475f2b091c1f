"""Facts of a robot policy, as `bundle.json` has them, and the graphs of a policy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

from sinkprune.contract.checks import OPTIONAL, Bounds, Count, Few
from sinkprune.contract.manifest import (
    ACTION_HEAD,
    EXPERT,
    PLACEHOLDER_ROW,
    STATE_ROW,
    STOP_ROW,
    LanguageModel,
    TensorSpec,
)

if TYPE_CHECKING:
    from sinkprune.contract.bundle import Interface, Interfaces

CAMERA_PREFIX = "observation.images."
"""What LeRobot writes before the name of a camera."""
LeRobotResize = Literal["resize_with_pad_torch", "resize_with_pad"]
"""LeRobot's functions that turn an image into a part of a square: in its middle, or at its right and lower edges."""
MODULATION = "modulation"
"""The graph of what a policy's expert reads of a step's time, where that is much."""
STATE_PROJECTOR = "state_projector"
"""The graph of the row that has the robot's state in a policy's prompt."""


@dataclass(frozen=True)
class NumberRanges:
    """What becomes -1 and 1 in normalised states or actions, for each of their numbers."""

    low: tuple[float, ...]
    high: tuple[float, ...]


@dataclass(frozen=True)
class ActionRows:
    """Rows at the end of the prompt that become actions in one pass of the decoder (OpenVLA-OFT, arXiv 2502.19645).

    The prompt ends with a placeholder for each number of the chunk, which is a row of zeros, and a stop token. Each
    row predicts the next one's number.
    """

    stop: Count
    """The token after the placeholders."""
    head_blocks: Count
    """The residual blocks of the action head."""


@dataclass(frozen=True)
class ActionTokens:
    """Tokens that become an action, one for each number (OpenVLA, arXiv 2406.09246). They are decoded greedily."""

    end: Count
    """The token after those of the bins. The one before it is the lowest bin."""
    edges: Few
    """The edges of the bins, from -1 to 1."""
    stop: Count
    """The token that ends an answer. An action with it is an error."""


@dataclass(frozen=True)
class FastTokens:
    """Tokens that become a chunk by FAST (pi0-FAST, arXiv 2501.09747). They are decoded greedily up to the token `|`.

    They are bytes of a text, whose characters are coefficients of a discrete cosine transform.
    """

    most: Few
    """The most tokens that are decoded."""
    skip: Count
    """The tokens of the vocabulary after those of FAST. Token 0 of FAST is the last one before them."""
    scale: Annotated[float, Bounds(1e-6, 1e6)]
    """What coefficients are divided by."""
    min_token: Annotated[int, Bounds(-(1 << 20), 1 << 20)]
    """The coefficient of the character 0."""
    pieces: tuple[Annotated[str, Bounds(0, 1 << 16)], ...]
    """The bytes of each token of FAST, in hexadecimal digits. Empty for random weights, whose chunks are zeros."""
    begins: bool
    """Whether tokens that do not begin with `Action:` are an error."""


@dataclass(frozen=True)
class PolicyFacts:
    """Facts of a robot policy. An action expert reads the decoder's caches (pi0, arXiv 2410.24164), a head reads its
    last rows, or tokens become actions."""

    expert: LanguageModel | None
    """The action expert, with the decoder's layers, key-value heads and `head_dim`. None with `rows`, `tokens` or
    `fast`."""
    chunk: Few
    """The number of actions of a chunk."""
    state_dim: Annotated[int, Bounds(0, 1 << 14)]
    """The width of the input for the robot's state: the most numbers that a state has. 0 for a policy without."""
    action_dim: Few
    """The width of the expert's or the head's actions."""
    steps: Few
    """The usual number of denoising steps; 1 without an expert."""
    min_period: Annotated[float, Bounds(1e-6, 1e6)] | None
    """The shortest period of the time embedding; time runs from 1 to 0. None without an expert."""
    max_period: Annotated[float, Bounds(1e-6, 1e6)] | None
    state_mean: tuple[float, ...]
    """The mean of each number of the state in the training data; empty if the checkpoint has none. Then states are
    not normalised."""
    state_std: tuple[float, ...]
    action_mean: tuple[float, ...]
    """The mean of each number of an action, likewise."""
    action_std: tuple[float, ...]
    state_range: NumberRanges | None = field(default=None, metadata=OPTIONAL)
    """The ranges of states that are normalised by ranges and not by `state_mean`, which is then empty."""
    action_range: NumberRanges | None = field(default=None, metadata=OPTIONAL)
    """The ranges of actions, likewise."""
    state_numbers: Few | None = field(default=None, metadata=OPTIONAL)
    """How many numbers a state without statistics has; None: `state_dim`."""
    action_numbers: Few | None = field(default=None, metadata=OPTIONAL)
    """How many numbers an action without statistics has; None: `action_dim`."""
    cameras: tuple[Annotated[str, Bounds(1, 200)], ...] | None = field(default=None, metadata=OPTIONAL)
    """The names of the cameras, in their order; None if the checkpoint has no names."""
    most_prompt_tokens: Few | None = field(default=None, metadata=OPTIONAL)
    """The most text tokens of a prompt in the training; None if the checkpoint does not have this number."""
    state_in_prompt: bool | None = field(default=None, metadata=OPTIONAL)
    """Whether the state is text of the prompt (pi0.5, arXiv 2504.16054) and no input of the expert."""
    relative_actions: tuple[bool, ...] | None = field(default=None, metadata=OPTIONAL)
    """Which numbers of an action the expert gives relative to the state's number at the same place (LeRobot's
    `relative_actions_processor`); None for none. Statistics of actions are of these differences."""
    most_held: Few | None = field(default=None, metadata=OPTIONAL)
    """The most actions at the start of a chunk that were held in the training (LeRobot's `rtc_training_max_delay`,
    arXiv 2512.05964). Their time is 0 in each step. None if the training held none."""
    rows: ActionRows | None = field(default=None, metadata=OPTIONAL)
    """The rows that become actions, if any."""
    tokens: ActionTokens | None = field(default=None, metadata=OPTIONAL)
    """The tokens that become actions, if any."""
    fast: FastTokens | None = field(default=None, metadata=OPTIONAL)
    """The tokens that become a chunk, if any."""
    prompt_end: Count | None = field(default=None, metadata=OPTIONAL)
    """The token at the end of every prompt's text, which is added to texts without; None for none."""
    lowercase: bool | None = field(default=None, metadata=OPTIONAL)
    """Whether instructions are written in lower case."""
    clips_state: bool | None = field(default=None, metadata=OPTIONAL)
    """Whether normalised states are clipped to -1 to 1."""

    @property
    def own_rows(self) -> int:
        """The rows of a prompt that are no text."""
        return 0 if self.rows is None else self.chunk * self.action_dim + 1 + (self.state_dim > 0)

    def completed(self, ids: Sequence[int]) -> list[int]:
        """Return the rows after a prompt's pictures, whose text has the token `ids`, with those that are no text."""
        text = [*ids]
        if self.prompt_end is not None and text[-1:] != [self.prompt_end]:
            text.append(self.prompt_end)
        if self.rows is None:
            return text
        state = [STATE_ROW] if self.state_dim else []
        return [*state, *text, *[PLACEHOLDER_ROW] * (self.chunk * self.action_dim), STOP_ROW]

    @property
    def new_tokens(self) -> int:
        """The most tokens that are decoded for a chunk."""
        return self.fast.most if self.fast else self.action_dim if self.tokens else 0

    @property
    def modulates(self) -> bool:
        """Whether the expert's norms read the graph `modulation`, which runs once for each time."""
        return bool(self.expert and self.state_in_prompt)

    @property
    def last_graph(self) -> str:
        """The graph after the decoder."""
        return "head" if self.new_tokens else EXPERT if self.expert else ACTION_HEAD

    @property
    def other_graphs(self) -> tuple[str, ...]:
        """The graphs that only policies have, besides the last one."""
        return (*[MODULATION] * self.modulates, *[STATE_PROJECTOR] * bool(self.rows and self.state_dim))

    def interfaces(self, model: Interfaces) -> Iterator[Interface]:
        """Yield the interfaces of the graphs that only policies have."""
        if self.new_tokens:
            return
        if self.expert is not None:
            yield from self._of_expert(model, self.expert)
        else:
            actions = TensorSpec("actions_out", "float32", (1, self.chunk, self.action_dim))
            yield ACTION_HEAD, model.rows()[:1], [actions]
            if STATE_PROJECTOR in self.other_graphs:
                state = TensorSpec("state", "float32", (1, 1, self.state_dim))
                yield STATE_PROJECTOR, [state], [model.floats("state_row", 1, 1, model.lm.hidden_size)]

    def _of_expert(self, model: Interfaces, expert: LanguageModel) -> Iterator[Interface]:
        embedding = TensorSpec("time_embedding", "float32", (1, 1, expert.hidden_size))
        # The scale, the shift and the gate of each of the expert's norms: two a layer, and the last.
        rows = 3 * (2 * expert.num_layers + 1)
        modulation = [model.floats("modulation", 1, rows, expert.hidden_size)]
        actions = (1, self.chunk, self.action_dim)
        takes = [model.floats(table, 1, self.expert_rows, model.lm.head_dim // 2) for table in ("cos", "sin")]
        takes.append(TensorSpec("actions", "float32", actions))
        if not self.state_in_prompt:
            takes.append(TensorSpec("state", "float32", (1, 1, self.state_dim)))
        takes += [embedding, *(modulation if self.modulates else [])]
        takes.append(TensorSpec("step", "float32", (1,)))
        if self.most_held:
            held = model.floats("modulation_held", 1, rows, expert.hidden_size)
            takes += [held, TensorSpec("held", "int64", (1,))]
        for segment, layers in enumerate(model.manifest.segments):
            takes.append(TensorSpec(f"length_{segment}", "int64", (1,)))
            for name in (f"past_{kind}_{layer}" for layer in layers for kind in ("key", "value")):
                takes.append(model.heads(name, model.lm.num_kv_heads))
        yield EXPERT, takes, [TensorSpec(name, "float32", actions) for name in ("actions_out", "velocity")]
        if self.modulates:
            yield MODULATION, [embedding], modulation

    @property
    def denoiser(self) -> LanguageModel:
        """The action expert; raises `ValueError` for a policy without one."""
        if self.expert is None:
            raise ValueError("the policy has no action expert")
        return self.expert

    @property
    def expert_rows(self) -> int:
        """The rows of the expert: the actions of a chunk, and the state where the expert takes it."""
        return self.chunk + (0 if self.state_in_prompt else 1)

    @property
    def normalised(self) -> tuple[str, ...]:
        """Which of "states" and "actions" have no statistics, so that they stay normalised."""
        without = {
            "states": self.state_dim and not (self.state_mean or self.state_range),
            "actions": not (self.action_mean or self.action_range),
        }
        return tuple(name for name, lacks in without.items() if lacks)

    @property
    def units_note(self) -> str | None:
        """A sentence about what stays normalised; None if all numbers are in the robot's units."""
        if not self.normalised:
            return None
        what = " and ".join(self.normalised)
        return (
            f"the checkpoint has no statistics of {what}, so {what} are normalised numbers and not in the robot's "
            "units. Do not send them to a robot."
        )

    @property
    def in_robots_units(self) -> bool:
        """Whether states and actions are in the robot's units: the bundle has the statistics of both."""
        return not self.normalised

    @property
    def action_width(self) -> int:
        """The numbers of an action that `Policy.act` returns."""
        if self.action_range:
            return len(self.action_range.low)
        return len(self.action_mean) or self.action_numbers or self.action_dim

    @property
    def usual_state(self) -> tuple[float, ...]:
        """A state in the middle of the training data, in the robot's units; its length is that of every state."""
        if self.state_range:
            ends = zip(self.state_range.low, self.state_range.high, strict=True)
            return tuple((low + high) / 2 for low, high in ends)
        return self.state_mean or (0.0,) * (self.state_numbers or self.state_dim)
