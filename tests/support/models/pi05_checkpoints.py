"""Small random pi0.5 checkpoints: pi0's, with an expert of adaptive norms."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from support.models.pi0_checkpoints import Pi0Shape, make_pi0_checkpoint

EXPERT = "paligemma_with_expert.gemma_expert.model."
_PI0_ONLY = re.compile(r"state_proj|action_time_mlp|gemma_expert.*norm")
Array = np.ndarray[Any, Any]


def make_pi05_checkpoint(folder: Path, shape: Pi0Shape, seed: int = 0) -> Path:
    """Write a pi0.5 checkpoint with random weights, tokenizer and statistics by ranges into the new `folder`."""
    make_pi0_checkpoint(folder, shape, seed)
    random, config = np.random.default_rng(seed), json.loads((folder / "config.json").read_text())
    width = config["dit_config"]["hidden_size"]
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: values for name, values in tensors.items() if not _PI0_ONLY.search(name)}
    norms = [f"layers.{layer}.{which}_layernorm" for layer in range(shape.num_layers) for which in _NORMS]
    layers = {f"{EXPERT}{norm}.dense": 3 for norm in (*norms, "norm")} | {"time_mlp_in": 1, "time_mlp_out": 1}
    for name, parts in layers.items():
        # Large enough that scales, shifts and gates differ from 0 by far, and from step to step.
        tensors[f"{name}.weight"] = drawn(random, 1.5 * width**-0.5, parts * width, width)
        tensors[f"{name}.bias"] = drawn(random, 0.5, parts * width)
    save_file(tensors, folder / "model.safetensors")
    config |= {"model_type": "pi05", "architectures": ["PI05Policy"]}
    (folder / "config.json").write_text(json.dumps(config))
    settings = json.loads((folder / "processor_config.json").read_text())
    for name, count in (("state", shape.state_dim - 1), ("actions", shape.action_dim - 1)):
        for which, least in (("mean", None), ("std", None), ("low", -1.5), ("high", 0.5)):
            settings.pop(f"{name}_{which}", None)
            if least is not None and shape.statistics:
                settings[f"{name}_{which}"] = [round(float(x), 3) for x in random.uniform(least, least + 1, count)]
    (folder / "processor_config.json").write_text(json.dumps(settings))
    return folder


_NORMS = ("input", "post_attention")


def drawn(random: np.random.Generator, std: float, *shape: int) -> Array:
    return (std * random.standard_normal(shape)).astype(np.float32)
