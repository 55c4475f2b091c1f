"""Folders that are no whole checkpoint in Hugging Face format: what each is, and what to do.

This module reads names, and the first bytes of small files. It imports no other module of the checkpoint.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from contextlib import closing, suppress
from fnmatch import fnmatch
from pathlib import Path

from sinkprune.contract.checks.format_value import format_value
from sinkprune.contract.errors import CheckpointError
from sinkprune.contract.files import untrusted

_POINTER = b"version https://git-lfs.github.com/spec/"
_POINTER_BYTES = 1024
_READ = (".json", ".jinja", ".safetensors")
_SAVE = 'python -c "from transformers import AutoModelForImageTextToText as Model; '
_OTHER_WEIGHTS = {
    "bundle.json": "It is a bundle, which this command writes. Run it: sinkprune-run '{folder}'",
    "engines.json": "It has the engines of a bundle. Run them: sinkprune-run '{folder}'",
    "*.incomplete": "A download has not finished. Run the same `hf download` again",
    "model.*.safetensors": "'{}' is a variant, which transformers reads on request only. Rename it to "
    "model.safetensors",
    "model.safetensors.index.*.json": "'{}' is the index of a variant, which transformers reads on request only. "
    "Rename it to model.safetensors.index.json",
    "model-*-of-*.safetensors": "'{}' is a shard, whose index is missing. Download model.safetensors.index.json too",
    "*-of-*.safetensors": "'{}' is a shard, whose index is missing. Download model.safetensors.index.json too",
    "pytorch_model*.bin*": "'{}' has PyTorch's format. Write safetensors next to it, with torch installed: "
    f"{_SAVE}Model.from_pretrained('{{folder}}', dtype='auto').save_pretrained('{{folder}}')\"",
    "consolidated*": "'{}' has the model's original format. Give the same model in transformers' format",
    "*.gguf": "'{}' is for llama.cpp, and its weights are rounded. Give the checkpoint that it was made of",
    "*.onnx": "'{}' is an ONNX graph, which this export writes itself. Give the checkpoint that it was made of",
    "onnx": "ONNX graphs are no checkpoint. Give the checkpoint that they were made of",
    "*.engine": "'{}' is an engine of TensorRT. Give the checkpoint that it was made of",
    "openvino_*.xml": "'{}' is OpenVINO's. Give the checkpoint that it was made of",
    "*.h5": "'{}' is TensorFlow's. Give the checkpoint in PyTorch's or safetensors' format",
    "*.msgpack": "'{}' is Flax's. Give the checkpoint in PyTorch's or safetensors' format",
    "zero_to_fp32.py": "It is a checkpoint of DeepSpeed. Join its weights in that folder: "
    "python zero_to_fp32.py . . --safe_serialization",
    "pytorch_model_fsdp*": "It is a checkpoint of FSDP. Join its weights: accelerate merge-weights '{folder}/{}' "
    "'{folder}'",
    "*.distcp": "'{}' is a part of a distributed checkpoint. Save the whole model with save_pretrained",
    "*.pth": "'{}' is no checkpoint in Hugging Face format. Save the model with transformers' save_pretrained",
    "*.pt": "'{}' is the state of a training, without the model's weights. Give the folder that save_model or "
    "save_pretrained wrote",
    "*.safetensors": "'{}' has a name that transformers does not read. Rename it to model.safetensors if it holds "
    "all weights",
}
"""What a folder without the weights that transformers reads is, by the names of its files, in this order."""


def missing_weights(folder: Path) -> str:
    """Return the sentences about a folder without weights that are read: what it holds, and what to do."""
    # Pipelines of LeRobot have their statistics in safetensors too.
    names = [name for name in _names(folder) if not name.startswith("policy_p")]
    downloading = folder / ".cache" / "huggingface" / "download"
    found = _described(folder, [*names, *_names(downloading)])
    if folder.parent.name == "snapshots":
        name = _name_in_cache(folder.parents[1])
        to = Path(name).name
        convert = _OTHER_WEIGHTS["pytorch_model*.bin*"].format("pytorch_model.bin", folder=to)
        return f"If it has PyTorch's weights only: hf download {name} --local-dir {to}. Then: {convert}."
    return found or "Download the weights, or save the model with transformers' save_pretrained."


def check_file(source: str) -> None:
    """Raise `CheckpointError` for a file in place of a checkpoint folder."""
    path = Path(source)
    if path.is_file():
        raise CheckpointError(
            f"'{source}' is a file, expected a folder in Hugging Face format. "
            f"{_described(path.parent, [path.name]) or 'Give the folder that holds it.'}"
        )


def check_pointers(folder: Path) -> None:
    """Raise `CheckpointError` for a folder that was cloned without Git LFS: its files are pointers to files."""
    pointers = [name for name in _names(folder) if name.endswith(_READ) and _is_pointer(folder / name)]
    if pointers:
        more = f" and {len(pointers) - 1} more" if len(pointers) > 1 else ""
        raise CheckpointError(
            f"'{folder / pointers[0]}'{more} in place of the file has a pointer of Git LFS. Run `git lfs pull` in "
            f"'{folder}', or download the checkpoint with `hf download`."
        )


def check_kind(source: str, folder: Path) -> None:
    """Raise `CheckpointError` for a folder that is known to be something else than a checkpoint of a whole model."""
    names = _names(folder)
    if "adapter_config.json" in names:
        raise _adapter(source, folder, names)
    if "model_index.json" in names:
        raise CheckpointError(
            f"'{source}' is a pipeline of diffusers (model_index.json), which makes pictures. Give a model that "
            "answers questions about pictures, such as llava-hf/llava-1.5-7b-hf."
        )
    if "config_sentence_transformers.json" in names or "modules.json" in names:
        raise CheckpointError(
            f"'{source}' is an embedding model (sentence-transformers), which gives vectors and no answers. Give the "
            "model that it was made of, such as Qwen/Qwen3-VL-2B-Instruct."
        )
    if "config.json" in names:
        return
    if folder.resolve().name.startswith("models--"):
        name = _name_in_cache(folder.resolve())
        raise CheckpointError(f"'{source}' is the folder of a model in the hub's cache. Give its name: {name}")
    below = [name for name in names if os.path.lexists(folder / name / "config.json")]
    if below:
        # The last checkpoint of a training.
        last = max(below, key=_number_at_end)
        raise CheckpointError(
            f"'{source}' has no config.json, and {len(below)} of its folders have one: {format_value(below)}. Give "
            f"one of them: {folder / last}"
        )
    found = _described(folder, names)
    if found:
        raise CheckpointError(f"'{source}' has no config.json, and is no checkpoint in Hugging Face format. {found}")


def _adapter(source: str, folder: Path, names: Iterable[str]) -> CheckpointError:
    base, kind = None, "PEFT"
    with suppress(untrusted.UnreadableError, AttributeError):
        config = untrusted.read_json(folder / "adapter_config.json", follow_links=False)
        base, kind = config.get("base_model_name_or_path"), config.get("peft_type") or kind
    merged = " If the weights here are merged already, delete adapter_config.json." if "config.json" in names else ""
    return CheckpointError(
        f"'{source}' is an adapter (adapter_config.json, {format_value(kind)}) of the model {format_value(base)}, "
        f'and no whole checkpoint. Merge both, with peft installed: python -c "from peft import PeftModel; from '
        "transformers import AutoModelForImageTextToText as Model, AutoProcessor; base = "
        f"{base if isinstance(base, str) else 'BASE'!r}; PeftModel.from_pretrained(Model.from_pretrained(base, "
        f"dtype='auto'), {str(source)!r}).merge_and_unload().save_pretrained('merged'); "
        f"AutoProcessor.from_pretrained(base).save_pretrained('merged')\". Then export 'merged'.{merged}"
    )


def _described(folder: Path, names: Iterable[str]) -> str | None:
    """Return the sentences about the first kind of file among `names` that tells what a folder is."""
    names = list(names)
    for pattern, words in _OTHER_WEIGHTS.items():
        found = next((name for name in names if fnmatch(name, pattern)), None)
        if found:
            return f"{words.format(found, folder=folder)}."
    return None


def _names(folder: Path) -> list[str]:
    """Return the sorted names in a folder; empty for a folder that cannot be listed."""
    with suppress(OSError):
        return sorted(path.name for path in folder.iterdir())
    return []


def _name_in_cache(folder: Path) -> str:
    """Return the name of the model whose folder in the hub's cache this is."""
    return folder.name.removeprefix("models--").replace("--", "/", 1)


def _number_at_end(name: str) -> int:
    found = re.search(r"\d{1,18}$", name)
    return int(found[0]) if found else -1


def _is_pointer(path: Path) -> bool:
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > _POINTER_BYTES:
            return False
        with closing(untrusted.open_regular(path, follow_links=False)) as file:
            return file.read(len(_POINTER)) == _POINTER
    except (OSError, untrusted.UnreadableError):
        return False
