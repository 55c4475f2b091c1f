"""A small LLaVA that TensorRT compiles: its attention takes no heads smaller than 64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sinkprune.bundle import Bundle, read_bundle
from sinkprune.export.bundle_writer import Request, export_bundle

CONFIG: dict[str, Any] = {
    "model_type": "llava",
    "image_token_index": 300,
    "vision_config": {
        "model_type": "clip_vision_model",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": 336,
        "patch_size": 14,
    },
    "text_config": {
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 320,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 320,
    },
}


def export_random(folder: Path, config: dict[str, Any] = CONFIG, **request: Any) -> Bundle:
    """A bundle of `config` with random weights, written into `folder`; `request` is `Request`'s."""
    (folder / "config.json").write_text(json.dumps(config))
    export_bundle(Request(str(folder), random_weights=True, **request), folder / "bundle")
    return read_bundle(folder / "bundle")
