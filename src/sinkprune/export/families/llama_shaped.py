"""The base of families with a decoder of Llama's shape, and the fields that their configurations share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Container, Mapping, Sequence
from functools import partial
from textwrap import shorten
from typing import Annotated, Any, TypedDict

from sinkprune.contract.budgets import FAMILIES
from sinkprune.contract.checks import Bounds
from sinkprune.contract.errors import CheckpointError
from sinkprune.contract.manifest import Colours, Filter, LanguageModel, Number, Scale, Scales, Side, SquareTower
from sinkprune.export.checkpoint.folder import Name, read_fields
from sinkprune.export.families import Family, WriteGraph
from sinkprune.export.models.llama import Llama, build_head, build_segment
from sinkprune.export.pruning.plan import VariableTokens

# 128 x 128. Published towers have 576.
_MOST_PATCHES = 16384

Setting = tuple[str, Any, Sequence[Any]]
"""A setting's name, the value found, and the supported values."""
Expectation = tuple[str, bool, Any]
"""An expectation, whether it holds, and the values found."""

Heads = Annotated[int, Bounds(1, 1024)]
"""Heads of a layer, blocks of a tower; the most published is 128."""
Hidden = Annotated[int, Bounds(1, 1 << 17)]
"""A width of hidden states; the largest published is 16384."""
Inner = Annotated[int, Bounds(1, 1 << 20)]
"""A width within an MLP; the largest published is 106496."""
Token = Annotated[int, Bounds(0, (1 << 19) - 1)]
"""A token's id; the largest published vocabulary has 262208."""
Epsilon = Annotated[Number, Bounds(1e-20, 0.1)]
"""What a norm adds, so that it never divides by zero."""
Theta = Annotated[Number, Bounds(1, 1e12)]
"""The base of rotary positions; the largest published is 5e8."""


class RopeFields(TypedDict, total=False):
    """Fields of a decoder's rotary positions."""

    rope_type: Name
    type: Name
    rope_theta: Theta
    mrope_section: Annotated[list[Annotated[int, Bounds(1, 1 << 12)]], Bounds(3, 3)]
    factor: Annotated[Number, Bounds(1, 1e6)]
    partial_rotary_factor: Annotated[Number, Bounds(1, 1)]


class DecoderFields(TypedDict, total=False):
    """Fields of a decoder's configuration, which some families have at the top of config.json."""

    vocab_size: Annotated[int, Bounds(1, 1 << 19)]
    hidden_size: Hidden
    intermediate_size: Inner
    num_hidden_layers: Annotated[int, Bounds(1, 1024)]
    num_attention_heads: Heads
    num_key_value_heads: Heads | None
    head_dim: Annotated[int, Bounds(1, 1 << 13)] | None
    max_position_embeddings: Annotated[int, Bounds(1, 1 << 30)]
    rms_norm_eps: Epsilon
    hidden_act: Name
    attention_bias: bool
    mlp_bias: bool
    use_sliding_window: bool | None
    sliding_window: Annotated[int, Bounds(1, 1 << 30)] | None
    max_window_layers: Annotated[int, Bounds(0, 10_000)] | None
    rope_theta: Theta
    rope_scaling: RopeFields | None
    rope_parameters: RopeFields | None
    partial_rotary_factor: Annotated[Number, Bounds(1, 1)] | None
    eos_token_id: Token | Annotated[list[Token], Bounds(0, 100)] | None
    tie_word_embeddings: bool


class TextFields(DecoderFields, total=False):
    """Fields of `text_config`."""

    model_type: Name


class ConfigFields(TypedDict, total=False):
    """Fields of every config.json, without `model_type` and the sections for tower and decoder."""

    tie_word_embeddings: bool


class SquareTowerFields(TypedDict, total=False):
    """Fields of the tower of a family whose pictures are squares of one size."""

    model_type: Name
    hidden_size: Hidden
    intermediate_size: Inner
    num_hidden_layers: Heads
    num_attention_heads: Heads
    image_size: Side
    patch_size: Side
    layer_norm_eps: Epsilon
    hidden_act: Name


class PixelFields(TypedDict, total=False):
    """Fields of every image processor's settings."""

    image_processor_type: Name | None
    do_convert_rgb: bool | None
    do_resize: bool | None
    resample: Filter | None
    do_rescale: bool | None
    rescale_factor: Scale | None
    do_normalize: bool | None
    image_mean: Colours | None
    image_std: Scales | None


CLIP_PIXELS: dict[str, Any] = {
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
"""The default rescaling and normalisation of image processors of CLIP's kind."""


class LlamaShaped(Family):
    """A configuration whose decoder has Llama's shape. Subclasses read the tower.

    Raises `CheckpointError` for malformed configurations, and for settings that the graphs do not compute.
    """

    embedding = "language_model.embed_tokens.weight"
    gate = "silu"
    """The activation of the decoder's MLP."""
    rope_types: Sequence[str] = ("default",)
    cuts_edges = False
    """Whether patches may leave out the right and the bottom edge of a square."""
    config_fields: type
    """The TypedDict of the fields read from config.json."""
    configured_as: str | None = None
    """The family whose configuration in transformers this one has; None for its own."""

    def __init__(self, source: str, config: Mapping[str, Any]) -> None:
        self._source = source
        known: Any = read_fields(self.config_fields, config, f"checkpoint '{source}': config.json")
        from transformers import CONFIG_MAPPING

        kind: Any = CONFIG_MAPPING[FAMILIES[self.configured_as or self.name].model_type]
        try:
            self._config: Any = kind.from_dict(known)
        except Exception as error:
            # transformers raises many kinds of errors for invalid configurations.
            reason = shorten(str(error), 300, placeholder=" ...").removesuffix(".")
            raise CheckpointError(f"checkpoint '{source}': config.json is not valid: {reason}.") from error
        text = self._text_config
        rope = (text.rope_parameters or {}).get("rope_type", "default")
        settings = [
            *self._settings(),
            ("text_config.hidden_act", text.hidden_act, (self.gate,)),
            ("text_config.rope_parameters.rope_type", rope, self.rope_types),
        ]
        self._check_settings(settings)
        self.image_token: int = self._image_token
        self._check_shapes(text)
        self._llama = self._read_llama(text)
        self.language_model, self.causal = self._llama.facts, self._llama.causal

    def graphs(self, segments: Sequence[range], held: Container[str]) -> dict[str, WriteGraph]:
        tied = self._config.tie_word_embeddings and "lm_head.weight" not in held
        head = self.embedding.removesuffix(".weight") if tied else "lm_head"
        return {**self._decoder(segments), "head": partial(build_head, llama=self._llama, lm_head=head)}

    def tokens_of(self, processor: Mapping[str, Any]) -> int | VariableTokens:
        assert isinstance(self.vision, SquareTower)
        return self.vision.tokens

    def groups_of(self, processor: Mapping[str, Any]) -> int:
        return 1

    def _decoder(self, segments: Sequence[range]) -> dict[str, WriteGraph]:
        """Return the writers of `decoder_0`, `decoder_1`, ..."""
        return {
            f"decoder_{number}": partial(build_segment, llama=self._llama, layers=layers)
            for number, layers in enumerate(segments)
        }

    @property
    def _text_config(self) -> Any:
        return self._config.text_config

    @property
    def _image_token(self) -> int:
        return self._config.image_token_id

    def _known_tokens(self, text: Any) -> int:
        """Return the number of ids that the tokenizer of the decoder `text` may have."""
        return text.vocab_size

    @abstractmethod
    def _settings(self) -> list[Setting]:
        """Return the settings that this family checks, in addition to those of all families."""

    @abstractmethod
    def _read_llama(self, text: Any) -> Llama:
        """Return the decoder of the configuration `text`."""

    def _error(self, what: str) -> CheckpointError:
        return CheckpointError(f"checkpoint '{self._source}': {what}")

    def _check_settings(self, settings: Sequence[Setting]) -> None:
        for name, found, supported in settings:
            if found not in supported:
                raise self._error(
                    f"{name} is {found!r}, expected {' or '.join(map(str, supported))}. Other variants of "
                    f"{FAMILIES[self.name].architecture} are not supported yet."
                )

    def _check(self, expectations: Sequence[Expectation]) -> None:
        for expectation, holds, found in expectations:
            if not holds:
                raise self._error(f"expected that {expectation}; found {found}. Correct config.json.")

    def _square_tower(self, vision: Any, blocks: int) -> dict[str, Any]:
        """Return the fields of a `SquareTower` of so many blocks; raises `CheckpointError`."""
        size, patch = vision.image_size, vision.patch_size
        patches, whole = (size // patch) ** 2, size % patch == 0 or (self.cuts_edges and patch < size)
        self._check(
            [
                ("image_size is a multiple of patch_size", whole, f"{size} and {patch}"),
                (f"image_size has at most {_MOST_PATCHES} patches", patches <= _MOST_PATCHES, patches),
            ]
        )
        return {
            "hidden_size": vision.hidden_size,
            "intermediate_size": vision.intermediate_size,
            "num_heads": vision.num_attention_heads,
            "num_blocks": blocks,
            "image_size": size,
            "patch_size": patch,
            "layer_norm_eps": vision.layer_norm_eps,
            "activation": vision.hidden_act,
            "tokens": patches,
        }

    def _special_tokens(self, texts: dict[int, str], count: int) -> dict[int, str]:
        """Return `texts` by id. Raises `CheckpointError` unless they have `count` different ids of the vocabulary."""
        if len(texts) < count or not all(0 <= token < self.language_model.vocab_size for token in texts):
            raise self._error(
                f"the special tokens of config.json have the ids {sorted(texts)}, "
                f"expected {count} different ones below {self.language_model.vocab_size}. Correct the ids of tokens."
            )
        return texts

    def _check_shapes(self, text: Any) -> None:
        heads, kv_heads = text.num_attention_heads, text.num_key_value_heads
        found = (
            f"hidden_size {text.hidden_size}, {heads} heads, {kv_heads} key-value heads, head_dim {head_dim(text)}, "
            f"vocabulary {text.vocab_size}, image token {self.image_token}"
        )
        expectations = [
            ("num_attention_heads is a multiple of num_key_value_heads", heads % kv_heads == 0),
            ("hidden_size is a multiple of num_attention_heads", text.hidden_size % heads == 0),
            ("head_dim is even", head_dim(text) % 2 == 0),
            ("the image token is in the vocabulary", self.image_token < self._known_tokens(text)),
        ]
        self._check([(expectation, holds, found) for expectation, holds in expectations])


def read_language_model(text: Any, rope_sections: Sequence[int] = ()) -> LanguageModel:
    """Return the facts of a Llama-shaped decoder from `text`, its configuration in transformers."""
    rope = text.rope_parameters
    return LanguageModel(
        hidden_size=text.hidden_size,
        intermediate_size=text.intermediate_size,
        num_layers=text.num_hidden_layers,
        num_heads=text.num_attention_heads,
        num_kv_heads=text.num_key_value_heads,
        head_dim=head_dim(text),
        vocab_size=text.vocab_size,
        max_positions=text.max_position_embeddings,
        rope_theta=float(rope["rope_theta"]),
        rope_sections=tuple(rope_sections),
        rope_factor=float(rope["factor"]) if rope.get("rope_type") == "linear" else 1.0,
    )


def head_dim(text: Any) -> int:
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def without_null(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return an image processor's settings without null, which means false for a flag, and the default for others."""
    flags = {key: bool(value) for key, value in settings.items() if key.startswith("do_")}
    return {key: value for key, value in settings.items() if value is not None} | flags
