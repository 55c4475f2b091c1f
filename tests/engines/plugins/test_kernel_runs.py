"""How the cases of `test_kernels.py` reach a GPU, as far as a fake without kernels can show it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from sinkprune.engines.plugins.kernel_runner import KernelRunner
from sinkprune.engines.plugins.launches import Launch
from support.stand_ins import kernel_runs
from support.stand_ins.fake_device import FakeDevice
from support.stand_ins.kernel_runs import Case


class FakeRunner(KernelRunner):
    """Records launches in place of running them."""

    def __init__(self) -> None:
        self.device = FakeDevice()
        self.launched: list[Launch] = []

    def run(self, launches: Sequence[Launch], stream: int) -> None:
        assert stream == self.device.stream
        for launch in launches:
            addresses = {int(argument) for argument in launch.arguments if argument.dtype == "uint64"}
            assert addresses <= set(self.device.allocations)
            assert len(addresses) == (4 if launch.kernel == "top_rho" else 5)
        self.launched += launches


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
        runner = FakeRunner()
        found = kernel_runs.on(runner.device, runner)(case)
        assert runner.device.allocations == {}
        for name, tensor in case.memory.items():
            assert found[name].dtype == tensor.dtype
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=0, equal_nan=True)


def test_the_shipped_kernels_are_launched_on_memory_of_the_device() -> None:
    for case, kernels in zip(
        cases(torch.float16), (["top_rho"], ["diversity_phase"] * 4, ["diversity_select"]), strict=True
    ):
        runner = FakeRunner()
        kernel_runs.on(runner.device, runner)(case)
        assert [launch.kernel for launch in runner.launched] == kernels
        for launch in runner.launched:
            assert launch.dtype == "float16" and launch.grid[1:] == (2, 1)
