"""Train the pocket robot on a CPU: `python benchmarks/train_pocket_robot.py CHECKPOINT --state STATE.pt`.

The first stage trains the tower on what each patch shows. Later stages add the prefix and the action expert, which
imitates the scripted expert by flow matching, then more objects and more patches a picture. An interrupted training
resumes from its state file. `STATE.csv` and `STATE.success.csv` hold the losses and the success so far.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from pocket_training.records import report, write_table
from pocket_training.robot.batches import Batch, draw_batch
from pocket_training.robot.episodes import run_episodes
from pocket_training.robot.losses import Probe, looking_loss, naming_loss, patch_loss, pointing_loss, summary_loss
from pocket_training.robot.model import GRID
from pocket_training.robot.oft import OftRobot
from pocket_training.robot.pi0 import Pi0Robot
from pocket_training.robot.robot import Robot
from pocket_training.stages import Stage, rate_at, schedule

_SAVE_EVERY = 100
_LOG_EVERY = 20
_MEASURE_EVERY = 500
_MEASURED = 40
"""Validation episodes."""
_CLIP = 1.0
_SEED = 7
_STATEFUL = ("model", "probe", "optimizer")
_COLUMNS = ("step", "stage", "seconds", "rate", "patches", "names", "points", "looks")
_ROBOTS: dict[str, Callable[[], Robot]] = {"pi0": Pi0Robot, "openvla-oft": OftRobot}


class RobotTraining:
    """The model, its optimizer, and the file that an interrupted training resumes from."""

    def __init__(self, state: Path, make: Callable[[], Robot] = Pi0Robot) -> None:
        torch.manual_seed(_SEED)
        self._path, self.robot, self.step, self.seconds = state, make(), 0, 0.0
        self.model, decoder = self.robot.model, self.robot.decoder
        self.probe = Probe(self.robot.tower_width, decoder.config.hidden_size, decoder.config.num_hidden_layers)
        self.log, self.success = list[dict[str, float | str]](), list[dict[str, float]]()
        modules = torch.nn.ModuleDict({"model": self.model, "probe": self.probe})
        self.parameters = list(modules.parameters())
        groups = [
            {"params": [value for value in self.parameters if value.ndim > 1], "weight_decay": 0.03},
            {"params": [value for value in self.parameters if value.ndim == 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True)
        if state.exists():
            self._load()

    def run(self, stages: Sequence[Stage]) -> None:
        """Run the remaining steps."""
        last = time.perf_counter()
        for stage, step, table in schedule(stages):
            if step < self.step:
                continue
            rate = rate_at(stages, stage, step)
            losses = self.train(stage, step, table, rate)
            self.step = step + 1
            self.seconds, last = self.seconds + time.perf_counter() - last, time.perf_counter()
            if step % _LOG_EVERY == 0:
                entry: dict[str, float | str] = {"step": step, "stage": stage.name, "seconds": round(self.seconds)}
                self.log.append({**entry, "rate": rate, **losses})
                report(self.log[-1])
            if stage.questions and self.step % _MEASURE_EVERY == 0:
                success, picked = run_episodes(self.robot.act, "validation", _MEASURED)
                self.success.append({"step": self.step, "success": success, "picked": picked})
                report(self.success[-1])
            if self.step % _SAVE_EVERY == 0:
                self._save()
        self._save()

    def train(self, stage: Stage, step: int, table: int, rate: float) -> dict[str, float]:
        """Run one step on the training tables from `table` on. Return its losses."""
        torch.manual_seed(step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        shown = min(GRID**2, round(stage.visual_tokens * (0.6 + 0.8 * torch.rand(()).item())))
        batch = draw_batch(table, stage.pictures, stage.most_objects, shown, self.robot.form)
        # Processors without AVX-512 emulate bfloat16.
        with torch.autocast("cpu", torch.bfloat16, enabled="AVX512" in torch.backends.cpu.get_cpu_capability()):
            loss, losses = self._losses(stage, batch)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, _CLIP)
        self.optimizer.step()
        return losses

    def _losses(self, stage: Stage, batch: Batch) -> tuple[torch.Tensor, dict[str, float]]:
        robot, seen = self.robot, self.robot.see(batch)
        words = robot.decoder.get_input_embeddings().weight
        losses = {
            "patches": patch_loss(self.probe, seen, batch),
            "names": naming_loss(words, seen, batch, robot.tokenizer),
        }
        if seen.summary is not None:
            losses["holds"] = summary_loss(seen.summary, batch)
        loss = stage.probe_weight * sum(losses.values(), torch.zeros(()))
        if stage.questions:
            prefix = robot.read(seen, batch)
            losses["points"] = pointing_loss(self.probe, prefix, batch)
            losses["looks"] = looking_loss(robot.decoder, prefix, batch)
            losses[robot.imitation] = robot.imitate(prefix, batch)
            loss = loss + losses[robot.imitation] + stage.probe_weight * (losses["points"] + losses["looks"])
        return loss, {name: value.item() for name, value in losses.items()}

    def _save(self) -> None:
        state = {name: getattr(self, name).state_dict() for name in _STATEFUL}
        state |= {"step": self.step, "seconds": self.seconds, "log": self.log, "success": self.success}
        beside = self._path.with_suffix(".new")
        torch.save(state, beside)
        beside.replace(self._path)
        self.write_log(self._path.with_suffix(".csv"))
        write_table(self._path.with_suffix(".success.csv"), ("step", "success", "picked"), self.success)

    def write_log(self, path: Path) -> None:
        """Write the loss curve."""
        write_table(path, (*_COLUMNS, *self.robot.own_losses), self.log)

    def _load(self) -> None:
        saved = torch.load(self._path)
        for name in _STATEFUL:
            getattr(self, name).load_state_dict(saved[name])
        self.step, self.seconds = saved["step"], saved["seconds"]
        self.log, self.success = saved["log"], saved["success"]


def main() -> None:
    """Train, and write the checkpoint and its loss curve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="folder to write the trained model to")
    parser.add_argument("--state", type=Path, required=True, help="file the training is saved to and resumed from")
    parser.add_argument("--policy", choices=_ROBOTS, default="pi0", help="the kind of policy (default: pi0)")
    parser.add_argument("--threads", type=int, default=2, help="threads of PyTorch (default: 2)")
    parser.add_argument("--so-far", action="store_true", help="write the model of the state file, and train no more")
    parser.add_argument("--episodes", type=int, default=0, help="then run as many test episodes (default: 0)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    training = RobotTraining(options.state, _ROBOTS[options.policy])
    if not options.so_far:
        training.run(training.robot.stages)
    training.robot.save(options.checkpoint)
    training.write_log(options.checkpoint / "loss.csv")
    for misnamed in (False, True) if options.episodes else ():
        success, picked = run_episodes(training.robot.act, "test", options.episodes, misnamed=misnamed)
        report({"misnamed": str(misnamed), "episodes": options.episodes, "success": success, "picked": picked})


if __name__ == "__main__":
    main()
