"""What a folder is that is no checkpoint of a whole model, for the errors about it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path

from sinkprune.contract.checks import format_value
from sinkprune.contract.errors import CheckpointError
from sinkprune.contract.files import untrusted

_SAVE = 'python -c "from transformers import AutoModelForImageTextToText as Model; '
_OTHER_WEIGHTS = {
    "bundle.json": "It is a bundle, which this command writes. Run it: sinkprune-run '{folder}'",
    "engines.json": "It has the engines of a bundle. Run them: sinkprune-run '{folder}'",
    "*.incomplete": "A download has not finished. Run the same `hf download` again",
    "model.*.safetensors": "'{}' is a variant, which transformers reads on request only. Rename it to "
    "model.safetensors",
    "model.safetensors.index.*.json": "'{}' is the index of a variant, which transformers reads on request only. "
    "Rename it to model.safetensors.index.json",
    "*-of-*.safetensors": "'{}' is a shard, whose index is missing. Download model.safetensors.index.json too",
    "pytorch_model*.bin*": "'{}' has PyTorch's format. Write safetensors next to it, with torch installed: "
    f"{_SAVE}Model.from_pretrained('{{folder}}', dtype='auto').save_pretrained('{{folder}}')\"",
    "model_index.json": "'{}' is of a pipeline of diffusers, whose weights lie in folders of their own. Give the "
    "checkpoint of the model that answers, with its weights beside config.json",
    "consolidated*": "'{}' has the model's original format. Give the same model in transformers' format",
    **dict.fromkeys(
        ("*.gguf", "*.onnx", "onnx", "*.engine"),
        "'{}' is for another runtime. Give the checkpoint that it was made of",
    ),
    "*.safetensors": "'{}' has a name that transformers does not read. Rename it to model.safetensors if it holds "
    "all weights",
}
"""What a folder without the weights that transformers reads is, by the names of its files, in this order."""


def missing_weights(folder: Path, names: Sequence[str], downloading: Sequence[str]) -> str:
    """Return the sentences about a folder without weights that are read: what it holds, and what to do.

    `names` are those of its entries, and `downloading` those of the hub client's folder of downloads in it.
    """
    # Pipelines of LeRobot have their statistics in safetensors too.
    own = [name for name in names if not name.startswith("policy_p")]
    found = described(folder, [*own, *downloading])
    if folder.parent.name == "snapshots":
        name = _name_in_cache(folder.parents[1])
        to = Path(name).name
        convert = _OTHER_WEIGHTS["pytorch_model*.bin*"].format("pytorch_model.bin", folder=to)
        return f"If it has PyTorch's weights only: hf download {name} --local-dir {to}. Then: {convert}."
    return found or "Download the weights, or save the model with transformers' save_pretrained."


def check_other_kinds(source: str, folder: Path, names: Sequence[str]) -> None:
    """Raise `CheckpointError` if a folder with entries of these `names` is known to be another kind."""
    if "adapter_config.json" in names:
        raise _adapter(source, folder, names)
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
        last = max(below, key=lambda name: int((re.search(r"\d{1,18}$", name) or ["-1"])[0]))
        raise CheckpointError(
            f"'{source}' has no config.json, and {len(below)} of its folders have one: {format_value(below)}. Give "
            f"one of them: {folder / last}"
        )
    if found := described(folder, names):
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


def described(folder: Path, names: Iterable[str]) -> str | None:
    """Return sentences about the first known kind of file among `names`; None if no kind is known."""
    names = list(names)
    found = ((words, name) for pattern, words in _OTHER_WEIGHTS.items() for name in names if fnmatch(name, pattern))
    return next((f"{words.format(name, folder=folder)}." for words, name in found), None)


def _name_in_cache(folder: Path) -> str:
    return folder.name.removeprefix("models--").replace("--", "/", 1)
