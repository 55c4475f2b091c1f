"""The interface of an engine, and the data that passes through it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

ENGINES = ("sinkprune", "transformers", "openvino_genai", "llama_cpp")
"""The engines; each is a module `<name>_engine` of this package."""


class NotRunError(Exception):
    """An engine, or one form of it, cannot run here; the report prints the message as the reason."""


@dataclass(frozen=True)
class Question:
    """The question of a round, the same for every engine: one new picture, the words, the answer's length."""

    seed: int
    """The seed of the random picture, another in every round."""
    side: int
    """Pixels of the picture's sides."""
    text: str
    new_tokens: int
    way: str = "none"
    """One of the form's `ways`."""


@dataclass(frozen=True)
class Timing:
    """The milliseconds of one answer, from the picture in memory and the words to its tokens."""

    ttft: float
    """To the first token, with the preparation of the picture and the vision tower."""
    per_token: float
    """Mean of the tokens after the first."""
    input_tokens: int
    """Text and visual tokens that enter the decoder."""
    tokens: Sequence[int]
    """The answer's ids: noise, but in fp32 the same noise from all engines that compute the same model."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Known parts of `ttft`: `vision`, `prefill`, `select`."""

    @classmethod
    def of(
        cls, start: float, times: Sequence[float], vision_ms: float, input_tokens: int, tokens: Sequence[int]
    ) -> Timing:
        """Return the timing of an answer from the seconds of its start and of each token."""
        ttft = (times[0] - start) * 1e3
        per_token = (times[-1] - times[0]) * 1e3 / max(1, len(times) - 1)
        return cls(ttft, per_token, input_tokens, tokens, {"vision": vision_ms, "prefill": ttft - vision_ms})


@dataclass(frozen=True)
class Form:
    """One form of the model in one engine: its weights, and its precision of computing."""

    engine: str
    """One of `ENGINES`."""
    name: str
    """For example `int8`, or `ort-cpu fp32` if the engine has several backends."""
    bits: float
    """Bits of a decoder weight."""
    ways: tuple[str, ...] = ("none",)
    """The kinds of pruning that one load runs: budgets, or an engine's own names."""

    @property
    def label(self) -> str:
        """The names of engine and form."""
        return f"{self.engine.replace('_', '-')} {self.name}"


Answer = Callable[[Question], Timing]


@dataclass(frozen=True)
class Loaded:
    """A form in memory."""

    answer: Answer
    versions: Mapping[str, str]
    decoder_bytes: int | None
    """Bytes of weights that a token after the first reads; None if unknown."""


class Engine(Protocol):
    """The functions of a module `<name>_engine`."""

    def forms(self, config: Mapping[str, Any]) -> Sequence[Form]:
        """Return the forms of a model, by its config.json; raises `NotRunError` if there are none or no engine."""

    def prepare(self, form: Form, place: Path) -> None:
        """Convert `place / "checkpoint"` into the files in `place` that `load` reads, unless they exist."""

    def load(self, form: Form, place: Path, threads: int) -> Loaded:
        """Load the files of `prepare`, to compute with so many threads."""


def engine(name: str) -> Engine:
    """Return the module of an engine, which imports the engine's library inside its functions."""
    module: Engine = import_module(f"peer_engines.{name}_engine")
    return module


def need(package: str, distribution: str) -> None:
    """Raise `NotRunError` if `package`, which pip calls `distribution`, is not installed."""
    try:
        import_module(package)
    except Exception as error:
        # Native libraries raise many kinds of errors.
        reason = "is not installed" if isinstance(error, ModuleNotFoundError) else f"does not load ({error})"
        raise NotRunError(f"{distribution} {reason}; docs/peers.md says how to install it") from error
