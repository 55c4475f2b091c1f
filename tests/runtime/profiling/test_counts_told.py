"""What an answer tells of its tokens is what its graphs kept: a manifest that says otherwise is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from sinkprune import Pipeline
from sinkprune.contract.errors import BundleError
from support.models.manifests import manifest_data, write_data


@pytest.mark.parametrize("told", [0, 5, 8])
def test_a_stage_that_keeps_others_than_told_is_refused(
    told: int, bundle: Callable[..., Path], photo: Image.Image, tmp_path: Path
) -> None:
    root = Path(shutil.copytree(bundle("gqa-112", "fp32", ("retain-64",)), tmp_path / "bundle"))
    data = manifest_data(root)
    counts = data["plans"]["sinkpruner"]["retain-64"]["counts"]
    assert counts["stages"] != [told]
    counts["stages"] = [told]
    write_data(root, data)
    with pytest.raises(BundleError, match=r"kept \d+ visual tokens, the bundle says \d+"):
        Pipeline.load(root).generate(photo, "What is this?", budget="retain-64", max_new_tokens=1)
