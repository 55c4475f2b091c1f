"""Errors a user can mend. Every message says what was found, what was expected and what to do.

A command turns any `SinkpruneError` into exit code 2 and its message, without a traceback; every other exception
is our bug and keeps its traceback (exit code 1). See `sinkprune.contract.command_line.command`.
"""

from __future__ import annotations


class SinkpruneError(Exception):
    """The base of all errors the user can mend."""


class CheckpointError(SinkpruneError):
    """A checkpoint is missing, damaged or of an architecture that is not supported."""


class BudgetError(SinkpruneError):
    """A budget, method or option is unknown, malformed or not in the bundle."""


class BundleError(SinkpruneError):
    """A bundle is missing, altered, of an unknown format or cannot be written."""


class EnginesError(SinkpruneError):
    """Engines are missing, altered, of an unknown format, or could not be built."""


class ImageError(SinkpruneError):
    """An image file is missing, damaged, not an image, or of an impossible size."""


class VideoError(ImageError):
    """A video is missing, damaged, without frames, or not what the bundle takes."""


class PromptError(SinkpruneError):
    """A prompt is empty or longer than the model can take."""


class PruningError(SinkpruneError):
    """Pruning was asked for and nothing was pruned."""


class BackendError(SinkpruneError):
    """An engine library or device is unknown, not installed or not usable."""


class OutputError(SinkpruneError):
    """A file the command was asked for cannot be written."""


class NumericsError(SinkpruneError):
    """A model gave values that are not finite, so no selection or token can be trusted."""


class UsageError(SinkpruneError):
    """An argument is outside its range."""


class OptionError(UsageError, TypeError):
    """A function was given an option that it does not have."""


class PowerError(SinkpruneError):
    """A power sensor may not be read, tells nothing of use, or has died."""


class NoSensorError(PowerError):
    """A power sensor is not there, or what reads it is not installed."""


class TaskError(SinkpruneError):
    """A task to evaluate on is unknown, or its file is missing or malformed."""


class AccuracyError(SinkpruneError):
    """Quantised weights change what a model gives by more than was allowed."""
