"""The two pocket models' recipes: what differs between their trainings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from PIL import Image
from tokenizers import Tokenizer

from pocket_training import model as llava_model
from pocket_training import qwen_model
from pocket_training.attention import Lessons
from pocket_training.batches import Names, first_of, pictures, training_scenes
from pocket_training.decoding import Sight
from pocket_training.lessons import LESSONS, draw_questions, shrink
from pocket_training.losses import PatchProbe, Probe, tower_states
from pocket_training.model import Dialogue
from pocket_training.outliers import OutlierProbe
from pocket_training.qwen_tower import VARIED_NAMES, varied_pictures
from pocket_training.qwen_tower import tower_states as qwen_states
from pocket_training.stages import LEAST_FACTOR, LLAVA_STAGES, MEASURED_KINDS, OUTLIER_STAGES, QWEN_STAGES, Stage
from sinkprune import demo
from sinkprune.contract.questions import Question
from sinkprune.demo.questions import KINDS, VARIED_KINDS
from sinkprune.demo.scenes import MOST_TOKENS, SIZES, Scene, compose_varied, make_scene, make_varied

POCKET = Path(demo.__file__).parent / "pocket"
"""The checkpoint of the pocket LLaVA."""
Drawn = list[tuple[Scene, Image.Image]]


class Seen(NamedTuple):
    """The tower's view of B pictures."""

    probe_loss: torch.Tensor
    sight: Sight
    classes: torch.Tensor
    """[B,V,5] int64: what each visual token shows (`Names.classes`)."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A pocket model, its scenes and its lessons."""

    stages: tuple[Stage, ...]
    dialogue: Dialogue
    names: Names
    lessons: Lessons
    measured: tuple[str, ...]
    """The kinds of questions of which the validation measures the accuracy."""
    half: bool
    """Whether matrices are multiplied in bf16."""
    new_model: Callable[[], Any]
    """Returns the initialised model."""
    new_tokenizer: Callable[[], Tokenizer]
    """Returns a tokenizer trained on the scenes' questions."""
    new_probe: Callable[[Any], PatchProbe]
    """Returns the probe of the tower's states of a model."""
    draw: Callable[[Stage, int], Drawn]
    """Returns the training scenes of a step, the first of which has the number that is given."""
    validation: Callable[[int], tuple[Scene, Image.Image]]
    """Returns a validation scene and its picture."""
    ask: Callable[[Scene, Random, int, tuple[str, ...]], list[Question]]
    """Returns up to so many questions of the given kinds about a scene."""
    see: Callable[[Any, Any, Drawn, int, int], Seen]
    """Runs the tower of a model, with its probe, on so many visual tokens of each picture, drawn by a seed."""
    save: Callable[[Any, Tokenizer, Path], None]
    """Writes the checkpoint."""


def _few(stage: Stage, first: int) -> Drawn:
    return training_scenes(first, stage.pictures, stage.most_objects)


def _see_square(model: Any, probe: Any, drawn: Drawn, shown: int, seed: int) -> Seen:
    seen = pictures(drawn, shown, seed)
    states = tower_states(model, seen)
    tokens = model.model.multi_modal_projector(states[:, 1:])
    count = tokens.shape[1]
    places = torch.arange(count).expand(1, len(tokens), -1)
    return Seen(probe.loss(states, seen), Sight(tokens, places, torch.full((len(tokens),), count)), seen.classes)


def _varied(stage: Stage, first: int) -> Drawn:
    # Whole pictures of one step have one size, and so have as many tokens.
    rng = Random(first)
    sizes = [rng.choice(SIZES)] if stage.visual_tokens >= MOST_TOKENS else SIZES
    factor = rng.uniform(LEAST_FACTOR, 1) if rng.random() < stage.shrunk else 1.0

    def fits(index: int) -> bool:
        scene = compose_varied("training", index)
        return len(scene.objects) <= stage.most_objects and scene.size in sizes

    numbers = (first_of(index, fits) for index in range(first, first + stage.pictures))
    drawn = [make_varied("training", number) for number in numbers]
    return drawn if factor == 1 else [shrink(*pair, factor) for pair in drawn]


def _see_varied(model: Any, probe: Any, drawn: Drawn, shown: int, seed: int) -> Seen:
    seen = varied_pictures(drawn, shown, model.model.visual.num_grid_per_side, seed)
    states, sight = qwen_states(model, seen)
    loss = probe.patch_loss(probe.norm(states), seen.patch_classes, seen.centres)
    return Seen(loss, sight, seen.classes)


_LLAVA = Recipe(
    stages=LLAVA_STAGES,
    dialogue=llava_model.DIALOGUE,
    names=Names(),
    lessons=Lessons((1,), (2, 3), (4, 5, 6), (4, 5), slice(0, 3), slice(3, 6)),
    measured=tuple(KINDS),
    half=False,
    new_model=llava_model.new_model,
    new_tokenizer=llava_model.new_tokenizer,
    new_probe=lambda model: Probe(model.config.vision_config.hidden_size),
    draw=_few,
    validation=partial(make_scene, "validation"),
    ask=draw_questions,
    see=_see_square,
    save=llava_model.save,
)
"""The pocket LLaVA-1.5, on square scenes."""


def _tuned(norm_weight: float) -> Recipe:
    """Return the recipe that tunes the demo's pocket LLaVA until its tower has outliers.

    Without a weight of the norms it is the control: the same tuning, which makes none.
    """
    return replace(
        _LLAVA,
        stages=OUTLIER_STAGES,
        new_model=partial(llava_model.tuned_from, POCKET),
        new_tokenizer=partial(Tokenizer.from_file, str(POCKET / "tokenizer.json")),
        new_probe=lambda model: OutlierProbe(model.config.vision_config.hidden_size, norm_weight),
    )


RECIPES = {
    "llava": _LLAVA,
    "llava-outliers": _tuned(norm_weight=1.0),
    "llava-control": _tuned(norm_weight=0.0),
    # The pocket Qwen3-VL, on scenes of several resolutions.
    "qwen3": Recipe(
        stages=QWEN_STAGES,
        dialogue=qwen_model.QWEN_DIALOGUE,
        names=VARIED_NAMES,
        lessons=Lessons((1,), (2, 3), (4, 6, 8), (4, 6), slice(0, 2), slice(2, 4)),
        measured=MEASURED_KINDS,
        half=True,
        new_model=qwen_model.new_model,
        new_tokenizer=qwen_model.new_tokenizer,
        new_probe=lambda model: PatchProbe(model.config.vision_config.hidden_size, VARIED_NAMES),
        draw=_varied,
        validation=partial(make_varied, "validation"),
        ask=partial(draw_questions, makers=VARIED_KINDS | LESSONS),
        see=_see_varied,
        save=qwen_model.save,
    ),
}
