"""A checkpoint of true shapes in Hugging Face format: random weights, a small tokenizer, a processor.

Weights are the exporter's own random ones in bf16, so every engine starts from the same values. Answers are noise,
but finite: norms are 1, biases 0, all other weights normal with a small spread.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jinja2
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from sinkprune.contract.errors import UsageError
from sinkprune.contract.precision import Array
from sinkprune.export.checkpoint.folder import read_json
from sinkprune.export.checkpoint.presets import RandomWeights
from sinkprune.export.families import Family
from sinkprune.export.source import ExportRequest, open_source

_OWN = {"dtype": "bfloat16"}
"""The checkpoint's configuration apart from the shapes."""
_SHARD_BYTES = 1 << 30
_PICTURE = re.compile(r"<image>\n?|<\|vision_start\|>.*?<\|vision_end\|>")
_PROCESSORS = {
    "llava": ("LlavaProcessor", "CLIPImageProcessor"),
    "llava_next": ("LlavaNextProcessor", "LlavaNextImageProcessor"),
    "qwen2_vl": ("Qwen2VLProcessor", "Qwen2VLImageProcessor"),
    "qwen2_5_vl": ("Qwen2_5_VLProcessor", "Qwen2VLImageProcessor"),
    "qwen3_vl": ("Qwen3VLProcessor", "Qwen2VLImageProcessor"),
    "pi0": ("PI0Processor", "PI0ImageProcessor"),
    "openvla_oft": ("PrismaticProcessor", "PrismaticImageProcessor"),
}
"""transformers' classes for whole prompts and for pictures, by `model_type`."""


def make_checkpoint(folder: Path, config: Mapping[str, Any], *, weights: bool = True) -> None:
    """Write a checkpoint of the shapes in `config` into `folder`, unless it exists; without `weights`, all but these.

    Raises `CheckpointError` for a configuration of no known family, and `UsageError` if `folder` holds a checkpoint
    of another configuration.
    """
    done = folder / "config.json"
    if done.exists():
        found = read_json(folder, done.name)
        if {**config, **_OWN} != found:
            raise UsageError(f"'{folder}' holds a checkpoint of another configuration. Give another --folder.")
        return
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    _write_json(partial / "config.json", {**config, **_OWN})
    _write_text(partial, config)
    if weights:
        _write_weights(partial, config)
    partial.rename(folder)


def _write_text(folder: Path, config: Mapping[str, Any]) -> None:
    """Write the exporter's artificial tokenizer, chat template, processor and generation settings."""
    source = open_source(ExportRequest(str(folder), random_weights=True))
    family, text = source.family, source.text
    (folder / "tokenizer.json").write_text(text.tokenizer_json, encoding="utf-8")
    (folder / "chat_template.jinja").write_text(text.chat_template, encoding="utf-8")
    tokens = {"bos_token": text.bos or None, "eos_token": text.eos, "pad_token": text.eos}
    image = family.special_tokens.texts[family.image_token]
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": 1 << 20,
            "clean_up_tokenization_spaces": False,
            **{name: token for name, token in tokens.items() if token},
            "extra_special_tokens": {"image_token": image},
        },
    )
    _write_json(folder / "generation_config.json", {"eos_token_id": list(text.stop), "do_sample": False})
    _write_processor(folder, config, family, source.processor)


def _write_processor(folder: Path, config: Mapping[str, Any], family: Family, processor: Mapping[str, Any]) -> None:
    whole, pictures = _PROCESSORS[config["model_type"]]
    settings = {name: value for name, value in processor.items() if name != "video"}
    image = {**settings, "image_processor_type": pictures, "processor_class": whole}
    _write_json(folder / "preprocessor_config.json", image)
    own: dict[str, Any] = {"processor_class": whole}
    if family.name.startswith("llava"):
        own |= {
            "patch_size": config["vision_config"]["patch_size"],
            "vision_feature_select_strategy": config["vision_feature_select_strategy"],
            "num_additional_image_tokens": 1,
            "image_token": family.special_tokens.texts[family.image_token],
        }
    _write_json(folder / "processor_config.json", own)


def _write_weights(folder: Path, config: Mapping[str, Any]) -> None:
    """Write shards of about a gigabyte, one in memory at a time, and their index."""
    places: dict[str, str] = {}
    shard: dict[str, Array] = {}
    total = 0

    def close() -> None:
        name = f"model-{len(set(places.values())) + 1:05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        places.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, shape in _tensors(config):
        if sum(array.nbytes for array in shard.values()) > _SHARD_BYTES:
            close()
        shard[name] = RandomWeights().tensor(name, shape).astype(ml_dtypes.bfloat16)
        total += shard[name].nbytes
    close()
    index = {"metadata": {"total_size": total}, "weight_map": places}
    _write_json(folder / "model.safetensors.index.json", index)


def _tensors(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes of PyTorch's own model, which is not allocated."""
    import torch
    import transformers

    if config["model_type"] == "openvla_oft":
        from oft_model import OftModel

        with torch.device("meta"):
            yield from ((name, tuple(value.shape)) for name, value in OftModel(config).named_parameters())
        return
    settings = {name: value for name, value in config.items() if name not in ("model_type", "architectures")}
    with torch.device("meta"):
        own = transformers.AutoConfig.for_model(config["model_type"], **settings)
        model = getattr(transformers, config["architectures"][0])(own)
    tied = set(model.all_tied_weights_keys)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name not in tied:
            yield name, tuple(parameter.shape)


def weight_bytes(folder: Path) -> int:
    """Return the bytes of the checkpoint's tensors, from its index."""
    index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
    total: int = index["metadata"]["total_size"]
    return total


def chat_text(folder: Path, question: str, picture: str | None = None) -> str:
    """Return the prompt by the chat template, with `picture` in the place of the template's picture tokens."""
    template = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).from_string(
        (folder / "chat_template.jinja").read_text(encoding="utf-8")
    )
    content = [{"type": "image"}, {"type": "text", "text": question}]
    bos = read_json(folder, "tokenizer_config.json").get("bos_token", "")
    text = template.render(messages=[{"role": "user", "content": content}], add_generation_prompt=True, bos_token=bos)
    return text if picture is None else _PICTURE.sub(lambda _: picture, text)


def random_picture(seed: int, side: int) -> Array:
    """Return a picture that is in no cache: uint8 [side,side,3], blocks of random colours with noise."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (-(-side // 16), -(-side // 16), 3))
    coarse = np.kron(blocks, np.ones((16, 16, 1), int))[:side, :side]
    return np.clip(coarse + rng.integers(-20, 21, coarse.shape), 0, 255).astype(np.uint8)


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
