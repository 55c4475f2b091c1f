"""A checkpoint may bring Python code and request to run it. The export runs none of it and asks no question."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from support.programs.commands import own_process


@pytest.mark.parametrize("outer", ["llava", "evil"])
def test_code_in_a_checkpoint_does_not_run(outer: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint("gqa-112"), tmp_path / "checkpoint"))
    ran = tmp_path / "ran"
    evil = {
        "auto_map": dict.fromkeys(("AutoConfig", "AutoModel", "AutoProcessor", "AutoImageProcessor"), "evil.Evil"),
        "configuration_files": ["config.other.json"],
        "tokenizer_class": "EvilTokenizer",
    }
    evil["auto_map"]["AutoTokenizer"] = ["evil.Evil", "evil.Evil"]  # type: ignore[call-overload]
    (folder / "evil.py").write_text(f"import pathlib\npathlib.Path({str(ran)!r}).touch()\nclass Evil: pass\n")
    for name in ("config.json", "tokenizer_config.json", "preprocessor_config.json"):
        content = json.loads((folder / name).read_text(encoding="utf-8")) | evil
        if name == "config.json":
            (folder / "config.other.json").write_text(json.dumps({**content, "model_type": "evil"}))
            content["model_type"] = outer
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    command = own_process("sinkprune-export", folder, "-o", tmp_path / "bundle", "--budgets", "retain-64")
    result = subprocess.run(command, input="y\n" * 99, capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == (0 if outer == "llava" else 2), result.stderr
    assert (tmp_path / "bundle" / "bundle.json").exists() == (outer == "llava")
    assert "[y/N]" not in result.stdout + result.stderr
    assert not ran.exists()
