"""What all families do with a config.json: parse it, refuse what their graphs do not compute, read the decoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sinkprune.contract.errors import CheckpointError
from sinkprune.contract.manifest import LanguageModel

Expectation = tuple[str, Any, Sequence[Any]]
"""A setting's name, what was found, and what is supported."""


def parse_config(source: str, kind: Any, config: Mapping[str, Any]) -> Any:
    """`config` as an instance of `kind`, a transformers configuration class; raises `CheckpointError`."""
    try:
        return kind.from_dict(dict(config))
    except Exception as error:
        # transformers checks configurations by many kinds of errors.
        reason = " ".join(str(error).split()).removesuffix(".")
        raise CheckpointError(f"checkpoint '{source}': config.json is not valid: {reason}.") from error


def check_settings(source: str, architecture: str, settings: Sequence[Expectation]) -> None:
    """Refuse the first setting that is none of those supported; raises `CheckpointError`."""
    for name, found, supported in settings:
        if found not in supported:
            expected = " or ".join(map(str, supported))
            raise CheckpointError(
                f"checkpoint '{source}': {name} is {found!r}, expected {expected}. "
                f"Other variants of {architecture} are not supported yet."
            )


def check_shapes(source: str, text: Any, image_token: int) -> None:
    """Refuse decoder shapes that no weights can have; raises `CheckpointError`."""
    heads, kv_heads = text.num_attention_heads, text.num_key_value_heads
    expectations = [
        ("num_attention_heads is a multiple of num_key_value_heads", heads % kv_heads == 0),
        ("hidden_size is a multiple of num_attention_heads", text.hidden_size % heads == 0),
        ("head_dim is even", head_dim(text) % 2 == 0),
        ("the image token is in the vocabulary", image_token < text.vocab_size),
    ]
    for expectation, holds in expectations:
        if not holds:
            raise CheckpointError(
                f"checkpoint '{source}': expected that {expectation}; found hidden_size "
                f"{text.hidden_size}, {heads} heads, {kv_heads} key-value heads, head_dim {head_dim(text)}, "
                f"vocabulary {text.vocab_size}, image token {image_token}. Mend config.json."
            )


def read_language_model(text: Any, rope_sections: Sequence[int] = ()) -> LanguageModel:
    """The decoder's facts from `text`, a transformers configuration of a decoder of Llama's kind."""
    return LanguageModel(
        hidden_size=text.hidden_size,
        intermediate_size=text.intermediate_size,
        num_layers=text.num_hidden_layers,
        num_heads=text.num_attention_heads,
        num_kv_heads=text.num_key_value_heads,
        head_dim=head_dim(text),
        vocab_size=text.vocab_size,
        max_positions=text.max_position_embeddings,
        rope_theta=float(text.rope_parameters["rope_theta"]),
        rope_sections=tuple(rope_sections),
    )


def head_dim(text: Any) -> int:
    """The size of one attention head."""
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
