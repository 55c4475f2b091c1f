"""Folders of OpenVLA and OpenVLA-OFT: statistics of a data set, and action heads in files of their own.

The folder does not name its robot. Lengths of the statistics name the published ones; others need request.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypedDict

from sinkprune.contract.checks import Bounds, format_value
from sinkprune.contract.errors import CheckpointError, UsageError
from sinkprune.contract.manifest import Number
from sinkprune.export.checkpoint.folder import FolderContent, file_of, has_entry, read_fields, read_json
from sinkprune.export.checkpoint.torch_file import TorchFile

if TYPE_CHECKING:
    from sinkprune.export.source import ExportRequest

STATISTICS = "dataset_statistics.json"
_HEAD, _STATE = "action_head", "proprio_projector"
_REFUSED = {
    "vision_backbone": "is of a tower that the instruction modulates (FiLM)",
    "noisy_action_projector": "is of a diffusion head",
}
BOUNDS = {"q01-q99": ("q01", "q99"), "min-max": ("min", "max")}
"""The statistics that become -1 and 1, by the values of --bounds."""


class _Robot(NamedTuple):
    name: str
    chunk: int
    bounds: str


_ROBOTS = {
    (7, 8): _Robot("LIBERO", 8, "q01-q99"),
    (7, 7): _Robot("BRIDGE", 5, "q01-q99"),
    (14, 14): _Robot("ALOHA", 25, "min-max"),
}
"""The robots of OpenVLA-OFT's code (prismatic/vla/constants.py), by the numbers of an action and of a state."""

_Values = Annotated[list[Annotated[Number, Bounds(-1e6, 1e6)]], Bounds(1, 1 << 10)]


class _Numbers(TypedDict, total=False):
    q01: _Values
    q99: _Values
    min: _Values
    max: _Values
    mask: Annotated[list[bool], Bounds(1, 1 << 10)] | None


class _DataSet(TypedDict, total=False):
    action: _Numbers
    proprio: _Numbers | None


def read_openvla(request: ExportRequest, folder: Path, config: Mapping[str, Any]) -> FolderContent:
    """Read a folder; raises `CheckpointError`, and `UsageError` for options that it needs or does not have."""
    source = request.source
    parts = _parts(source, folder)
    kept = {name: value for name, value in config.items() if name != "norm_stats"}
    if not parts:
        if request.chunk or request.bounds:
            raise UsageError(
                f"--chunk and --bounds are for OpenVLA-OFT, and '{source}' is OpenVLA: it has no action head, and "
                "gives one action at a time. Leave them out."
            )
        action = _data_set(source, folder, config, request.unnorm_key).get("action", {})
        ends = {f"actions_{end}": values for end, values in _ends(source, "actions", action, "q01-q99").items()}
        return FolderContent(
            {"config.json": {**kept, "action_dim": len(ends["actions_low"])}, "processor_config.json": ends}, {}
        )
    head, state_dim = _head(source, folder, parts)
    data = _data_set(source, folder, config, request.unnorm_key)
    action, proprio = data.get("action", {}), data.get("proprio") or {}
    robot = _ROBOTS.get((head["action_dim"], len(proprio.get("q01", ()))))
    chunk, bounds = request.chunk or (robot and robot.chunk), request.bounds or (robot and robot.bounds)
    if chunk is None or bounds is None:
        known = ", ".join(f"{one.name} {sizes[0]} and {sizes[1]}" for sizes, one in _ROBOTS.items())
        raise UsageError(
            f"'{source}' has {head['action_dim']} numbers of an action and {len(proprio.get('q01', ()))} of a state, "
            f"and no file says how many actions a chunk has and which statistics became -1 and 1. Add --chunk N and "
            f"--bounds {' or '.join(BOUNDS)}, as in the training ({known} are known)."
        )
    statistics = {
        f"{name}_{end}": values
        for name, numbers in (("actions", action), *([("state", proprio)] if state_dim else []))
        for end, values in _ends(source, name, numbers, bounds).items()
    }
    for name, width in (("actions", head["action_dim"]), ("state", state_dim)):
        if len(statistics.get(f"{name}_low", ())) != width:
            raise _error(
                source,
                f"its statistics have {len(statistics.get(f'{name}_low', ()))} numbers of {name}, expected {width} "
                "by its .pt files",
                "Give the statistics of its training, or another --unnorm-key.",
            )
    made = {**kept, "model_type": "openvla_oft", "action_head": {**head, "chunk": chunk, "state_dim": state_dim}}
    # The checkpoint's own has names of classes alone.
    return FolderContent({"config.json": made, "processor_config.json": statistics}, parts)


def _error(source: str, found: str, remedy: str) -> CheckpointError:
    return CheckpointError(f"checkpoint '{source}': {found}. {remedy}")


def _parts(source: str, folder: Path) -> dict[str, str]:
    """Return the files of OpenVLA-OFT's head and of its projector of states, by their names; none for OpenVLA."""
    files = sorted(path.name for path in folder.glob("*checkpoint*.pt"))
    for name, what in _REFUSED.items():
        if own := [file for file in files if name in file]:
            raise _error(source, f"'{own[0]}' {what}", "Such variants of OpenVLA-OFT are not supported yet.")
    found = {name: [file for file in files if name in file] for name in (_HEAD, _STATE)}
    for name, own in found.items():
        if len(own) > 1:
            raise _error(
                source,
                f"it has {len(own)} files of the part {name}: {', '.join(own)}",
                "Keep the one of the step that you want.",
            )
    if not found[_HEAD] and (found[_STATE] or has_entry(folder, "lora_adapter")):
        raise _error(
            source,
            f"it is of OpenVLA-OFT's training and has no {_HEAD}--N_checkpoint.pt, so it decodes all tokens of its "
            "actions at once",
            "Discrete OpenVLA-OFT is not supported yet. Give a checkpoint with an L1 head, such as "
            "moojink/openvla-7b-oft-finetuned-libero-spatial.",
        )
    return {name: own[0] for name, own in found.items() if own}


def _head(source: str, folder: Path, parts: Mapping[str, str]) -> tuple[dict[str, int], int]:
    """Return the sizes of the action head, and the numbers of the state, 0 without a row for it."""
    with closing(TorchFile(file_of(folder, parts[_HEAD]))) as file:
        names = set(file.keys())
        if any(name.startswith("noise_predictor.") for name in names):
            raise _error(
                source, f"'{parts[_HEAD]}' is a diffusion head", "Such variants of OpenVLA-OFT are not supported yet."
            )
        blocks = {found[1] for name in names if (found := re.match(r"model\.mlp_resnet_blocks\.(\d+)\.", name))}
        if "model.fc2.bias" not in names or blocks != {str(place) for place in range(len(blocks))}:
            shown = format_value(", ".join(sorted(names)))
            raise _error(source, f"'{parts[_HEAD]}' has the tensors {shown}", "Expected those of an L1 head.")
        (width,) = file.get_slice("model.fc2.bias").get_shape()
    if _STATE not in parts:
        return {"action_dim": width, "blocks": len(blocks)}, 0
    with closing(TorchFile(file_of(folder, parts[_STATE]))) as file:
        if "fc1.weight" not in file.keys():  # noqa: SIM118  (it has no other way to ask)
            raise _error(source, f"'{parts[_STATE]}' has no fc1.weight", "Expected a projector of states.")
        state_dim = file.get_slice("fc1.weight").get_shape()[-1]
    return {"action_dim": width, "blocks": len(blocks)}, state_dim


def _data_set(source: str, folder: Path, config: Mapping[str, Any], key: str | None) -> _DataSet:
    """Return the statistics of the data set `key`, or of the only one. Their own file replaces config.json's."""
    own = has_entry(folder, STATISTICS)
    name, every = (STATISTICS, read_json(folder, STATISTICS)) if own else ("config.json", config.get("norm_stats"))
    if not isinstance(every, dict) or not every:
        raise _error(
            source,
            f"it has no {STATISTICS}, and config.json no norm_stats",
            "Add the statistics that the training wrote.",
        )
    if key is None and len(every) == 1:
        (key,) = every
    if key is None or key not in every:
        found = f"no data set '{key}'" if key else f"{len(every)} data sets, and none was chosen"
        raise UsageError(
            f"{name} of '{source}' has {found}. Add --unnorm-key with one of: {', '.join(map(str, every))}."
        )
    return read_fields(_DataSet, every[key], f"checkpoint '{source}': '{key}' of {name}")


def _ends(source: str, name: str, numbers: _Numbers, bounds: str) -> dict[str, list[float]]:
    """Return the numbers that become -1 and 1. Those that the mask leaves as they are have -1 and 1 themselves."""
    given: Mapping[str, Any] = numbers
    low, high = (given.get(end) for end in BOUNDS[bounds])
    mask = given.get("mask") or [True] * len(low or ())
    if not low or not high or not len(low) == len(high) == len(mask):
        raise _error(
            source,
            f"its statistics of {name} have {len(low or ())} values {BOUNDS[bounds][0]}, {len(high or ())} "
            f"{BOUNDS[bounds][1]} and {len(mask)} of mask, expected as many of each",
            "Correct them, or give other --bounds.",
        )
    return {
        "low": [float(value) if used else -1.0 for value, used in zip(low, mask, strict=True)],
        "high": [float(value) if used else 1.0 for value, used in zip(high, mask, strict=True)],
    }
