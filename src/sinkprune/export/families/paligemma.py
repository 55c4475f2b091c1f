"""PaliGemma: a SigLIP tower, a linear projector and a Gemma decoder (arXiv 2407.07726).

The rows of a prompt see each other in both directions, and those of the answer all rows before them.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, TypedDict

from sinkprune.contract.checks import Bounds
from sinkprune.contract.manifest import Side, SiglipTower
from sinkprune.export.checkpoint.folder import Name
from sinkprune.export.checkpoint.text import SpecialTokens
from sinkprune.export.families import WriteGraph
from sinkprune.export.families.llama_shaped import (
    CLIP_PIXELS,
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
    without_null,
)
from sinkprune.export.graph import WeightedGraph
from sinkprune.export.models.llama import Llama
from sinkprune.export.models.vit import build_vision, other_towers


class _VisionFields(SquareTowerFields, total=False):
    num_channels: Annotated[int, Bounds(1, 64)]
    projection_dim: Hidden
    vision_use_head: bool


class PaliGemmaFields(ConfigFields, total=False):
    """Fields of a configuration of PaliGemma, which others contain."""

    model_type: Name
    text_config: TextFields | None
    vision_config: _VisionFields | None
    projection_dim: Hidden
    image_token_index: Token
    image_token_id: Token


PIXELS = {
    "do_convert_rgb": True,
    "do_resize": True,
    "resample": 3,
    **CLIP_PIXELS,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
"""The settings of SigLIP's pictures, besides their size."""


class _Sides(TypedDict, total=False):
    height: Side | None
    width: Side | None


class _ProcessorFields(PixelFields, total=False):
    size: _Sides | None
    image_seq_length: Annotated[int, Bounds(1, 1 << 14)] | None


class PaliGemma(LlamaShaped):
    """A `PaliGemmaForConditionalGeneration` configuration, and the base of those that contain one."""

    name = "paligemma"
    within = ""
    """The place of PaliGemma's fields in the configuration."""
    projector = "projector"
    adds_bos = False
    gate = "gelu_pytorch_tanh"
    config_fields: type = PaliGemmaFields
    processor_fields: type = _ProcessorFields
    # transformers' PaliGemmaProcessor and PI0Processor: every picture, BOS, the text, the end of the line.
    chat_template = (
        "{% if messages | length > 1 %}{{ raise_exception('one question only') }}{% endif %}"
        "{% for message in messages %}"
        "{% for content in message['content'] if content['type'] == 'image' %}{{ '<image>' }}{% endfor %}"
        "{{ bos_token }}"
        "{% for content in message['content'] if content['type'] == 'text' %}{{ content['text'] }}{% endfor %}"
        "{{ '\n' }}{% endfor %}"
    )

    def __init__(self, source: str, config: Mapping[str, Any], salience: str | None = None) -> None:
        super().__init__(source, config)
        vision = self._paligemma.vision_config
        blocks, tower = vision.num_hidden_layers, self._square_tower(vision, vision.num_hidden_layers)
        self._check([("the vision tower has two blocks at least", blocks >= 2, blocks)])
        # Of rows of the table alone: pictures' rows are not scaled.
        self.embedding_scale = self.language_model.hidden_size**0.5
        self.vision = SiglipTower(**tower, salience_block=blocks - (1 if salience == "last" else 2))
        self.visual_width = self.vision.hidden_size
        self._tower = partial(build_vision, tower=self.vision, normed=True)
        self.other_towers = other_towers(self.vision, self._tower, padded=True)

    @property
    def special_tokens(self) -> SpecialTokens:
        texts = {0: "<pad>", 1: "<eos>", 2: "<bos>", 3: "<unk>"}
        every = {self.image_token: "<image>", **texts}
        # The image token may be the one after the vocabulary.
        inside = {token: text for token, text in every.items() if token != self.language_model.vocab_size}
        self._special_tokens(inside, len(texts) + (self.image_token in inside))
        return SpecialTokens(every, bos="<bos>", eos="<eos>", unknown="<unk>")

    def graphs(self, segments: Sequence[range], held: Container[str]) -> dict[str, WriteGraph]:
        return {**self._looks(), **super().graphs(segments, held)}

    def processor(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        side, tokens = self.vision.image_size, self.vision.tokens
        square = {"height": side, "width": side}
        own = {"image_processor_type": "SiglipImageProcessor", "size": square, **PIXELS}
        given = without_null({"do_convert_rgb": True, **settings})
        known: dict[str, Any] = {key: given.get(key, value) for key, value in own.items()}
        self._check_settings(
            [
                (
                    "image_processor_type",
                    str(known["image_processor_type"]).removesuffix("Fast"),
                    ("SiglipImageProcessor",),
                ),
                ("do_resize", known["do_resize"], (True,)),
                ("size", known["size"], (square,)),
                ("image_seq_length", given.get("image_seq_length", tokens), (tokens,)),
            ]
        )
        return {**known, "do_center_crop": False, "crop_size": square, "do_pad": False}

    def _looks(self) -> dict[str, WriteGraph]:
        """Return the writers of the graphs before the decoder."""
        return {"vision": self._tower, "projector": self._build_projector}

    def _build_projector(self, graph: WeightedGraph) -> None:
        d, width = self.visual_width, self.language_model.hidden_size
        tokens = graph.input("tokens", ["G", "n", d])
        x = graph.linear(tokens, "multi_modal_projector.linear", d, width, bias=True)
        graph.output("embeddings", x, ["G", "n", width])

    @property
    def _paligemma(self) -> Any:
        """The configuration of PaliGemma."""
        return self._config

    @property
    def _text_config(self) -> Any:
        return self._paligemma.text_config

    @property
    def _image_token(self) -> int:
        token: int = self._paligemma.image_token_id
        return token

    def _known_tokens(self, text: Any) -> int:
        # PaliGemma's image token may follow the rows of the embedding table.
        return text.vocab_size + 1

    def _settings(self) -> list[Setting]:
        vision, text = self._paligemma.vision_config, self._text_config
        if text.model_type == "gemma2":
            raise self._error(
                "it is PaliGemma 2, whose decoder is Gemma 2, which is not supported. Export a PaliGemma 1, such as "
                "google/paligemma-3b-mix-448."
            )
        settings = [
            ("text_config.model_type", text.model_type, ("gemma",)),
            ("vision_config.model_type", vision.model_type, ("siglip_vision_model",)),
            ("vision_config.num_channels", vision.num_channels, (3,)),
            ("vision_config.hidden_act", vision.hidden_act, ("gelu_pytorch_tanh",)),
            ("vision_config.projection_dim", vision.projection_dim, (text.hidden_size,)),
        ]
        return [(self.within + name, found, supported) for name, found, supported in settings]

    def _read_llama(self, text: Any) -> Llama:
        return self._read_gemma(text, causal=False)

    def _read_gemma(self, text: Any, *, causal: bool = True) -> Llama:
        # One section of all frequencies: kept rows keep their positions.
        facts = read_language_model(text, [head_dim(text) // 2])
        bias = text.attention_bias
        return Llama(
            facts,
            text.rms_norm_eps,
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=False,
            causal=causal,
            gate="gelu_pytorch_tanh",
            norm_offset=1.0,
        )
