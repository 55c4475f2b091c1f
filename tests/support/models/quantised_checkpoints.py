"""Checkpoints as AutoGPTQ, GPTQModel and AutoAWQ write them, packed value by value out of small float ones.

The layouts are those of AutoGPTQ's `QuantLinear.pack` and AutoAWQ's `WQLinear_GEMM.from_linear`.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from sinkprune.contract.precision import Array

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
QUANTISED = re.compile(r"layers\.\d+\.(self_attn|mlp)\.\w+_proj\.weight$")
TOWER = re.compile(r"vision|visual")


@dataclass(frozen=True)
class Layout:
    """What published checkpoints differ in."""

    method: str = "gptq"
    bits: int = 4
    group_size: int = 32
    sym: bool = True
    desc_act: bool = False
    version_2: bool = False
    """Whether GPTQ's zero points are stored as they are, not less one."""
    one_order: bool = False
    """With `desc_act`: whether all matrices of as many inputs have their groups in one order, as GPTQ gives those of
    the same inputs."""
    kept: str = ""
    """Matrices with this in their name stay floats."""

    @property
    def config(self) -> dict[str, Any]:
        """`quantization_config`, with the fields that the library writes and nobody here reads."""
        common = {"quant_method": self.method, "bits": self.bits, "group_size": self.group_size}
        if self.method == "awq":
            own = {"version": "gemm", "zero_point": True, "modules_to_not_convert": ["vision_tower", "visual"]}
        else:
            layout = {"checkpoint_format": "gptq_v2"} if self.version_2 else {}
            own = {"sym": self.sym, "desc_act": self.desc_act, "damp_percent": 0.01, "dynamic": None, **layout}
        return {**common, **own}


@dataclass(frozen=True)
class Codes:
    """A matrix as it is quantised."""

    codes: Array
    """[inputs,outputs] whole numbers from 0 on."""
    scales: Array
    """[groups,outputs] fp16."""
    zeros: Array
    """[groups,outputs] whole numbers."""
    groups: Array
    """[inputs]: each input's group."""

    @property
    def matrix(self) -> Array:
        """[outputs,inputs] fp32."""
        scales = self.scales[self.groups].astype(np.float32)
        return ((self.codes - self.zeros[self.groups]) * scales).astype(np.float32).T


def quantise(weight: Array, layout: Layout, rng: np.random.Generator) -> Codes:
    """Codes near `weight` [outputs,inputs]; with `desc_act` groups are of inputs in an order of chance."""
    outputs, inputs = weight.shape
    size, most = inputs if layout.group_size == -1 else layout.group_size, (1 << layout.bits) - 1
    groups = np.arange(inputs) // size
    if layout.desc_act:
        (np.random.default_rng(inputs) if layout.one_order else rng).shuffle(groups)
    count, middle = inputs // size, (most + 1) // 2
    scales, zeros = np.zeros((count, outputs), np.float16), np.full((count, outputs), middle)
    codes = np.zeros((inputs, outputs), int)
    for group in range(count):
        values = weight[:, groups == group].astype(np.float64)
        if layout.sym and layout.method == "gptq":
            scales[group] = np.abs(values).max(axis=1) / (middle - 1)
        else:
            low, high = values.min(axis=1), values.max(axis=1)
            scales[group] = (high - low) / most
            # Whatever may be stored less one
            zeros[group] = np.clip(np.rint(-low / scales[group]), 1, most)
        codes[groups == group] = np.clip(np.rint(values / scales[group][:, None]).T + zeros[group], 0, most)
    return Codes(codes, scales, zeros, groups)


def packed_rows(values: Array, bits: int) -> Array:
    """int32 words [rows * bits / 32, columns] of `values` [rows,columns], the first row in the lowest bits."""
    return np.ascontiguousarray(packed_columns(values.T, bits).T)


def packed_columns(values: Array, bits: int, order: tuple[int, ...] | None = None) -> Array:
    """int32 words [rows, columns * bits / 32]; `order` says which of a word's columns each field holds."""
    each = 32 // bits
    columns = values.reshape(len(values), -1, each).astype(np.uint32)
    words = np.zeros(columns.shape[:2], np.uint32)
    for field, column in enumerate(order or range(each)):
        words |= columns[:, :, column] << np.uint32(bits * field)
    return words.view(np.int32)


def stored(name: str, layer: Codes, layout: Layout) -> dict[str, Array]:
    """The tensors of the matrix `name`, which ends in `.weight`."""
    tensors = {"scales": layer.scales}
    if layout.method == "awq":
        tensors["qweight"] = packed_columns(layer.codes, 4, AWQ_ORDER)
        tensors["qzeros"] = packed_columns(layer.zeros, 4, AWQ_ORDER)
    else:
        tensors["qweight"] = packed_rows(layer.codes, layout.bits)
        tensors["qzeros"] = packed_columns(layer.zeros if layout.version_2 else layer.zeros - 1, layout.bits)
        tensors["g_idx"] = layer.groups.astype(np.int32)
    return {name.replace("weight", part): tensor for part, tensor in tensors.items()}


@dataclass(frozen=True)
class Made:
    """A quantised checkpoint, and what it means."""

    folder: Path
    floats: Path
    """The checkpoint of its dequantised weights."""
    original: Path
    """The checkpoint before it was quantised."""
    layers: dict[str, Codes]
    """By the names of the float checkpoint's tensors."""


def make_quantised(original: Path, folder: Path, layout: Layout) -> Made:
    """The checkpoint `original` with its decoder's matrices quantised, below `folder`."""
    rng, tensors = np.random.default_rng(7), load_file(original / "model.safetensors")
    names = [name for name in tensors if QUANTISED.search(name) and not TOWER.search(name)]
    names = [name for name in names if not layout.kept or layout.kept not in name]
    layers = {name: quantise(tensors[name], layout, rng) for name in names}
    floats = {name: layers[name].matrix if name in layers else tensor for name, tensor in tensors.items()}
    held = {name: tensor for name, tensor in tensors.items() if name not in layers}
    for name, layer in layers.items():
        held |= stored(name, layer, layout)
    found = Made(folder / "quantised", folder / "floats", original, layers)
    for place, content in ((found.folder, held), (found.floats, floats)):
        shutil.copytree(original, place, ignore=shutil.ignore_patterns("*.safetensors"))
        arrays = {name: np.ascontiguousarray(tensor) for name, tensor in content.items()}
        save_file(arrays, place / "model.safetensors", metadata={"format": "pt"})
    change_config(found.folder, layout.config)
    return found


def change_config(folder: Path, quantisation: object) -> None:
    """Write `quantization_config` into a checkpoint's config.json."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantisation}))
