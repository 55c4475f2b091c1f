"""InternVL3 and InternVL3.5: InternViT on tiles, a pixel shuffle, a projector, and a Qwen2 or Qwen3 decoder."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, TypedDict

import onnx_ir as ir

from sinkprune.contract.checks import Bounds
from sinkprune.contract.errors import UsageError
from sinkprune.contract.manifest import InternVLTower, Number, Side, Tiles
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
from sinkprune.export.families.llava import FeatureLayer
from sinkprune.export.graph import FLOAT, WeightedGraph
from sinkprune.export.models.llama import Llama
from sinkprune.export.models.vit import ACTIVATIONS, after_cls, cls_salience, layer_norm, patch_rows, two_layers

_Sides = Side | Annotated[list[Side], Bounds(2, 2)]
# That of torch, which the projector has.
_EPSILON = 1e-5
# That of the tower's norms of queries and keys, which no configuration has.
_ROW_EPSILON = 1e-6


class _VisionFields(SquareTowerFields, total=False):
    image_size: _Sides  # type: ignore[misc]
    patch_size: _Sides  # type: ignore[misc]
    num_channels: Annotated[int, Bounds(3, 3)]
    attention_bias: bool
    use_qk_norm: bool
    norm_type: Name
    use_mean_pooling: bool
    use_absolute_position_embeddings: bool


class _ConfigFields(ConfigFields, total=False):
    image_token_id: Token
    image_seq_length: Annotated[int, Bounds(1, 1 << 14)]
    downsample_ratio: Annotated[Number, Bounds(1e-3, 1)]
    projector_hidden_act: Name
    vision_feature_layer: FeatureLayer | Annotated[list[FeatureLayer], Bounds(1, 1024)]
    vision_feature_select_strategy: Name
    vision_config: _VisionFields | None
    text_config: TextFields | None


class _Size(TypedDict, total=False):
    height: Side | None
    width: Side | None


class _ProcessorFields(PixelFields, total=False):
    size: _Size | None
    min_patches: Tiles | None
    max_patches: Tiles | None


class _VideoFields(PixelFields, total=False):
    size: _Size | None
    do_center_crop: bool | None
    do_sample_frames: bool | None


class InternVL(LlamaShaped):
    """An `InternVLForConditionalGeneration` configuration."""

    name = "internvl"
    projector = "projector"
    # Within the model's positions, dynamic scaling changes nothing.
    rope_types = ("default", "linear", "dynamic")
    config_fields = _ConfigFields
    processor_fields = _ProcessorFields
    video_fields = _VideoFields
    chat_template = (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
        "{% for content in message['content'] %}"
        "{% if content['type'] == 'image' %}{{ '<IMG_CONTEXT>\n' }}"
        "{% elif content['type'] == 'text' %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}"
        "{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )

    def __init__(self, source: str, config: Mapping[str, Any], salience: str | None = None) -> None:
        super().__init__(source, config)
        if salience is not None:
            raise UsageError(f"family '{self.name}' takes salience from its CLS token: leave out --salience.")
        vision, ratio = self._config.vision_config, self._config.downsample_ratio
        for name in ("image_size", "patch_size"):
            height, width = getattr(vision, name)
            self._check([(f"vision_config.{name} is a square", height == width, [height, width])])
            setattr(vision, name, height)
        merge, heads = round(1 / ratio), (vision.hidden_size, vision.num_attention_heads)
        facts = self._square_tower(vision, vision.num_hidden_layers)
        side, tokens = vision.image_size // vision.patch_size, facts["tokens"] // merge**2
        whole, length = merge * ratio == 1 and side % merge == 0, self._config.image_seq_length
        self._check(
            [
                ("vision_config.hidden_size is a multiple of num_attention_heads", heads[0] % heads[1] == 0, heads),
                (f"downsample_ratio is 1 over a divisor of {side}, the patches of a side", whole, ratio),
                (f"image_seq_length is {tokens}, the visual tokens of a tile", length == tokens, length),
            ]
        )
        self.vision = InternVLTower(**{**facts, "tokens": tokens}, merge_size=merge)
        self.visual_width = vision.hidden_size * merge**2
        self._tower = _InternViT(
            self.vision,
            qkv_bias=vision.attention_bias,
            row_norms=vision.use_qk_norm,
            rms=vision.norm_type == "rms_norm",
            last_norm=not vision.use_mean_pooling,
        )

    @property
    def special_tokens(self) -> SpecialTokens:
        # As in the published vocabularies: im_start is before im_end, and img and its end are before the image token.
        end, image = self._config.text_config.eos_token_id, self.image_token
        end = end[0] if isinstance(end, list) and end else end if isinstance(end, int) else -1
        texts = {
            end - 1: "<|im_start|>",
            end: "<|im_end|>",
            image - 2: "<img>",
            image - 1: "</img>",
            image: "<IMG_CONTEXT>",
        }
        return SpecialTokens(self._special_tokens(texts, 5), bos="", eos="<|im_end|>")

    def graphs(self, segments: Sequence[range], held: Container[str]) -> dict[str, WriteGraph]:
        tower = partial(_build_vision, vit=self._tower)
        return {"vision": tower, "projector": self._build_projector, **super().graphs(segments, held)}

    def processor(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        side, given = self.vision.image_size, without_null(settings)
        square = {"height": side, "width": side}
        own = {
            "image_processor_type": "GotOcr2ImageProcessor",
            "do_convert_rgb": True,
            "do_resize": True,
            "size": square,
            "resample": 3,
            "min_patches": 1,
            "max_patches": 12,
            **CLIP_PIXELS,
        }
        known: dict[str, Any] = {key: given.get(key, value) for key, value in own.items()}
        kind, least, most = str(known["image_processor_type"]), known["min_patches"], known["max_patches"]
        self._check_settings(
            [
                ("image_processor_type", kind.removesuffix("Fast"), ("GotOcr2ImageProcessor",)),
                ("do_resize", known["do_resize"], (True,)),
                ("size", known["size"], (square,)),
            ]
        )
        if least > most:
            raise self._error(
                f"its image processor has min_patches {least} and max_patches {most}, expected no more than that. "
                "Correct preprocessor_config.json."
            )
        if "max_frames" in settings:
            known["video"] = self._video(settings, known)
        return known

    def groups_of(self, processor: Mapping[str, Any]) -> int:
        # Several tiles come with the whole image.
        tiles, frames = processor["max_patches"], processor["video"]["max_frames"] if "video" in processor else 1
        return max(tiles + (tiles > 1), frames)

    def _video(self, settings: Mapping[str, Any], image: Mapping[str, Any]) -> dict[str, Any]:
        """Return how a clip's frames become squares.

        Without a file for videos, transformers reads that for images.
        """
        given, square = settings.get("video_processor"), image["size"]
        # Those of InternVLVideoProcessor's class.
        own = {"do_resize": True, "resample": 3, "size": {"height": 384, "width": 384}, **CLIP_PIXELS}
        known = {**image} if given is None else {**own, **without_null(given)}
        self._check_settings(
            [
                ("do_resize of videos", known["do_resize"], (True,)),
                ("do_center_crop of videos", known.get("do_center_crop", False), (False,)),
                ("do_sample_frames of videos", known.get("do_sample_frames", False), (False,)),
                ("resample of videos", known["resample"], (3,)),
                ("size of videos", known["size"], (square,)),
            ]
        )
        return {**{key: known[key] for key in ("resample", *CLIP_PIXELS)}, "max_frames": settings["max_frames"]}

    def _build_projector(self, graph: WeightedGraph) -> None:
        joined, width, name = self.visual_width, self.language_model.hidden_size, "multi_modal_projector"
        x = layer_norm(graph, graph.input("tokens", ["G", "n", joined]), f"{name}.layer_norm", joined, _EPSILON)
        layers, act = [f"{name}.linear_{number}" for number in (1, 2)], self._config.projector_hidden_act
        graph.output("embeddings", two_layers(graph, x, layers, [joined, width, width], act), ["G", "n", width])

    def _settings(self) -> list[Setting]:
        config, text, vision = self._config, self._config.text_config, self._config.vision_config
        return [
            ("text_config.model_type", text.model_type, ("qwen2", "qwen3")),
            ("text_config.use_sliding_window", bool(getattr(text, "use_sliding_window", None)), (False,)),
            ("vision_config.model_type", vision.model_type, ("internvl_vision",)),
            ("vision_config.hidden_act", vision.hidden_act, ACTIVATIONS),
            ("vision_config.norm_type", vision.norm_type, ("layer_norm", "rms_norm")),
            ("vision_config.use_absolute_position_embeddings", vision.use_absolute_position_embeddings, (True,)),
            ("projector_hidden_act", config.projector_hidden_act, ACTIVATIONS),
            ("vision_feature_layer", config.vision_feature_layer, (-1,)),
            ("vision_feature_select_strategy", config.vision_feature_select_strategy, ("default",)),
        ]

    def _read_llama(self, text: Any) -> Llama:
        facts, norms = read_language_model(text), text.model_type == "qwen3"
        # Qwen2 has fixed biases, and no setting for them.
        bias = norms and text.attention_bias
        return Llama(
            facts, text.rms_norm_eps, qkv_bias=bias or not norms, output_bias=bias, mlp_bias=False, head_norms=norms
        )


@dataclass(frozen=True)
class _InternViT:
    """InternVL's tower: the manifest's facts, and what else its graph needs."""

    facts: InternVLTower
    qkv_bias: bool
    row_norms: bool
    """Whether queries and keys are normed, all heads together."""
    rms: bool
    """Whether the norms of blocks are RMSNorm, and not LayerNorm."""
    last_norm: bool
    """Whether the rows after the last block are normed."""

    def norm(self, graph: WeightedGraph, x: ir.Value, name: str) -> ir.Value:
        """Return the norm of the rows `x` [...,D] in a block, with the weights `name`."""
        size, epsilon = self.facts.hidden_size, self.facts.layer_norm_eps
        if not self.rms:
            return layer_norm(graph, x, name, size, epsilon)
        return graph.dialect.rms_norm(graph.op, x, graph.parameter(f"{name}.weight", [size]), epsilon)


def _build_vision(graph: WeightedGraph, vit: _InternViT) -> None:
    """Write `vision` of the graph contract: pixel values to tokens, each of `merge_size`**2 patches, joined.

    A token's norm is the largest of its patches, before the tower's last norm layer. Its salience is their mean.
    """
    op, facts, d = graph.op, vit.facts, vit.facts.hidden_size
    merge, side = facts.merge_size, facts.image_size // facts.patch_size
    pixels = graph.input("pixel_values", ["G", 3, facts.image_size, facts.image_size])
    name = "vision_tower.embeddings"
    patches = patch_rows(graph, facts, pixels, f"{name}.patch_embeddings.projection", bias=True)
    x = after_cls(graph, pixels, patches, graph.parameter(f"{name}.cls_token", [1, 1, d]))
    x = op.Add(x, graph.parameter(f"{name}.position_embeddings", [1, facts.patches + 1, d]))
    for block in range(facts.num_blocks):
        x, query, key = _intern_block(graph, vit, f"vision_tower.encoder.layer.{block}", x)
    rows = op.Slice(x, [1], [facts.patches + 1], [1])
    norms = op.ReduceL2(op.Cast(rows, to=FLOAT), [-1], keepdims=0)
    salience = cls_salience(graph, facts, query, key, [1, facts.patches + 1])
    if vit.last_norm:
        rows = layer_norm(graph, rows, "vision_tower.layernorm", d, facts.layer_norm_eps)

    def joined(y: ir.Value, width: int) -> ir.Value:
        """Return [G,N,merge**2*width] of [G,patches,width], both in raster order."""
        y = op.Reshape(y, [0, side // merge, merge, side // merge, merge * width])
        return op.Reshape(op.Transpose(y, perm=[0, 1, 3, 2, 4]), [0, facts.tokens, merge**2 * width])

    graph.output("tokens", joined(rows, d), ["G", facts.tokens, merge**2 * d])
    graph.output("norms", op.ReduceMax(joined(norms, 1), [-1], keepdims=0), ["G", facts.tokens], FLOAT)
    graph.output("salience", op.ReduceMean(joined(salience, 1), [-1], keepdims=0), ["G", facts.tokens], FLOAT)


def _intern_block(
    graph: WeightedGraph, vit: _InternViT, name: str, x: ir.Value
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Return the output [G,T,D] of a block on `x`, and the queries and keys [G,H,T,h] of its attention."""
    op, facts, d, own = graph.op, vit.facts, vit.facts.hidden_size, f"{name}.attention"

    def heads(which: str) -> ir.Value:
        projected = graph.linear(y, f"{own}.{which}_proj", d, d, bias=vit.qkv_bias)
        if vit.row_norms and which != "v":
            weight = graph.parameter(f"{own}.{which}_norm.weight", [d])
            projected = graph.dialect.rms_norm(op, projected, weight, _ROW_EPSILON)
        split = op.Reshape(projected, [0, 0, facts.num_heads, d // facts.num_heads])
        return op.Transpose(split, perm=[0, 2, 1, 3])

    def scaled(part: ir.Value, which: int) -> ir.Value:
        return op.Mul(part, graph.parameter(f"{name}.lambda_{which}", [d]))

    y = vit.norm(graph, x, f"{name}.layernorm_before")
    query, key, value = map(heads, "qkv")
    mixed = graph.dialect.attention(op, query, key, value)
    mixed = op.Reshape(op.Transpose(mixed, perm=[0, 2, 1, 3]), [0, 0, d])
    x = op.Add(x, scaled(graph.linear(mixed, f"{own}.projection_layer", d, d, bias=True), 1))
    layers, widths = [f"{name}.mlp.fc1", f"{name}.mlp.fc2"], [d, facts.intermediate_size, d]
    y = two_layers(graph, vit.norm(graph, x, f"{name}.layernorm_after"), layers, widths, facts.activation)
    return op.Add(x, scaled(y, 2)), query, key
