"""The two pocket models' recipes: what differs between their trainings."""

from __future__ import annotations

from abc import ABC, abstractmethod
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
from sinkprune.contract.text.questions import Question
from sinkprune.demo.scene_questions import KINDS
from sinkprune.demo.scenes import Scene, make_scene
from sinkprune.demo.varied_questions import VARIED_KINDS
from sinkprune.demo.varied_scenes import MOST_TOKENS, SIZES, compose_varied, make_varied

POCKET = Path(demo.__file__).parent / "pocket"
"""The checkpoint of the pocket LLaVA."""
Drawn = list[tuple[Scene, Image.Image]]


class Seen(NamedTuple):
    """The tower's view of B pictures."""

    probe_loss: torch.Tensor
    sight: Sight
    classes: torch.Tensor
    """[B,V,5] int64: what each visual token shows (`Names.classes`)."""


class Recipe(ABC):
    """A pocket model, its scenes and its lessons."""

    stages: tuple[Stage, ...]
    dialogue: Dialogue
    names: Names
    lessons: Lessons
    measured: tuple[str, ...]
    """The kinds of questions of which the validation measures the accuracy."""
    half: bool
    """Whether matrices are multiplied in bf16."""

    @abstractmethod
    def new_model(self) -> Any:
        """Return the initialised model."""

    @abstractmethod
    def new_tokenizer(self) -> Tokenizer:
        """Return a tokenizer trained on the scenes' questions."""

    @abstractmethod
    def new_probe(self, model: Any) -> PatchProbe:
        """Return the probe of the tower's states."""

    @abstractmethod
    def draw(self, stage: Stage, first: int) -> Drawn:
        """Return the training scenes of a step, the first of which has number `first`."""

    @abstractmethod
    def validation(self, index: int) -> tuple[Scene, Image.Image]:
        """Return a validation scene and its picture."""

    @abstractmethod
    def ask(self, scene: Scene, rng: Random, count: int, kinds: tuple[str, ...]) -> list[Question]:
        """Return up to `count` questions of `kinds` about a scene."""

    @abstractmethod
    def see(self, model: Any, probe: Any, drawn: Drawn, shown: int, seed: int) -> Seen:
        """Run the tower on `shown` visual tokens of each picture."""

    @abstractmethod
    def save(self, model: Any, tokenizer: Tokenizer, folder: Path) -> None:
        """Write the checkpoint."""


class LlavaRecipe(Recipe):
    """The pocket LLaVA-1.5, on square scenes."""

    stages: tuple[Stage, ...] = LLAVA_STAGES
    dialogue = llava_model.DIALOGUE
    names = Names()
    lessons = Lessons((1,), (2, 3), (4, 5, 6), (4, 5), slice(0, 3), slice(3, 6))
    measured = tuple(KINDS)
    half = False

    def new_model(self) -> Any:
        return llava_model.new_model()

    def new_tokenizer(self) -> Tokenizer:
        return llava_model.new_tokenizer()

    def new_probe(self, model: Any) -> PatchProbe:
        return Probe(model.config.vision_config.hidden_size)

    def draw(self, stage: Stage, first: int) -> Drawn:
        return training_scenes(first, stage.pictures, stage.most_objects)

    def validation(self, index: int) -> tuple[Scene, Image.Image]:
        return make_scene("validation", index)

    def ask(self, scene: Scene, rng: Random, count: int, kinds: tuple[str, ...]) -> list[Question]:
        return draw_questions(scene, rng, count, kinds)

    def see(self, model: Any, probe: Any, drawn: Drawn, shown: int, seed: int) -> Seen:
        seen = pictures(drawn, shown, seed)
        states = tower_states(model, seen)
        tokens = model.model.multi_modal_projector(states[:, 1:])
        count = tokens.shape[1]
        places = torch.arange(count).expand(1, len(tokens), -1)
        return Seen(probe.loss(states, seen), Sight(tokens, places, torch.full((len(tokens),), count)), seen.classes)

    def save(self, model: Any, tokenizer: Tokenizer, folder: Path) -> None:
        llava_model.save(model, tokenizer, folder)


class OutlierRecipe(LlavaRecipe):
    """The pocket LLaVA-1.5, tuned from the demo's weights until its tower has outliers.

    Without a weight of the norms it is the control: the same tuning, which makes none.
    """

    stages = OUTLIER_STAGES

    def __init__(self, norm_weight: float) -> None:
        self._norm_weight = norm_weight

    def new_model(self) -> Any:
        return llava_model.tuned_from(POCKET)

    def new_tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(str(POCKET / "tokenizer.json"))

    def new_probe(self, model: Any) -> PatchProbe:
        return OutlierProbe(model.config.vision_config.hidden_size, self._norm_weight)


class QwenRecipe(Recipe):
    """The pocket Qwen3-VL, on scenes of several resolutions."""

    stages = QWEN_STAGES
    dialogue = qwen_model.QWEN_DIALOGUE
    names = VARIED_NAMES
    lessons = Lessons((1,), (2, 3), (4, 6, 8), (4, 6), slice(0, 2), slice(2, 4))
    measured = MEASURED_KINDS
    half = True

    def new_model(self) -> Any:
        return qwen_model.new_model()

    def new_tokenizer(self) -> Tokenizer:
        return qwen_model.new_tokenizer()

    def new_probe(self, model: Any) -> PatchProbe:
        return PatchProbe(model.config.vision_config.hidden_size, self.names)

    def draw(self, stage: Stage, first: int) -> Drawn:
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

    def validation(self, index: int) -> tuple[Scene, Image.Image]:
        return make_varied("validation", index)

    def ask(self, scene: Scene, rng: Random, count: int, kinds: tuple[str, ...]) -> list[Question]:
        return draw_questions(scene, rng, count, kinds, VARIED_KINDS | LESSONS)

    def see(self, model: Any, probe: Any, drawn: Drawn, shown: int, seed: int) -> Seen:
        seen = varied_pictures(drawn, shown, model.model.visual.num_grid_per_side, seed)
        states, sight = qwen_states(model, seen)
        loss = probe.patch_loss(probe.norm(states), seen.patch_classes, seen.centres)
        return Seen(loss, sight, seen.classes)

    def save(self, model: Any, tokenizer: Tokenizer, folder: Path) -> None:
        qwen_model.save(model, tokenizer, folder)


RECIPES: dict[str, Recipe] = {
    "llava": LlavaRecipe(),
    "llava-outliers": OutlierRecipe(norm_weight=1.0),
    "llava-control": OutlierRecipe(norm_weight=0.0),
    "qwen3": QwenRecipe(),
}
