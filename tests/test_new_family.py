"""A family is the files that docs/new-family.md names, no others: one made for this test answers as LLaVA does."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from sinkprune import Pipeline

ROOT = Path(__file__).parents[1]
QUESTION = "Which colour is the cup on the table?"

_EXPORT = '''
"""Viola: a LLaVA-1.5 by another name, which transformers does not know."""

from typing import Any

from sinkprune.export.families.llava import Llava


class Viola(Llava):
    name = "viola"

    def _config_class(self) -> Any:
        from transformers import LlavaConfig

        class ViolaConfig(LlavaConfig):
            model_type = "viola"

        return ViolaConfig


FAMILY = Viola
'''
_RUNTIME = '''
"""Viola: a LLaVA-1.5 by another name."""

from sinkprune.runtime.families.llava import Llava


class Viola(Llava):
    pass


FAMILY = Viola
'''
_TABLE = "FAMILIES: dict[str, FamilyRow] = {\n"
_ROW = '    "viola": FamilyRow("viola", "ViolaForConditionalGeneration", "viola", LLAVA_BUDGETS),\n'
WRITTEN: dict[str, Callable[[str], str]] = {
    "export/families/<name>.py": lambda nothing: _EXPORT,
    "runtime/families/<name>.py": lambda nothing: _RUNTIME,
    "contract/families.py": lambda before: before.replace(_TABLE, _TABLE + _ROW),
}
"""What each file holds, given what it held."""

_PROGRAM = """
import json, sys
sys.modules["torch"] = None
import sinkprune
from sinkprune.export.command import main
checkpoint, bundle, photo, question = sys.argv[1:]
assert main([checkpoint, "-o", bundle, "--budgets", "retain-64"]) == 0
pipeline = sinkprune.Pipeline.load(bundle)
answer = pipeline.generate(photo, question, budget="retain-64", max_new_tokens=12, min_new_tokens=12)
print(json.dumps([sinkprune.__file__, pipeline.bundle.manifest.family, answer.token_ids, answer.tokens_per_layer]))
"""


def files_of_a_family() -> list[str]:
    """The first column of the table in docs/new-family.md."""
    page = (ROOT / "docs/new-family.md").read_text(encoding="utf-8")
    section = page.split("## The files\n")[1].split("\n## ")[0]
    return re.findall(r"^\| `([^`]+)`", section, re.MULTILINE)


def renamed(checkpoint: Path, copy: Path) -> Path:
    """The checkpoint as one of the new family."""
    shutil.copytree(checkpoint, copy)
    config = json.loads((copy / "config.json").read_text())
    config |= {"model_type": "viola", "architectures": ["ViolaForConditionalGeneration"]}
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def test_a_family_is_the_files_that_the_page_names(
    checkpoint: Callable[[str], Path], pipeline: Callable[..., Pipeline], photo_file: Path, tmp_path: Path
) -> None:
    named = files_of_a_family()
    assert sorted(named) == sorted(WRITTEN)
    package = tmp_path / "src/sinkprune"
    shutil.copytree(ROOT / "src/sinkprune", package, ignore=shutil.ignore_patterns("__pycache__", "demo"))
    for name in named:
        path = package / name.replace("<name>", "viola")
        assert path.exists() == ("<name>" not in name)
        path.write_text(WRITTEN[name](path.read_text() if path.exists() else ""))

    arguments = (renamed(checkpoint("gqa-112"), tmp_path / "viola"), tmp_path / "bundle", photo_file, QUESTION)
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(package.parent)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    where, family, token_ids, tokens_per_layer = json.loads(done.stdout.splitlines()[-1])
    assert Path(where).is_relative_to(package)
    assert family == "viola"
    ordinary = pipeline("gqa-112").generate(
        photo_file, QUESTION, budget="retain-64", max_new_tokens=12, min_new_tokens=12
    )
    assert (token_ids, tokens_per_layer) == (ordinary.token_ids, ordinary.tokens_per_layer)
