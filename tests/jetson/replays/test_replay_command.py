"""`sinkprune-replay` on bags that rosbags writes; mcap-ros2-support and rosbags read the output."""

from __future__ import annotations

import io
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mcap.reader import make_reader
from PIL import Image
from rosbags.typesys import get_types_from_msg

from sinkprune import Pipeline, overlay
from sinkprune.jetson import replay as command
from sinkprune.jetson.bags.answers_file import FrameResult, Journal
from support.models.bags import (
    COMPRESSED,
    PERIOD_NS,
    START_NS,
    TOPIC,
    Said,
    frames,
    raw_image,
    text,
    typestore,
    write_bag,
)
from support.programs.commands import Outcome, assert_refused, own_process, run, succeed
from support.programs.replays import ANSWER, COUNT, FIGURES, OVERLAY, QUESTION, messages


@pytest.fixture(scope="module")
def model(bundle: Callable[..., Path]) -> Path:
    return bundle("gqa-112", "fp32", ("retain-64",))


@pytest.fixture(scope="module")
def pictures(photo: Image.Image) -> list[Image.Image]:
    """Five views of the photo, so that answers differ."""
    return [photo.crop((90 * number, 40, 90 * number + 200, 190)) for number in range(COUNT)]


@pytest.fixture(scope="module")
def bag(pictures: list[Image.Image], tmp_path_factory: pytest.TempPathFactory) -> Path:
    said = [Said("/words", START_NS, text("hello")), *frames(pictures)]
    return write_bag(tmp_path_factory.mktemp("bags") / "drive", said)


def test_every_answer_has_its_frame_s_time_and_the_pipeline_s_text(
    model: Path, bag: Path, pictures: list[Image.Image], tmp_path: Path
) -> None:
    out = tmp_path / "out.mcap"
    outcome = succeed("sinkprune-replay", model, bag, *QUESTION, "--budget", "retain-64", "-o", out)
    pipeline, found = Pipeline.load(model), messages(out)
    times = [START_NS + number * PERIOD_NS for number in range(COUNT)]
    stamps = {topic: [time for time, _ in said] for topic, said in found.items()}
    assert stamps == dict.fromkeys((ANSWER, FIGURES, OVERLAY), times)
    options: dict[str, Any] = {"budget": "retain-64", "max_new_tokens": 3}
    answers = [pipeline.generate(picture, "What is this?", **options) for picture in pictures]
    assert len({answer.text for answer in answers}) > 1
    lines = outcome.stdout.splitlines()
    for number, answer in enumerate(answers):
        (_, said), (_, figures), (_, drawn) = (found[topic][number] for topic in (ANSWER, FIGURES, OVERLAY))
        assert said.data == answer.text
        assert lines[number].startswith(f"{number} {number / 10:.3f} s: ")
        stamp = times[number] - 5_000_000
        for header in (figures.header, drawn.header):
            assert (header.stamp.sec, header.stamp.nanosec) == (stamp // 10**9, stamp % 10**9)
            assert header.frame_id == "camera"
        assert figures.frame == number
        assert (figures.budget, figures.finish) == (answer.budget, answer.finish)
        assert list(figures.tokens_per_layer) == answer.tokens_per_layer
        assert (figures.visual_tokens, figures.kept_after_sanitizer) == (64, answer.tokens_per_layer[0])
        assert (figures.prompt_tokens, figures.kv_bytes) == (answer.prompt_tokens, answer.kv_bytes)
        assert np.isnan(figures.confidence)
        assert 0 < figures.vision_ms < figures.ttft_ms <= figures.latency_ms
        assert drawn.format == "jpeg"
        expected = np.asarray(overlay(answer, pictures[number], "What is this?"), int)
        assert np.abs(np.asarray(Image.open(io.BytesIO(drawn.data)), int) - expected).mean() < 8
    assert lines[COUNT].startswith(f"[retain-64] {COUNT} of {COUNT} frames answered; TTFT ")
    assert " (of fewer than 20, p95 is close to the slowest); written to " in lines[COUNT]
    assert not (tmp_path / ".out.mcap.replaying").exists()
    # Messages are defined as in ROS 2.
    with out.open("rb") as file:
        summary = make_reader(file).get_summary()
    assert summary is not None
    schemas = {schema.name: schema.data.decode() for schema in summary.schemas.values()}
    assert {channel.topic: summary.schemas[channel.schema_id].name for channel in summary.channels.values()} == {
        ANSWER: "std_msgs/msg/String",
        FIGURES: "sinkprune_msgs/msg/Figures",
        OVERLAY: COMPRESSED,
    }
    for kind in ("std_msgs/msg/String", COMPRESSED):
        known, _ = typestore().generate_msgdef(kind, ros_version=2)
        assert get_types_from_msg(schemas[kind], kind) == get_types_from_msg(known, kind)


def test_frames_are_counted_in_the_json_and_in_the_metadata(
    model: Path, pictures: list[Image.Image], tmp_path: Path
) -> None:
    said = frames(pictures * 4)
    said[6] = Said(TOPIC, said[6].time_ns, raw_image(np.zeros((4, 4, 2), np.uint8), "yuv422", said[6].time_ns))
    bag = write_bag(tmp_path / "bag", said, "sqlite3")
    out = tmp_path / "out.mcap"
    choice = ("--choice", "the cup", "--choice", "the table")
    outcome = succeed(
        *("sinkprune-replay", model, bag, *QUESTION[:4], *choice, "-o", out, "--json"),
        *("--start", "0.2", "--end", "1.6", "--max-rate", "5", "--limit", "4"),
    )
    report = json.loads(outcome.stdout)
    assert report["frames"] == {"total": 20, "answered": 3, "failed": 1, "skipped": 3, "outside": 5, "after_limit": 8}
    (failure,) = report["failures"]
    assert (failure["frame"], failure["time_ns"]) == (6, said[6].time_ns)
    assert "the encoding is 'yuv422'" in failure["reason"]
    assert "warning: 1 frame could not be decoded. Frame 6: the encoding is 'yuv422'" in outcome.stderr
    assert "no overlays were drawn" in outcome.stderr
    with out.open("rb") as file:
        (record,) = make_reader(file).iter_metadata()
    assert record.name == "sinkprune"
    written = record.metadata
    for name in ("frames", "failures", "ms", "damage"):
        assert json.loads(written[name]) == report[name]
    assert (written["topic"], written["prompt"], written["budget"]) == (TOPIC, "What is this?", "none")
    found = messages(out)
    assert OVERLAY not in found
    assert [time for time, _ in found[ANSWER]] == [said[number].time_ns for number in (2, 4, 8)]
    for (_, answer), (_, figures) in zip(found[ANSWER], found[FIGURES], strict=True):
        assert answer.data in ("the cup", "the table") and 0.5 <= figures.confidence <= 1


def test_a_bag_that_is_cut_off_is_answered_up_to_there(model: Path, tmp_path: Path) -> None:
    said = frames([Image.new("RGB", (64, 64), (40 * number, 0, 0)) for number in range(COUNT)])
    folder = write_bag(tmp_path / "drive", said[:3])
    (folder / "metadata.yaml").unlink()
    more = next(write_bag(tmp_path / "more", said).glob("*.mcap")).read_bytes()
    (folder / "drive_1.mcap").write_bytes(more[: len(more) // 2])
    outcome = succeed("sinkprune-replay", model, folder, *QUESTION, "-o", tmp_path / "out.mcap", "--json")
    report = json.loads(outcome.stdout)
    assert report["frames"]["answered"] == report["frames"]["total"] == 3
    assert "drive_1.mcap" in report["damage"] and "is cut off" in report["damage"]
    assert "warning: the bag ends early" in outcome.stderr and "3 frames were read before" in outcome.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--topic", "/nope"), "Its topics are: /camera/image_raw (sensor_msgs/msg/Image), /words (std_msgs"),
        (("--every", "1", "--max-rate", "1"), "--every and --max-rate both"),
        (("--start", "2", "--end", "1"), "expected an end after the start"),
        (("--budget", "retain-7"), "retain-7"),
        (("--prompt", "{image} and {image}"), "2 places for images"),
        (("--choice", "one"), "choice"),
        (("-o", "out.bag"), "expected .mcap"),
        (("-o", "BAG/out.mcap"), "which is read"),
    ],
)
def test_wrong_options_are_rejected_before_anything_is_loaded(
    words: tuple[str, str], said: str, model: Path, bag: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "load_pipeline", None)
    given = [word.replace("BAG", str(bag)) for word in words]
    assert_refused(run("sinkprune-replay", model, bag, *QUESTION, "-o", "out.mcap", *given), said)
    assert not list(tmp_path.iterdir())


STOPPED = """
import os
from sinkprune.jetson.bags.answers_file import Journal
add = Journal.add
def add_and_die(journal, result):
    add(journal, result)
    if journal.count == 2:
        os.kill(os.getpid(), 9)
Journal.add = add_and_die
"""
"""A program that begins with this is killed after its second frame."""


@pytest.fixture
def words(model: Path, bag: Path, tmp_path: Path) -> tuple[object, ...]:
    """Return the command of a replay to `out.mcap`, whose journal is `.out.mcap.replaying`."""
    # In a process of its own the default backend may have its tower in bf16, unlike that of the tests.
    return ("sinkprune-replay", model, bag, *QUESTION, "--backend", "ort-cpu", "-o", tmp_path / "out.mcap")


def test_a_replay_that_is_killed_goes_on(words: tuple[object, ...], tmp_path: Path) -> None:
    out, journal, whole = (tmp_path / name for name in ("out.mcap", ".out.mcap.replaying", "whole.mcap"))
    words = (*words, "--budget", "retain-64")
    python, flag, program, *rest = own_process(*words)
    process = subprocess.run([python, flag, STOPPED + program, *rest], capture_output=True, check=False)
    assert process.returncode == -signal.SIGKILL, process.stderr
    assert [path.name for path in tmp_path.iterdir()] == [journal.name]
    # A power cut in the middle of a line
    with journal.open("ab") as file:
        file.write(b'{"number": 2, "time_')
    assert_refused(run(*words, "--limit", "3"), "answers of another replay: different frames")
    outcome = succeed(*words, "--json")
    assert "goes on after 2 frames" in outcome.stderr
    report = json.loads(outcome.stdout)
    assert report["resumed"] == 2 and report["frames"]["answered"] == COUNT
    assert not journal.exists()
    assert_refused(run(*words, "--limit", 1), "exists already", "--force")
    succeed(*words, "-o", whole)
    ours, theirs = messages(out), messages(whole)
    for topic in (ANSWER, OVERLAY):
        assert [(time, message.data) for time, message in ours[topic]] == [
            (time, message.data) for time, message in theirs[topic]
        ]
    assert [message.frame for _, message in ours[FIGURES]] == [*range(COUNT)]


def test_a_replay_that_is_interrupted_says_what_to_do(
    words: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = Journal.add

    def add_and_interrupt(journal: Journal, result: FrameResult) -> None:
        add(journal, result)
        if journal.count == 3:
            os.kill(os.getpid(), signal.SIGINT)

    def shown(outcome: Outcome) -> list[str]:
        return [line.split(":")[0] for line in outcome.stdout.splitlines()]

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "add", add_and_interrupt)
        outcome = run(*words)
    assert outcome.code == 130 and len(shown(outcome)) in (2, 3)
    place = tmp_path / ".out.mcap.replaying"
    assert outcome.stderr.endswith(f"interrupted; 3 frames are in '{place}'; the same command goes on.\n")
    # Seconds count from the topic's first frame, also where a replay goes on or starts later.
    times = [f"{number} {number / 10:.3f} s" for number in range(COUNT)]
    assert shown(outcome) == times[: len(shown(outcome))] and shown(run(*words))[:-1] == times[3:]
    late = run(*words, "-o", tmp_path / "late.mcap", "--start", "0.01")
    assert shown(late)[0] == times[1]


def test_a_full_disk_leaves_the_complete_frames(
    words: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "add", add_with_little_room)
        outcome = run(*words, "--json")
    assert_refused(outcome, f"'{place}' cannot be written: File too large. It has 2 frames. Free space and repeat")
    assert json.loads(run(*words, "--json").stdout)["resumed"] == 2
    assert len(messages(tmp_path / "out.mcap")[ANSWER]) == COUNT


def test_one_process_writes_an_output_at_a_time(
    words: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = []

    def load(*arguments: Any) -> Pipeline:
        second.append(run(*words))
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "load_pipeline", load)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert run(*words).code == 130
    assert_refused(second[0], "another sinkprune-replay is writing")
    assert not list(tmp_path.iterdir())


def test_a_file_or_a_link_at_the_journal_s_place_is_not_touched(words: tuple[object, ...], tmp_path: Path) -> None:
    place, other = tmp_path / ".out.mcap.replaying", tmp_path / "other"
    other.write_text("precious\n")
    for make, said in (
        (lambda: place.symlink_to(other), "is a link"),
        (lambda: place.hardlink_to(other), "has answers of another replay"),
        (lambda: os.mkfifo(place), "not a file of your own"),
    ):
        make()
        assert_refused(run(*words), said)
        place.unlink()
        assert other.read_text() == "precious\n"
