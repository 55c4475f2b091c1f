"""The settings of `generation_config.json`: those that bundles apply, and those that they do not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sinkprune.contract.checks.fields import fits
from sinkprune.contract.checks.format_value import format_value
from sinkprune.contract.errors import CheckpointError
from sinkprune.contract.manifest import RepetitionPenalty
from sinkprune.export.checkpoint.tokenizer import read_object

_FILE, _CONFIG = "generation_config.json", "config.json"
_REJECTED: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences", "guidance_scale"), (1,)),
    **dict.fromkeys(("min_length", "min_new_tokens", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), (0,)),
    **dict.fromkeys(("penalty_alpha", "diversity_penalty"), (0,)),
    **dict.fromkeys(("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "stop_strings"), ([],)),
    **dict.fromkeys(("sequence_bias", "force_words_ids", "constraints"), ([], {})),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"), ()),
    **dict.fromkeys(("watermarking_config", "dola_layers", "max_time"), ()),
    "encoder_repetition_penalty": (1,),
    "token_healing": (False,),
}
"""Settings that change greedy answers too, with the values at which they do not. null changes nothing."""
_LEFT_OUT: Mapping[str, tuple[Any, ...]] = {
    "do_sample": (False,),
    "temperature": (1,),
    "top_k": (50,),
    "top_p": (1,),
    "typical_p": (1,),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff"), (0,)),
    **dict.fromkeys(("min_p", "top_h", "max_new_tokens"), ()),
    "max_length": (20,),
}
"""Settings of sampled answers and of lengths, which are a request's own, with transformers' defaults."""
_OF_NO_ANSWER = {
    *("_from_model_config", "transformers_version", "_commit_hash", "bos_token_id", "eos_token_id", "pad_token_id"),
    *("decoder_start_token_id", "repetition_penalty", "early_stopping", "length_penalty", "remove_invalid_values"),
    *("renormalize_logits", "low_memory", "use_cache", "return_dict_in_generate", "prompt_lookup_num_tokens"),
    *("max_matching_ngram_size", "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule"),
    *("target_lookbehind", "speculation_type", "use_mtp", "compile_config", "disable_compile", "prefill_chunk_size"),
    *("continuous_batching_config", "max_cache_len"),
}
"""Settings that change no answer here, or that are read: of beams, of speed, of outputs."""
_PREFIXES = ("output_", "cache_", "assistant_")


@dataclass(frozen=True)
class GenerationSettings:
    """How a checkpoint generates answers by default."""

    eos: Any = None
    """One id of an end-of-sequence token, or a list of them; None if the checkpoint does not have it here."""
    repetition_penalty: float | None = None
    left_out: dict[str, Any] = field(default_factory=dict)
    """Settings that a bundle does not apply, because they are a request's own, or unknown."""


def read_generation_settings(folder: Path) -> GenerationSettings:
    """Return the settings of a checkpoint's generation_config.json, or else of config.json, as transformers does.

    Raises `CheckpointError` for settings that change greedy answers and that bundles cannot apply.
    """
    name, given = _FILE, read_object(folder, _FILE)
    if not given:
        name, config = _CONFIG, read_object(folder, _CONFIG)
        text = config.get("text_config")
        merged = {**(text if isinstance(text, dict) else {}), **_without_null(config)}
        known = {*_REJECTED, *_LEFT_OUT, "repetition_penalty", "eos_token_id"}
        given = {key: value for key, value in merged.items() if key in known}
    given = _without_null(given)
    rejected = [key for key, neutral in _REJECTED.items() if key in given and given[key] not in neutral]
    if rejected:
        raise CheckpointError(
            f"'{folder / name}' has {', '.join(f'{key} {format_value(given[key])}' for key in rejected)}, which "
            f"{'changes' if len(rejected) == 1 else 'change'} answers, and bundles do not apply it. Remove it from "
            "the file to export without."
        )
    penalty = given.get("repetition_penalty")
    if penalty is not None and not fits(RepetitionPenalty, penalty):
        raise CheckpointError(
            f"'{folder / name}' has the repetition_penalty {format_value(penalty)}, expected a number from 0.01 to "
            "100. Correct it, or remove it."
        )
    left_out = {
        key: value
        for key, value in given.items()
        if key not in _REJECTED
        and key not in _OF_NO_ANSWER
        and not key.startswith(_PREFIXES)
        and value not in _LEFT_OUT.get(key, ())
    }
    own = None if penalty is None or penalty == 1 else float(penalty)
    return GenerationSettings(given.get("eos_token_id"), own, left_out)


def _without_null(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value is not None}
