"""Visual token pruning inside the decoder of multimodal LLMs, on exported graphs or engines.

    from sinkprune import Pipeline

`runtime/steps/chain.py` is `sinkprune.runtime.steps.chain`: the folders at the top of the repository are links here.
Importing the package loads its errors, but neither torch nor an engine library. Other names load when first used.
"""

from __future__ import annotations

from importlib import import_module

from sinkprune.contract import errors
from sinkprune.contract.errors import *  # noqa: F403  (every error is public)

# Instead of `typing.TYPE_CHECKING`: importing `typing` would double the time until a command handles Ctrl-C.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from sinkprune.contract.schedule import PictureSchedule as PictureSchedule
    from sinkprune.contract.schedule import VisualLayout as VisualLayout
    from sinkprune.deadlines.costs import ActionCosts as ActionCosts
    from sinkprune.deadlines.costs import BudgetCosts as BudgetCosts
    from sinkprune.deadlines.costs import Costs as Costs
    from sinkprune.deadlines.costs import Place as Place
    from sinkprune.deadlines.costs import read_action_costs as read_action_costs
    from sinkprune.deadlines.costs import read_costs as read_costs
    from sinkprune.deadlines.costs import write_costs as write_costs
    from sinkprune.deadlines.pipeline import Pipeline as Pipeline
    from sinkprune.policies.loop import ActionLimits as ActionLimits
    from sinkprune.policies.loop import LoopFault as LoopFault
    from sinkprune.policies.loop import LoopReport as LoopReport
    from sinkprune.policies.loop import Observed as Observed
    from sinkprune.policies.loop import PolicyLoop as PolicyLoop
    from sinkprune.policies.policy import Policy as Policy
    from sinkprune.policies.report import ActionDeadline as ActionDeadline
    from sinkprune.policies.report import ActionFlops as ActionFlops
    from sinkprune.policies.report import ActionReport as ActionReport
    from sinkprune.runtime.camera import Camera as Camera
    from sinkprune.runtime.hooks import Observer as Observer
    from sinkprune.runtime.loading import LoadOptions as LoadOptions
    from sinkprune.runtime.media.clip import Clip as Clip
    from sinkprune.runtime.media.video_file import VideoFile as VideoFile
    from sinkprune.runtime.overlay import overlay as overlay
    from sinkprune.runtime.steps.answer import Answer as Answer
    from sinkprune.runtime.steps.answer import DeadlineReport as DeadlineReport
    from sinkprune.runtime.steps.decoding import Kept as Kept
    from sinkprune.runtime.steps.request import Request as Request
    from sinkprune.runtime.stream import Stream as Stream
    from sinkprune.runtime.text.prompt import Turn as Turn
    from sinkprune.runtime.text.tools import ToolCall as ToolCall
    from sinkprune.runtime.text.tools import Tools as Tools
    from sinkprune.serving.sessions import Session as Session

__version__ = "0.1.0"
_NAMES = {
    "contract.schedule": "PictureSchedule VisualLayout",
    "deadlines.costs": "ActionCosts BudgetCosts Costs Place read_action_costs read_costs write_costs",
    "deadlines.pipeline": "Pipeline",
    "policies.loop": "ActionLimits LoopFault LoopReport Observed PolicyLoop",
    "policies.policy": "Policy",
    "policies.report": "ActionDeadline ActionFlops ActionReport",
    "runtime.camera": "Camera",
    "runtime.hooks": "Observer",
    "runtime.loading": "LoadOptions",
    "runtime.media.clip": "Clip",
    "runtime.media.video_file": "VideoFile",
    "runtime.overlay": "overlay",
    "runtime.steps.answer": "Answer DeadlineReport",
    "runtime.steps.decoding": "Kept",
    "runtime.steps.request": "Request",
    "runtime.stream": "Stream",
    "runtime.text.prompt": "Turn",
    "runtime.text.tools": "ToolCall Tools",
    "serving.sessions": "Session",
}
_MODULES = {name: f"sinkprune.{module}" for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted([*_MODULES, *(name for name, kind in vars(errors).items() if isinstance(kind, type))])


def __getattr__(name: str) -> Any:
    """Return a public name, and load its module now."""
    if name not in _MODULES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return list(__all__)
