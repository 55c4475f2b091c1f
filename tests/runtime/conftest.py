"""Prompt encoders beside transformers' own, and the folders they read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from support.references.prompt_encoders import Pairs


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    """Both encoders, by the tokenizer's name and the template."""
    from support.references.prompt_encoders import Pairs

    return Pairs(lambda: tmp_path_factory.mktemp("text"))


@pytest.fixture
def tokenizer_folder(tmp_path: Path) -> Path:
    """A folder that holds a tokenizer."""
    from support.models.checkpoints import tokenizer

    tokenizer().backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path
