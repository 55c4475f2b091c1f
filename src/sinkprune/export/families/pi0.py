"""pi0, pi0.5 and pi0-FAST: checkpoints to graphs.

transformers has pi0 alone. Other checkpoints are LeRobot's, or have pi0's configuration with the `model_type` "pi05".
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any, TypedDict, get_args

from sinkprune.contract.checks import Bounds, from_json
from sinkprune.contract.errors import CheckpointError
from sinkprune.contract.manifest import Number, Side
from sinkprune.contract.policy_facts import FastTokens, LeRobotResize, NumberRanges, PolicyFacts
from sinkprune.export.checkpoint.folder import Name, read_fields
from sinkprune.export.checkpoint.lerobot import PolicyFields, lerobot_pixels
from sinkprune.export.families import WriteGraph
from sinkprune.export.families.llama_shaped import ConfigFields, PixelFields, Setting, TextFields, head_dim
from sinkprune.export.families.paligemma import PIXELS, PaliGemma, PaliGemmaFields
from sinkprune.export.graph import WeightedGraph
from sinkprune.export.models.actions import ActionExpert, build_adaptive_expert, build_expert, build_modulation
from sinkprune.export.models.llama import Llama

_Number = Annotated[Number, Bounds(-1e6, 1e6)]
_Statistics = Annotated[list[_Number], Bounds(1, 1 << 12)]


class _PolicyFields(TypedDict, total=False):
    """Fields of transformers' PI0Processor, and those that a checkpoint of LeRobot is given."""

    state_mean: _Statistics | None
    state_std: _Statistics | None
    actions_mean: _Statistics | None
    actions_std: _Statistics | None
    state_low: _Statistics
    state_high: _Statistics
    actions_low: _Statistics
    actions_high: _Statistics
    state_width: Annotated[int, Bounds(1, 1 << 12)]
    actions_width: Annotated[int, Bounds(1, 1 << 12)]
    cameras: Annotated[list[Name], Bounds(1, 64)]
    most_prompt_tokens: Annotated[int, Bounds(1, 1 << 14)]
    actions_relative: Annotated[list[bool], Bounds(1, 1 << 12)]


def statistics_of(source: str, settings: Mapping[str, Any], widths: Mapping[str, int]) -> dict[str, Any]:
    """Return the arguments of `PolicyFacts` that processor_config.json has, with `settings` as its content.

    `widths` are the most numbers of "state" and "actions". Raises `CheckpointError`.
    """
    found = read_fields(_PolicyFields, settings, f"checkpoint '{source}': processor_config.json")

    def check(expectation: str, found: Any, *, holds: bool) -> None:
        if not holds:
            raise CheckpointError(
                f"checkpoint '{source}': expected that {expectation}; found {found}. Correct processor_config.json."
            )

    def pair(name: str, first: str, second: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
        given: list[Any] = [found.get(f"{name}_{which}") or () for which in (first, second)]
        one, other = (tuple(map(float, values)) for values in given)
        lengths, most = (len(one), len(other)), widths[name]
        check(f"{name}_{first} and {name}_{second} have one length", lengths, holds=lengths[0] == lengths[1])
        check(f"{name}_{first} has at most {most} numbers", lengths[0], holds=lengths[0] <= most)
        return one, other

    facts, numbers = dict[str, Any](), dict[str, int]()
    for name, own in (("state", "state"), ("actions", "action")):
        mean, std = pair(name, "mean", "std")
        check(f"{name}_std has no number below 0", list(std), holds=all(value >= 0 for value in std))
        low, high = pair(name, "low", "high")
        facts |= {
            f"{own}_mean": mean,
            f"{own}_std": std,
            f"{own}_range": NumberRanges(low, high) if low else None,
            f"{own}_numbers": found.get(f"{name}_width"),
        }
        numbers[name] = len(mean) or len(low) or facts[f"{own}_numbers"] or widths[name]
    relative = found.get("actions_relative") or []
    check(
        "actions_relative has a value for each number of an action, and the state has these numbers too",
        f"{len(relative)} values, {numbers['actions']} numbers of an action and {numbers['state']} of the state",
        holds=not relative or len(relative) == numbers["actions"] <= numbers["state"],
    )
    cameras = found.get("cameras")
    return {
        **facts,
        "cameras": tuple(cameras) if cameras else None,
        "most_prompt_tokens": found.get("most_prompt_tokens"),
        "relative_actions": tuple(relative) or None,
    }


class _Pi0Fields(ConfigFields, PolicyFields, total=False):
    vlm_config: PaliGemmaFields | None
    dit_config: TextFields | None


class _Sides(TypedDict, total=False):
    max_height: Side | None
    max_width: Side | None
    height: Side | None
    width: Side | None


class ProcessorFields(PixelFields, total=False):
    """Fields of transformers' PI0ImageProcessor, or those that a checkpoint of LeRobot is given."""

    size: _Sides | None
    do_pad: bool | None
    pad_size: _Sides | None


WriteExpert = Callable[[WeightedGraph, ActionExpert, Sequence[range]], None]
"""Writes a graph of an expert, over the caches of the decoder's segments."""


class Pi0(PaliGemma):
    """A `PI0ForConditionalGeneration` configuration."""

    name = "pi0"
    within = "vlm_config."
    state_in_prompt = False
    expert_graphs: Mapping[str, WriteExpert] = MappingProxyType({"expert": build_expert})
    config_fields: type = _Pi0Fields
    processor_fields: type = ProcessorFields

    def __init__(self, source: str, config: Mapping[str, Any], salience: str | None = None) -> None:
        super().__init__(source, config, salience)
        expert, lm = self._config.dit_config, self.language_model
        most_held = getattr(self._config, "rtc_training_max_delay", 0)
        shared = [
            (expert.num_hidden_layers, lm.num_layers),
            (expert.num_key_value_heads, lm.num_kv_heads),
            (head_dim(expert), lm.head_dim),
            (float(expert.rope_parameters["rope_theta"]), lm.rope_theta),
        ]
        self._check(
            [
                (
                    "dit_config has the layers, key-value heads, head_dim and rope_theta of vlm_config.text_config",
                    all(own == prefix for own, prefix in shared),
                    shared,
                ),
                ("dit_config.hidden_size is even", expert.hidden_size % 2 == 0, expert.hidden_size),
                (
                    "rtc_training_max_delay is below chunk_size, and 0 in pi0",
                    most_held < (self._config.chunk_size if self.state_in_prompt else 1),
                    most_held,
                ),
            ]
        )
        self._expert = ActionExpert(
            llama=self._read_gemma(expert),
            chunk=self._config.chunk_size,
            state_dim=self._config.max_state_dim,
            action_dim=self._config.max_action_dim,
            most_held=most_held,
        )

    def graphs(self, segments: Sequence[range], held: Container[str]) -> dict[str, WriteGraph]:
        return {
            **self._looks(),
            **self._decoder(segments),
            **{name: self._of_expert(write, segments) for name, write in self.expert_graphs.items()},
        }

    def processor(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        side = self.vision.image_size
        within, square = {"max_height": side, "max_width": side}, {"height": side, "width": side}
        if settings.get("image_processor_type") in get_args(LeRobotResize):
            self._check_settings([("pad_size", settings.get("pad_size"), (square,))])
            return dict(settings)
        known: dict[str, Any] = {
            **PIXELS,
            "image_processor_type": "PI0ImageProcessor",
            "size": within,
            "do_pad": True,
            "pad_size": square,
        }
        known |= {key: settings[key] for key in known if settings.get(key) is not None}
        sizes = {name: {key: side for key, side in known[name].items() if side} for name in ("size", "pad_size")}
        kind = str(known["image_processor_type"]).removesuffix("Fast")
        self._check_settings(
            [
                ("image_processor_type", kind, ("PI0ImageProcessor",)),
                ("do_resize", known["do_resize"], (True,)),
                ("do_pad", known["do_pad"], (True,)),
                ("size", sizes["size"], (within,)),
                ("pad_size", sizes["pad_size"], (square,)),
            ]
        )
        return {**known, **sizes}

    def policy(self, settings: Mapping[str, Any]) -> PolicyFacts:
        config, expert = self._config, self._expert
        numbers = statistics_of(self._source, settings, {"state": expert.state_dim, "actions": expert.action_dim})
        return PolicyFacts(
            expert.llama.facts,
            expert.chunk,
            expert.state_dim,
            expert.action_dim,
            config.num_inference_steps,
            float(config.min_period),
            float(config.max_period),
            **numbers,
            state_in_prompt=self.state_in_prompt or None,
            most_held=expert.most_held or None,
        )

    def _of_expert(self, write: WriteExpert, segments: Sequence[range]) -> WriteGraph:
        return lambda graph: write(graph, self._expert, segments)

    @property
    def _paligemma(self) -> Any:
        return self._config.vlm_config

    def _settings(self) -> list[Setting]:
        expert, text = self._config.dit_config, self._text_config
        return [
            ("vlm_config.model_type", self._paligemma.model_type, ("paligemma",)),
            ("dit_config.model_type", expert.model_type, ("gemma",)),
            ("dit_config.hidden_act", expert.hidden_act, (self.gate,)),
            ("dit_config.attention_bias", expert.attention_bias, (text.attention_bias,)),
            *super()._settings(),
        ]

    def _read_llama(self, text: Any) -> Llama:
        # The expert reads the caches alone.
        return replace(super()._read_llama(text), gives_rows=False)


class Pi05(Pi0):
    """A configuration of pi0.5."""

    name = "pi0.5"
    configured_as = "pi0"
    state_in_prompt = True
    expert_graphs: Mapping[str, WriteExpert] = MappingProxyType(
        {"modulation": build_modulation, "expert": build_adaptive_expert}
    )
    # openpi's PaligemmaTokenizer. The runtime writes the text around the instruction, because it has the state.
    chat_template = (
        "{% for message in messages %}"
        "{% for content in message['content'] if content['type'] == 'image' %}{{ '<image>' }}{% endfor %}"
        "{{ bos_token }}"
        "{% for content in message['content'] if content['type'] == 'text' %}{{ content['text'] }}{% endfor %}"
        "{% endfor %}"
    )


class _Pi0FastFields(PaliGemmaFields, total=False):
    chunk_size: Annotated[int, Bounds(1, 1 << 10)]
    max_state_dim: Annotated[int, Bounds(1, 1 << 12)]
    action_dim: Annotated[int, Bounds(1, 1 << 12)]


class Pi0Fast(PaliGemma):
    """A configuration of pi0-FAST (arXiv 2501.09747), as `sinkprune.export.checkpoint.lerobot` translates it.

    PaliGemma decodes tokens of actions.
    """

    name = "pi0-fast"
    configured_as = "paligemma"
    config_fields: type = _Pi0FastFields
    processor_fields: type = ProcessorFields
    # LeRobot's second BOS is after the prompt, which has the state and ends its line.
    chat_template = (
        "{% for message in messages %}"
        "{% for content in message['content'] if content['type'] == 'image' %}{{ '<image>' }}{% endfor %}"
        "{{ bos_token }}"
        "{% for content in message['content'] if content['type'] == 'text' %}{{ content['text'] }}{% endfor %}"
        "{{ bos_token }}{% endfor %}"
    )

    def processor(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        square = {"height": self.vision.image_size, "width": self.vision.image_size}
        self._check_settings([("pad_size", settings.get("pad_size", square), (square,))])
        return {**lerobot_pixels(self.vision.image_size), **settings}

    def policy(self, settings: Mapping[str, Any]) -> PolicyFacts:
        config = self._config
        numbers = statistics_of(self._source, settings, {"state": config.max_state_dim, "actions": config.action_dim})
        fast = {"most": 256, "skip": 128, "scale": 10.0, "min_token": -354, "pieces": [], "begins": False}
        return PolicyFacts(
            None,
            config.chunk_size,
            config.max_state_dim,
            config.action_dim,
            1,
            None,
            None,
            **numbers,
            state_in_prompt=True,
            fast=from_json(FastTokens, {**fast, **settings.get("fast", {})}, "$.fast"),
        )
