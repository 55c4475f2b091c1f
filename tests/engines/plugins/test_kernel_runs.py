"""How the cases of `test_kernels.py` reach a GPU, as far as a fake without kernels can show it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from sinkprune.engines.plugins.binaries import binary
from support.stand_ins import kernel_runs
from support.stand_ins.fake_device import FakeDevice
from support.stand_ins.kernel_runs import Case


class FakeGpu(FakeDevice):
    """Records kernels in place of running them."""

    def __init__(self) -> None:
        super().__init__(compute_capability=87)
        self.launched: list[tuple[Any, ...]] = []

    def load_kernel(self, image: bytes, name: str) -> Any:
        return image, name

    def launch(
        self, kernel: Any, grid: tuple[int, int, int], threads: int, shared_bytes: int, arguments: Sequence[Any]
    ) -> None:
        addresses = [int(argument) for argument in arguments if argument.dtype == "uint64"]
        assert set(addresses) <= set(self.allocations)
        self.launched.append((*kernel, grid, threads, shared_bytes, len(addresses)))


def cases(dtype: torch.dtype) -> list[Case]:
    generator = torch.Generator().manual_seed(0)
    # Not contiguous, as a test may have made them.
    tokens = torch.randn(2, 48, 40, generator=generator).to(dtype).transpose(1, 2)
    candidate, reserved = torch.rand(2, 40, generator=generator) < 0.5, torch.zeros(2, 0, dtype=torch.int64)
    return [
        kernel_runs.top_rho(tokens, torch.rand(2, 40, generator=generator), 3),
        kernel_runs.diversity(tokens, candidate, reserved, 7, 4),
        kernel_runs.diversity(tokens, candidate, reserved, 7, 4, single=True),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_tensors_go_to_the_device_and_come_back(dtype: torch.dtype) -> None:
    for case in cases(dtype):
        device = FakeGpu()
        found = kernel_runs.on(device)(case)
        assert device.allocations == {}
        for name, tensor in case.memory.items():
            assert found[name].dtype == tensor.dtype
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=0, equal_nan=True)


def test_the_shipped_kernels_are_launched() -> None:
    for case, kernels in zip(
        cases(torch.float16), (["top_rho"], ["diversity_phase"] * 4, ["diversity_select"]), strict=True
    ):
        device = FakeGpu()
        kernel_runs.on(device)(case)
        assert len(device.launched) == len(kernels)
        for (image, entry, grid, threads, shared_bytes, addresses), kernel in zip(
            device.launched, kernels, strict=True
        ):
            code = binary(kernel, "float16", 87)
            assert (image, entry, threads, shared_bytes) == (code.image, code.entry, code.threads, code.shared_bytes)
            assert grid[1:] == (2, 1)
            assert addresses == (4 if kernel == "top_rho" else 5)
