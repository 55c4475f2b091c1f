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

    from sinkprune.contract.errors import (
        AccuracyError,
        BackendError,
        BagError,
        BudgetError,
        BundleError,
        CheckpointError,
        CostsWarning,
        DeadlineError,
        DividedPictureWarning,
        EnginesError,
        FewerFramesWarning,
        FirstFrameWarning,
        ImageError,
        NewTokensError,
        NoSensorError,
        NumericsError,
        OptionError,
        OutOfMemoryError,
        OutputError,
        PartlySeenWarning,
        PictureWarning,
        PowerError,
        PromptError,
        PruningError,
        ScaledDownWarning,
        SinkpruneError,
        TaskError,
        TooLittleMemoryError,
        ToolsError,
        UnitsWarning,
        UnknownBoardError,
        UnusualStateWarning,
        UsageError,
        VideoError,
    )
    from sinkprune.contract.schedule import PictureSchedule, VisualLayout
    from sinkprune.deadlines.costs import (
        ActionCosts,
        BudgetCosts,
        Costs,
        Place,
        read_action_costs,
        read_costs,
        write_costs,
    )
    from sinkprune.deadlines.pipeline import Pipeline
    from sinkprune.policies.loop import ActionLimits, LoopFault, LoopReport, Observed, PolicyLoop
    from sinkprune.policies.policy import Policy
    from sinkprune.policies.report import ActionDeadline, ActionFlops, ActionReport
    from sinkprune.runtime.camera import Camera
    from sinkprune.runtime.hooks import Observer
    from sinkprune.runtime.loading import LoadOptions
    from sinkprune.runtime.media.clip import Clip
    from sinkprune.runtime.media.video_file import VideoFile
    from sinkprune.runtime.overlay import overlay
    from sinkprune.runtime.steps.answer import Answer, DeadlineReport
    from sinkprune.runtime.steps.decoding import Kept
    from sinkprune.runtime.steps.request import Request
    from sinkprune.runtime.stream import Stream
    from sinkprune.runtime.text.prompt import Turn
    from sinkprune.runtime.text.tools import ToolCall, Tools
    from sinkprune.serving.sessions import Session

__version__ = "0.1.0"
__all__ = [
    "AccuracyError",
    "ActionCosts",
    "ActionDeadline",
    "ActionFlops",
    "ActionLimits",
    "ActionReport",
    "Answer",
    "BackendError",
    "BagError",
    "BudgetCosts",
    "BudgetError",
    "BundleError",
    "Camera",
    "CheckpointError",
    "Clip",
    "Costs",
    "CostsWarning",
    "DeadlineError",
    "DeadlineReport",
    "DividedPictureWarning",
    "EnginesError",
    "FewerFramesWarning",
    "FirstFrameWarning",
    "ImageError",
    "Kept",
    "LoadOptions",
    "LoopFault",
    "LoopReport",
    "NewTokensError",
    "NoSensorError",
    "NumericsError",
    "Observed",
    "Observer",
    "OptionError",
    "OutOfMemoryError",
    "OutputError",
    "PartlySeenWarning",
    "PictureSchedule",
    "PictureWarning",
    "Pipeline",
    "Place",
    "Policy",
    "PolicyLoop",
    "PowerError",
    "PromptError",
    "PruningError",
    "Request",
    "ScaledDownWarning",
    "Session",
    "SinkpruneError",
    "Stream",
    "TaskError",
    "TooLittleMemoryError",
    "ToolCall",
    "Tools",
    "ToolsError",
    "Turn",
    "UnitsWarning",
    "UnknownBoardError",
    "UnusualStateWarning",
    "UsageError",
    "VideoError",
    "VideoFile",
    "VisualLayout",
    "overlay",
    "read_action_costs",
    "read_costs",
    "write_costs",
]

_NAMES = {
    "contract.schedule": "PictureSchedule VisualLayout",
    "deadlines.costs": "ActionCosts BudgetCosts Costs Place read_action_costs read_costs write_costs",
    "policies.loop": "ActionLimits LoopFault LoopReport Observed PolicyLoop",
    "policies.policy": "Policy",
    "policies.report": "ActionDeadline ActionFlops ActionReport",
    "runtime.camera": "Camera",
    "runtime.hooks": "Observer",
    "runtime.loading": "LoadOptions",
    "runtime.media.clip": "Clip",
    "runtime.media.video_file": "VideoFile",
    "runtime.overlay": "overlay",
    "deadlines.pipeline": "Pipeline",
    "runtime.steps.answer": "Answer DeadlineReport Kept",
    "runtime.steps.request": "Request",
    "runtime.stream": "Stream",
    "runtime.text.prompt": "Turn",
    "runtime.text.tools": "ToolCall Tools",
    "serving.sessions": "Session",
}
_MODULES = {name: f"sinkprune.{module}" for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Return a public name, and load its module now."""
    if name not in __all__:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    # Names without a row in the table are exceptions.
    return getattr(import_module(_MODULES.get(name, "sinkprune.contract.errors")), name)


def __dir__() -> list[str]:
    return list(__all__)
