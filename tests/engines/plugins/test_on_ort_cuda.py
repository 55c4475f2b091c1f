"""Kernels in sanitizers on ort-cuda: library, device and kernels are stand-ins, the cut graph is the real one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sinkprune import Pipeline, Policy
from sinkprune.engines.plugins import on_ort_cuda
from support.models.small_models import PI0_SHAPES, QWEN_SHAPES
from support.references.pi0 import INSTRUCTION
from support.references.same_answers import asked, assert_equal, kept_sets
from support.references.steps import ask
from support.stand_ins.fake_kernels import FakeKernels
from support.stand_ins.fake_ort_cuda import CudaRig

KERNELS = {"top_rho", "diversity_phase", "diversity_phase_unaligned"}


@pytest.fixture
def rig_of(monkeypatch: pytest.MonkeyPatch, bundle: Callable[..., Path]) -> Callable[..., CudaRig]:
    """Return a rig of a bundle, with kernels or with the reason why there are none."""

    def make(name: str = "gqa-112", missing: str = "", **options: Any) -> CudaRig:
        rig = CudaRig(bundle(name, **options))
        monkeypatch.setattr(on_ort_cuda, "KernelRunner", lambda: FakeKernels(rig.device, missing))
        return rig

    return make


@pytest.mark.parametrize("budget", ["retain-64", "retain-64+keep-outliers"])
@pytest.mark.parametrize("dialect", ["opset24", "opset20"])
def test_answers_are_those_of_the_function_bodies(
    budget: str, dialect: str, rig_of: Callable[..., CudaRig], photo: Image.Image
) -> None:
    rig = rig_of(budgets=(budget,), dialect=dialect)
    ours, theirs = rig.pipeline(), Pipeline.load(rig.bundle, threads=1)
    for turn in range(4):
        with rig.counted() as calls:
            assert_equal(ours, theirs, photo.rotate(turn), budget=budget)
        # Launched, then launched and recorded, then replayed.
        assert bool(calls.keys() & KERNELS) == (turn < 2)
    assert rig.report.without_kernels == {}
    captured = [name for name in rig.report.graphs if "sanitizer" in name]
    assert any("DiversitySelect" in name for name in captured)
    assert any(", part " in name for name in captured)


def test_the_host_reads_nothing_between_kernels(rig_of: Callable[..., CudaRig], photo: Image.Image) -> None:
    rig = rig_of(budgets=("retain-64",))
    ours, start = rig.pipeline(), 0
    for _ in range(3):
        start = len(rig.device.calls)
        ask(ours, photo, "retain-64", 1)
    calls = rig.device.calls[start:]
    assert "copy_out" not in calls[: len(calls) - 1 - calls[::-1].index("replayed graph")]
    assert calls.count("replay") == 2


def test_counts_that_depend_on_the_picture_are_read_once_for_each_size(
    rig_of: Callable[..., CudaRig], photo: Image.Image
) -> None:
    budget = "prune-77.8"
    rig = rig_of(min(QWEN_SHAPES), budgets=(budget,))
    ours, theirs, reads = rig.pipeline(), Pipeline.load(rig.bundle, threads=1), []
    for picture in (photo, photo.resize((300, 500)), photo, photo.resize((300, 500)), photo):
        with rig.counted() as calls:
            answer, _ = asked(ours, picture, budget=budget)
        reads.append(calls["copy_out"])
        assert kept_sets(answer) == kept_sets(asked(theirs, picture, budget=budget)[0])
    assert reads[0] == reads[1] > reads[2] == reads[3] == reads[4]
    assert rig.report.without_kernels == {}


def test_the_cameras_of_a_policy_are_sanitised_by_kernels(rig_of: Callable[..., CudaRig], photo: Image.Image) -> None:
    budget = "prune-77.8"
    rig = rig_of(min(PI0_SHAPES), budgets=(budget,), max_images=2)
    ours, theirs = rig.policy(), Policy.load(rig.bundle, threads=1)
    state = np.zeros(len(theirs.facts.usual_state))
    for seed in range(3):
        request = ([photo.rotate(seed), photo], INSTRUCTION, state)
        own, other = (policy.act(*request, budget=budget, seed=seed, steps=2) for policy in (ours, theirs))
        np.testing.assert_allclose(own.actions, other.actions, atol=1e-5)
    assert rig.report.without_kernels == {}


def test_without_kernels_for_a_gpu_the_function_bodies_run_and_the_report_says_why(
    rig_of: Callable[..., CudaRig], photo: Image.Image
) -> None:
    missing = "the kernel top_rho is shipped for sm_80, and this GPU is sm_61."
    rig = rig_of(missing=missing, budgets=("retain-64",))
    assert_equal(rig.pipeline(), Pipeline.load(rig.bundle, threads=1), photo, budget="retain-64")
    assert [missing in reason for reason in rig.report.without_kernels.values()] == [True]
