"""Folders that people give and that are no checkpoint: each is named, with what to do instead."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from sinkprune.contract.errors import CheckpointError
from sinkprune.export.checkpoint.folder import locate
from sinkprune.export.source import ExportRequest, open_source
from support.programs.commands import assert_refused, run

POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 4968243304\n"
ADAPTER = json.dumps({"peft_type": "LORA", "base_model_name_or_path": "Qwen/Qwen3-VL-8B-Instruct"})
TEXT = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
POLICY = "pretrained_model"
LLAVA = {"model_type": "llava", "architectures": ["LlavaLlamaForCausalLM"], "mm_vision_tower": "openai/clip"}

WITHOUT_WEIGHTS = {
    "model.fp16.safetensors": "'model.fp16.safetensors' is a variant, which transformers reads on request only. ",
    "model-00001-of-00002.safetensors": "is a shard, whose index is missing. Download model.safetensors.index.json",
    "pytorch_model.bin": "from_pretrained('{folder}', dtype='auto').save_pretrained('{folder}')",
    "llava-Q4_K_M.gguf": "is for another runtime. Give the checkpoint that it was made of",
    ".cache/huggingface/download/x.incomplete": "A download has not finished. Run the same `hf download` again",
    "policy_preprocessor_step_6_normalizer_processor.safetensors": "Download the weights",
    "README.md": "Download the weights",
}
"""What is said by the name of a file in a folder that has no weights that are read."""


@pytest.mark.parametrize("name", WITHOUT_WEIGHTS)
def test_a_folder_without_weights_is_named_by_what_it_has(name: str, copied: Callable[..., Path]) -> None:
    folder = copied("gqa-112")
    (folder / "model.safetensors").unlink()
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("{}")
    said = "neither model.safetensors nor model.safetensors.index.json. "
    with pytest.raises(CheckpointError, match=said + ".*" + re.escape(WITHOUT_WEIGHTS[name].format(folder=folder))):
        open_source(ExportRequest(str(folder)))


FOLDERS: dict[str, tuple[dict[str, str], str]] = {
    "LoRA": ({"adapter_config.json": ADAPTER}, "'LORA') of the model 'Qwen/Qwen3-VL-8B-Instruct', and no whole"),
    "embedding": ({"modules.json": "[]", "config.json": "{}"}, "is an embedding model (sentence-transformers)"),
    "trainings": (
        {f"checkpoint-{n}/config.json": "{}" for n in (500, 1000)},
        "one of them: {folder}/checkpoint-1000",
    ),
    "gguf": ({"mmproj-model-f16.gguf": ""}, "is no checkpoint in Hugging Face format. 'mmproj"),
    "empty": ({}, "config.json' is missing"),
    "original llava": ({"config.json": json.dumps(LLAVA)}, "Export the same model from huggingface.co/llava-hf"),
    "text": ({"config.json": json.dumps(TEXT)}, "is a Qwen2ForCausalLM, a text model without a vision tower"),
    "last training": ({f"last/{POLICY}/config.json": '{"type": "pi0"}'}, "lerobot-train"),
    "trainings of a policy": (
        {f"checkpoints/{steps}/{POLICY}/config.json": "{}" for steps in ("020000", "100000", "060000")},
        "Export {folder}/checkpoints/100000/pretrained_model",
    ),
    "openpi in JAX form": ({"params/_METADATA": "{}", "assets/x/norm_stats.json": "{}"}, "lerobot/pi0_base"),
    "openpi in PyTorch form": ({"config.json": '{"action_dim": 32, "action_horizon": 10}'}, "lerobot/pi05_base"),
    "adapter of a policy": (
        {"adapter_config.json": ADAPTER, "config.json": '{"type": "pi0"}'},
        "an adapter (PEFT, LoRA) of the policy 'Qwen/Qwen3-VL-8B-Instruct'",
    ),
}


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_folder_that_is_no_checkpoint_is_named(kind: str, tmp_path: Path) -> None:
    files, said = FOLDERS[kind]
    folder = tmp_path / "it"
    for name, text in {**files, "notes.txt": ""}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    assert_refused(run("sinkprune-export", folder, "-o", tmp_path / "out"), said.format(folder=folder))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_pointers_of_git_lfs_are_named(
    name: str, checkpoint: Callable[[str], Path], copied: Callable[..., Path]
) -> None:
    folder = copied("qwen")
    (folder / name).write_text(POINTER)
    (folder / "model-00002-of-00002.safetensors").write_text(POINTER)
    (folder / "photo.png").write_text(POINTER)
    with pytest.raises(CheckpointError, match=r"/\S+' and 1 more in place of the file has a pointer.*git lfs pull"):
        open_source(ExportRequest(str(folder)))
    with pytest.raises(CheckpointError, match="pointer of Git LFS"):
        open_source(ExportRequest(str(checkpoint("qwen")), tokenizer=str(folder)))


def test_files_and_folders_of_the_hub_s_cache_are_named(tmp_path: Path) -> None:
    (tmp_path / "llava.gguf").touch()
    with pytest.raises(CheckpointError, match=r"is a file, expected a folder .* is for another runtime"):
        locate(str(tmp_path / "llava.gguf"))
    snapshot = tmp_path / "models--llava-hf--llava-1.5-7b-hf" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"Give its name: llava-hf/llava-1\.5-7b-hf"):
        open_source(ExportRequest(str(snapshot.parents[1])))
