"""The loop of `lerobot-record` around the pocket robot's table: LeRobot's factories, processors and `predict_action`.

    python -m support.lerobot.control_loop FOLDER SEED BATCHES.npz

runs an episode with the policy of FOLDER, another with a policy of the same fields without a folder, and prints JSON:
for both the actions, and whether the robot picked the named object. BATCHES.npz are the observations of the first
episode's chunks, as LeRobot's processors give them to the policy.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from lerobot.configs.policies import PreTrainedConfig
from lerobot.policies.factory import make_policy, make_pre_post_processors

try:
    from lerobot.utils.control_utils import predict_action
except ModuleNotFoundError:  # LeRobot 0.6
    from lerobot.common.control_utils import predict_action

import sinkprune.policies.lerobot.policy  # noqa: F401 -- registers the type
from sinkprune.demo.robot_table import SIDE, RobotTable

NAMES = ["height", "width", "channels"]
FEATURES = {
    **{
        f"observation.images.{camera}": {"dtype": "video", "shape": (SIDE, SIDE, 3), "names": NAMES}
        for camera in ("table", "close")
    },
    "observation.state": {"dtype": "float32", "shape": (2,), "names": ["x", "y"]},
    "action": {"dtype": "float32", "shape": (3,), "names": ["dx", "dy", "closing"]},
}
"""What a data set of the table has."""


def run_episode(config: Any, folder: str | None, seed: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Run an episode; returns its actions, and the arrays of `recorded`."""
    config.pretrained_path = folder
    policy = make_policy(config, ds_meta=SimpleNamespace(features=FEATURES, stats={}))
    before, after = make_pre_post_processors(
        config,
        folder,
        # As `lerobot-record` does.
        preprocessor_overrides={
            "device_processor": {"device": "cpu"},
            "rename_observations_processor": {"rename_map": {}},
        },
    )
    batches, predict = list[dict[str, Any]](), policy.predict_action_chunk

    def predict_recorded(batch: dict[str, Any], *others: Any) -> torch.Tensor:
        batches.append(batch)
        return predict(batch, *others)

    policy.predict_action_chunk = predict_recorded
    table, actions = RobotTable(seed), list[list[float]]()
    while not table.done:
        frames = map(np.asarray, table.cameras())
        observation = {**dict(zip(list(FEATURES)[:2], frames, strict=True)), "observation.state": table.state()}
        action = predict_action(observation, policy, torch.device("cpu"), before, after, False, table.instruction)
        actions.append(action.squeeze(0).tolist())
        table.step(np.array(actions[-1]))
    return {"actions": actions, "succeeded": table.succeeded}, recorded(batches)


def recorded(batches: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Return the observations of batches, by `NUMBER/KEY`, without keys that have no value."""
    return {
        f"{number}/{key}": np.asarray(value)
        for number, batch in enumerate(batches)
        for key, value in batch.items()
        if value is not None and value != {}
    }


if __name__ == "__main__":
    folder, seed, file = sys.argv[1:]
    config = PreTrainedConfig.from_pretrained(folder)
    of_folder, arrays = run_episode(config, folder, seed)
    of_fields, _ = run_episode(config, None, seed)
    np.savez_compressed(file, **arrays)
    json.dump([of_folder, of_fields], sys.stdout)
