"""What a plugin enqueues: the kernel launches of `TopRho` and `DiversitySelect`, from raw device addresses.

Nothing of Triton is needed here. The kernels are in `kernels.py`, their binaries come from `binaries.py`. A kernel's
parameters stand in the order an ahead-of-time TensorRT plugin passes them: inputs, integers, outputs. Masks are
int32, not bool: TensorRT's plugins take no BOOL (NvInferRuntimePlugin.h, `PluginTensorDesc::type`); the graph casts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

COLUMNS = 64
"""How many columns of `tokens` one block of the kernel `top_rho` averages."""
ROWS = 32
"""How many tokens one block of the kernel `diversity_phase` compares at a time."""
MOST_BLOCKS = 128
"""The most blocks a group has: each finds the smallest similarities for itself, which more do not make faster."""
SCRATCH_ROWS = 4
"""Rows of N fp32 that `DiversitySelect` needs a group: scale, 1 / length, and the similarity twice."""
ALIGNMENT = 16
"""What the width of `tokens` in elements, and their address in bytes, must be multiples of for the fast kernels."""


@dataclass(frozen=True)
class Launch:
    """One kernel, ready to be enqueued: `binary(launch.kernel, launch.dtype, sm)` has its code and its threads."""

    kernel: str
    dtype: str
    """The type of the tokens: `float32`, `float16` or `bfloat16`."""
    grid: tuple[int, int, int]
    """Blocks along three axes."""
    arguments: tuple[np.uint64 | np.int32, ...]
    """Addresses are uint64, integers int32."""


def top_rho_grid(groups: int, width: int) -> tuple[int, int, int]:
    """The blocks of the kernel `top_rho`, whose one launch is the whole of `TopRho`: by columns, then groups."""
    return (-(-width // COLUMNS), groups, 1)


def top_rho_launches(
    *, norms: int, tokens: int, sink: int, outlier: int, dtype: str, groups: int, n: int, width: int, count: int
) -> list[Launch]:
    """`TopRho`: the mean of each group's `count` tokens of largest norm, and which those are.

    Addresses: norms [G,N] fp32, tokens [G,N,D]; out: sink [G,1,D] in the type of the tokens, outlier [G,N] int32,
    1 or 0. `count` is at least 1.
    """
    inputs, integers, outputs = _addresses(norms, tokens), _integers(n, width, count), _addresses(sink, outlier)
    return [Launch("top_rho", dtype, top_rho_grid(groups, width), (*inputs, *integers, *outputs))]


def diversity_phases(count: int, batch: int) -> int:
    """How many phases `DiversitySelect` has: row lengths, likeness to what is reserved, then one a round."""
    return 2 + -(-count // batch)


def diversity_workspace(groups: int, n: int) -> int:
    """Bytes of workspace that `diversity_launches` needs; as an output of one kernel, fp32 [G,4,N]."""
    return groups * SCRATCH_ROWS * n * 4


def diversity_launches(
    *,
    tokens: int,
    candidate: int,
    reserved: int,
    chosen: int,
    workspace: int,
    dtype: str,
    groups: int,
    n: int,
    width: int,
    reserves: int,
    count: int,
    batch: int,
) -> list[Launch]:
    """`DiversitySelect`: `count` candidates a group, `batch` a round, least like what is kept; one launch a phase.

    Addresses: tokens [G,N,D], candidate [G,N] int32, not 0 where true, at least `count` in each group, reserved
    [G,`reserves`] int64 (any address where `reserves` is 0); out: chosen [G,`count`] int64, ascending; workspace.
    The last phase only chooses, so it takes one block a group.
    """
    kernel = variant("diversity_phase", width, tokens)
    blocks = min(-(-n // ROWS), MOST_BLOCKS)
    phases = diversity_phases(count, batch)
    return [
        Launch(
            kernel,
            dtype,
            (blocks if phase + 1 < phases else 1, groups, 1),
            (
                *_addresses(tokens, candidate, reserved),
                *_integers(n, width, reserves, count, batch, phase, phase + 1),
                *_addresses(chosen, workspace),
            ),
        )
        for phase in range(phases if count else 0)
    ]


def in_one_launch(phases: list[Launch]) -> list[Launch]:
    """The launches of `diversity_launches` as one, of a block a group: as an ahead-of-time plugin has them."""
    first, last = phases[0], phases[-1]
    kernel = first.kernel.replace("diversity_phase", "diversity_select")
    arguments = (*first.arguments[:9], last.arguments[9], *first.arguments[10:])
    return [Launch(kernel, first.dtype, last.grid, arguments)]


def variant(kernel: str, width: int, tokens: int = 0) -> str:
    """The name of `kernel` for rows of `width` elements at address `tokens`: vector loads need both aligned."""
    return kernel if width % ALIGNMENT == 0 and tokens % ALIGNMENT == 0 else f"{kernel}_unaligned"


def _addresses(*values: int) -> tuple[np.uint64, ...]:
    return tuple(np.uint64(value) for value in values)


def _integers(*values: int) -> tuple[np.int32, ...]:
    return tuple(np.int32(value) for value in values)
