"""The programs of `benchmarks/gpu.sh`, as far as they run without a GPU: on the processor, with small shapes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import frames
import gpu_parts
import next_to_vllm
from rows_table import PARTS
from sinkprune.export.checkpoint.presets import PRESETS
from support.models.small_models import PI0_SHAPES

ON_CPU = ("--backend", "ort-cpu", "--device", "cpu", "--dtype", "float32", "--rounds", "1")


@pytest.mark.parametrize("part", [*gpu_parts.PARTS, "power"])
def test_without_a_gpu_each_part_has_a_reason(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_parts, "gpu", lambda folder=None: "no GPU: none")
    monkeypatch.setenv("VLLM_PYTHON", sys.executable)
    assert gpu_parts.main([part, "--folder", str(tmp_path)]) == 0
    reason = "no GPU: none" if not part.startswith("vllm") else "there is no vLLM in the environment of "
    assert capsys.readouterr().out.startswith(reason)


def test_frames_are_measured_and_written(tmp_path: Path) -> None:
    path = tmp_path / "frames.json"
    frames.main(["--rounds", "2", "--size", "64x48", "--threads", "1", "--json", str(path)])
    rows = json.loads(path.read_text())
    assert [row["frame"] for row in rows] == ["64x48"] * 3
    assert all(row["difference"] == 0 and len(row["graph_ms"]) == len(row["host_ms"]) == 2 for row in rows[:2])


SMALL = {
    "llava-1.5-7b": ("gqa-112", {"budgets": ("retain-64",)}, ("--frame", "64x48", "--new-tokens", "3")),
    "pi0": (min(PI0_SHAPES), {"budgets": ("prune-77.8",), "max_images": 3}, ("--new-tokens", "2")),
}
"""Small models in the place of presets, options of their export, and arguments."""


@pytest.mark.slow
@pytest.mark.parametrize("preset", SMALL)
def test_rows_next_to_pytorch(
    preset: str,
    bundle: Callable[..., Path],
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import next_to_pytorch

    name, options, words = SMALL[preset]
    config = json.loads((checkpoint(name) / "config.json").read_text())
    monkeypatch.setitem(PRESETS, preset, config)
    root, path = bundle(name, **options), tmp_path / "rows.json"
    assert next_to_pytorch.main([preset, str(root), *ON_CPU, *words, "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert {*report["ms"]} >= {"PyTorch float32, eager", "PyTorch float32, compiled", "ort-cpu none"}
    assert all(len(row[part]) == 1 for row in report["ms"].values() for part in PARTS)
    assert report["text_tokens"] > 0


def test_rows_of_vllm_come_from_its_own_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a stand-in of the library: what it is given, and what is computed of its times."""
    given: list[Any] = []

    class LLM:
        def __init__(self, **options: Any) -> None:
            assert options["load_format"] == "dummy" and Path(options["model"], "config.json").is_file()

        def generate(self, prompt: Any, params: Any, use_tqdm: bool) -> Any:
            given.append((prompt, params))
            return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[7] * params.max_tokens)])]

    module: Any = ModuleType("vllm")
    module.LLM, module.SamplingParams = LLM, SimpleNamespace
    monkeypatch.setitem(sys.modules, "vllm", module)
    (tmp_path / "config.json").write_text(json.dumps({"image_token_index": 32000}))
    like, path = tmp_path / "like.json", tmp_path / "vllm.json"
    like.write_text(json.dumps({"text_tokens": 41}))
    options = ["--rounds", "2", "--frame", "64x48", "--new-tokens", "5"]
    next_to_vllm.main([str(tmp_path), "--like", str(like), *options, "--json", str(path)])
    times = json.loads(path.read_text())["ms"][next_to_vllm.ROW]
    assert [len(times[part]) for part in ("ttft", "per_token")] == [2, 2]
    assert [params.max_tokens for _, params in given] == [1, 5] * (2 + next_to_vllm.WARM_UP)
    pictures = [prompt["multi_modal_data"]["image"] for prompt, _ in given]
    assert len({np.asarray(picture).tobytes() for picture in pictures}) == len(given)
    assert all(len(prompt["prompt_token_ids"]) == 42 for prompt, _ in given)
    assert given[0][0]["prompt_token_ids"].count(32000) == 1 and pictures[0].size == (64, 48)
    assert "| - | - |" in capsys.readouterr().out


@pytest.mark.slow
def test_the_checkpoint_for_vllm_has_a_processor_and_no_weights(
    tmp_path: Path, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    folder = tmp_path / "made"
    next_to_vllm.main([str(folder), "--write", "llava-1.5-7b"])
    assert not [*folder.glob("*.safetensors*")]
    processor = transformers.AutoProcessor.from_pretrained(folder)
    ids = processor(images=next_to_vllm.frame(0, (64, 48)), text="<image>What?", return_tensors="np")["input_ids"]
    config = transformers.AutoConfig.from_pretrained(folder)
    assert (ids == config.image_token_id).sum() == 576
