"""Errors that a user can mend. Every message has what was found, what was expected and what to do.

A command turns any `SinkpruneError` into exit code 2 and its message, without a traceback; every other exception
is our bug and keeps its traceback (exit code 1). See `sinkprune.contract.command_line.command`.
"""


class SinkpruneError(Exception):
    """The base of all errors that the user can mend."""


class CheckpointError(SinkpruneError):
    """A checkpoint is missing, damaged or of an architecture that is not supported."""


class BudgetError(SinkpruneError):
    """A budget, method or option is unknown, malformed or not in the bundle."""


class BundleError(SinkpruneError):
    """A bundle is missing, altered, of an unknown format or cannot be written."""


class EnginesError(SinkpruneError):
    """Engines are missing, altered, of an unknown format, or could not be built."""


class OutOfMemoryError(EnginesError):
    """Building an engine needs more memory than there is."""


class TooLittleMemoryError(SinkpruneError):
    """Running or calibrating a bundle needs more memory than is free."""


class UnknownBoardError(SinkpruneError):
    """No board has this name."""


class ImageError(SinkpruneError):
    """An image file is missing, damaged, not an image, or of an impossible size."""


class VideoError(ImageError):
    """A video is missing, damaged, without frames, or not what the bundle takes."""


class BagError(SinkpruneError):
    """A recording of a robot is missing, damaged, or has no pictures in the topic."""


class PromptError(SinkpruneError):
    """A prompt is empty or longer than the model can take."""


class NewTokensError(PromptError):
    """More new tokens were requested than engines were built for, or than the model has positions for."""


class ToolsError(PromptError):
    """The model's chat template cannot write tools or calls."""


class PruningError(SinkpruneError):
    """Pruning was requested and dropped nothing."""


class BackendError(SinkpruneError):
    """An engine library or device is unknown, not installed or not usable."""


class OutputError(SinkpruneError):
    """An output file cannot be written."""


class NumericsError(SinkpruneError):
    """A model returned values that are not finite, so no selection or token is reliable."""


class UsageError(SinkpruneError):
    """An argument is outside its range."""


class DeadlineError(UsageError):
    """A deadline was given, and the costs of requests are not known."""


class PictureWarning(UserWarning):
    """The model does not see a picture as it is. A pipeline warns once for each size of pictures."""


class PartlySeenWarning(PictureWarning):
    """The model does not see the sides of a picture."""


class FirstFrameWarning(PictureWarning):
    """The file of a picture has several frames or pages, and the model sees the first."""


class DividedPictureWarning(PictureWarning):
    """A picture of 16 bits a channel was scaled to 8: greyscale, such as a depth camera's, or colour that is nearly
    black now."""


class ScaledDownWarning(PictureWarning):
    """A picture was larger than the bundle's limit: the model sees it scaled down to less than 81 % of its pixels."""


class FewerFramesWarning(PictureWarning):
    """A clip was longer than the bundle's limit, and the model sees fewer frames of it a second."""


class UnusualStateWarning(UserWarning):
    """Numbers of a robot's state are far outside the training data of its policy."""


class UnitsWarning(UserWarning):
    """A policy's states or actions are not in the robot's units, because its checkpoint has no statistics of them."""


class CostsWarning(UserWarning):
    """Measured costs of requests are of a busy machine, or cannot be written for later processes."""


class OptionError(UsageError, TypeError):
    """A function has no such option."""


class PowerError(SinkpruneError):
    """A power sensor may not be read, returns nothing useful, or has failed."""


class NoSensorError(PowerError):
    """A power sensor does not exist, or its library is not installed."""


class TaskError(SinkpruneError):
    """A task to evaluate on is unknown, or its file is missing or malformed."""


class AccuracyError(SinkpruneError):
    """Quantised weights change the model's outputs by more than the limit."""
