"""Writes the folder of a policy of type `sinkprune`, which LeRobot loads like a checkpoint.

    python -m sinkprune.runtime.lerobot.write_policy --output=robot-policy --policy.bundle=policy \\
        --policy.cameras='{front: [480, 640], wrist: [480, 640]}' --policy.budget=prune-80

The folder has LeRobot's three files of JSON: the configuration, and the pipelines before and after the policy.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import draccus

from sinkprune.contract.command_line.command import run_command
from sinkprune.runtime.lerobot.policy import SinkpruneConfig, SinkprunePolicy, make_sinkprune_pre_post_processors


@dataclass
class Options:
    """The options, which draccus parses as LeRobot's commands do."""

    output: Path
    policy: SinkpruneConfig = field(default_factory=SinkpruneConfig)


def write_policy(folder: Path, config: SinkpruneConfig) -> None:
    """Write the folder of a policy, after loading the policy once; raises what `SinkprunePolicy` raises."""
    # LeRobot's commands may run in other folders.
    config.bundle = str(Path(config.bundle).resolve())
    policy = SinkprunePolicy(config)
    for part in (policy, *make_sinkprune_pre_post_processors(config)):
        part.save_pretrained(folder)


def _write(arguments: Sequence[str] | None) -> None:
    options = draccus.parse(Options, args=arguments)
    write_policy(options.output, options.policy)
    sys.stdout.write(f"{options.output}: a policy of type 'sinkprune' for LeRobot\n")


if __name__ == "__main__":
    sys.exit(run_command(_write, None))
