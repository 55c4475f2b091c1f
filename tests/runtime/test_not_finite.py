"""A vision tower whose numbers are not finite is refused: selection by NaN would choose anything."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from commands import assert_refused, run
from sinkprune import Pipeline
from sinkprune.contract.errors import NumericsError


@pytest.fixture(params=[np.nan, np.inf], ids=str)
def broken(request: pytest.FixtureRequest, bundle: Callable[..., Path], tmp_path: Path) -> Path:
    """A bundle whose vision weights are all of one number, which is not finite."""
    path = shutil.copytree(bundle("gqa-112"), tmp_path / "broken")
    weights = path / "graphs" / "weights" / "vision.bin"
    np.full(weights.stat().st_size // 4, request.param, np.float32).tofile(weights)
    return path


@pytest.mark.parametrize("budget", ["retain-64", "none"])
def test_features_that_are_not_finite_are_refused(broken: Path, photo: Image.Image, budget: str) -> None:
    pipeline = Pipeline.load(broken, check_sums=False)
    with pytest.raises(NumericsError, match=r"norms or salience that are not finite.*--precision fp32"):
        pipeline.generate(photo, "What is this?", budget=budget, max_new_tokens=2)


def test_the_command_refuses_them_too(broken: Path, photo_file: Path) -> None:
    options = ("--skip-sums", "--image", photo_file, "--prompt", "What is this?", "--budget", "retain-64")
    assert_refused(run("sinkprune-run", broken, *options), "norms or salience that are not finite")
