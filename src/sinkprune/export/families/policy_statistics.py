"""What a policy's checkpoint has about its training data: statistics, the names of cameras, the length of prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypedDict

from sinkprune.contract.checks.fields import Bounds
from sinkprune.contract.errors import CheckpointError
from sinkprune.contract.image_settings import Number
from sinkprune.contract.manifest import NumberRanges
from sinkprune.export.checkpoint.folder import Name, read_fields

_Number = Annotated[Number, Bounds(-1e6, 1e6)]
_Statistics = Annotated[list[_Number], Bounds(1, 1 << 12)]


class _PolicyFields(TypedDict, total=False):
    """Fields of transformers' PI0Processor, and those that a checkpoint of LeRobot is given."""

    state_mean: _Statistics | None
    state_std: _Statistics | None
    actions_mean: _Statistics | None
    actions_std: _Statistics | None
    state_low: _Statistics
    state_high: _Statistics
    actions_low: _Statistics
    actions_high: _Statistics
    state_width: Annotated[int, Bounds(1, 1 << 12)]
    actions_width: Annotated[int, Bounds(1, 1 << 12)]
    cameras: Annotated[list[Name], Bounds(1, 64)]
    most_prompt_tokens: Annotated[int, Bounds(1, 1 << 14)]


def statistics_of(source: str, settings: Mapping[str, Any], widths: Mapping[str, int]) -> dict[str, Any]:
    """Return the arguments of `PolicyFacts` that processor_config.json has, with `settings` as its content.

    `widths` are the most numbers of "state" and "actions". Raises `CheckpointError`.
    """
    found = read_fields(_PolicyFields, settings, f"checkpoint '{source}': processor_config.json")

    def check(expectation: str, found: Any, *, holds: bool) -> None:
        if not holds:
            raise CheckpointError(
                f"checkpoint '{source}': expected that {expectation}; found {found}. Correct processor_config.json."
            )

    def pair(name: str, first: str, second: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
        given: list[Any] = [found.get(f"{name}_{which}") or () for which in (first, second)]
        one, other = (tuple(map(float, values)) for values in given)
        lengths, most = (len(one), len(other)), widths[name]
        check(f"{name}_{first} and {name}_{second} have one length", lengths, holds=lengths[0] == lengths[1])
        check(f"{name}_{first} has at most {most} numbers", lengths[0], holds=lengths[0] <= most)
        return one, other

    facts: dict[str, Any] = {}
    for name, own in (("state", "state"), ("actions", "action")):
        mean, std = pair(name, "mean", "std")
        check(f"{name}_std has no number below 0", list(std), holds=all(value >= 0 for value in std))
        low, high = pair(name, "low", "high")
        facts |= {
            f"{own}_mean": mean,
            f"{own}_std": std,
            f"{own}_range": NumberRanges(low, high) if low else None,
            f"{own}_numbers": found.get(f"{name}_width"),
        }
    cameras = found.get("cameras")
    return {
        **facts,
        "cameras": tuple(cameras) if cameras else None,
        "most_prompt_tokens": found.get("most_prompt_tokens"),
    }
