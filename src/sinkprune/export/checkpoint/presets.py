"""Model shapes by name, random weights and a small tokenizer, for `--random-weights`: sizing before any download."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import chain, count, islice, product
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from sinkprune.contract.checks import unknown_name
from sinkprune.contract.errors import CheckpointError
from sinkprune.contract.precision import Array
from sinkprune.export.checkpoint.folder import has_entry, read_json
from sinkprune.export.checkpoint.text import SpecialTokens, Text

_CLIP_L_336 = {
    "model_type": "clip_vision_model",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
    "projection_dim": 768,
}
_QWEN_VISION = {"depth": 32, "num_heads": 16, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
_QWEN3_VISION = {
    **_QWEN_VISION,
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "patch_size": 16,
    "deepstack_visual_indexes": [5, 11, 17],
}
_QWEN3_LARGE_VISION = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "deepstack_visual_indexes": [8, 16, 24],
}
_MISTRAL = {"model_type": "mistral", "max_position_embeddings": 32768, "rope_theta": 1e6, "sliding_window": None}
_QWEN_TOKENS = {
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
}
# The columns of the table below
_SHAPE = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


def _llava(*shape: int, **text: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "image_token_index": 32000,
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "projector_hidden_act": "gelu",
        "tie_word_embeddings": False,
        "vision_config": _CLIP_L_336,
        "text_config": {
            "model_type": "llama",
            "vocab_size": 32064,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            **dict(zip(_SHAPE, shape, strict=True)),
            **text,
        },
    }


def _llava_next(*shape: int, **text: Any) -> dict[str, Any]:
    return {
        **_llava(*shape, **text),
        "architectures": ["LlavaNextForConditionalGeneration"],
        "model_type": "llava_next",
        "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
    }


def _qwen(*shape: int, **text: Any) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        **_QWEN_TOKENS,
        "vision_config": {
            **_QWEN_VISION,
            "model_type": "qwen2_5_vl_vision",
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "out_hidden_size": shape[0],
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
            "tokens_per_second": 2,
        },
        "text_config": {
            "model_type": "qwen2_5_vl_text",
            "max_position_embeddings": 128000,
            "rms_norm_eps": 1e-6,
            "eos_token_id": 151645,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
            **dict(zip(_SHAPE, shape, strict=True)),
            **text,
        },
    }


def _qwen2(*shape: int, **text: Any) -> dict[str, Any]:
    own = {"model_type": "qwen2_vl_vision", "embed_dim": 1280, "mlp_ratio": 4, "hidden_size": shape[0]}
    return {
        **_qwen(*shape, **text, model_type="qwen2_vl_text", max_position_embeddings=32768),
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        "vision_config": {**_QWEN_VISION, **own},
    }


def _qwen3(*shape: int, tied: bool, **vision: Any) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        **_QWEN_TOKENS,
        "tie_word_embeddings": tied,
        "vision_config": {
            **_QWEN3_VISION,
            "model_type": "qwen3_vl_vision",
            "hidden_act": "gelu_pytorch_tanh",
            "out_hidden_size": shape[0],
            "num_position_embeddings": 2304,
            **vision,
        },
        "text_config": {
            "model_type": "qwen3_vl_text",
            "vocab_size": 151936,
            "max_position_embeddings": 262144,
            "head_dim": 128,
            "rms_norm_eps": 1e-6,
            "eos_token_id": 151645,
            "tie_word_embeddings": tied,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5e6,
                "mrope_section": [24, 20, 20],
                "mrope_interleaved": True,
            },
            **dict(zip(_SHAPE, shape, strict=True)),
        },
    }


def _internvl(*shape: int, **text: Any) -> dict[str, Any]:
    """InternVL3 with the settings of its Qwen2 decoders; `text` has those of others."""
    return {
        "architectures": ["InternVLForConditionalGeneration"],
        "model_type": "internvl",
        "image_token_id": 151667,
        "vision_config": {"model_type": "internvl_vision", "attention_bias": True},
        "text_config": {
            "model_type": "qwen2",
            "vocab_size": 151674,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "eos_token_id": 151645,
            "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e6},
            **dict(zip(_SHAPE, shape, strict=True)),
            **text,
        },
    }


def _internvl3_5(*shape: int) -> dict[str, Any]:
    text = {"model_type": "qwen3", "vocab_size": 151936, "head_dim": 128, "max_position_embeddings": 40960}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    return {**_internvl(*shape, **text, **rope), "image_token_id": 151671}


_GEMMA = {
    "model_type": "gemma",
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "num_hidden_layers": 18,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
}


def _paligemma(image_size: int, vocab_size: int = 257216) -> dict[str, Any]:
    return {
        "architectures": ["PaliGemmaForConditionalGeneration"],
        "model_type": "paligemma",
        "projection_dim": 2048,
        "image_token_id": 257152,
        "text_config": {**_GEMMA, "hidden_size": 2048, "intermediate_size": 16384, "vocab_size": vocab_size},
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "image_size": image_size,
            "patch_size": 14,
            "projection_dim": 2048,
            "vision_use_head": False,
        },
    }


def _pi0_fast() -> dict[str, Any]:
    own = {"architectures": ["PI0FastPolicy"], "model_type": "pi0_fast", "action_dim": 7}
    return {**_paligemma(224, vocab_size=257152), **own, "chunk_size": 50, "max_state_dim": 32}


def _pi0() -> dict[str, Any]:
    """PaliGemma 3B of 224 pixels with an action expert of 300 M weights, as in openpi's `pi0_base`."""
    return {
        "architectures": ["PI0ForConditionalGeneration"],
        "model_type": "pi0",
        "vlm_config": _paligemma(224, vocab_size=257152),
        "dit_config": {**_GEMMA, "hidden_size": 1024, "intermediate_size": 4096},
        "chunk_size": 50,
        "max_state_dim": 32,
        "max_action_dim": 32,
        "num_inference_steps": 10,
    }


def _openvla(**own: Any) -> dict[str, Any]:
    """Prismatic's towers and Llama-2-7B, whose sizes are transformers' defaults, and LIBERO's numbers."""
    return {
        "architectures": ["OpenVLAForActionPrediction"],
        "model_type": "openvla",
        "arch_specifier": "no-align+fused-gelu-mlp",
        "vision_backbone_id": "dinosiglip-vit-so-224px",
        "use_fused_vision_backbone": True,
        "image_resize_strategy": "resize-naive",
        "image_sizes": [224, 224],
        "timm_model_ids": ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"],
        "timm_override_act_layers": [None, None],
        "n_action_bins": 256,
        "pad_to_multiple_of": 64,
        "pad_token_id": 32000,
        "text_config": {"model_type": "llama", "vocab_size": 32064},
        **own,
    }


PRESETS: dict[str, dict[str, Any]] = {
    "llava-1.5-7b": _llava(4096, 11008, 32, 32, 32),
    "llava-1.5-13b": _llava(5120, 13824, 40, 40, 40),
    "llava-1.1b": _llava(2048, 5632, 22, 32, 4),
    "llava-next-7b": _llava_next(4096, 11008, 32, 32, 32),
    "llava-next-mistral-7b": _llava_next(4096, 14336, 32, 32, 8, **_MISTRAL),
    "qwen2-vl-7b": _qwen2(3584, 18944, 28, 28, 4, vocab_size=152064),
    "qwen2.5-vl-3b": _qwen(2048, 11008, 36, 16, 2, vocab_size=151936),
    "qwen2.5-vl-7b": _qwen(3584, 18944, 28, 28, 4, vocab_size=152064),
    "qwen3-vl-2b": _qwen3(2048, 6144, 28, 16, 8, tied=True),
    "qwen3-vl-4b": _qwen3(2560, 9728, 36, 32, 8, tied=True),
    "qwen3-vl-8b": _qwen3(4096, 12288, 36, 32, 8, tied=False, **_QWEN3_LARGE_VISION),
    "internvl3-1b": _internvl(896, 4864, 24, 14, 2),
    "internvl3-2b": _internvl(1536, 8960, 28, 12, 2),
    "internvl3-8b": _internvl(3584, 18944, 28, 28, 4),
    "internvl3.5-1b": _internvl3_5(1024, 3072, 28, 16, 8),
    "internvl3.5-2b": _internvl3_5(2048, 6144, 28, 16, 8),
    "internvl3.5-8b": _internvl3_5(4096, 12288, 36, 32, 8),
    "openvla-7b": _openvla(action_dim=7),
    "openvla-7b-oft": _openvla(
        model_type="openvla_oft", action_head={"chunk": 8, "action_dim": 7, "blocks": 2, "state_dim": 8}
    ),
    **{f"paligemma-3b-{size}": _paligemma(size) for size in (224, 448, 896)},
    "pi0": _pi0(),
    "pi0-fast": _pi0_fast(),
    "pi0.5": {**_pi0(), "architectures": ["PI05Policy"], "model_type": "pi05"},
}
SAME_SHAPES = {
    "cosmos-reason1-7b": "qwen2.5-vl-7b",
    "cosmos-reason2-2b": "qwen3-vl-2b",
    "cosmos-reason2-8b": "qwen3-vl-8b",
    "cosmos3-nano": "qwen3-vl-8b",
}
"""Checkpoints of NVIDIA, by the preset whose shapes they have."""
PRESETS |= {name: PRESETS[same] for name, same in SAME_SHAPES.items()}
"""Parsed config.json by preset. `llava-1.1b` is CLIP-L/336 with a TinyLlama-shaped decoder."""


def preset_or_file(source: str) -> dict[str, Any]:
    """Return the configuration of a preset, or in the config.json or folder `source`; raises `CheckpointError`."""
    if source in PRESETS:
        return PRESETS[source]
    path = Path(source)
    # The user's own file may be a link.
    resolved = path.resolve()
    folder, name = (path, "config.json") if path.is_dir() else (resolved.parent, resolved.name)
    if not has_entry(folder, name):
        raise CheckpointError(
            unknown_name(
                f"'{source}' is no config.json, no folder holding one and no preset", source, PRESETS, "Presets are"
            )
        )
    return read_json(folder, name)


class RandomWeights:
    """Seeded random tensors: norm weights are 1, biases 0, all others normal with std 0.02.

    A tensor depends on its name and shape only, so that two exports of a configuration are equal.
    """

    std = 0.02

    def __contains__(self, name: object) -> bool:
        return True

    def close(self) -> None:
        """Do nothing: no file is open."""

    def tensor(self, name: str, shape: Sequence[int]) -> Array:
        if name.endswith("bias"):
            return np.zeros(shape, np.float32)
        if len(shape) == 1 and ("norm" in name or ".ln_" in name):
            return np.ones(shape, np.float32)
        generator = np.random.default_rng(zlib.crc32(name.encode()))
        return generator.standard_normal(shape, np.float32) * np.float32(self.std)


_SYLLABLES = [a + b + c for a in "bdfgklmnprstvwyz" for b in "aeiou" for c in ("", "n")]


def small_text(vocab_size: int, specials: SpecialTokens, template: str) -> Text:
    """Return a tokenizer for random weights: bytes, then invented syllables, so that every id has a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made_up = ("Ġ" + "".join(word) for length in count(1) for word in product(_SYLLABLES, repeat=length))
    # "na" + "na" and "nan" + "a" are one word. Twice as many words as needed are enough without duplicates.
    words = iter(dict.fromkeys(islice(chain(alphabet, made_up), 2 * vocab_size)))
    vocabulary = {}
    for token in range(vocab_size):
        word = specials.texts.get(token) or next(words)
        vocabulary[word] = token
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=specials.unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if specials.bos:
        bos = specials.bos
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, vocabulary[bos])]
        )
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in specials.texts.values()])
    return Text(tokenizer.to_str(), template, (vocabulary[specials.eos],), specials.bos, specials.eos)
