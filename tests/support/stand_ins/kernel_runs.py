"""Runs the kernel launches of the plugins, in Triton's interpreter on the CPU or compiled on a GPU."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from sinkprune.engines.plugins import launches
from sinkprune.engines.plugins.launches import KernelRunner, Launch
from sinkprune.runtime.device.cuda import Device

Memory = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """Launches, and the tensors that they read and write."""

    launches: Callable[[dict[str, int], dict[str, int], str], list[Launch]]
    """From the address of each tensor by name, `sizes`, and the type of the tokens."""
    memory: Memory
    sizes: dict[str, int]

    @property
    def dtype(self) -> str:
        return str(self.memory["tokens"].dtype).removeprefix("torch.")


Runner = Callable[[Case], Memory]
"""Returns the tensors of a case after its launches."""


def top_rho(tokens: torch.Tensor, norms: torch.Tensor, count: int) -> Case:
    """Return the case of `TopRho` on tokens [G,N,D] and norms [G,N], which writes `sink` and `outlier`."""
    groups, n, width = tokens.shape
    memory = {
        "tokens": tokens.contiguous(),
        "norms": norms.contiguous(),
        "sink": torch.full((groups, 1, width), torch.nan, dtype=tokens.dtype),
        "outlier": torch.full((groups, n), -1, dtype=torch.int32),
    }
    return Case(launches.top_rho_launches, memory, {"G": groups, "N": n, "D": width, "count": count})


def diversity(tokens: torch.Tensor, candidate: torch.Tensor, reserved: torch.Tensor, count: int, rounds: int) -> Case:
    """Return the case of `DiversitySelect` on tokens [G,N,D], candidate [G,N] and reserved [G,R]; writes `chosen`."""
    groups, n, width = tokens.shape
    memory = {
        "tokens": tokens.contiguous(),
        # Any value but 0 is true.
        "candidate": candidate.to(torch.int32) * 7,
        "reserved": reserved.contiguous(),
        "chosen": torch.full((groups, count), -1, dtype=torch.int64),
        "workspace": torch.full((launches.diversity_workspace(groups, n) // 4,), torch.nan),
    }
    sizes = {"G": groups, "N": n, "D": width, "R": reserved.shape[1], "count": count, "rounds": rounds}
    return Case(launches.diversity_launches, memory, sizes)


@contextmanager
def interpreter() -> Iterator[Runner]:
    """Yield a runner of kernels in Triton's interpreter, in a new process: the first import of triton selects it."""
    context = multiprocessing.get_context("spawn")
    with (
        pytest.MonkeyPatch.context() as patch,
        ProcessPoolExecutor(1, mp_context=context, initializer=_choose_interpreter) as pool,
    ):
        # The interpreter multiplies by numpy. OpenBLAS as it is for some processors (Haswell, Zen) gives equal rows
        # sums that differ by where they stand, which no GPU does.
        patch.setenv("OPENBLAS_CORETYPE", "Prescott")
        # As bytes: tensors would otherwise travel as shared memory.
        yield lambda case: pool.submit(_interpret, pickle.dumps(case)).result()


def _choose_interpreter() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)


def _interpret(pickled: bytes) -> Memory:
    from sinkprune.engines.plugins import kernels
    from sinkprune.engines.plugins.compile import configurations

    case: Case = pickle.loads(pickled)
    tensors = {tensor.data_ptr(): tensor for tensor in case.memory.values()}
    addresses = {name: tensor.data_ptr() for name, tensor in case.memory.items()}
    for launch in case.launches(addresses, case.sizes, case.dtype):
        configuration = configurations(launch.dtype)[launch.kernel]
        arguments = [tensors[int(a)] if isinstance(a, np.uint64) else int(a) for a in launch.arguments]
        getattr(kernels, configuration.function)[launch.grid](*arguments, **configuration.constants)
    return case.memory


def on(device: Device, kernels: KernelRunner) -> Runner:
    """Return what runs the shipped kernels on a GPU."""

    def run(case: Case) -> Memory:
        arrays = {name: _array(tensor.clone()) for name, tensor in case.memory.items()}
        addresses = {name: device.allocate(max(array.nbytes, 1)) for name, array in arrays.items()}
        try:
            for name, array in arrays.items():
                device.copy_in(addresses[name], array)
            kernels.run(case.launches(addresses, case.sizes, case.dtype), device.stream)
            for name, array in arrays.items():
                device.copy_out(array, addresses[name])
        finally:
            for address in addresses.values():
                device.free(address)
        return {name: torch.from_numpy(array).view(case.memory[name].dtype) for name, array in arrays.items()}

    return run


def _array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    # numpy has no bfloat16.
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
