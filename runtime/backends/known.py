"""The backends there are, and what is known of each before its library is imported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from sinkprune.contract.engines_manifest import Target

Compute = Literal["fastest", "bf16", "fp32"]
"""What a backend that has the choice computes in. Selection is in fp32 always.

`fastest`: int8 for rows that meet int8 or int4 weights, and in openvino bf16 for the rest where the processor has it;
in openvino-gpu fp16, or int8 where the library chooses it; ort-cpu+openvino has the tower in openvino's types.
`bf16`: openvino alone, for all but selection. `fp32`: rows are not rounded, and openvino computes all in fp32.
"""
COMPUTES: tuple[Compute, ...] = get_args(Compute)


@dataclass(frozen=True)
class Traits:
    """What a backend is, in words of the contract."""

    target: Target | None
    """What its engines are built for (`sinkprune-build --target`); None for one that runs bundles only."""
    computes: tuple[Compute, ...] = ()
    """What it can be asked to compute in; nothing where it computes in the types of a bundle's graphs."""
    on_gpu: bool = False
    takes_threads: bool = True


KNOWN = {
    "ort-cpu": Traits("onnxruntime", ("fastest", "fp32")),
    "ort-cpu+openvino": Traits(None, ("fastest", "fp32")),
    "ort-cuda": Traits("onnxruntime", on_gpu=True),
    "openvino": Traits("openvino", COMPUTES),
    "openvino-gpu": Traits("openvino", ("fastest", "fp32"), on_gpu=True, takes_threads=False),
    "tensorrt": Traits("tensorrt", on_gpu=True, takes_threads=False),
    "tensorrt-rtx": Traits("tensorrt-rtx", on_gpu=True, takes_threads=False),
}
"""By name. The first runs bundles where no backend is named, the first of a target its engines."""
BACKENDS = tuple(KNOWN)
ON_CPU = tuple(name for name, traits in KNOWN.items() if not traits.on_gpu)
