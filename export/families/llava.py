"""LLaVA-1.5: a CLIP tower, a two-layer projector and a Llama decoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sinkprune.contract.errors import CheckpointError, UsageError
from sinkprune.contract.families import FAMILIES
from sinkprune.export.families import Family
from sinkprune.export.families.configuration import check_settings, check_shapes, parse_config, read_language_model
from sinkprune.export.graph import WeightedGraph, Weights
from sinkprune.export.llama import Llama, build_head, build_segment
from sinkprune.export.text import SpecialTokens
from sinkprune.export.vit import ACTIVATIONS, ViT, activation, build_vision


class Llava(Family):
    """A `LlavaForConditionalGeneration` configuration."""

    name = "llava"
    embedding = "language_model.embed_tokens.weight"
    projector: str | None = "projector"
    most_groups = 1
    groups_are_frames = False
    extra_rows: Mapping[str, str] = {}
    decoders: Sequence[str] = ("llama",)
    processors: Sequence[str] = ("CLIPImageProcessor", "LlavaImageProcessor")
    chat_template = (
        "{% for message in messages %}{{ message['role'].upper() + ': ' }}"
        "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}"
        "{% endfor %}"
        "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
        "{{ content['text'] + ' ' }}{% endfor %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
    )

    def __init__(self, source: str, config: Mapping[str, Any], salience: str | None = None) -> None:
        if salience is not None:
            raise UsageError(f"family '{self.name}' takes salience from its CLS token: leave out --salience.")
        self._source = source
        self._config: Any = parse_config(source, self._config_class(), config)
        self._check()
        self._llama = _read_llama(self._config.text_config)
        self._vit = _read_vit(self._config)
        self.language_model = self._llama.facts
        self.visual_tokens, self.visual_width = self._vit.tokens, self._vit.hidden_size
        self.vision = self._vit
        self.image_token: int = self._config.image_token_id

    def _config_class(self) -> Any:
        from transformers import LlavaConfig

        return LlavaConfig

    @property
    def special_tokens(self) -> SpecialTokens:
        texts = {0: "<unk>", 1: "<s>", 2: "</s>", self.image_token: "<image>"}
        return SpecialTokens(texts, bos="<s>", eos="</s>", unknown="<unk>")

    def tokens_of(self, processor: Mapping[str, Any]) -> int:
        return self.visual_tokens

    def groups_of(self, processor: Mapping[str, Any]) -> int:
        return self.most_groups

    @property
    def default_processor(self) -> dict[str, Any]:
        """The settings of CLIPImageProcessor at the tower's image size: what a checkpoint leaves out."""
        size = self._vit.image_size
        return {
            "image_processor_type": "CLIPImageProcessor",
            "do_convert_rgb": True,
            "do_resize": True,
            "size": {"shortest_edge": size},
            "resample": 3,
            "do_center_crop": True,
            "crop_size": {"height": size, "width": size},
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_std": [0.26862954, 0.26130258, 0.27577711],
            "do_pad": False,
        }

    @property
    def parameters(self) -> int:
        lm, d = self.language_model, self.language_model.hidden_size
        projector = self.visual_width * d + d * d + 2 * d
        rows = 2 * lm.vocab_size + 1 + len(self.extra_rows)
        return self._vit.parameters + projector + lm.decoder_parameters + rows * d

    def graphs(self, segments: Sequence[range]) -> list[str]:
        return ["vision", "projector", *(f"decoder_{s}" for s in range(len(segments))), "head"]

    def build(self, name: str, graph: WeightedGraph, segments: Sequence[range], weights: Weights) -> None:
        if name == "vision":
            build_vision(graph, self._vit)
        elif name == "projector":
            self._build_projector(graph)
        elif name == "head":
            build_head(graph, self._llama, self._lm_head(weights))
        else:
            build_segment(graph, self._llama, segments[int(name.removeprefix("decoder_"))])

    def processor(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        # processor_config.json nests what preprocessor_config.json holds at the top
        settings = settings.get("image_processor", settings)
        known = {key: settings.get(key, value) for key, value in self.default_processor.items()}
        size, crop = known["size"], known["crop_size"]
        known["size"] = {"shortest_edge": size} if isinstance(size, int) else dict(size)
        known["crop_size"] = {"height": crop, "width": crop} if isinstance(crop, int) else dict(crop)
        kind = str(known["image_processor_type"])
        if not kind.startswith(tuple(self.processors)):
            raise CheckpointError(
                f"checkpoint '{self._source}' has image processor '{kind}', expected {' or '.join(self.processors)}."
            )
        side = self._vit.image_size
        shown = known["crop_size"] if known["do_center_crop"] else known["size"] if known["do_resize"] else {}
        if (shown.get("height"), shown.get("width")) != (side, side):
            raise CheckpointError(
                f"checkpoint '{self._source}': its image processor ends with {shown or 'no fixed size'}, expected "
                f"{side}x{side} as the vision tower takes it. They do not belong together."
            )
        return known

    def _lm_head(self, weights: Weights) -> str:
        tied = self._config.tie_word_embeddings and "lm_head.weight" not in weights
        return self.embedding.removesuffix(".weight") if tied else "lm_head"

    def _build_projector(self, graph: WeightedGraph) -> None:
        """`projector` of the graph contract: linear, activation, linear."""
        config, d, width = self._config, self.visual_width, self.language_model.hidden_size
        bias = config.multimodal_projector_bias
        x = graph.input("tokens", ["G", "n", d])
        x = graph.linear(x, "multi_modal_projector.linear_1", d, width, bias=bias)
        x = activation(graph, config.projector_hidden_act, x)
        x = graph.linear(x, "multi_modal_projector.linear_2", width, width, bias=bias)
        graph.output("embeddings", x, ["G", "n", width])

    def _check(self) -> None:
        """Refuse what these graphs do not compute, setting by setting."""
        config, text = self._config, self._config.text_config
        rope = (text.rope_parameters or {}).get("rope_type", "default")
        settings = [
            ("text_config.model_type", text.model_type, self.decoders),
            ("text_config.sliding_window", getattr(text, "sliding_window", None), (None,)),
            ("vision_config.model_type", config.vision_config.model_type, ("clip_vision_model",)),
            ("text_config.hidden_act", text.hidden_act, ("silu",)),
            ("text_config.rope_parameters.rope_type", rope, ("default",)),
            ("vision_config.hidden_act", config.vision_config.hidden_act, ACTIVATIONS),
            ("projector_hidden_act", config.projector_hidden_act, ACTIVATIONS),
            ("vision_feature_select_strategy", config.vision_feature_select_strategy, ("default",)),
            ("quantization_config", getattr(config, "quantization_config", None), (None,)),
        ]
        check_settings(self._source, FAMILIES[self.name].architecture, settings)
        check_shapes(self._source, text, config.image_token_id)
        if not isinstance(config.vision_feature_layer, int):
            raise CheckpointError(
                f"checkpoint '{self._source}': vision_feature_layer is {config.vision_feature_layer}, expected one "
                "layer. Features joined from several layers are not supported yet."
            )
        blocks, available = _feature_blocks(config), config.vision_config.num_hidden_layers
        if not 1 <= blocks <= available:
            raise CheckpointError(
                f"checkpoint '{self._source}': vision_feature_layer {config.vision_feature_layer} is none of the "
                f"tower's {available} blocks."
            )


def _read_llama(text: Any) -> Llama:
    # Mistral, of the same shape, has no biases to configure.
    bias, mlp_bias = getattr(text, "attention_bias", False), getattr(text, "mlp_bias", False)
    return Llama(read_language_model(text), text.rms_norm_eps, qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias)


def _read_vit(config: Any) -> ViT:
    vision = config.vision_config
    return ViT(
        hidden_size=vision.hidden_size,
        intermediate_size=vision.intermediate_size,
        num_heads=vision.num_attention_heads,
        num_blocks=_feature_blocks(config),
        image_size=vision.image_size,
        patch_size=vision.patch_size,
        layer_norm_eps=vision.layer_norm_eps,
        activation=vision.hidden_act,
        tokens=(vision.image_size // vision.patch_size) ** 2,
    )


def _feature_blocks(config: Any) -> int:
    """How many blocks the feature layer needs: hidden state 0 is the embedding, i the output of block i-1."""
    layer: int = config.vision_feature_layer
    return layer if layer >= 0 else int(config.vision_config.num_hidden_layers) + 1 + layer


FAMILY = Llava
