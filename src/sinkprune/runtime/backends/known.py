"""The backends there are, and what is known of each before its library is imported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from sinkprune.contract.engines_manifest import Target

Compute = Literal["fastest", "bf16", "fp32"]
"""What a backend that has the choice computes in. Selection is in fp32 always.

`fastest`: in ort-cpu int8 for rows that meet quantised weights; in openvino bf16 where the processor has it, and
int8 for such rows where the library finds that faster; in openvino-gpu fp16, or int8 in the same way;
ort-cpu+openvino has the tower in openvino's types.
`bf16`: openvino alone, for all but selection. `fp32`: rows are not rounded, and openvino computes all in fp32.
"""
COMPUTES: tuple[Compute, ...] = get_args(Compute)
TOWER_IN = "; vision in "
"""Stands in reports between what graphs are computed in and what the vision tower is, where that is another."""


@dataclass(frozen=True)
class Traits:
    """What a backend is, in words of the contract."""

    target: Target
    """What its engines are built for (`sinkprune-build --target`)."""
    computes: tuple[Compute, ...] = ()
    """What it can be asked to compute in; nothing where it computes in the types of a bundle's graphs."""
    on_gpu: bool = False
    takes_threads: bool = True


KNOWN = {
    "ort-cpu": Traits("onnxruntime", ("fastest", "fp32")),
    "ort-cpu+openvino": Traits("onnxruntime+openvino", ("fastest", "fp32")),
    "ort-cuda": Traits("onnxruntime", on_gpu=True),
    "openvino": Traits("openvino", COMPUTES),
    "openvino-gpu": Traits("openvino", ("fastest", "fp32"), on_gpu=True, takes_threads=False),
    "tensorrt": Traits("tensorrt", on_gpu=True, takes_threads=False),
    "tensorrt-rtx": Traits("tensorrt-rtx", on_gpu=True, takes_threads=False),
}
"""By name. The first runs bundles where no backend is named, the first of a target its engines."""
BACKENDS = tuple(KNOWN)
ON_CPU = tuple(name for name, traits in KNOWN.items() if not traits.on_gpu)
