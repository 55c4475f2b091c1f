"""LLaVA-1.5: a CLIP or SigLIP tower, a two-layer projector, and a decoder of Llama's shape."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, TypedDict

from sinkprune.contract.checks import Bounds
from sinkprune.contract.errors import UsageError
from sinkprune.contract.manifest import Pinpoints, Side, SiglipTower, ViTTower
from sinkprune.export.checkpoint.folder import Name
from sinkprune.export.checkpoint.text import SpecialTokens
from sinkprune.export.families import WriteGraph
from sinkprune.export.families.llama_shaped import (
    CLIP_PIXELS,
    ConfigFields,
    LlamaShaped,
    PixelFields,
    Setting,
    SquareTowerFields,
    TextFields,
    Token,
    read_language_model,
    without_null,
)
from sinkprune.export.graph import WeightedGraph
from sinkprune.export.models.llama import Llama
from sinkprune.export.models.vit import ACTIVATIONS, build_vision, other_towers, two_layers

_SIGLIP = "siglip_vision_model"
FeatureLayer = Annotated[int, Bounds(-1024, 1024)]


class _ClipFields(SquareTowerFields, total=False):
    num_channels: Annotated[int, Bounds(3, 3)]


class _LlavaFields(ConfigFields, total=False):
    image_token_index: Token
    image_token_id: Token
    projector_hidden_act: Name
    vision_feature_select_strategy: Name
    vision_feature_layer: FeatureLayer | Annotated[list[FeatureLayer], Bounds(1, 1024)]
    multimodal_projector_bias: bool
    image_grid_pinpoints: Pinpoints | None
    vision_config: _ClipFields | None
    text_config: TextFields | None


class _Shape(TypedDict, total=False):
    shortest_edge: Side
    height: Side
    width: Side


class _ProcessorFields(PixelFields, total=False):
    size: Side | _Shape | None
    do_center_crop: bool | None
    crop_size: Side | _Shape | None
    do_pad: bool | None
    image_grid_pinpoints: Pinpoints | None


class Llava(LlamaShaped):
    """A `LlavaForConditionalGeneration` configuration."""

    name = "llava"
    projector = "projector"
    most_groups = 1
    one_square = True
    """Whether the tower sees one square of each picture."""
    decoders: Sequence[str] = ("llama", "mistral", "qwen2")
    rope_types = ("default", "linear")
    cuts_edges = True
    processors: Sequence[str] = ("CLIPImageProcessor", "LlavaImageProcessor", "SiglipImageProcessor")
    towers: Sequence[str] = ("clip_vision_model", _SIGLIP)
    config_fields: type = _LlavaFields
    processor_fields: type = _ProcessorFields
    chat_template = (
        "{% for message in messages %}"
        "{% if message['role'] != 'system' %}{{ message['role'].upper() + ': ' }}{% endif %}"
        "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}"
        "{% endfor %}"
        "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
        "{{ content['text'] + ' ' }}{% endfor %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
    )

    def __init__(self, source: str, config: Mapping[str, Any], salience: str | None = None) -> None:
        super().__init__(source, config)
        vision, given = self._config.vision_config, self._config.vision_feature_layer
        layer, *more = given if isinstance(given, list) else [given]
        if more:
            raise self._error(
                f"vision_feature_layer is {given}, expected one layer. Features of several layers side by side, as "
                "in granite-vision, are not supported. Give a checkpoint such as llava-hf/llava-v1.6-mistral-7b-hf."
            )
        # Hidden state 0 is the embedding, and hidden state i is the output of block i-1.
        blocks = layer if layer >= 0 else vision.num_hidden_layers + 1 + layer
        if not 1 <= blocks <= vision.num_hidden_layers:
            count = vision.num_hidden_layers
            raise self._error(f"vision_feature_layer {layer} is none of the tower's {count} blocks.")
        facts = self._square_tower(vision, blocks)
        if vision.model_type == _SIGLIP:
            self._check([("two blocks of the tower at least are used", blocks >= 2, blocks)])
            from_end = 1 if salience == "last" else 2
            self.vision: ViTTower | SiglipTower = SiglipTower(**facts, salience_block=blocks - from_end)
        elif salience is not None:
            raise UsageError(f"family '{self.name}' takes salience from its CLS token: leave out --salience.")
        else:
            self.vision = ViTTower(**facts)
        self.visual_width = self.vision.hidden_size
        # transformers' features of SigLIP are the rows before the tower's last norm layer.
        self._tower = partial(build_vision, tower=self.vision)
        self.other_towers = other_towers(self.vision, self._tower, padded=self.one_square)

    @property
    def special_tokens(self) -> SpecialTokens:
        texts = {0: "<unk>", 1: "<s>", 2: "</s>", self.image_token: "<image>"}
        return SpecialTokens(self._special_tokens(texts, 4), bos="<s>", eos="</s>", unknown="<unk>")

    def groups_of(self, processor: Mapping[str, Any]) -> int:
        return self.most_groups

    @property
    def default_processor(self) -> dict[str, Any]:
        """The settings of the tower's processor at its image size, for those that a checkpoint leaves out."""
        size = self.vision.image_size
        square = {"height": size, "width": size}
        clip = {
            "image_processor_type": "CLIPImageProcessor",
            "do_convert_rgb": True,
            "do_resize": True,
            "size": {"shortest_edge": size},
            "resample": 3,
            "do_center_crop": True,
            "crop_size": square,
            **CLIP_PIXELS,
            "do_pad": False,
        }
        if not isinstance(self.vision, SiglipTower):
            return clip
        colours = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
        own = {"image_processor_type": "SiglipImageProcessor", "size": square, "do_center_crop": False}
        return {**clip, **own, **colours}

    def graphs(self, segments: Sequence[range], held: Container[str]) -> dict[str, WriteGraph]:
        return {"vision": self._tower, "projector": self._build_projector, **super().graphs(segments, held)}

    def processor(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        given = without_null(settings)
        known = {key: given.get(key, value) for key, value in self.default_processor.items()}
        size, crop = known["size"], known["crop_size"]
        known["size"] = {"shortest_edge": size} if isinstance(size, int) else dict(size)
        known["crop_size"] = {"height": crop, "width": crop} if isinstance(crop, int) else dict(crop)
        if known["size"].keys() not in ({"shortest_edge"}, {"height", "width"}):
            raise self._error(
                f"its image processor has the size {known['size']}, expected a "
                "shortest_edge, or a height and a width. Correct preprocessor_config.json."
            )
        kind = str(known["image_processor_type"])
        if not kind.startswith(tuple(self.processors)):
            raise self._error(f"has image processor '{kind}', expected {' or '.join(self.processors)}.")
        # The others' padding fills up a batch, and here every image is a batch of its own.
        known["do_pad"] = known["do_pad"] and kind.startswith("LlavaImageProcessor")
        side = self.vision.image_size
        shown = known["crop_size"] if known["do_center_crop"] else known["size"] if known["do_resize"] else {}
        if (shown.get("height"), shown.get("width")) != (side, side):
            raise self._error(
                f"its image processor ends with {shown or 'no fixed size'}, expected "
                f"{side}x{side} as the vision tower takes it. They do not belong together."
            )
        return known

    def _build_projector(self, graph: WeightedGraph) -> None:
        config, d, width = self._config, self.visual_width, self.language_model.hidden_size
        layers = [f"multi_modal_projector.linear_{number}" for number in (1, 2)]
        act, bias = config.projector_hidden_act, config.multimodal_projector_bias
        x = two_layers(graph, graph.input("tokens", ["G", "n", d]), layers, [d, width, width], act, bias=bias)
        graph.output("embeddings", x, ["G", "n", width])

    def _settings(self) -> list[Setting]:
        config, text = self._config, self._config.text_config
        # SigLIP has no CLS token, which `default` leaves out.
        strategy = "full" if config.vision_config.model_type == _SIGLIP else "default"
        return [
            ("text_config.model_type", text.model_type, self.decoders),
            ("text_config.use_sliding_window", bool(getattr(text, "use_sliding_window", None)), (False,)),
            ("vision_config.model_type", config.vision_config.model_type, self.towers),
            ("vision_config.hidden_act", config.vision_config.hidden_act, ACTIVATIONS),
            ("projector_hidden_act", config.projector_hidden_act, ACTIVATIONS),
            ("vision_feature_select_strategy", config.vision_feature_select_strategy, (strategy,)),
        ]

    def _read_llama(self, text: Any) -> Llama:
        # Mistral and Qwen2 have the same shape, but no settings for biases.
        bias, mlp_bias = getattr(text, "attention_bias", False), getattr(text, "mlp_bias", False)
        qkv_bias = bias or text.model_type == "qwen2"
        facts, window = read_language_model(text), getattr(text, "sliding_window", None)
        if window:
            # Shorter contexts have no row outside the window.
            facts = replace(facts, max_positions=min(facts.max_positions, window))
        return Llama(facts, text.rms_norm_eps, qkv_bias=qkv_bias, output_bias=bias, mlp_bias=mlp_bias)
