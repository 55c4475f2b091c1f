"""What `sinkprune-run` writes: escaped on a terminal, as it is to a program; names of files always escaped."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import pytest

import sinkprune.runtime.commands.run as command
from sinkprune import Answer, Stream
from support.programs.commands import assert_refused, run

OUTPUT = "a\x1b[2Jb\n\tc\r\x9b1m"


class Terminal(io.StringIO):
    """A stream that reports to be a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "shown"), [(io.StringIO, OUTPUT), (Terminal, "a\\x1b[2Jb\n\tc\\r\\x9b1m")])
def test_an_answer_moves_no_cursor(
    stream: type[io.StringIO],
    shown: str,
    bundle: Callable[..., Path],
    photo_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rest = Stream.rest

    def answer_after_said(answering: Stream, on_text: Callable[[str], None]) -> Answer:
        on_text(OUTPUT)
        return rest(answering, on_text)

    monkeypatch.setattr(Stream, "rest", answer_after_said)
    arguments = (bundle("gqa-112"), "--image", photo_file, "--prompt", "What is this?", "--max-new-tokens", 2)
    with redirect_stdout(stream()) as stdout:
        assert command.main([*map(str, arguments)]) == 0
    assert stdout.getvalue().startswith(shown)


def test_a_picture_s_name_is_escaped_in_its_refusal(bundle: Callable[..., Path], tmp_path: Path) -> None:
    path = tmp_path / "\x1b]0;owned\x07\nphoto.jpg"
    path.write_bytes(b"no picture")
    outcome = run("sinkprune-run", bundle("gqa-112"), "--image", path, "--prompt", "What is this?")
    assert_refused(outcome, r"\x1b]0;owned\x07\nphoto.jpg' is not an image")
