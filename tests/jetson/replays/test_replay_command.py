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
from rosbags.rosbag2 import Reader
from rosbags.typesys import Stores, get_types_from_msg, get_typestore

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
    write_bag,
    write_metadata,
)
from support.programs.commands import assert_refused, own_process, run
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
    outcome = run("sinkprune-replay", model, bag, *QUESTION, "--budget", "retain-64", "-o", out)
    assert outcome.code == 0, outcome.stderr
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


def test_rosbags_reads_the_output_by_its_own_definitions(model: Path, bag: Path, tmp_path: Path) -> None:
    out = tmp_path / "bag" / "out.mcap"
    out.parent.mkdir()
    assert run("sinkprune-replay", model, bag, *QUESTION, "--budget", "retain-64", "-o", out).code == 0
    types = {ANSWER: "std_msgs/msg/String", FIGURES: "sinkprune_msgs/msg/Figures", OVERLAY: COMPRESSED}
    write_metadata(out, types, 3 * COUNT)
    expected, store = messages(out), get_typestore(Stores.ROS2_HUMBLE)
    with Reader(out.parent) as reader:
        kinds = {connection.topic: connection for connection in reader.connections}
        assert {topic: connection.msgtype for topic, connection in kinds.items()} == types
        for kind in (types[ANSWER], types[OVERLAY]):
            known, _ = store.generate_msgdef(kind, ros_version=2)
            (own,) = (each.msgdef.data for each in kinds.values() if each.msgtype == kind)
            assert get_types_from_msg(own, kind)[kind][1] == get_types_from_msg(known, kind)[kind][1]
        definition = get_types_from_msg(kinds[FIGURES].msgdef.data, kinds[FIGURES].msgtype)
        store.register({name: fields for name, fields in definition.items() if name not in store.fielddefs})
        for connection, time_ns, data in reader.messages():
            found: Any = store.deserialize_cdr(data, connection.msgtype)
            (ours,) = (message for time, message in expected[connection.topic] if time == time_ns)
            if connection.topic == ANSWER:
                assert found.data == ours.data
            elif connection.topic == OVERLAY:
                assert bytes(found.data) == ours.data
            else:
                assert list(found.tokens_per_layer) == list(ours.tokens_per_layer)
                assert (found.latency_ms, found.kv_bytes) == (ours.latency_ms, ours.kv_bytes)


def test_frames_are_counted_in_the_json_and_in_the_metadata(
    model: Path, pictures: list[Image.Image], tmp_path: Path
) -> None:
    said = frames(pictures * 4)
    said[6] = Said(TOPIC, said[6].time_ns, raw_image(np.zeros((4, 4, 2), np.uint8), "yuv422", said[6].time_ns))
    bag = write_bag(tmp_path / "bag", said, "sqlite3")
    out = tmp_path / "out.mcap"
    choice = ("--choice", "the cup", "--choice", "the table")
    outcome = run(
        *("sinkprune-replay", model, bag, *QUESTION[:4], *choice, "-o", out, "--json"),
        *("--start", "0.2", "--end", "1.6", "--max-rate", "5", "--limit", "4"),
    )
    assert outcome.code == 0, outcome.stderr
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


def test_a_bag_that_is_cut_off_is_answered_up_to_there(model: Path, bag: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.mcap"
    said = frames([Image.new("RGB", (64, 64), (40 * number, 0, 0)) for number in range(COUNT)])
    whole = next(write_bag(tmp_path / "bag", said[:3]).glob("*.mcap")).read_bytes()
    more = next(write_bag(tmp_path / "more", said).glob("*.mcap")).read_bytes()
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "drive_0.mcap").write_bytes(whole)
    (folder / "drive_1.mcap").write_bytes(more[: len(more) // 2])
    outcome = run("sinkprune-replay", model, folder, *QUESTION, "-o", tmp_path / "out.mcap", "--json")
    assert outcome.code == 0, outcome.stderr
    report = json.loads(outcome.stdout)
    assert report["frames"]["answered"] == report["frames"]["total"] == 3
    assert "drive_1.mcap" in report["damage"] and "is cut off" in report["damage"]
    assert "warning: the bag ends early" in outcome.stderr and "3 frames were read before" in outcome.stderr
    cut.write_bytes(more[:200])
    assert_refused(run("sinkprune-replay", model, cut, *QUESTION, "-o", tmp_path / "x.mcap"), "cut off")
    assert not (tmp_path / "x.mcap").exists()


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
import resource
from sinkprune.jetson.bags.answers_file import Journal
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
    # In a process of its own the default backend may have its tower in bf16, unlike that of the tests.
    words = (model, bag, *QUESTION, "--budget", "retain-64", "--backend", "ort-cpu", "-o", out)
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
