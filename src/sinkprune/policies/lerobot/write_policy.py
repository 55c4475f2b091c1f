"""Writes the folder of a policy of type `sinkprune`, which LeRobot loads like a checkpoint.

    python -m sinkprune.policies.lerobot.write_policy --output=robot-policy --policy.bundle=policy \\
        --policy.cameras='{front: [480, 640], wrist: [480, 640]}' --policy.budget=prune-80

The folder has LeRobot's three files of JSON: the configuration, and the pipelines before and after the policy.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import field, make_dataclass
from pathlib import Path

from sinkprune.contract.checks import needs_package
from sinkprune.contract.command_line.command import run_command
from sinkprune.policies.lerobot import INSTALL


def _write(arguments: Sequence[str] | None) -> None:
    """Load the policy once, and write its folder; raises what `SinkprunePolicy` raises."""
    with needs_package("a policy of LeRobot", INSTALL):
        import draccus

        from sinkprune.policies.lerobot.policy import (
            SinkpruneConfig,
            SinkprunePolicy,
            make_sinkprune_pre_post_processors,
        )
    # draccus parses the options as LeRobot's commands do.
    policy_option = ("policy", SinkpruneConfig, field(default_factory=SinkpruneConfig))
    options = draccus.parse(make_dataclass("Options", [("output", Path), policy_option]), args=arguments)
    folder, config = options.output, options.policy
    # LeRobot's commands may run in other folders.
    config.bundle = str(Path(config.bundle).resolve())
    policy = SinkprunePolicy(config)
    for part in (policy, *make_sinkprune_pre_post_processors(config)):
        part.save_pretrained(folder)
    sys.stdout.write(f"{folder}: a policy of type 'sinkprune' for LeRobot\n")


if __name__ == "__main__":
    sys.exit(run_command(_write, None))
