"""Train the pocket model on a CPU: `python benchmarks/train_pocket_model.py CHECKPOINT --state STATE.pt`.

The first stage trains the tower on what each patch shows. Later stages add the LLM, more objects and more patches a
picture. The last stage shows all patches and asks most about counting, the hardest kind. Pictures with few patches
cost a third. An interrupted training resumes from its state file.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from PIL import Image
from tokenizers import Tokenizer

from pocket_training.attention import looking_loss
from pocket_training.batches import pictures, training_scenes, turns, words
from pocket_training.losses import Probe, answer_loss, naming_loss, tower_states
from pocket_training.model import new_model, new_tokenizer, save
from sinkprune.contract.text.questions import Question
from sinkprune.demo.scene_questions import KINDS, LESSONS, description, draw_questions
from sinkprune.demo.scenes import Scene


@dataclass(frozen=True)
class Stage:
    """A part of the training, with a learning rate that changes linearly from the first value to the second."""

    name: str
    steps: int
    pictures: int
    """Pictures a step."""
    learning_rate: tuple[float, float]
    questions: int = 0
    """Questions a picture; 0 leaves the LLM out."""
    visual_tokens: int = 256
    """Patches of each picture: centres of things first, then other patches of things, then random background."""
    probe_weight: float = 1.0
    """The weight of the losses for what patches show and what that is called."""
    most_objects: int = 6
    """The most objects in a picture."""
    kinds: tuple[str, ...] = (*KINDS, *LESSONS)
    """Kinds of questions."""
    described: bool = False
    """Whether to ask for the picture's description too. Its many tokens outweigh those of other answers."""
    warm_up: int = 0
    """Steps over which the learning rate rises from 0."""


_EVERY = (*KINDS, *LESSONS)
# Kinds with many wrong answers after stage "four"; counting and relations take longest.
_HARD = ("existence-random", "existence-adversarial", *3 * ("relation",), *3 * ("counting",), "place")
_COUNTING = (*10 * ("counting",), *2 * ("relation",), "size", "choice")
STAGES = (
    Stage("vision", 700, 16, (1.2e-3, 9e-4), visual_tokens=96, warm_up=100),
    Stage("two", 700, 12, (8e-4, 8e-4), 8, 32, 0.3, 2, described=True, warm_up=100),
    Stage("four", 500, 8, (8e-4, 7e-4), 8, 48, 0.3, 4, described=True),
    Stage("six", 1000, 6, (7e-4, 5.5e-4), 10, 64, 0.3, 6, (*_EVERY, *_HARD)),
    Stage("things", 700, 6, (5.5e-4, 4.864e-4), 10, 112, 0.3, 6, (*_EVERY, *_HARD)),
    Stage("counting", 500, 6, (4.8e-4, 4.5e-4), 20, 112, 0.3, 6, (*KINDS, *_COUNTING)),
    Stage("whole", 1000, 6, (4.5e-4, 0.0), 20, 256, 0.2, 6, (*KINDS, *_COUNTING)),
)
_SAVE_EVERY = 100
_LOG_EVERY = 20
_CLIP = 1.0
_SEED = 7
_STATEFUL = ("model", "probe", "optimizer")


class Training:
    """The model, its optimizer, and the file that an interrupted training resumes from."""

    def __init__(self, state: Path) -> None:
        torch.manual_seed(_SEED)
        self._path = state
        self.model, self.step, self.log = new_model(), 0, list[dict[str, float | str]]()
        self.probe = Probe(self.model.config.vision_config.hidden_size)
        modules = torch.nn.ModuleList([self.model, self.probe])
        self.parameters = [parameter for parameter in modules.parameters() if parameter.requires_grad]
        matrices = [parameter for parameter in self.parameters if parameter.ndim > 1]
        others = [parameter for parameter in self.parameters if parameter.ndim == 1]
        groups = [{"params": matrices, "weight_decay": 0.03}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True)
        self.tokenizer = self._load() if state.exists() else new_tokenizer()

    def run(self, stages: Sequence[Stage]) -> None:
        """Run the remaining steps."""
        start = time.perf_counter()
        for stage, step, scenes in _drawn_ahead(_schedule(stages), self.step):
            rate = self._set_rate(stage, step, stages)
            losses = self._train_on(stage, step, scenes)
            self.step = step + 1
            if step % _LOG_EVERY == 0:
                entry: dict[str, float | str] = {"step": step, "stage": stage.name, "rate": rate, **losses}
                self.log.append(entry)
                line = " ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in entry.items())
                sys.stderr.write(f"{time.perf_counter() - start:7.0f} s  {line}\n")
            if self.step % _SAVE_EVERY == 0:
                self._save()
        self._save()

    def _train_on(self, stage: Stage, step: int, scenes: list[tuple[Scene, Image.Image]]) -> dict[str, float]:
        seen = pictures(scenes, stage.visual_tokens, seed=step)
        states = tower_states(self.model, seen)
        probe = self.probe.loss(states, seen)
        loss, losses = stage.probe_weight * probe, {"probe": probe.item()}
        if stage.questions:
            rng = Random(step)
            asked = [_questions(stage, scene, rng) for scene, _ in scenes]
            visual = self.model.model.multi_modal_projector(states[:, 1:])
            spoken, known = turns(asked, self.tokenizer), words(self.tokenizer)
            answers, reading = answer_loss(self.model, visual, spoken)
            names = naming_loss(self.model, visual, seen, known)
            looks = looking_loss(self.model, reading, spoken, seen, known)
            loss = loss + answers + stage.probe_weight * (names + looks)
            losses |= {"answers": answers.item(), "names": names.item(), "looks": looks.item()}
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, _CLIP)
        self.optimizer.step()
        return losses

    def _set_rate(self, stage: Stage, step: int, stages: Sequence[Stage]) -> float:
        begin = sum(earlier.steps for earlier in stages[: stages.index(stage)])
        done = (step - begin) / stage.steps
        first, last = stage.learning_rate
        rate = (first + (last - first) * done) * min(1.0, (step - begin + 1) / max(1, stage.warm_up))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _save(self) -> None:
        state = {name: getattr(self, name).state_dict() for name in _STATEFUL}
        state |= {"step": self.step, "log": self.log, "tokenizer": self.tokenizer.to_str()}
        beside = self._path.with_suffix(".new")
        torch.save(state, beside)
        beside.replace(self._path)

    def _load(self) -> Tokenizer:
        saved = torch.load(self._path)
        for name in _STATEFUL:
            getattr(self, name).load_state_dict(saved[name])
        self.step, self.log = saved["step"], saved["log"]
        return Tokenizer.from_str(saved["tokenizer"])


def _questions(stage: Stage, scene: Scene, rng: Random) -> list[Question]:
    described = [description(scene)] if stage.described else []
    return [*described, *draw_questions(scene, rng, stage.questions, stage.kinds)]


def _schedule(stages: Sequence[Stage]) -> Iterator[tuple[Stage, int, int]]:
    """Yield the stage, the number and the first training picture of each step."""
    step = picture = 0
    for stage in stages:
        for _ in range(stage.steps):
            yield stage, step, picture
            step, picture = step + 1, picture + stage.pictures


def _drawn_ahead(
    schedule: Iterator[tuple[Stage, int, int]], first: int
) -> Iterator[tuple[Stage, int, list[tuple[Scene, Image.Image]]]]:
    """Yield the steps from `first` on with their scenes, drawn while the step before runs."""
    with ThreadPoolExecutor(1) as pool:
        drawing = (
            (stage, step, pool.submit(training_scenes, picture, stage.pictures, stage.most_objects))
            for stage, step, picture in schedule
            if step >= first
        )
        waiting = next(drawing, None)
        while waiting:
            (stage, step, scenes), waiting = waiting, next(drawing, None)
            yield stage, step, scenes.result()


def main() -> None:
    """Train, and write the checkpoint and its loss curve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="folder to write the trained model to")
    parser.add_argument("--state", type=Path, required=True, help="file the training is saved to and resumed from")
    options = parser.parse_args()
    training = Training(options.state)
    training.run(STAGES)
    save(training.model, training.tokenizer, options.checkpoint)
    with (options.checkpoint / "loss.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["step", "stage", "rate", "probe", "names", "looks", "answers"])
        writer.writeheader()
        writer.writerows(training.log)


if __name__ == "__main__":
    main()
