"""Visual token pruning inside the decoder of multimodal LLMs, on exported graphs or engines.

    from sinkprune import Pipeline

`runtime/steps/chain.py` is `sinkprune.runtime.steps.chain`: the folders at the top of the repository are links here.
Importing the package loads neither torch nor an engine library. A public name is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module

# Instead of `typing.TYPE_CHECKING`: importing `typing` would double the time until a command handles Ctrl-C.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from sinkprune.contract.errors import AccuracyError as AccuracyError
    from sinkprune.contract.errors import BackendError as BackendError
    from sinkprune.contract.errors import BagError as BagError
    from sinkprune.contract.errors import BudgetError as BudgetError
    from sinkprune.contract.errors import BundleError as BundleError
    from sinkprune.contract.errors import CheckpointError as CheckpointError
    from sinkprune.contract.errors import CostsWarning as CostsWarning
    from sinkprune.contract.errors import DeadlineError as DeadlineError
    from sinkprune.contract.errors import DividedPictureWarning as DividedPictureWarning
    from sinkprune.contract.errors import EnginesError as EnginesError
    from sinkprune.contract.errors import FewerFramesWarning as FewerFramesWarning
    from sinkprune.contract.errors import FirstFrameWarning as FirstFrameWarning
    from sinkprune.contract.errors import ImageError as ImageError
    from sinkprune.contract.errors import NewTokensError as NewTokensError
    from sinkprune.contract.errors import NoSensorError as NoSensorError
    from sinkprune.contract.errors import NumericsError as NumericsError
    from sinkprune.contract.errors import OptionError as OptionError
    from sinkprune.contract.errors import OutOfMemoryError as OutOfMemoryError
    from sinkprune.contract.errors import OutputError as OutputError
    from sinkprune.contract.errors import PartlySeenWarning as PartlySeenWarning
    from sinkprune.contract.errors import PictureWarning as PictureWarning
    from sinkprune.contract.errors import PowerError as PowerError
    from sinkprune.contract.errors import PromptError as PromptError
    from sinkprune.contract.errors import PruningError as PruningError
    from sinkprune.contract.errors import ScaledDownWarning as ScaledDownWarning
    from sinkprune.contract.errors import SinkpruneError as SinkpruneError
    from sinkprune.contract.errors import TaskError as TaskError
    from sinkprune.contract.errors import TooLittleMemoryError as TooLittleMemoryError
    from sinkprune.contract.errors import ToolsError as ToolsError
    from sinkprune.contract.errors import UnitsWarning as UnitsWarning
    from sinkprune.contract.errors import UnknownBoardError as UnknownBoardError
    from sinkprune.contract.errors import UnusualStateWarning as UnusualStateWarning
    from sinkprune.contract.errors import UsageError as UsageError
    from sinkprune.contract.errors import VideoError as VideoError
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
    "contract.errors": "AccuracyError BackendError BagError BudgetError BundleError CheckpointError CostsWarning "
    "DeadlineError DividedPictureWarning EnginesError FewerFramesWarning FirstFrameWarning ImageError "
    "NewTokensError NoSensorError NumericsError OptionError OutOfMemoryError OutputError "
    "PartlySeenWarning PictureWarning PowerError PromptError PruningError ScaledDownWarning "
    "SinkpruneError TaskError TooLittleMemoryError ToolsError UnitsWarning UnknownBoardError "
    "UnusualStateWarning UsageError VideoError",
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
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    """Return a public name, and load its module now."""
    if name not in _MODULES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return list(__all__)
