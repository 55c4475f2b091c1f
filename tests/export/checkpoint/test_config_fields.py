"""Fields of a checkpoint's JSON files: each one, of each family, with invalid values."""

from __future__ import annotations

import json
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from sinkprune.contract.errors import CheckpointError, SinkpruneError
from sinkprune.export.checkpoint.presets import PRESETS
from sinkprune.export.dialects import load_dialect
from sinkprune.export.families import read_family
from sinkprune.export.planning import parse_budgets, plan_graphs
from sinkprune.export.pruning.plan import PlanFacts
from sinkprune.export.source import ExportRequest, open_source
from sinkprune.export.weights import PRECISIONS
from support.models.published_configs import with_value

Checkpoints = Callable[[str], Path]
Place = tuple[str | int, ...]

WRONG = [None, True, -1, 0, 1, 10**8, 10**18, 10**30, -0.5, 1e300, "", "x", "1", [], [1], {}, {"a": 1}]
SECONDS, BYTES = 2, 300 << 20


def places(value: Any, place: Place = ()) -> Iterator[Place]:
    """Where every value of a JSON document stands, the document's own place aside; two of each list."""
    parts = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, part in parts:
        yield (*place, key)
        yield from places(part, (*place, key))


def opened(request: ExportRequest) -> PlanFacts:
    """Return the facts that planning uses, of an opened checkpoint."""
    source = open_source(request)
    with closing(source.weights):
        family, groups = source.family, source.family.groups_of(source.processor)
        tokens, joined = family.tokens_of(source.processor), family.groups_are_frames and groups > 1
        fp16, trt = PRECISIONS["fp16"], load_dialect("opset20")
        return PlanFacts(family.language_model, tokens, family.visual_width, fp16, trt, groups, 1, joined)


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize(("family", "like"), [("llava", "next-mistral"), ("qwen2.5-vl", "qwen2-vl")])
@pytest.mark.parametrize("name", ["config.json", "preprocessor_config.json"])
@pytest.mark.parametrize("share", [6, pytest.param(1, marks=pytest.mark.slow)], ids=["a sixth in turn", "all values"])
def test_no_value_of_any_field_does_harm(
    share: int, name: str, family: str, like: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    tried: set[tuple[Place, str]] = set()
    planned: set[PlanFacts] = set()
    shapes = {"llava": "gqa-112", "qwen2.5-vl": "qwen"}
    # What two families read alike is tried with one of them.
    for shape in (shapes[family], like):
        folder = Path(shutil.copytree(checkpoint(shape), tmp_path / shape))
        document, frames = json.loads((folder / name).read_text()), 8 * (family == "qwen2.5-vl")
        request = ExportRequest(str(folder), random_weights=name == "config.json", max_frames=frames)
        planned.add(opened(request))
        for number, place in enumerate(places(document)):
            for value in WRONG[number % share :: share]:
                key = (place, json.dumps(value))
                if key in tried:
                    continue
                tried.add(key)
                (folder / name).write_text(json.dumps(with_value(document, place, value)))
                start, before = time.process_time(), peak()
                try:
                    facts = opened(request)
                    if facts not in planned:
                        planned.add(facts)
                        # One budget shows what a field does; the others cost seconds each.
                        budgets = dict([*parse_budgets(family, None).items()][0 if share == 1 else -1 :])
                        plan_graphs(facts, ["sinkpruner"], budgets, lambda plan: None)
                except SinkpruneError as error:
                    assert len(str(error)) < 1000
                assert time.process_time() - start < SECONDS, key
                assert peak() - before < BYTES, key
    assert len(tried) > 200 // share


TEXT = "text_config"
VISION = "vision_config"


@pytest.mark.parametrize(
    ("preset", "place", "value", "message"),
    [
        ("llava-1.1b", ("model_type",), ["llava"], r"model_type: found \['llava'\], expected 1 to 200"),
        ("llava-1.1b", (TEXT, "vocab_size"), 10**8, "vocab_size: found 100000000, expected .* to 524288"),
        ("llava-1.1b", (TEXT, "rope_scaling"), {"rope_type": "magic"}, "rope_type is 'magic', expected default"),
        ("llava-1.1b", (VISION, "patch_size"), 337, "image_size is a multiple of patch_size; found 336 and 337"),
        ("llava-1.1b", (VISION, "patch_size"), 1, "at most 16384 patches; found 112896"),
        ("llava-1.1b", (VISION, "num_attention_heads"), 15, r"not a multiple of the number of attention heads"),
        ("llava-1.1b", (VISION, "num_channels"), 4, "num_channels: found 4, expected a whole number from 3"),
        ("llava-next-7b", ("image_grid_pinpoints",), [[336]], r"pinpoints\[0\]: found \[336\], expected a list"),
        ("qwen2.5-vl-3b", (TEXT, "eos_token_id"), [1.5], r"eos_token_id\[0\]: found 1.5"),
        ("qwen2-vl-7b", (VISION, "mlp_ratio"), 0, "mlp_ratio: found 0, expected a number from 1 to 64"),
    ],
)
def test_a_field_of_the_configuration_is_named(preset: str, place: Place, value: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_family("given", with_value(PRESETS[preset], place, value))


IMAGES, CLIPS = "preprocessor_config", "video_preprocessor_config"


@pytest.mark.parametrize(
    ("shape", "file", "settings", "message"),
    [
        ("gqa-112", IMAGES, {"rescale_factor": 0}, r"preprocessor_config.json .*_factor: found 0, expected a number"),
        ("gqa-112", IMAGES, {"size": {"shortest_edge": 1, "height": 1}}, "expected a shortest_edge, or a height"),
        ("qwen", IMAGES, {"min_pixels": 500, "max_pixels": 400}, "500 to 400 pixels"),
        ("qwen", IMAGES, {"max_pixels": 10**12}, "max_pixels: found 1000000000000, expected .* to 268435456"),
        ("qwen", CLIPS, {"fps": "two"}, r"video_preprocessor_config.json .*\$.fps: found 'two'"),
        ("qwen", CLIPS, {"max_pixels": 100}, "a frame of a clip may have the 784 pixels of a token; found 100"),
    ],
)
def test_a_field_of_a_processor_is_named_with_its_file(
    shape: str, file: str, settings: dict[str, Any], message: str, copied: Callable[..., Path]
) -> None:
    request = ExportRequest(str(copied(shape, **{file: settings})), max_frames=8 if shape == "qwen" else 0)
    with pytest.raises(CheckpointError, match=message):
        open_source(request)


def test_special_tokens_that_are_one_are_rejected() -> None:
    for token, preset in ((2, "llava-1.1b"), (151645, "qwen2.5-vl-3b")):
        name = "image_token_index" if preset == "llava-1.1b" else "image_token_id"
        with pytest.raises(CheckpointError, match=r"special tokens .* different ones"):
            read_family("given", {**PRESETS[preset], name: token}).special_tokens  # noqa: B018
    for none in (None, []):
        config = with_value(PRESETS["qwen2.5-vl-3b"], (TEXT, "eos_token_id"), none)
        with pytest.raises(CheckpointError, match="special tokens"):
            read_family("given", config).special_tokens  # noqa: B018
