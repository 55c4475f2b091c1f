"""Sizes of a bundle in another form of weights, before it is exported again."""

from __future__ import annotations

from dataclasses import replace

from sinkprune.contract.files.manifest_file import FileSpec
from sinkprune.contract.manifest import Manifest
from sinkprune.contract.precision import BLOCK_SIZES, DTYPES, PrecisionName, WeightForms, WeightsName

_BITS: dict[WeightsName, int] = {"fp32": 32, "fp16": 16, "bf16": 16, "int8": 8, "int4": 4, "uint4": 4}
_IN_BLOCKS = ("int4", "uint4")


def manifest_in_form(manifest: Manifest, precision: PrecisionName, form: WeightsName) -> Manifest:
    """Return the manifest of an export with `--precision` and `--weights`, without the files' sums.

    As in the export, a tower next to quantised weights is int8, and blocks have 128 weights. All weights of a graph
    count as matrices of linear layers. Others are below 2 % of a tower, and less of a decoder.
    """
    quantised = form in ("int8", *_IN_BLOCKS)
    block = max(BLOCK_SIZES) if form in _IN_BLOCKS else None
    forms = WeightForms(form, "int8" if quantised else form, block)
    files = {
        f"graphs/weights/{graph}.bin": FileSpec(
            round(
                manifest.weight_bytes(graph)
                * _bits(forms, graph, precision)
                / _bits(manifest.weights, graph, manifest.precision)
            ),
            "",
        )
        for graph in manifest.graphs
        if manifest.weight_bytes(graph)
    }
    return replace(manifest, precision=precision, weights=forms, files={**manifest.files, **files})


def _bits(forms: WeightForms, graph: str, precision: PrecisionName) -> float:
    """Return the bits of a weight of `graph`, with its share of a block's scale and zero point."""
    form = forms.vision if graph == "vision" else forms.decoder
    if form not in _IN_BLOCKS:
        return _BITS[form]
    scale = 8 * DTYPES[precision].itemsize + (_BITS[form] if form == "uint4" else 0)
    return _BITS[form] + scale / (forms.block_size or max(BLOCK_SIZES))
