"""Weights pass through memory a few tensors at a time, however large a segment is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.programs.commands import own_process

# Run in a process of its own, whose children's peak is then the export's.
_MEASURE = "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL); \
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)"


def peak_bytes(config: dict[str, Any], folder: Path) -> int:
    """The peak resident memory of exporting `config` with random weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    command = own_process(
        "sinkprune-export", folder, "--random-weights", "-o", folder / "out", "--budgets", "retain-64"
    )
    measure = [sys.executable, "-c", _MEASURE, *command]
    done = subprocess.run(measure, capture_output=True, text=True, check=True, timeout=120, cwd=folder)
    return int(done.stdout)


def llava(layers: int, width: int) -> dict[str, Any]:
    """A LLaVA whose decoder is nearly all of it."""
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    text = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers, "vocab_size": 320}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
    return {
        "model_type": "llava",
        "image_token_index": 300,
        "vision_config": {"model_type": "clip_vision_model", "image_size": 112, "patch_size": 14, **vision},
        "text_config": {"model_type": "llama", **text, **heads},
    }


@pytest.mark.slow
def test_export_holds_a_fraction_of_a_segment(tmp_path: Path) -> None:
    small = peak_bytes(llava(layers=4, width=64), tmp_path / "small")
    large = peak_bytes(llava(layers=12, width=448), tmp_path / "large")
    # decoder_2 is layers 7 to 11, 16 d^2 weights each, fp32
    largest_segment = 5 * 16 * 448**2 * 4
    assert large - small < 0.5 * largest_segment
