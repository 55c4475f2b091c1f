"""Checkpoints in Hugging Face format: configuration, tensors, tokenizer and processor files."""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (teaches numpy bfloat16, which safetensors then returns)
import numpy as np
from safetensors import SafetensorError, safe_open

from sinkprune.contract.errors import CheckpointError
from sinkprune.contract.precision import Array

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]

# Checkpoints saved by transformers before and after 4.52 nest the same modules differently.
_RENAMINGS = [
    (re.compile(r"^model\."), ""),
    (re.compile(r"^language_model\.model\."), "language_model."),
    (re.compile(r"^language_model\.lm_head\."), "lm_head."),
    (re.compile(r"^vision_tower\.vision_model\."), "vision_tower."),
    (re.compile(r"^(embed_tokens|layers|norm)\."), r"language_model.\1."),
]


def locate(source: str) -> Path:
    """The local folder of a checkpoint: `source` itself, or its download if it is a hub name."""
    folder = Path(source)
    if folder.is_dir():
        return folder
    if folder.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", source):
        raise CheckpointError(
            f"checkpoint '{source}': found no such folder. Give a local folder in Hugging Face format, a hub name "
            "such as llava-hf/llava-1.5-7b-hf, or a preset with --random-weights."
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(snapshot_download(source, allow_patterns=_FILES))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(
            f"checkpoint '{source}' is no local folder and could not be downloaded: {reason} "
            "Check the name and the network, or give a local folder."
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; raises `CheckpointError`."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"'{path}' is missing. Give a checkpoint folder in Hugging Face format, downloaded completely."
        ) from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"'{path}' cannot be read as JSON: {error}. Download it again.") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"'{path}' holds {type(data).__name__}, expected a JSON object.")
    return data


def config_sha256(config: Mapping[str, Any]) -> str:
    """A fingerprint of a configuration that does not depend on key order."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


class SafetensorsWeights:
    """The tensors of a checkpoint folder, read one at a time under their canonical names.

    Opening reads every shard's header, so that a missing or truncated shard is found before any work is done.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._owners: dict[str, tuple[Any, str]] = {}
        for shard in self._shards():
            handle = self._open(shard)
            for name in handle.keys():  # noqa: SIM118  (a safetensors handle is no dict)
                self._owners[_canonical(name)] = (handle, name)

    def close(self) -> None:
        """Close the shards."""
        self._stack.close()

    def __contains__(self, name: object) -> bool:
        return name in self._owners

    def tensor(self, name: str, shape: Sequence[int]) -> Array:
        """The tensor `name`; raises `CheckpointError` if it is missing or not of `shape`."""
        if name not in self._owners:
            raise CheckpointError(
                f"checkpoint '{self._folder}' holds no tensor '{name}', expected one of shape {list(shape)}. "
                "The configuration and the weights do not belong together, or a shard is missing."
            )
        handle, stored = self._owners[name]
        found = handle.get_slice(stored)
        if found.get_shape() != list(shape):
            raise CheckpointError(
                f"checkpoint '{self._folder}': tensor '{stored}' has shape {found.get_shape()}, expected "
                f"{list(shape)} by config.json. They do not belong together."
            )
        if found.get_dtype() not in ("F64", "F32", "F16", "BF16"):
            raise CheckpointError(
                f"checkpoint '{self._folder}': tensor '{stored}' is {found.get_dtype()}, expected F32, F16 or BF16. "
                "Give the unquantised checkpoint."
            )
        return handle.get_tensor(stored)

    def _shards(self) -> list[Path]:
        if (self._folder / _INDEX).exists():
            weight_map = read_json(self._folder / _INDEX).get("weight_map", {})
            return [self._folder / name for name in sorted(set(weight_map.values()))]
        if (self._folder / _SINGLE).exists():
            return [self._folder / _SINGLE]
        raise CheckpointError(
            f"checkpoint '{self._folder}': found neither {_INDEX} nor {_SINGLE}. Only safetensors are read; convert "
            "others with transformers' save_pretrained."
        )

    def _open(self, shard: Path) -> Any:
        try:
            return self._stack.enter_context(safe_open(shard, framework="np"))
        except FileNotFoundError as error:
            raise CheckpointError(
                f"checkpoint '{self._folder}': shard '{shard.name}' is missing, though {_INDEX} names it. "
                "Download it again."
            ) from error
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"checkpoint '{self._folder}': shard '{shard.name}' is damaged ({error}). It has "
                f"{shard.stat().st_size} bytes; download it again."
            ) from error


class RandomWeights:
    """Seeded random tensors of the right shapes: norm weights are 1, biases 0, all else normal with std 0.02.

    A tensor depends on its name and shape only, so two exports of one configuration are equal.
    """

    std = 0.02

    def __contains__(self, name: object) -> bool:
        return True

    def close(self) -> None:
        """Nothing is open."""

    def tensor(self, name: str, shape: Sequence[int]) -> Array:
        """The tensor `name` of `shape`, fp32."""
        if name.endswith("bias"):
            return np.zeros(shape, np.float32)
        if "norm" in name or ".ln_" in name:
            return np.ones(shape, np.float32)
        generator = np.random.default_rng(zlib.crc32(name.encode()))
        return generator.standard_normal(shape, np.float32) * np.float32(self.std)


def _canonical(name: str) -> str:
    for pattern, replacement in _RENAMINGS:
        name = pattern.sub(replacement, name)
    return name
