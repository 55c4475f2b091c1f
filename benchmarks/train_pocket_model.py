"""Train a pocket model on a CPU: `python benchmarks/train_pocket_model.py CHECKPOINT --state STATE.pt --model qwen3`.

The first stage trains the tower on what each patch shows. Later stages add the LLM, more objects and more patches a
picture. The last stage shows all patches and asks most about counting, the hardest kind. Pictures with few patches
cost a third. An interrupted training resumes from its state file. `STATE.csv` and `STATE.accuracy.csv` hold the
losses and the accuracy on validation scenes so far.

`--model llava-outliers` tunes the demo's LLaVA until its tower has outlier tokens. `llava-control` tunes it as much,
without the reward for their norms.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import torch
from tokenizers import Tokenizer

from pocket_training.attention import looking_loss
from pocket_training.batches import turns, words
from pocket_training.decoding import answer_loss, read, right_turns
from pocket_training.lessons import description
from pocket_training.losses import naming_loss
from pocket_training.recipes import RECIPES, Drawn, Recipe
from pocket_training.records import report, write_table
from pocket_training.stages import Stage, rate_at, schedule
from sinkprune.contract.questions import Question
from sinkprune.demo.scenes import Scene

_SAVE_EVERY = 100
_LOG_EVERY = 20
_MEASURE_EVERY = 250
_MEASURED = 24
"""Validation pictures."""
_ALL = 1 << 20
"""More visual tokens than any picture has."""
_CLIP = 1.0
_SEED = 7
_GAINS = ("q_norm.weight", "k_norm.weight")
_FASTER = 5
"""How much faster these are trained: they bound how sharp attention can be, and grow from 1 to several times that."""
_STATEFUL = ("model", "probe", "optimizer")
_LOSSES = ("step", "stage", "seconds", "rate", "probe", "names", "looks", "answers")


class Training:
    """The model, its optimizer, and the file that an interrupted training resumes from."""

    def __init__(self, state: Path, recipe: Recipe) -> None:
        torch.manual_seed(_SEED)
        self._path, self._recipe = state, recipe
        self.model, self.step, self.seconds = recipe.new_model(), 0, 0.0
        self.log, self.accuracy = list[dict[str, float | str]](), list[dict[str, float]]()
        self.probe = recipe.new_probe(self.model)
        named = dict(torch.nn.ModuleDict({"model": self.model, "probe": self.probe}).named_parameters())
        self.parameters = list(named.values())
        gains = [value for name, value in named.items() if name.endswith(_GAINS)]
        matrices = [value for value in self.parameters if value.ndim > 1]
        others = [value for name, value in named.items() if value.ndim == 1 and not name.endswith(_GAINS)]
        groups: list[dict[str, Any]] = [{"params": matrices, "weight_decay": 0.03}]
        groups += [{"params": others, "weight_decay": 0.0}, {"params": gains, "weight_decay": 0.0, "faster": _FASTER}]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True)
        self.tokenizer = self._load() if state.exists() else recipe.new_tokenizer()

    def run(self, stages: Sequence[Stage]) -> None:
        """Run the remaining steps."""
        last = time.perf_counter()
        for stage, step, scenes in _drawn_ahead(self._recipe, schedule(stages), self.step):
            rate = self._set_rate(stage, step, stages)
            losses = self._train_on(stage, step, scenes)
            self.step = step + 1
            self.seconds, last = self.seconds + time.perf_counter() - last, time.perf_counter()
            if step % _LOG_EVERY == 0:
                entry: dict[str, float | str] = {
                    "step": step,
                    "stage": stage.name,
                    "seconds": round(self.seconds),
                    "rate": rate,
                    **losses,
                }
                self.log.append(entry)
                report(entry)
            if stage.questions and self.step % _MEASURE_EVERY == 0:
                self.accuracy.append({"step": self.step, **self.measure(stage.layers)})
                report(self.accuracy[-1])
            if self.step % _SAVE_EVERY == 0:
                self._save()
        self._save()

    @torch.no_grad()
    def measure(self, layers: Sequence[int] | None) -> dict[str, float]:
        """Return the accuracy on whole validation pictures, of all answers and by kind."""
        asked, right = Counter[str](), Counter[str]()
        for index in range(_MEASURED):
            scene, picture = self._recipe.validation(index)
            kinds = self._recipe.measured
            questions = [q for kind in kinds for q in self._recipe.ask(scene, Random(index), 1, (kind,))]
            with self._precision():
                seen = self._recipe.see(self.model, self.probe, [(scene, picture)], _ALL, 0)
                spoken = turns([questions], self.tokenizer, self._recipe.dialogue)
                (row,) = right_turns(read(self.model, seen.sight, spoken, layers), spoken)
            for question, answered in zip(questions, row, strict=True):
                for kind in ("all", question.kind):
                    asked[kind] += 1
                    right[kind] += answered
        return {kind: right[kind] / asked[kind] for kind in asked}

    def _precision(self) -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16, enabled=self._recipe.half)

    def _train_on(self, stage: Stage, step: int, scenes: Drawn) -> dict[str, float]:
        with self._precision():
            loss, losses = self._losses(stage, step, scenes)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, _CLIP)
        self.optimizer.step()
        return losses

    def _losses(self, stage: Stage, step: int, scenes: Drawn) -> tuple[torch.Tensor, dict[str, float]]:
        recipe = self._recipe
        seen = recipe.see(self.model, self.probe, scenes, stage.visual_tokens, step)
        loss, losses = stage.probe_weight * seen.probe_loss, {"probe": seen.probe_loss.item()}
        if stage.questions:
            rng = Random(step)
            asked = [self._questions(stage, scene, rng) for scene, _ in scenes]
            spoken, known = turns(asked, self.tokenizer, recipe.dialogue), words(self.tokenizer, recipe.names)
            reading = read(self.model, seen.sight, spoken, stage.layers)
            answers = answer_loss(reading, spoken)
            names = naming_loss(self.model, seen.sight.tokens, seen.classes, known)
            looks = looking_loss(self.model, reading, spoken, seen.classes, known, recipe.lessons)
            loss = loss + answers + stage.probe_weight * (names + looks)
            losses |= {"answers": answers.item(), "names": names.item(), "looks": looks.item()}
        return loss, losses

    def _questions(self, stage: Stage, scene: Scene, rng: Random) -> list[Question]:
        described = [description(scene)] if stage.described else []
        return [*described, *self._recipe.ask(scene, rng, stage.questions, stage.kinds)]

    def _set_rate(self, stage: Stage, step: int, stages: Sequence[Stage]) -> float:
        rate = rate_at(stages, stage, step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("faster", 1)
        return rate

    def _save(self) -> None:
        state = {name: getattr(self, name).state_dict() for name in _STATEFUL}
        state |= {"step": self.step, "seconds": self.seconds, "log": self.log, "accuracy": self.accuracy}
        state["tokenizer"] = self.tokenizer.to_str()
        beside = self._path.with_suffix(".new")
        torch.save(state, beside)
        beside.replace(self._path)
        write_table(self._path.with_suffix(".csv"), _LOSSES, self.log)
        write_table(self._path.with_suffix(".accuracy.csv"), ("step", "all", *self._recipe.measured), self.accuracy)

    def _load(self) -> Tokenizer:
        saved = torch.load(self._path)
        for name in _STATEFUL:
            getattr(self, name).load_state_dict(saved[name])
        self.step, self.seconds = saved["step"], saved["seconds"]
        self.log, self.accuracy = saved["log"], saved["accuracy"]
        return Tokenizer.from_str(saved["tokenizer"])


def _drawn_ahead(
    recipe: Recipe, schedule: Iterator[tuple[Stage, int, int]], first: int
) -> Iterator[tuple[Stage, int, Drawn]]:
    """Yield the steps from `first` on with their scenes, drawn while the step before runs."""
    with ThreadPoolExecutor(1) as pool:
        drawing = (
            (stage, step, pool.submit(recipe.draw, stage, picture))
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
    parser.add_argument("--model", choices=RECIPES, default="llava", help="which pocket model (default: llava)")
    parser.add_argument("--threads", type=int, default=2, help="threads of PyTorch (default: 2)")
    parser.add_argument("--so-far", action="store_true", help="write the model of the state file, and train no more")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    recipe = RECIPES[options.model]
    training = Training(options.state, recipe)
    if not options.so_far:
        training.run(recipe.stages)
    recipe.save(training.model, training.tokenizer, options.checkpoint)
    write_table(options.checkpoint / "loss.csv", _LOSSES, training.log)


if __name__ == "__main__":
    main()
