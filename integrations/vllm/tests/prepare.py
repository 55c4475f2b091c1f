"""Writes what the tests of vLLM need of sinkprune: python prepare.py FOLDER, in sinkprune's environment.

These are checkpoints, 20 pictures, and what `ort-cpu` keeps of each. vLLM has an environment of its own.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from safetensors.numpy import load_file, save_file

from sinkprune import Pipeline
from sinkprune.demo.scenes import make_scene
from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.source import ExportRequest
from support.models.checkpoints import NextShape, make_llava_next_checkpoint
from support.models.qwen_checkpoints import QwenShape, make_qwen_checkpoint

DEMO = Path(__file__).parents[3] / "demo"
BUDGETS = {
    "llava": ("retain-64", "retain-32"),
    "llava-next": ("retain-320", "retain-160"),
    "qwen2.5-vl": ("prune-80", "prune-88.9"),
    "qwen3-vl": ("prune-80", "prune-88.9"),
}
# Shapes that LLaVA-NeXT does not pad: padding makes tokens that differ by rounding only. Qwen-VL does not scale them.
SIZES = [(224, 224), (112, 112), (280, 140), (140, 280), (420, 140), (84, 252)]


def give_hub_names(folder: Path) -> None:
    """Give the tower's tensors the names of published checkpoints, which vLLM reads."""
    (file,) = folder.glob("*.safetensors")
    old, new = "vision_tower.", "vision_tower.vision_model."
    tensors = {name.removeprefix("model."): tensor for name, tensor in load_file(file).items()}
    renamed = {name if name.startswith(new) else name.replace(old, new): x for name, x in tensors.items()}
    save_file(renamed, file, metadata={"format": "pt"})


def main(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shutil.copytree(DEMO / "pocket", folder / "llava")
    shutil.copytree(DEMO / "pocket-qwen3", folder / "qwen3-vl")
    # With heads of a size that vLLM takes.
    make_llava_next_checkpoint(folder / "llava-next", NextShape(text={"hidden_size": 128}))
    make_qwen_checkpoint(folder / "qwen2.5-vl", QwenShape(num_heads=2))
    for family in BUDGETS:
        shutil.copytree(folder / family, folder / "saved" / family)
        if family.startswith("llava"):
            give_hub_names(folder / family)
    pictures = []
    for number in range(20):
        picture = make_scene("test", number)[1].resize(SIZES[number % len(SIZES)])
        picture.save(folder / f"{number}.png")
        pictures.append(picture)
    expected: dict[str, dict[str, list[list[list[int]]]]] = {}
    for family, budgets in BUDGETS.items():
        bundle = folder / f"{family}-bundle"
        export_bundle(ExportRequest(str(folder / family), budgets=budgets), bundle)
        pipeline = Pipeline.load(bundle, backend="ort-cpu", threads=1)
        expected[family] = {
            budget: [
                pipeline.generate(picture, "What?", budget=budget, max_new_tokens=1).kept.index.tolist()
                for picture in pictures
            ]
            for budget in budgets
        }
    (folder / "expected.json").write_text(json.dumps(expected))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
