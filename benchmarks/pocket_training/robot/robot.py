"""What the training of a pocket robot needs of a policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from pocket_training.robot.batches import Batch, Form, normalise
from pocket_training.robot.losses import Prefix, Seen
from pocket_training.stages import Stage
from sinkprune.demo.robot_table import RobotTable


class Robot(ABC):
    """A policy in PyTorch, with the pictures, texts and numbers that it reads."""

    stages: Sequence[Stage]
    imitation: str
    """The name of the loss of the action chunk."""
    own_losses: Sequence[str]
    """This and other losses that not all policies have."""
    model: Any
    tokenizer: Tokenizer
    form: Form
    tower_width: int
    decoder: Any
    """The decoder of Gemma's or Llama's kind."""

    @abstractmethod
    def see(self, batch: Batch) -> Seen:
        """Run tower and projector on the patches of the batch."""

    @abstractmethod
    def read(self, seen: Seen, batch: Batch) -> Prefix:
        """Run the decoder. Its rows keep the positions that they have among all visual tokens."""

    @abstractmethod
    def imitate(self, prefix: Prefix, batch: Batch) -> torch.Tensor:
        """Return the loss of the expert's chunks; scalar."""

    @abstractmethod
    def act(self, tables: Sequence[RobotTable], instructions: Sequence[str], seed: int) -> NDArray[np.float32]:
        """Return [B,8,3]: the next actions at each table, in the robot's units."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the model as an fp16 checkpoint."""

    def observed(self, tables: Sequence[RobotTable]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return pictures [B,2,3,s,s] and normalised states [B,3]."""
        numbers = self.form.statistics
        pixels = np.stack([[self.form.pixels(picture) for picture in table.cameras()] for table in tables])
        states = [normalise(table.state(), numbers.state_mean, numbers.state_std) for table in tables]
        return torch.from_numpy(pixels), torch.from_numpy(np.stack(states))

    def in_robots_units(self, actions: torch.Tensor) -> NDArray[np.float32]:
        """Return normalised `actions` in widths of the table."""
        mean, std = (np.array(values, np.float32) for values in self.form.statistics[2:])
        return np.asarray(actions.detach().numpy() * std + mean)
