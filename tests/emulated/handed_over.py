"""What emulated tests use in place of `tests/conftest.py`: bundles and a photo that another machine made.

`python handed_over.py FOLDER` makes them, where torch and transformers are installed. The fixtures read them from the
folder in the environment variable HANDED_OVER (`pytest --noconftest -p emulated.handed_over`). A test whose bundle is
missing is skipped.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

# pytest finds these fixtures here, as it does not read conftest.py.
from conftest import ort_cpu_where_no_backend_is_named, photo_file, pipeline  # noqa: F401
from sinkprune.contract.bundle import read_bundle

BUNDLES: list[tuple[str, dict[str, Any]]] = [
    ("gqa-112", {}),
    ("mha-336", {}),
    ("gqa-112", {"precision": "fp16"}),
    ("qwen", {}),
]
"""A name of `tests/conftest.py` and options of its fixture `bundle`."""
DEFAULTS = {"precision": "fp32", "dialect": "opset24"}


def folder_name(name: str, options: dict[str, Any]) -> str:
    return "-".join([name, *(f"{key}-{value}" for key, value in sorted(options.items()))])


@pytest.fixture(scope="session")
def bundle() -> Callable[..., Path]:
    """A bundle that was handed over. Tests must not write into it."""

    def get(
        name: str, precision: str = "fp32", budgets: tuple[str, ...] = (), dialect: str = "opset24", **options: Any
    ) -> Path:
        given = {**options, "precision": precision, "dialect": dialect}
        changed = {key: value for key, value in given.items() if value != DEFAULTS.get(key)}
        folder = Path(os.environ["HANDED_OVER"]) / folder_name(name, changed)
        # A bundle with more budgets than the test needs serves as well.
        if not folder.exists() or not set(budgets) <= set(read_bundle(folder).manifest.budgets):
            pytest.skip(f"bundle {folder.name} with budgets {budgets or 'of the family'} was not handed over")
        return folder

    return get


@pytest.fixture(scope="session")
def photo() -> Image.Image:
    """A cup of coffee on a table, 600x400."""
    return Image.open(Path(os.environ["HANDED_OVER"]) / "photo.png").convert("RGB")


def hand_over(folder: Path) -> None:
    """Export the bundles into `folder`, and write the photo."""
    from skimage import data

    from sinkprune.export.bundle_writer import export_bundle
    from sinkprune.export.source import ExportRequest
    from support.models.small_models import make_small_model

    for name, options in BUNDLES:
        output, checkpoint = folder / folder_name(name, options), folder / "checkpoints" / name
        checkpoint.parent.mkdir(exist_ok=True)
        if not checkpoint.exists():
            make_small_model(name, checkpoint)
        export_bundle(ExportRequest(str(checkpoint), **options), output)
    Image.fromarray(data.coffee()).save(folder / "photo.png")


if __name__ == "__main__":
    hand_over(Path(sys.argv[1]))
