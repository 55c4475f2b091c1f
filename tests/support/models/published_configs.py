"""The config.json and the processor settings of published checkpoints, without fields that no code here names."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_FILES = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
PUBLISHED: dict[str, dict[str, Any]] = _FILES["config.json"]
"""By the name of its preset where there is one. llava-hf/llava-1.5-7b-hf leaves most of the decoder to Llama's
defaults; Qwen2-VL and Qwen2.5-VL have the decoder's settings at the top."""
PROCESSORS: dict[str, dict[str, Any]] = _FILES["preprocessor_config.json"]
PINPOINTS = PUBLISHED["llava-next-7b"]["image_grid_pinpoints"]


def with_value(document: Any, place: Sequence[str | int], value: Any) -> Any:
    """Return a copy of a JSON `document` that has `value` at `place`."""
    changed = copy.deepcopy(document)
    inner = changed
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return changed
