"""What an engine has to tell and do to be measured beside the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

ENGINES = ("sinkprune", "transformers", "openvino_genai", "llama_cpp")
"""The modules of this package that hold an engine: `<name>_engine`."""


class NotRunError(Exception):
    """This engine, or one form of it, cannot be run here; the message is the reason that the report gives."""


@dataclass(frozen=True)
class Question:
    """What every engine is asked in a round: one new picture, the same words, answers of one length."""

    seed: int
    """Of the random picture: no two rounds show the same."""
    side: int
    """Pixels of the picture's sides."""
    text: str
    new_tokens: int
    way: str = "none"
    """One of the form's `ways`."""


@dataclass(frozen=True)
class Timing:
    """What one answer took, in milliseconds, from the picture in memory and the words to its tokens."""

    ttft: float
    """To the first token; preparing the picture and the vision tower are in it."""
    per_token: float
    """Mean of the tokens behind the first."""
    input_tokens: int
    """Text and visual tokens as the decoder first sees them."""
    tokens: Sequence[int]
    """The answer's ids: noise, but in fp32 the same noise from everybody who computes the same model."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Of `ttft`, where the engine tells: `vision`, `prefill`, `select`."""


@dataclass(frozen=True)
class Form:
    """One form of the model in one engine: its weights, and what it computes in."""

    engine: str
    """One of `ENGINES`."""
    name: str
    """As in `int8`, or `ort-cpu fp32` where the engine has several backends."""
    bits: float
    """Of a decoder weight, for comparing like with like."""
    ways: tuple[str, ...] = ("none",)
    """What of pruning is asked for, within one load: budgets, or an engine's own words."""

    @property
    def label(self) -> str:
        """Engine and form in one."""
        return f"{self.engine.replace('_', '-')} {self.name}"


Answer = Callable[[Question], Timing]


@dataclass(frozen=True)
class Loaded:
    """A form that is in memory."""

    answer: Answer
    versions: Mapping[str, str]
    decoder_bytes: int | None
    """Weights that a token behind the first has read; None where it cannot be told."""


class Engine(Protocol):
    """What a module `<name>_engine` holds."""

    def forms(self, config: Mapping[str, Any]) -> Sequence[Form]:
        """The forms it has of a model, by its config.json.

        Raises `NotRunError` where it takes the model in none, or is not installed.
        """

    def prepare(self, form: Form, place: Path) -> None:
        """Convert `place / "checkpoint"` into what `load` reads, beside it, unless it is there already."""

    def load(self, form: Form, place: Path, threads: int) -> Loaded:
        """Load what `prepare` made, to compute with so many threads."""


def engine(name: str) -> Engine:
    """The module of an engine; it imports what it is about inside its functions."""
    module: Engine = import_module(f"peer_engines.{name}_engine")
    return module


def need(package: str, distribution: str) -> None:
    """Raise `NotRunError` where `package`, which pip calls `distribution`, is not installed."""
    try:
        import_module(package)
    except Exception as error:
        # Native libraries raise of many kinds.
        reason = "is not installed" if isinstance(error, ModuleNotFoundError) else f"does not load ({error})"
        raise NotRunError(f"{distribution} {reason}; docs/peers.md says how to install it") from error
