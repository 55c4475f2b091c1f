"""pi0 and pi0.5: checkpoints to graphs.

transformers has no class for it. Checkpoints are LeRobot's, or have pi0's configuration with the `model_type` "pi05".
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any, TypedDict, get_args

from sinkprune.contract.checks import Bounds
from sinkprune.contract.errors import CheckpointError
from sinkprune.contract.manifest import LeRobotResize, Number, NumberRanges, PolicyFacts, Side, SiglipTower
from sinkprune.export.checkpoint.folder import Name, read_fields
from sinkprune.export.checkpoint.lerobot import PolicyFields
from sinkprune.export.checkpoint.text import SpecialTokens
from sinkprune.export.families import WriteGraph
from sinkprune.export.families.llama_shaped import (
    ConfigFields,
    Hidden,
    LlamaShaped,
    PixelFields,
    Setting,
    SquareTowerFields,
    TextFields,
    Token,
    head_dim,
    read_language_model,
)
from sinkprune.export.graph import WeightedGraph
from sinkprune.export.models.action_expert import ActionExpert, build_adaptive_expert, build_expert, build_modulation
from sinkprune.export.models.llama import Llama
from sinkprune.export.models.vit import build_siglip, other_towers

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


class _VisionFields(SquareTowerFields, total=False):
    num_channels: Annotated[int, Bounds(1, 64)]
    projection_dim: Hidden
    vision_use_head: bool


class _PaliGemmaFields(TypedDict, total=False):
    model_type: Name
    text_config: TextFields | None
    vision_config: _VisionFields | None
    projection_dim: Hidden
    image_token_index: Token
    image_token_id: Token


class _Pi0Fields(ConfigFields, PolicyFields, total=False):
    vlm_config: _PaliGemmaFields | None
    dit_config: TextFields | None


class _Sides(TypedDict, total=False):
    max_height: Side | None
    max_width: Side | None
    height: Side | None
    width: Side | None


class _ProcessorFields(PixelFields, total=False):
    """Fields of transformers' PI0ImageProcessor, or those that a checkpoint of LeRobot is given."""

    size: _Sides | None
    do_pad: bool | None
    pad_size: _Sides | None


WriteExpert = Callable[[WeightedGraph, ActionExpert, Sequence[range]], None]
"""Writes a graph of an expert, over the caches of the decoder's segments."""


class Pi0(LlamaShaped):
    """A `PI0ForConditionalGeneration` configuration."""

    name = "pi0"
    projector = "projector"
    groups_are_frames = False
    adds_bos = False
    gate = "gelu_pytorch_tanh"
    state_in_prompt = False
    expert_graphs: Mapping[str, WriteExpert] = MappingProxyType({"expert": build_expert})
    config_fields: type = _Pi0Fields
    processor_fields: type = _ProcessorFields
    # transformers' PI0Processor: every camera, BOS, the instruction, the end of the line.
    chat_template = (
        "{% for message in messages %}"
        "{% for content in message['content'] if content['type'] == 'image' %}{{ '<image>' }}{% endfor %}"
        "{{ bos_token }}"
        "{% for content in message['content'] if content['type'] == 'text' %}{{ content['text'] }}{% endfor %}"
        "{{ '\n' }}{% endfor %}"
    )

    def __init__(self, source: str, config: Mapping[str, Any], salience: str | None = None) -> None:
        """Read `config`. `salience` is the block whose attention is the salience, by default `penultimate`."""
        super().__init__(source, config)
        vision, expert = self._config.vlm_config.vision_config, self._config.dit_config
        blocks, lm = vision.num_hidden_layers, self.language_model
        most_held = getattr(self._config, "rtc_training_max_delay", 0)
        tower = self._square_tower(vision, blocks)
        shared = [
            (expert.num_hidden_layers, lm.num_layers),
            (expert.num_key_value_heads, lm.num_kv_heads),
            (head_dim(expert), lm.head_dim),
            (float(expert.rope_parameters["rope_theta"]), lm.rope_theta),
        ]
        self._check(
            [
                ("the vision tower has two blocks at least", blocks >= 2, blocks),
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
        self.embedding_scale = lm.hidden_size**0.5
        self.vision = SiglipTower(**tower, salience_block=blocks - (1 if salience == "last" else 2))
        self.visual_width = self.vision.hidden_size
        self._tower = partial(build_siglip, tower=self.vision)
        self.other_towers = other_towers(self.vision, self._tower, padded=True)
        self._expert = ActionExpert(
            llama=self._read_gemma(expert),
            chunk=self._config.chunk_size,
            state_dim=self._config.max_state_dim,
            action_dim=self._config.max_action_dim,
            most_held=most_held,
        )

    @property
    def special_tokens(self) -> SpecialTokens:
        texts = {0: "<pad>", 1: "<eos>", 2: "<bos>", 3: "<unk>"}
        every = {self.image_token: "<image>", **texts}
        # The image token may be the one after the vocabulary.
        inside = {token: text for token, text in every.items() if token != self.language_model.vocab_size}
        self._special_tokens(inside, len(texts) + (self.image_token in inside))
        return SpecialTokens(every, bos="<bos>", eos="<eos>", unknown="<unk>")

    def graphs(self, segments: Sequence[range], held: Container[str]) -> dict[str, WriteGraph]:
        return {
            "vision": self._tower,
            "projector": self._build_projector,
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
            "image_processor_type": "PI0ImageProcessor",
            "do_convert_rgb": True,
            "do_resize": True,
            "size": within,
            "resample": 3,
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
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

    def tokens_of(self, processor: Mapping[str, Any]) -> int:
        return self.vision.tokens

    def groups_of(self, processor: Mapping[str, Any]) -> int:
        return 1

    def _of_expert(self, write: WriteExpert, segments: Sequence[range]) -> WriteGraph:
        return lambda graph: write(graph, self._expert, segments)

    def _build_projector(self, graph: WeightedGraph) -> None:
        d, width = self.visual_width, self.language_model.hidden_size
        tokens = graph.input("tokens", ["G", "n", d])
        x = graph.linear(tokens, "multi_modal_projector.linear", d, width, bias=True)
        graph.output("embeddings", x, ["G", "n", width])

    @property
    def _text_config(self) -> Any:
        return self._config.vlm_config.text_config

    @property
    def _image_token(self) -> int:
        return self._config.vlm_config.image_token_id

    def _known_tokens(self, text: Any) -> int:
        # PaliGemma's image token follows the rows of the embedding table.
        return text.vocab_size + 1

    def _settings(self) -> list[Setting]:
        vlm, expert = self._config.vlm_config, self._config.dit_config
        vision, text = vlm.vision_config, vlm.text_config
        return [
            ("vlm_config.model_type", vlm.model_type, ("paligemma",)),
            ("vlm_config.text_config.model_type", text.model_type, ("gemma",)),
            ("dit_config.model_type", expert.model_type, ("gemma",)),
            ("dit_config.hidden_act", expert.hidden_act, (self.gate,)),
            ("dit_config.attention_bias", expert.attention_bias, (text.attention_bias,)),
            ("vlm_config.vision_config.model_type", vision.model_type, ("siglip_vision_model",)),
            ("vlm_config.vision_config.num_channels", vision.num_channels, (3,)),
            ("vlm_config.vision_config.hidden_act", vision.hidden_act, ("gelu_pytorch_tanh",)),
            ("vlm_config.vision_config.projection_dim", vision.projection_dim, (text.hidden_size,)),
        ]

    def _read_llama(self, text: Any) -> Llama:
        # The expert reads the caches alone.
        return replace(self._read_gemma(text), causal=False, gives_rows=False)

    def _read_gemma(self, text: Any) -> Llama:
        # One section of all frequencies: kept rows keep their positions.
        facts = read_language_model(text, [head_dim(text) // 2])
        bias = text.attention_bias
        return Llama(
            facts,
            text.rms_norm_eps,
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=False,
            gate="gelu_pytorch_tanh",
            norm_offset=1.0,
        )


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
