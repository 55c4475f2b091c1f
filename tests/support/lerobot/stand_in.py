"""What stands in for LeRobot where it is not installed: the base classes of configurations and policies.

Nothing here computes. The tests of `make test-lerobot` run on LeRobot itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import Any

import pytest
import torch


class FeatureType(str, Enum):
    STATE, VISUAL, ACTION = "STATE", "VISUAL", "ACTION"


@dataclass
class PolicyFeature:
    type: FeatureType
    shape: tuple[int, ...]


@dataclass
class PreTrainedConfig:
    input_features: dict[str, PolicyFeature] | None = None
    output_features: dict[str, PolicyFeature] | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        self.input_features, self.output_features = self.input_features or {}, self.output_features or {}

    @classmethod
    def register_subclass(cls, name: str) -> Callable[[Any], Any]:
        return lambda kind: kind


@dataclass
class RTCConfig:
    enabled: bool = True
    execution_horizon: int = 10


class PreTrainedPolicy(torch.nn.Module):
    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.config = config


MODULES: dict[str, dict[str, Any]] = {
    "lerobot": {},
    "lerobot.configs": {},
    "lerobot.configs.policies": {"PreTrainedConfig": PreTrainedConfig},
    "lerobot.configs.types": {"FeatureType": FeatureType, "PolicyFeature": PolicyFeature},
    "lerobot.policies": {},
    "lerobot.policies.pretrained": {"PreTrainedPolicy": PreTrainedPolicy},
    "lerobot.policies.rtc": {},
    "lerobot.policies.rtc.configuration_rtc": {"RTCConfig": RTCConfig},
}


@contextmanager
def standing_in() -> Iterator[None]:
    """Have imports of LeRobot find the stand-ins, until the block ends."""
    with pytest.MonkeyPatch.context() as patch:
        for name, content in MODULES.items():
            module = ModuleType(name)
            vars(module).update(content)
            patch.setitem(sys.modules, name, module)
        yield
