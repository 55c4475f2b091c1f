"""`quantization_config` of a checkpoint's config.json, for matrices that GPTQ or AWQ has quantised.

Its fields are those that AutoGPTQ, GPTQModel and AutoAWQ write and transformers reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypedDict

from sinkprune.contract.checks import Bounds
from sinkprune.contract.errors import CheckpointError
from sinkprune.contract.precision import WeightsName
from sinkprune.export.checkpoint.folder import Name, read_fields

# Engines have blocks of multiples of 32, and a group must be made of whole blocks.
_GROUP_UNIT = 32
_ALL_INPUTS = -1

_BITS = {"gptq": (4, 8), "awq": (4,)}
_LAYOUTS = {"gptq": ("gptq", "gptq_v2"), "awq": ("gemm",)}


class _Fields(TypedDict, total=False):
    quant_method: Name
    bits: Annotated[int, Bounds(1, 64)]
    group_size: Annotated[int, Bounds(_ALL_INPUTS, 1 << 20)] | None
    desc_act: bool | None
    sym: bool | None
    zero_point: bool | None
    checkpoint_format: Name | None
    format: Name | None
    version: Name | None
    is_marlin_format: bool | None


class _Place(TypedDict, total=False):
    quantization_config: _Fields | None


class _Places(_Place, total=False):
    text_config: _Place | None


@dataclass(frozen=True)
class Quantisation:
    """How a checkpoint has quantised its matrices, and how it packs their codes."""

    method: str
    """`gptq` or `awq`."""
    bits: int
    """The bits of a code: 4 or 8."""
    group_size: int | None
    """The number of inputs that share a scale; None means all inputs."""
    symmetric: bool
    """Whether every zero point is the middle code."""
    reordered: bool
    """Whether inputs may belong to groups out of order (`desc_act`)."""
    zeros_less_one: bool
    """Whether zero points are stored less one, as in GPTQ's first layout."""

    @property
    def form(self) -> WeightsName:
        """The form of the repacked matrices."""
        if self.bits == 8:
            return "int8"
        return "int4" if self.symmetric else "uint4"

    def repacks(self, requested: WeightsName | None) -> bool:
        """Return whether the export keeps the codes, if it requests the form `requested`, or None.

        int8 has no zero points, and on request one scale for each output.
        """
        if self.bits == 8 and not self.symmetric:
            return False
        return requested is None or (requested == self.form and (self.bits == 4 or self.group_size is None))


def read_quantisation(source: str, config: Mapping[str, Any]) -> Quantisation | None:
    """Return the quantisation in the config.json of the checkpoint `source`; None if its matrices are floats.

    Raises `CheckpointError` for malformed fields, and with the name of an unsupported setting.
    """
    where = f"checkpoint '{source}': config.json"
    known: Any = read_fields(_Places, config, where)
    found = known.get("quantization_config") or (known.get("text_config") or {}).get("quantization_config")
    if not found and config.get("quantization"):
        raise CheckpointError(
            f"{where}: quantization is MLX's, which is not read. Give the checkpoint that the MLX one was made of, "
            "and export it with --weights int4 or int8."
        )
    if not found:
        return None
    where += ": quantization_config."
    method = found.get("quant_method")
    _expect(where, "quant_method", method, tuple(_LAYOUTS))
    _expect(where, "bits", found.get("bits"), _BITS[method])
    if found.get("is_marlin_format"):
        raise _refusal(where, "is_marlin_format", "true", "false")
    # The names of the field, from the newest to the oldest. The first layouts had none.
    name = next((key for key in ("checkpoint_format", "format", "version") if found.get(key)), None)
    layout = found[name].lower() if name else _LAYOUTS[method][0]
    _expect(where, name or "format", layout, _LAYOUTS[method])
    group = found.get("group_size")
    group = 128 if group is None else group
    if group != _ALL_INPUTS and (group < _GROUP_UNIT or group % _GROUP_UNIT):
        raise _refusal(where, "group_size", group, f"a multiple of {_GROUP_UNIT}, or -1 for all inputs")
    if method == "awq" and found.get("zero_point") is False:
        raise _refusal(where, "zero_point", "false", "true")
    return Quantisation(
        method=method,
        bits=found["bits"],
        group_size=None if group == _ALL_INPUTS else group,
        symmetric=method == "gptq" and found.get("sym") is not False,
        reordered=method == "gptq" and bool(found.get("desc_act")),
        zeros_less_one=layout == "gptq",
    )


def _expect(where: str, name: str, found: Any, supported: tuple[Any, ...]) -> None:
    if found not in supported:
        raise _refusal(where, name, repr(found), " or ".join(map(str, supported)))


def _refusal(where: str, name: str, found: Any, expected: str) -> CheckpointError:
    return CheckpointError(
        f"{where}{name} is {found}, expected {expected}; others are not read. Give the unquantised checkpoint, and "
        "export it with --weights int4 or int8."
    )
