"""`sinkprune-replay` goes on where it was killed or interrupted."""

from __future__ import annotations

import io
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from sinkprune import Pipeline
from sinkprune.jetson import replay as command
from sinkprune.jetson.bags.answers_file import FrameResult, Journal
from support.models.bags import TOPIC, frames, write_bag
from support.programs.commands import assert_refused, own_process, run
from support.programs.replays import ANSWER, COUNT, FIGURES, OVERLAY, QUESTION, messages

STOPPED = """
import os
import resource
from sinkprune.jetson.bags.journal import Journal
add = Journal.add
def add_and_die(journal, result):
    add(journal, result)
    if journal.count == 2:
        os.kill(os.getpid(), 9)
Journal.add = add_and_die
"""
"""A program that begins with this is killed after its second frame."""


def stopped(*words: object) -> None:
    """Start a replay that is killed after two frames."""
    python, flag, program, *rest = own_process("sinkprune-replay", *words)
    process = subprocess.run([python, flag, STOPPED + program, *rest], capture_output=True, check=False)
    assert process.returncode == -signal.SIGKILL, process.stderr


def test_a_replay_that_is_killed_goes_on(model: Path, bag: Path, tmp_path: Path) -> None:
    out, journal = tmp_path / "out.mcap", tmp_path / ".out.mcap.replaying"
    words = (model, bag, *QUESTION, "--budget", "retain-64", "-o", out)
    stopped(*words)
    assert [path.name for path in tmp_path.iterdir()] == [journal.name]
    # A power cut in the middle of a line
    with journal.open("ab") as file:
        file.write(b'{"number": 2, "time_')
    assert_refused(run("sinkprune-replay", *words, "--limit", "3"), "answers of another replay: different frames")
    outcome = run("sinkprune-replay", *words, "--json")
    assert outcome.code == 0, outcome.stderr
    assert "goes on after 2 frames" in outcome.stderr
    report = json.loads(outcome.stdout)
    assert report["resumed"] == 2 and report["frames"]["answered"] == COUNT
    assert not journal.exists()
    whole = tmp_path / "whole.mcap"
    assert run("sinkprune-replay", *words[:-1], whole).code == 0
    assert_refused(run("sinkprune-replay", *words[:-1], whole, "--limit", 1), "exists already", "--force")
    ours, theirs = messages(out), messages(whole)
    for topic in (ANSWER, OVERLAY):
        assert [(time, message.data) for time, message in ours[topic]] == [
            (time, message.data) for time, message in theirs[topic]
        ]
    assert [message.frame for _, message in ours[FIGURES]] == [*range(COUNT)]


def test_a_replay_that_is_interrupted_says_what_to_do(
    model: Path, bag: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = Journal.add

    def add_and_interrupt(journal: Journal, result: FrameResult) -> None:
        add(journal, result)
        if journal.count == 3:
            os.kill(os.getpid(), signal.SIGINT)

    words = ("sinkprune-replay", model, bag, *QUESTION, "-o", tmp_path / "out.mcap")
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "add", add_and_interrupt)
        outcome = run(*words)
    assert outcome.code == 130 and len(outcome.stdout.splitlines()) in (2, 3)
    shown = [line.split(":")[0] for line in outcome.stdout.splitlines()]
    place = tmp_path / ".out.mcap.replaying"
    assert outcome.stderr.endswith(f"interrupted; 3 frames are in '{place}'; the same command goes on.\n")
    whole = run("sinkprune-replay", model, bag, *QUESTION, "-o", tmp_path / "whole.mcap").stdout.splitlines()
    resumed = run(*words).stdout.splitlines()
    # Seconds count from the topic's first frame, also where a replay goes on or starts later.
    times = [line.split(":")[0] for line in whole[:-1]]
    assert shown == times[: len(shown)] and [line.split(":")[0] for line in resumed[:-1]] == times[3:]
    late = run("sinkprune-replay", model, bag, *QUESTION, "-o", tmp_path / "late.mcap", "--start", "0.01")
    assert late.stdout.splitlines()[0].split(":")[0] == times[1]


def test_a_full_disk_leaves_the_complete_frames(
    model: Path, bag: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add, limits = Journal.add, resource.getrlimit(resource.RLIMIT_FSIZE)
    place = tmp_path / ".out.mcap.replaying"

    def add_with_little_room(journal: Journal, result: FrameResult) -> None:
        if journal.count == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (place.stat().st_size + 10, limits[1]))
        try:
            add(journal, result)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    words = ("sinkprune-replay", model, bag, *QUESTION, "-o", tmp_path / "out.mcap", "--json")
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "add", add_with_little_room)
        outcome = run(*words)
    assert_refused(outcome, f"'{place}' cannot be written: File too large. It has 2 frames. Free space and repeat")
    assert json.loads(run(*words).stdout)["resumed"] == 2
    assert len(messages(tmp_path / "out.mcap")[ANSWER]) == COUNT


def test_a_replay_whose_reader_has_seen_enough_writes_its_output(model: Path, bag: Path, tmp_path: Path) -> None:
    words = own_process("sinkprune-replay", model, bag, *QUESTION, "-o", tmp_path / "out.mcap")
    report = tmp_path / "report.json"
    with subprocess.Popen([*words, "--json", str(report)], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
    assert process.returncode == 0, said
    assert len(messages(tmp_path / "out.mcap")[ANSWER]) == COUNT
    found = json.loads(report.read_text())
    assert found["frames"]["answered"] == COUNT and 0 < found["seen_share"] <= 1


def test_one_process_writes_an_output_at_a_time(
    model: Path, bag: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("sinkprune-replay", model, bag, *QUESTION, "-o", tmp_path / "out.mcap")
    second = []

    def load(*arguments: Any) -> Pipeline:
        second.append(run(*words))
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "load_pipeline", load)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert run(*words).code == 130
    assert_refused(second[0], "another sinkprune-replay is writing")
    assert not list(tmp_path.iterdir())


def test_an_interrupted_output_leaves_the_answers(
    model: Path, bag: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("sinkprune-replay", model, bag, *QUESTION, "-o", tmp_path / "out.mcap")

    def full(path: Path, *arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(command, "write_answers", full)
        assert_refused(run(*words[:1], *words[1:], "--json"), "No space left")
    assert [path.name for path in tmp_path.iterdir()] == [".out.mcap.replaying"]
    with monkeypatch.context() as patch:
        patch.setattr(Pipeline, "generate", None)
        assert json.loads(run(*words, "--json").stdout)["resumed"] == COUNT
    assert len(messages(tmp_path / "out.mcap")[ANSWER]) == COUNT


def test_a_file_or_a_link_at_the_journal_s_place_is_not_touched(model: Path, bag: Path, tmp_path: Path) -> None:
    words = ("sinkprune-replay", model, bag, *QUESTION, "-o", tmp_path / "out.mcap")
    place, other = tmp_path / ".out.mcap.replaying", tmp_path / "other"
    other.write_text("precious\n")
    place.symlink_to(other)
    assert_refused(run(*words), "is a link")
    assert other.read_text() == "precious\n"
    place.unlink()
    place.write_text("precious\n")
    assert_refused(run(*words), "has answers of another replay")
    assert place.read_text() == "precious\n"
    place.unlink()
    os.mkfifo(place)
    assert_refused(run(*words), "not a file of your own")


def test_a_later_frame_of_another_shape_counts(model: Path, pictures: list[Image.Image], tmp_path: Path) -> None:
    square, wide = pictures[0].resize((224, 224)), pictures[1].resize((224, 50))
    bag = write_bag(tmp_path / "drive", frames([square, wide, square, wide]))
    words = (model, bag, *QUESTION, "--fit", "crop", "--json", "-o")
    whole = run("sinkprune-replay", *words, tmp_path / "whole.mcap")
    assert json.loads(whole.stdout)["seen_share"] == pytest.approx(50 / 224, abs=1e-3)
    notes = [line for line in whole.stderr.splitlines() if "--fit pad" in line]
    assert len(notes) == 1 and notes[0].startswith(f"{TOPIC}: the model sees 22 %")
    # Also where an earlier replay had answered it.
    bag = write_bag(tmp_path / "walk", frames([square, wide, square]))
    words = (model, bag, *QUESTION, "--fit", "crop", "--json", "-o", tmp_path / "out.mcap")
    stopped(*words)
    found = json.loads(run("sinkprune-replay", *words).stdout)
    assert found["resumed"] == 2 and found["seen_share"] == pytest.approx(50 / 224, abs=1e-3)
