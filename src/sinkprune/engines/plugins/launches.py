"""The kernel launches of `TopRho` and `DiversitySelect`, from raw device addresses. Needs no Triton.

The kernels are in `kernels.py`, their binaries come from `binaries.py`. A kernel's parameters are its
inputs, integers and outputs. Masks are int32, not bool: TensorRT's plugins take no BOOL (NvInferRuntimePlugin.h,
`PluginTensorDesc::type`), and the graph has casts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

COLUMNS = 64
"""The columns of `tokens` that one block of the kernel `top_rho` averages."""
ROWS = 32
"""The tokens that one block of the kernel `diversity_phase` compares at a time."""
MOST_BLOCKS = 128
"""The most blocks of a group. Each block finds the smallest similarities itself, so more blocks are not faster."""
SCRATCH_ROWS = 4
"""Rows of N fp32 that `DiversitySelect` needs for a group: scale, 1 / length, and the similarity twice."""
ALIGNMENT = 16
"""The fast kernels need `tokens` with a width in elements and an address in bytes that are multiples of this."""


@dataclass(frozen=True)
class Launch:
    """One kernel to enqueue; `binary(launch.kernel, launch.dtype, sm)` has its code and its threads."""

    kernel: str
    dtype: str
    """The type of the tokens: `float32`, `float16` or `bfloat16`."""
    grid: tuple[int, int, int]
    """Blocks along three axes."""
    arguments: tuple[np.uint64 | np.int32, ...]
    """Addresses are uint64, integers int32."""


def top_rho_grid(groups: int, width: int) -> tuple[int, int, int]:
    """Return the blocks of the kernel `top_rho`, whose one launch is all of `TopRho`: by columns, then groups."""
    return (-(-width // COLUMNS), groups, 1)


def top_rho_launches(addresses: Mapping[str, int], sizes: Mapping[str, int], dtype: str) -> list[Launch]:
    """Return the launch of `TopRho`: the mean of each group's `count` tokens of largest norm, and their mask.

    `addresses` by name: norms [G,N] fp32, tokens [G,N,D] of `dtype`; out: sink [G,1,D] of `dtype`, outlier [G,N]
    int32, 1 or 0. `sizes` are G, N, D and `count`, which is at least 1.
    """
    inputs, outputs = _addresses(addresses, "norms", "tokens"), _addresses(addresses, "sink", "outlier")
    integers = _integers(sizes["N"], sizes["D"], sizes["count"])
    return [Launch("top_rho", dtype, top_rho_grid(sizes["G"], sizes["D"]), (*inputs, *integers, *outputs))]


def diversity_phases(count: int, batch: int) -> int:
    """Return the number of phases of `DiversitySelect`: lengths, similarity to reserved tokens, then one a round."""
    return 2 + -(-count // batch)


def diversity_workspace(groups: int, n: int) -> int:
    """Return the bytes of workspace that `diversity_launches` needs: fp32 [G,4,N]."""
    return groups * SCRATCH_ROWS * n * 4


def diversity_launches(addresses: Mapping[str, int], sizes: Mapping[str, int], dtype: str) -> list[Launch]:
    """Return the launches of `DiversitySelect`, one a phase: `count` candidates a group, `batch` a round.

    Each round chooses the candidates that are least similar to the kept tokens.

    `addresses` by name: tokens [G,N,D] of `dtype`, candidate [G,N] int32, not 0 where true, at least `count` in each
    group, reserved [G,R] int64 (any address where R is 0); out: chosen [G,`count`] int64, ascending; workspace.
    `sizes` are G, N, D, R, `count` and `batch`. The last phase only chooses, so it takes one block a group.
    """
    n, width, count, batch = sizes["N"], sizes["D"], sizes["count"], sizes["batch"]
    kernel = variant("diversity_phase", width, addresses["tokens"])
    inputs = _addresses(addresses, "tokens", "candidate", "reserved")
    outputs = _addresses(addresses, "chosen", "workspace")
    phases = diversity_phases(count, batch) if count else 0
    launches = []
    for phase in range(phases):
        blocks = min(-(-n // ROWS), MOST_BLOCKS) if phase + 1 < phases else 1
        integers = _integers(n, width, sizes["R"], count, batch, phase, phase + 1)
        launches.append(Launch(kernel, dtype, (blocks, sizes["G"], 1), (*inputs, *integers, *outputs)))
    return launches


def variant(kernel: str, width: int, tokens: int = 0) -> str:
    """Return the name of `kernel` for rows of `width` elements at address `tokens`: vector loads need alignment."""
    return kernel if width % ALIGNMENT == 0 and tokens % ALIGNMENT == 0 else f"{kernel}_unaligned"


def _addresses(addresses: Mapping[str, int], *names: str) -> tuple[np.uint64, ...]:
    return tuple(np.uint64(addresses[name]) for name in names)


def _integers(*values: int) -> tuple[np.int32, ...]:
    return tuple(np.int32(value) for value in values)
