"""Checkpoints that GPTQ or AWQ has quantised: `quantization_config`, and matrices in their form or repacked.

Fields of `quantization_config` in config.json are those that AutoGPTQ, GPTQModel and AutoAWQ write and transformers
reads.

A matrix [outputs,inputs] has `qweight`, codes packed into 32-bit words. `scales` and `qzeros`, packed zero points,
hold for a group of inputs and an output. GPTQ adds `g_idx`, the group of each input. Value (o,i) is (code - zero) *
scale, as in AutoGPTQ's and GPTQModel's QuantLinear and in AutoAWQ's WQLinear_GEMM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import hypot
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import numpy as np
import onnx_ir as ir

from sinkprune.contract.checks import Bounds, escaped
from sinkprune.contract.errors import CheckpointError
from sinkprune.contract.precision import Array, WeightsName
from sinkprune.export.checkpoint.folder import Name, SafetensorsWeights, read_fields
from sinkprune.export.weights import Matrix, WeightForm, form_of
from sinkprune.export.weights.rounding import RoundedMatrix, block_of, dequantised

if TYPE_CHECKING:
    from sinkprune.export.graph import WeightedGraph

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


_WORD = 32
# The column, of a word's eight, of each of its fields, from the lowest bits up.
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


class QuantisedWeights:
    """A checkpoint's tensors, read one at a time: quantised matrices as floats, or as codes of a layer."""

    def __init__(self, weights: SafetensorsWeights, quantisation: Quantisation) -> None:
        self.quantisation = quantisation
        self._weights = weights

    def __contains__(self, name: object) -> bool:
        return name in self._weights or (isinstance(name, str) and self.quantised(name))

    def close(self) -> None:
        self._weights.close()

    def quantised(self, name: str) -> bool:
        """Return whether the matrix `name`, which ends in `.weight`, is stored as codes.

        Raises `CheckpointError` if it is also stored as floats.
        """
        found = name.endswith(".weight") and f"{name.removesuffix('weight')}qweight" in self._weights
        if found and name in self._weights:
            raise CheckpointError(
                f"checkpoint '{self._weights.folder}' holds '{name}' as floats and as codes (qweight), expected "
                "one of them. Download it again."
            )
        return found

    def tensor(self, name: str, shape: Sequence[int]) -> Array:
        """Return the tensor `name` of `shape`, dequantised if it is stored as codes; raises `CheckpointError`."""
        if not self.quantised(name):
            return self._weights.tensor(name, shape)
        outputs, inputs = shape
        return self.layer(name, inputs, outputs).dequantised()

    def layer(self, name: str, inputs: int, outputs: int) -> QuantisedLayer:
        """Return the quantised matrix `name` [outputs,inputs]; raises `CheckpointError`."""
        return QuantisedLayer(self._weights, self.quantisation, name, inputs, outputs)


class QuantisedLayer:
    """A matrix [outputs,inputs] as codes, scales and zero points. Each call reads them again.

    The inputs are in an order that puts the inputs of a group together. All methods raise `CheckpointError`.
    """

    def __init__(
        self, weights: SafetensorsWeights, quantisation: Quantisation, name: str, inputs: int, outputs: int
    ) -> None:
        self._weights, self._quantisation = weights, quantisation
        self._name, self._inputs, self._outputs = name.removesuffix(".weight"), inputs, outputs
        self.group: int = quantisation.group_size or inputs
        """The number of inputs that share a scale."""
        self._fields = _WORD // quantisation.bits
        if inputs % self.group:
            raise self._wrong(f"has {inputs} inputs", f"a multiple of {self.group}, which share a scale")
        for what, count in (("inputs", inputs), ("outputs", outputs)):
            if count % self._fields:
                raise self._wrong(f"has {count} {what}", f"a multiple of {self._fields}, which share a word")
        self.order: Array | None = self._order()
        """The inputs [inputs] int64 in the order of the codes; None if it is the layer's own order."""

    def codes(self) -> Array:
        """Return [inputs,outputs] uint8, from 0 on, inputs in their `order`."""
        name, fields = f"{self._name}.qweight", self._fields
        if self._quantisation.method == "awq":
            words = self._weights.integers(name, [self._inputs, self._outputs // fields])
            codes = self._unpacked_columns(words)
        else:
            words = self._weights.integers(name, [self._inputs // fields, self._outputs])
            codes = np.empty((self._inputs, self._outputs), np.uint8)
            for place in range(fields):
                codes[place::fields] = self._field(words, place)
        return codes if self.order is None else codes[self.order]

    def scales(self) -> Array:
        """Return [groups,outputs] floats, as stored."""
        return self._weights.tensor(f"{self._name}.scales", [self._inputs // self.group, self._outputs])

    def zeros(self) -> Array:
        """Return [groups,outputs] uint8: the codes of zero."""
        shape = [self._inputs // self.group, self._outputs // self._fields]
        zeros = self._unpacked_columns(self._weights.integers(f"{self._name}.qzeros", shape))
        most = (1 << self._quantisation.bits) - 1
        if self._quantisation.zeros_less_one:
            # Engines differ in reading it: as zero, or as the code after the last.
            if zeros.max() == most:
                raise self._wrong(
                    f"stores the zero point {most}, less one", f"at most {most - 1}, which all engines read alike"
                )
            zeros += 1
        middle = (most + 1) // 2
        if self._quantisation.symmetric and (zeros != middle).any():
            odd = int(zeros[zeros != middle][0])
            raise self._wrong(
                f"has the zero point {odd}", f"{middle} alone, because config.json declares symmetric codes"
            )
        return zeros

    def dequantised(self) -> Array:
        """Return [outputs,inputs] fp32, inputs in their own order; not finite if scales are infinite or too large."""
        values = self.codes().astype(np.float32).reshape(-1, self.group, self._outputs)
        values -= self.zeros()[:, None]
        # `Precision.converted` rejects what is not finite.
        with np.errstate(invalid="ignore", over="ignore"):
            values *= self.scales()[:, None]
        matrix = values.reshape(self._inputs, self._outputs)
        if self.order is not None:
            matrix = matrix[np.argsort(self.order)]
        return np.ascontiguousarray(matrix.T)

    def _order(self) -> Array | None:
        """Return the order of `g_idx`, which a checkpoint may leave out if groups are in order."""
        name = f"{self._name}.g_idx"
        if self._quantisation.method == "awq" or not (name in self._weights or self._quantisation.reordered):
            return None
        groups = self._weights.integers(name, [self._inputs])
        if (groups == np.arange(self._inputs) // self.group).all():
            return None
        count = self._inputs // self.group
        if groups.min() < 0 or groups.max() >= count:
            raise self._wrong(f"has inputs of group {groups.min()} to {groups.max()} (g_idx)", f"0 to {count - 1}")
        sizes = np.bincount(groups, minlength=count)
        if (sizes != self.group).any():
            raise self._wrong(f"has groups of {sizes.min()} to {sizes.max()} inputs (g_idx)", f"{self.group} in each")
        return np.argsort(groups, kind="stable")

    def _unpacked_columns(self, words: Array) -> Array:
        awq = self._quantisation.method == "awq"
        values = np.empty((len(words), words.shape[1] * self._fields), np.uint8)
        for place in range(self._fields):
            column = _AWQ_COLUMNS[place] if awq else place
            values[:, column :: self._fields] = self._field(words, place)
        return values

    def _field(self, words: Array, place: int) -> Array:
        """Return the values in the same bits of all `words`."""
        bits = self._quantisation.bits
        return (words.view(np.uint32) >> np.uint32(bits * place)) & np.uint32((1 << bits) - 1)

    def _wrong(self, found: str, expected: str) -> CheckpointError:
        return CheckpointError(
            f"checkpoint '{self._weights.folder}': the quantised matrix '{self._name}' {found}, expected {expected}. "
            "Download it again, or give the unquantised checkpoint."
        )


class CheckpointForm(WeightForm):
    """One form for the matrices that the checkpoint has quantised, another for those that it has left in floats."""

    def __init__(self, weights: QuantisedWeights, quantised: WeightForm, floats: WeightForm) -> None:
        self._weights, self._quantised, self._floats = weights, quantised, floats
        self.least_opset = max(quantised.least_opset, floats.least_opset)

    def matrix(self, graph: WeightedGraph, matrix: Matrix) -> ir.Value:
        return self._form(matrix).matrix(graph, matrix)

    def input_order(self, matrix: Matrix) -> Array | None:
        return self._form(matrix).input_order(matrix)

    def joins(self, matrix: Matrix) -> bool:
        """Return whether the checkpoint has quantised all parts, or none, and their form joins them."""
        same = len({self._weights.quantised(name) for name in matrix.parts}) == 1
        return same and self._form(matrix).joins(matrix)

    def _form(self, matrix: Matrix) -> WeightForm:
        """Return the form of the first part, which all parts of a joined matrix have."""
        return self._quantised if self._weights.quantised(next(iter(matrix.parts))) else self._floats


class RepackedForm(WeightForm):
    """Codes, scales and zero points of the checkpoint.

    A scale holds for a block of at most `most_in_block` inputs. A group's scale is repeated for each of its blocks,
    because engines have fast kernels for few block sizes. With 8 bits and one group, each output has one scale.
    """

    def __init__(self, weights: QuantisedWeights, most_in_block: int | None, on_read: Callable[[int], None]) -> None:
        """`on_read` receives the number of weights of each matrix that is read."""
        self._weights, self._most_in_block, self._on_read = weights, most_in_block, on_read
        self.least_opset = 19 if most_in_block is None else 21

    def input_order(self, matrix: Matrix) -> Array | None:
        return self._layers(matrix)[0].order

    def joins(self, matrix: Matrix) -> bool:
        """Return whether all parts take their inputs in the same order."""
        orders = {None if layer.order is None else layer.order.tobytes() for layer in self._layers(matrix)}
        return len(orders) == 1

    def matrix(self, graph: WeightedGraph, matrix: Matrix) -> ir.Value:
        layers, quantisation = self._layers(matrix), self._weights.quantisation
        form, group = quantisation.form, layers[0].group
        block = None if self._most_in_block is None else block_of(matrix.name, group, self._most_in_block)

        def by_block(by_group: Sequence[Array]) -> Array:
            return np.repeat(_beside(by_group), group // (block or group), axis=0)

        def read() -> list[Array]:
            codes = _beside([layer.codes() for layer in layers])
            self._on_read(codes.size)
            # Reading the zero points checks that a symmetric matrix has the middle code alone.
            zeros = by_block([layer.zeros() for layer in layers])
            parts = zip(matrix.parts, layers, strict=True)
            scales = by_block([graph.precision.converted(f"{part}.scale", layer.scales()) for part, layer in parts])
            if form == "uint4":
                return [codes, scales, zeros]
            return [(codes - np.uint8(1 << (quantisation.bits - 1))).view(np.int8), scales]

        return dequantised(graph, matrix, form, block, read)

    def _layers(self, matrix: Matrix) -> Sequence[QuantisedLayer]:
        return [self._weights.layer(name, matrix.inputs, outputs) for name, outputs in matrix.parts.items()]


def _beside(parts: Sequence[Array]) -> Array:
    """Return `parts` [n,outputs], one next to the other."""
    return np.concatenate(parts, axis=1)


@dataclass(frozen=True)
class Requantised:
    """A matrix that was rounded a second time."""

    layer: str
    norm: float
    """The root of the sum of its squares."""
    error: float
    """The root of the sum of the squares of its difference from the checkpoint."""

    @classmethod
    def between(cls, layer: str, weight: Array, found: Array) -> Requantised:
        """Compare the matrix `layer` of values `weight` with its rounded values `found`."""
        return cls(layer, float(np.linalg.norm(weight)), float(np.linalg.norm(found - weight)))

    @property
    def relative_error(self) -> float:
        """The error divided by the norm; 0 for a matrix of zeros."""
        return self.error / self.norm if self.norm else 0.0


def reporting_form(
    weights: QuantisedWeights, name: WeightsName, block_size: int | None, report: Callable[[Requantised], None]
) -> WeightForm:
    """Return the form `name`; `report` receives each matrix that the checkpoint had quantised."""

    def on_rounded(matrix: str, weight: Array, found: RoundedMatrix) -> None:
        if weights.quantised(matrix):
            report(Requantised.between(matrix, weight, found.values()))

    return form_of(name, block_size, on_rounded)


def decoder_form(
    weights: QuantisedWeights,
    rounded: WeightForm,
    floats: WeightForm,
    requested: WeightsName | None,
    block_size: int | None,
    on_read: Callable[[int], None],
) -> WeightForm:
    """Return the form of the decoder's matrices: their codes where `requested` keeps them, else `rounded`.

    `floats` is that of matrices that the checkpoint has not quantised. `on_read` is that of `RepackedForm`.
    """
    keeps_codes = weights.quantisation.repacks(requested)
    return CheckpointForm(weights, RepackedForm(weights, block_size, on_read) if keeps_codes else rounded, floats)


def summary(layers: Sequence[Requantised]) -> dict[str, Any]:
    """Return the number of layers, their relative L2 error together, and the layer with the largest error."""
    together = Requantised("", hypot(*(layer.norm for layer in layers)), hypot(*(layer.error for layer in layers)))
    largest = max(layers, key=lambda layer: layer.relative_error)
    return {
        "layers": len(layers),
        "relative_error": together.relative_error,
        "largest": {"layer": largest.layer, "relative_error": largest.relative_error},
    }


def in_words(errors: dict[str, Any]) -> str:
    """Return a `summary` as a line."""
    largest = errors["largest"]
    return (
        f"rounded a second time: {errors['layers']} matrices that the checkpoint had quantised, relative L2 error "
        f"{errors['relative_error']:.2%}; the largest is {largest['relative_error']:.2%}, "
        f"in {escaped(largest['layer'])}\n"
    )
