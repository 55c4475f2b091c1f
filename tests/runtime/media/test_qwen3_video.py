"""Qwen3-VL on a clip, with the time between its frames: unpruned equal to transformers, pruned equal to masking."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers import AutoTokenizer
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor, smart_resize

from sinkprune import Clip, Pipeline
from sinkprune.contract.budgets import prune_layers
from sinkprune.contract.families import parse_budget
from sinkprune.export.families import read_family
from sinkprune.export.presets import PRESETS
from sinkprune.runtime.media.clip import ClipSize, Shown, sampled_to_the_end
from sinkprune.runtime.processors.qwen import Qwen3Processor
from sinkprune.runtime.steps.pictures import decoded
from sinkprune.runtime.steps.request import new_request
from support.models.clips import LIMITS, frames
from support.models.qwen_checkpoints import SPECIALS, VIDEO_TOKEN
from support.models.qwen_towers import features
from support.models.small_models import QWEN_SHAPES
from support.models.video_files import write_video
from support.programs.commands import run
from support.references.masking import Sequence, embedded, masked_forward
from support.references.picture_prompts import PIECES, rendered
from support.references.reference import beside_kept, sanitize
from support.references.steps import QUESTION, ask, deepstack_output, tower_output, watched

Array = np.ndarray[Any, Any]

BUDGETS = ("prune-80", "prune-88.9+per-frame+raster", "prune-80+no-sanitizer")
NEW_TOKENS = 6
# 8 frames make 4 groups of 4 x 5 tokens
SIZE, TOKENS = (170, 140), 20
PRESET = read_family("preset", PRESETS["qwen3-vl-2b"])
HUB_IMAGE = {"max_pixels": 1 << 24, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
HUB_VIDEO = {"size": {"shortest_edge": 4096, "longest_edge": 25165824}}

sizes = st.tuples(st.integers(1, 3000), st.integers(1, 3000)).filter(lambda size: max(size) <= 150 * min(size))


@pytest.fixture
def pipe(pipeline: Callable[..., Pipeline]) -> Pipeline:
    """A bundle for clips of up to 8 frames."""
    return pipeline("qwen3-vl", "fp32", BUDGETS, max_frames=8)


@pytest.fixture
def clip(photo: Image.Image) -> Clip:
    return Clip(frames(8, SIZE, photo), fps=2)


def own_text(clip: Shown, indices: list[int], fps: float) -> str:
    """What the model's own processor writes for a clip of groups of `TOKENS`, in the place of its token."""
    processor = Qwen3VLProcessor.__new__(Qwen3VLProcessor)
    processor.video_token, processor.vision_start_token = "<|video_pad|>", "<|vision_start|>"
    processor.vision_end_token = "<|vision_end|>"
    processor.video_processor = SimpleNamespace(merge_size=2, temporal_patch_size=2)
    grid = torch.tensor([[-(-clip.size.frames // 2), 1, 4 * TOKENS]])
    metadata = [SimpleNamespace(fps=fps, frames_indices=np.array(indices))]
    text: str = processor.replace_video_token({"video_grid_thw": grid, "video_metadata": metadata}, 0)
    return text


def own_ids(folder: Path, taken: Shown, fps: float, pieces: str | list[str] = QUESTION) -> list[int]:
    """The prompt's ids by the model's own processor; the published template writes <|video_pad|> for clips."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    indices = [round(second * fps) for second in taken.seconds]
    text = rendered(tokenizer, "qwen3-vl", 1, pieces).replace("<|image_pad|>", own_text(taken, indices, fps))
    ids: list[int] = tokenizer(text)["input_ids"]
    return ids


@pytest.mark.parametrize("count", [8, 7, 2, 1])
@pytest.mark.parametrize("fps", [2, 1.37, 24])
@pytest.mark.parametrize("pieces", [QUESTION, PIECES[:2]], ids=["in front", "within"])
def test_ids_equal_the_models_processor(
    count: int,
    fps: float,
    pieces: str | list[str],
    checkpoint: Callable[[str], Path],
    pipe: Pipeline,
    photo: Image.Image,
) -> None:
    clip = Clip(frames(count, SIZE, photo), fps)
    taken = decoded(clip, pipe.family)
    assert isinstance(taken, Shown)
    layout = pipe.family.layout(taken)
    assert (layout.groups, layout.tokens, len(layout.texts)) == (
        -(-taken.size.frames // 2),
        TOKENS,
        layout.groups + 1,
    )
    texts = pipe.prompts.encode(new_request([clip], pieces).texts, [layout.texts]).texts
    assert len(texts) == layout.groups + 1
    found = texts[0] + [token for text in texts[1:] for token in [*[VIDEO_TOKEN] * TOKENS, *text]]
    assert found == own_ids(checkpoint("qwen3-vl"), taken, fps, pieces)


def test_a_time_that_the_user_types_is_text(pipe: Pipeline, clip: Clip) -> None:
    layout = pipe.family.layout(decoded(clip, pipe.family))
    typed = "<0.3 seconds><|vision_start|> what?"
    texts = pipe.prompts.encode(["", typed], [layout.texts]).texts
    start = next(token for token, text in SPECIALS.items() if text == "<|vision_start|>")
    assert sum(text.count(start) for text in texts) == layout.groups + 1


@given(st.integers(1, 4000), st.floats(1, 60), st.integers(2, 768), st.floats(0.5, 4))
def test_frames_are_sampled_as_the_models_processor_does(count: int, fps: float, most: int, target: float) -> None:
    limits = SimpleNamespace(fps=target, min_frames=min(4, most), max_frames=most)
    metadata = SimpleNamespace(total_num_frames=count, fps=fps)
    expected = Qwen3VLVideoProcessor.sample_frames(limits, metadata).tolist()
    found = sampled_to_the_end(count, fps, {**LIMITS, **vars(limits)}, 2)
    assert found == expected
    assert len(found) <= most


@given(sizes, st.integers(2, 16))
def test_frames_are_as_large_as_the_models_processor_makes_them(size: tuple[int, int], count: int) -> None:
    """In the longest clip; the frames of shorter ones are no larger, nor are those of an odd number of frames."""
    known = PRESET.processor({**HUB_IMAGE, "video_processor": HUB_VIDEO, "max_frames": count})
    grid = Qwen3Processor(known).grid(ClipSize(*size, count, 2.0))
    limits = {"min_pixels": 4096, "max_pixels": 25165824 // count * count}
    own = smart_resize(count, size[1], size[0], 2, 32, **limits)
    assert (grid.h * 16, grid.w * 16) == own or (count % 2 and own[0] * own[1] * count > limits["max_pixels"])
    assert grid.h * grid.w // 4 <= known["video"]["most_tokens"]
    one = Qwen3Processor(known).grid(ClipSize(*size, 2, 2.0))
    assert one.h * one.w // 4 <= known["video"]["most_tokens"]


@pytest.mark.parametrize("size", [(170, 140), (37, 500), (640, 480)], ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("count", [3, 4])
def test_patches_are_those_of_the_models_processor(count: int, size: tuple[int, int], photo: Image.Image) -> None:
    """uint8 tensors, resized by what torchvision calls for them on a CPU, then cut by the model's own processor."""
    video = {"size": {"shortest_edge": 4096, "longest_edge": 400000}}
    known = PRESET.processor({**HUB_IMAGE, "video_processor": video, "max_frames": 4})
    taken = Shown(frames(count, size, photo), ClipSize(*size, count, 2.0))
    processor = Qwen3Processor(known)
    grid = processor.grid(taken.size)
    pixels = torch.from_numpy(np.stack([np.asarray(frame) for frame in taken.frames])).permute(0, 3, 1, 2)
    resized = torch.nn.functional.interpolate(pixels, size=(grid.h * 16, grid.w * 16), mode="bicubic", antialias=True)
    values = (resized / 255 - 0.5) / 0.5
    own, *shape = Qwen3VLVideoProcessor.patchify(None, values[None], 16, 2, 2)
    assert tuple(shape) == tuple(grid)
    assert np.abs(processor(taken) - own[0].numpy()).max() < 1e-5


@pytest.mark.parametrize("fps", [2, 1.3])
def test_greedy_text_and_logits_equal_transformers(
    fps: float, model: Callable[[str], Any], checkpoint: Callable[[str], Path], pipe: Pipeline, clip: Clip
) -> None:
    clip = replace(clip, fps=fps)
    taken = decoded(clip, pipe.family)
    assert isinstance(taken, Shown)
    ids = torch.tensor([own_ids(checkpoint("qwen3-vl"), taken, fps)])
    grid = torch.tensor([[4, 8, 10]])
    with torch.no_grad():
        expected = model("qwen3-vl").generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=2 * (ids == VIDEO_TOKEN).int(),
            pixel_values_videos=torch.from_numpy(pipe.family.inputs(taken)["pixel_values"]).flatten(0, 1),
            video_grid_thw=grid,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    answer, logits = ask(pipe, clip, "none", NEW_TOKENS)
    assert answer.visual_tokens == 4 * TOKENS
    assert answer.visual_tokens + answer.prompt_tokens == ids.shape[1]
    assert np.abs(logits - torch.stack(expected.logits)[:, 0].numpy()).max() < 1e-3
    assert answer.token_ids == expected.sequences[0, ids.shape[1] :].tolist()


@torch.no_grad()
def test_features_of_a_clip_are_transformers(model: Callable[[str], Any], pipe: Pipeline, clip: Clip) -> None:
    taken = decoded(clip, pipe.family)
    pixels = torch.from_numpy(pipe.family.inputs(taken)["pixel_values"]).flatten(0, 1)
    expected = features(model("qwen3-vl").model.visual, pixels, torch.tensor([[4, 8, 10]]), -2)
    tokens, norms, salience = tower_output(pipe, taken)
    np.testing.assert_allclose(tokens.reshape(-1, 64), expected.tokens, atol=1e-4)
    np.testing.assert_allclose(norms.ravel(), expected.norms, rtol=1e-4)
    np.testing.assert_allclose(salience.ravel(), expected.salience, rtol=1e-4, atol=1e-9)
    beside = deepstack_output(pipe, taken)
    assert beside is not None and expected.deepstack is not None
    np.testing.assert_allclose(np.concatenate([*beside], axis=-1).reshape(-1, 192), expected.deepstack, atol=1e-4)


def expected_sequence(model: Any, pipe: Pipeline, clip: Clip, budget: str, ids: list[int]) -> tuple[Sequence, Array]:
    """The prompt `ids` with the kept tokens of each temporal patch in its place; and their sources."""
    taken = decoded(clip, pipe.family)
    groups = [x.reshape(4, TOKENS, *x.shape[2:]) for x in tower_output(pipe, taken)]
    beside = deepstack_output(pipe, taken)
    assert beside is not None
    options, kept = parse_budget("qwen3-vl", budget), []
    if options.frames == "together":
        groups = [x.reshape(1, -1, *x.shape[2:]) for x in groups]
    each = groups[1].shape[1]
    for number, (tokens, norms, salience) in enumerate(zip(*groups, strict=True)):
        own, index = beside.reshape(3, -1, each, 64)[:, number], list(range(each))
        if options.sanitizer:
            reserve, diverse = options.reserve.of(each), options.diverse.of(each)
            raster = options.order == "raster"
            tokens, index = sanitize(tokens, norms, salience, reserve=reserve, diverse=diverse, raster=raster)
        own = beside_kept(own, norms, index, sink=options.sanitizer)
        kept += [(number * each + i, tokens[row], own[:, row]) for row, i in enumerate(index)]
    # In the order of frames, and within each as the sanitizer gives them.
    kept.sort(key=lambda token: token[0] // TOKENS)
    prompt = torch.tensor([ids])
    positions, _ = model.model.get_rope_index(
        prompt, 2 * (prompt == VIDEO_TOKEN).int(), video_grid_thw=torch.tensor([[4, 8, 10]])
    )
    places = [place for place, token in enumerate(ids) if token == VIDEO_TOKEN]
    rows, hidden, visual, text = [], [], [], []
    table = embedded(model, ids)
    for place, token in enumerate(ids):
        if token != VIDEO_TOKEN:
            text.append(len(rows))
            rows.append(place)
            hidden.append(table[place])
        elif places.index(place) % TOKENS == 0:
            group = places.index(place) // TOKENS
            for source, row, _ in kept:
                if source // TOKENS == group:
                    visual.append(len(rows))
                    rows.append(places[source])
                    hidden.append(row)
    asking = [row for row in text if rows[row] > places[-1]]
    deepstack = np.stack([own for _, _, own in kept], axis=1)
    sequence = Sequence(
        np.stack(hidden), visual, asking, positions[:, 0, rows].numpy(), "qwen3-vl", deepstack=deepstack
    )
    return sequence, np.array([source for source, _, _ in kept])


@pytest.mark.parametrize("budget", BUDGETS)
def test_pruned_equals_the_masked_full_sequence(
    budget: str, model: Callable[[str], Any], checkpoint: Callable[[str], Path], pipe: Pipeline, clip: Clip
) -> None:
    torch_model, taken = model("qwen3-vl"), decoded(clip, pipe.family)
    assert isinstance(taken, Shown)
    ids = own_ids(checkpoint("qwen3-vl"), taken, clip.fps)
    sequence, sources = expected_sequence(torch_model, pipe, clip, budget, ids)
    answer, logits = ask(pipe, clip, budget, NEW_TOKENS)
    shares, cuts = parse_budget("qwen3-vl", budget).stages, prune_layers(QWEN_SHAPES["qwen3-vl"].num_layers)
    stages = {cut: share.of(4 * TOKENS) for cut, share in zip(cuts, shares, strict=True)}
    masked = masked_forward(torch_model, sequence, budget, stages, later=embedded(torch_model, answer.token_ids[:-1]))
    expected = masked.logits[len(sequence.rows) - 1 :]
    assert np.abs(logits - expected).max() < 1e-3
    assert answer.token_ids == expected.argmax(axis=1).tolist()
    # Rows of the answer are those that the sanitizer gave, in its order.
    given = (answer.kept.index + np.arange(len(answer.kept.index))[:, None] * (80 // len(answer.kept.index))).ravel()
    assert sorted(given) == sorted(sources)
    for layer, kept in answer.kept.after_stage.items():
        left = {int(sources[sequence.visual.index(row)]) for row in masked.survivors[layer] if row in sequence.visual}
        assert {int(given[row]) for row in kept} == left


def test_text_rows_have_no_features(pipe: Pipeline, clip: Clip) -> None:
    rows = watched(pipe, clip, budget="prune-80", max_new_tokens=1).rows
    beside = pipe.backend.numpy(rows.beside["deepstack"])[0]
    text = np.setdiff1d(np.arange(rows.length), rows.visual)
    assert not beside[text].any()
    assert (np.abs(beside[rows.visual]).max(axis=1) > 0).all()


def test_a_clip_and_an_image_in_one_prompt(pipeline: Callable[..., Pipeline], photo: Image.Image, clip: Clip) -> None:
    both = pipeline("qwen3-vl", "fp32", ("prune-80",), max_frames=8, max_images=2)
    for pictures, counts in (([clip, photo.resize(SIZE)], [80, 20]), ([photo.resize(SIZE), clip], [20, 80])):
        answer = both.generate(pictures, QUESTION, budget="prune-80", max_new_tokens=2)
        assert [kept.norms.size for kept in answer.images] == counts
        assert [len(kept.after_stage[2]) for kept in answer.images] == [n * 3 // 10 for n in counts]


def test_the_commands_take_a_video_file(bundle: Callable[..., Path], photo: Image.Image, tmp_path: Path) -> None:
    video = write_video(tmp_path / "clip.mp4", frames(20, SIZE, photo))
    root, kept = bundle("qwen3-vl", "fp32", BUDGETS, max_frames=8), tmp_path / "kept.png"
    asked = ("--video", video, "--prompt", "What happens?", "--budget", "prune-80", "--json")
    outcome = run("sinkprune-run", root, *asked, "--max-new-tokens", 2, "--overlay", kept)
    assert outcome.code == 0, outcome.stderr
    answer = json.loads(outcome.stdout)
    # 2 seconds at 10 frames: 4 shown, 2 groups of 20 tokens
    assert (answer["visual_tokens"], answer["kept_after_sanitizer"]) == (40, 1 + 16 + 2)
    assert kept.exists()
