"""What commands print while they work: without a reader, the files that the user wants are still written."""

from __future__ import annotations

import errno
import io
import json
import os
import re
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from PIL import Image

from sinkprune.policies.act import main as act
from sinkprune.policies.policy import Policy
from sinkprune.runtime.commands.run import main as run
from support.programs.commands import without_notes

CLOSED, FULL = (OSError(number, os.strerror(number)) for number in (errno.EPIPE, errno.ENOSPC))


class _TakesNothing(io.StringIO):
    """Standard output without a buffer, that a reader has closed, or of a full disk."""

    def __init__(self, error: OSError) -> None:
        super().__init__()
        self._error = error

    def write(self, text: str) -> int:
        raise self._error


def into(error: OSError, main: Callable[..., int], *words: object) -> tuple[int, str]:
    """Return the exit code and stderr of a command whose output nobody takes."""
    stderr = io.StringIO()
    with redirect_stdout(_TakesNothing(error)), redirect_stderr(stderr):
        code = main([*map(str, words)])
    return code, without_notes(stderr.getvalue())


@pytest.fixture(scope="module")
def photo_file(photo: Image.Image, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("photo") / "photo.png"
    photo.save(path)
    return path


@pytest.fixture
def question(bundle: Callable[..., Path], photo_file: Path) -> list[object]:
    """A question of one budget."""
    small = bundle("gqa-112", "fp32", ("retain-64",))
    return [small, "--image", photo_file, "--prompt", "What?", "--max-new-tokens", 2, "--budget", "retain-64"]


@pytest.fixture
def moments(bundle: Callable[..., Path], photo_file: Path, tmp_path: Path) -> list[object]:
    """Two moments of a policy."""
    (tmp_path / "frames").mkdir()
    for number in range(2):
        os.link(photo_file, tmp_path / "frames" / f"{number}.png")
    policy = bundle("pi0", budgets=("prune-77.8", "prune-88.9"), max_images=2)
    cameras = ["--camera", tmp_path / "frames", "--camera", "none"]
    return [policy, *cameras, "--instruction", "pick up the cup", "--state", "0.1,0.2,0.3,0.4,0.5"]


@pytest.mark.parametrize(("error", "code"), [(CLOSED, 0), (FULL, 2)])
def test_an_answer_s_files_are_written(error: OSError, code: int, question: list[object], tmp_path: Path) -> None:
    files = ["--json", tmp_path / "answer.json", "--overlay", tmp_path / "kept.png"]
    found, stderr = into(error, run, *question, *files)
    assert found == code, stderr
    assert json.loads((tmp_path / "answer.json").read_text())["token_ids"]
    Image.open(tmp_path / "kept.png").load()
    assert ("error: the system refused 'standard output': No space left" in stderr) == (code == 2)


def test_without_files_the_work_ends(moments: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    done = []
    whole = Policy.act
    monkeypatch.setattr(Policy, "act", lambda *given, **options: done.append(1) or whole(*given, **options))
    code, stderr = into(CLOSED, act, *moments)
    assert code == 0 and re.fullmatch("cameras: [^\n]*\n", stderr)
    assert len(done) == 1
