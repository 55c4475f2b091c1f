"""Bags and pictures that the library rosbags writes, whole and damaged."""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from itertools import product
from pathlib import Path
from typing import Any

import lz4.frame
import mcap.writer
import numpy as np
import pytest
import zstandard
from PIL import Image
from rosbags.rosbag2 import CompressionMode

from sinkprune.contract.errors import BagError, ImageError
from sinkprune.jetson.bags.bag import open_bag, read_frame
from sinkprune.jetson.bags.bag_files import DamagedError, decompressed
from sinkprune.runtime.media.images import largest_of_16_bits
from support.models.bags import (
    COMPRESSED,
    IMAGE,
    PERIOD_NS,
    START_NS,
    TOPIC,
    Said,
    Storage,
    compressed_image,
    raw_image,
    text,
    typestore,
    write_bag,
)

STORAGES: tuple[Storage, ...] = ("mcap", "sqlite3")
COUNT = 6
STRING = "std_msgs/msg/String"


def said() -> list[Said]:
    """Six frames of noise, with messages of another topic between them."""
    random = np.random.default_rng(0)
    found = []
    for number in range(COUNT):
        time_ns = START_NS + number * PERIOD_NS
        pixels = random.integers(0, 256, (32, 32, 3), np.uint8)
        found += [
            Said(TOPIC, time_ns, raw_image(pixels, "rgb8", time_ns)),
            Said("/words", time_ns + 1, text("x" * 50)),
        ]
    return found


def read(path: Path) -> tuple[list[int], str | None]:
    """Return the numbers of the frames that are read, and the damage."""
    bag = open_bag(path)
    assert bag.check_pictures(TOPIC) == "sensor_msgs/msg/Image"
    messages = list(bag.messages(TOPIC))
    return [(message.time_ns - START_NS) // PERIOD_NS for message in messages], bag.damage


def only_file(folder: Path) -> Path:
    (found,) = (path for path in folder.iterdir() if path.suffix in (".mcap", ".db3"))
    return found


@contextmanager
def mcap_writer(path: Path, **options: Any) -> Iterator[tuple[mcap.writer.Writer, int, int]]:
    """Yield a writer of MCAP, and its channels of pictures and of words."""
    with path.open("wb") as file:
        writer = mcap.writer.Writer(file, **options)
        writer.start("ros2")
        camera, words = (
            writer.register_channel(topic, "cdr", writer.register_schema(kind, "ros2msg", b""))
            for topic, kind in ((TOPIC, IMAGE), ("/words", STRING))
        )
        yield writer, camera, words
        writer.finish()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    ("storage", "mode"),
    [*product(STORAGES, (CompressionMode.NONE, CompressionMode.MESSAGE)), ("mcap", CompressionMode.STORAGE)],
)
@pytest.mark.parametrize("metadata", [True, False])
def test_bags_are_read_compressed_or_not(
    storage: Storage, mode: CompressionMode, metadata: bool, tmp_path: Path
) -> None:
    """Only the metadata states that messages are compressed, and a recorder that is killed writes none."""
    folder = write_bag(tmp_path / "bag", said(), storage, mode)
    if not metadata:
        (folder / "metadata.yaml").unlink()
    before = sorted(folder.iterdir())
    for path in (folder, only_file(folder)):
        assert read(path) == (list(range(COUNT)), None)
        bag = open_bag(path)
        assert {name: topic.type_name for name, topic in bag.topics.items()} == {TOPIC: IMAGE, "/words": STRING}
        assert bag.counts == ({TOPIC: COUNT, "/words": COUNT} if storage == "mcap" else None)
        frames = [read_frame(IMAGE, message.data) for message in bag.messages(TOPIC)]
        expected = [np.frombuffer(one.message.data, np.uint8).reshape(32, 32, 3) for one in said()[::2]]
        assert np.array_equal([np.asarray(frame.picture) for frame in frames], expected)
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("metadata", [True, False])
def test_a_bag_of_compressed_files_is_read_once_they_are_unpacked(
    storage: Storage, metadata: bool, tmp_path: Path
) -> None:
    frames = [one for one in said() if one.topic == TOPIC]
    folder = write_bag(tmp_path / "bag", frames[:3], storage, CompressionMode.FILE)
    (first,) = (path for path in folder.iterdir() if path.suffix == ".zstd")
    # The part that was being recorded is not compressed yet.
    last = only_file(write_bag(tmp_path / "part", frames[3:], storage))
    rest = shutil.copy(last, folder / first.name.replace("bag", "bag_1").removesuffix(".zstd"))
    if not metadata:
        (folder / "metadata.yaml").unlink()
    for path in (folder, first):
        with pytest.raises(BagError, match=f"{first.name}' is compressed as a whole with zstd. Unpack it, and all"):
            open_bag(path)
    packed = lz4.frame.compress(rest.read_bytes())
    (tmp_path / "drive.bag").write_bytes(packed)
    with pytest.raises(BagError, match=r"compressed as a whole with lz4\. Unpack it, and all .* lz4 -d"):
        open_bag(tmp_path / "drive.bag")
    # zstd -d leaves the compressed file where it is.
    first.with_suffix("").write_bytes(zstandard.ZstdDecompressor().stream_reader(first.read_bytes()).read())
    assert read(folder) == ([0, 1, 2] if metadata else [0, 1, 2, 3, 4, 5], None)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("content", [b"", bytes(4096)])
def test_a_bag_whose_last_file_was_lost_in_a_power_cut_is_read_up_to_there(
    storage: Storage, content: bytes, tmp_path: Path
) -> None:
    folder = write_bag(tmp_path / "bag", said(), storage)
    (folder / "metadata.yaml").unlink()
    first = only_file(folder)
    lost = first.rename(folder / f"bag_0{first.suffix}").with_name(f"bag_1{first.suffix}")
    lost.write_bytes(content)
    frames, damage = read(folder)
    assert frames == list(range(COUNT)) and damage is not None and damage.startswith(f"'{lost}' is ")
    with pytest.raises(BagError, match=f"{lost.name}' is .*Give a folder of rosbag2"):
        open_bag(lost)


def test_files_are_read_in_the_order_of_the_metadata_or_of_their_numbers(tmp_path: Path) -> None:
    frames = [one for one in said() if one.topic == TOPIC]
    folder = tmp_path / "all"
    folder.mkdir()
    for number, own in ((0, frames[:4]), (9, frames[4:5]), (10, frames[5:])):
        part = write_bag(tmp_path / f"part{number}", own)
        shutil.copy(only_file(part), folder / f"all_{number}.mcap")
    assert read(folder) == ([0, 1, 2, 3, 4, 5], None)
    (folder / "metadata.yaml").write_text("a:\n  relative_file_paths: [all/all_10.mcap, all_0.mcap]\n")
    assert read(folder) == ([5, 0, 1, 2, 3], None)


@pytest.mark.parametrize("compression", [*mcap.writer.CompressionType])
@pytest.mark.parametrize("chunked", [True, False])
def test_an_mcap_that_is_cut_off_is_read_up_to_there(
    compression: mcap.writer.CompressionType, chunked: bool, tmp_path: Path
) -> None:
    path = tmp_path / "bag.mcap"
    # A chunk to each message.
    options = {"chunk_size": 1, "compression": compression, "use_chunking": chunked}
    with mcap_writer(path, **options) as (writer, camera, _):
        for number in range(COUNT):
            noise = np.random.default_rng(number).bytes(4000)
            writer.add_message(camera, START_NS + number * PERIOD_NS, noise, START_NS)
    whole = path.read_bytes()
    assert read(path) == (list(range(COUNT)), None)
    last = 0
    for size in range(300, len(whole), 331):
        path.write_bytes(whole[:size])
        try:
            frames, damage = read(path)
        except BagError as error:
            # Before the first channel
            assert size < 4500 and "is cut off" in str(error)
            continue
        assert frames == list(range(len(frames))) and last <= len(frames)
        last = len(frames)
        assert damage is not None or len(frames) == COUNT
    assert last == COUNT
    if chunked:
        # One wrong byte in the fourth message
        at = whole.index(np.random.default_rng(3).bytes(4000)[:50]) if compression.name != "ZSTD" else len(whole) // 2
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        frames, damage = read(path)
        assert frames == [0, 1, 2] and damage is not None and "is damaged" in damage


@pytest.mark.parametrize("repeat_schemas", [True, False])
def test_an_mcap_with_many_equal_messages_and_few_repetitions_is_read(repeat_schemas: bool, tmp_path: Path) -> None:
    """Recorders may repeat channels without schemas. Nodes send equal messages while simulated time stands still."""
    path = tmp_path / "bag.mcap"
    with mcap_writer(path, repeat_schemas=repeat_schemas) as (writer, camera, words):
        for number in range(COUNT):
            for _ in range(2000):
                writer.add_message(words, START_NS, b"\0\1\0\0\0", START_NS)
            writer.add_message(camera, START_NS + number * PERIOD_NS, bytes(100), START_NS)
    assert read(path) == (list(range(COUNT)), None)
    assert open_bag(path).counts == {TOPIC: COUNT, "/words": 2000 * COUNT}


def test_a_sqlite3_file_that_is_cut_off_is_read_up_to_there(tmp_path: Path) -> None:
    path = only_file(write_bag(tmp_path / "bag", said(), "sqlite3"))
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 3 // 4])
    frames, damage = read(path)
    assert 0 < len(frames) < COUNT and frames == list(range(len(frames)))
    assert damage is not None and "is damaged: " in damage and str(path) in damage


@pytest.mark.parametrize("log", ["wal", "journal"])
def test_a_sqlite3_file_with_a_log_is_rejected_until_it_is_merged(log: str, tmp_path: Path) -> None:
    path = only_file(write_bag(tmp_path / "bag", said(), "sqlite3"))
    killed = f"""
import os, sqlite3, sys
database = sqlite3.connect(sys.argv[1], isolation_level=None)
database.executescript("PRAGMA journal_mode={"WAL" if log == "wal" else "PERSIST"}; PRAGMA cache_size=1; BEGIN;")
database.execute("UPDATE messages SET timestamp = 0, data = zeroblob(9000)")
os._exit(0)
"""
    subprocess.run([sys.executable, "-c", killed, path], check=True)
    with pytest.raises(BagError, match=f"has changes in '{path.name}-{log}'.* wal_checkpoint"):
        open_bag(path)
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    assert read(path) == (list(range(COUNT)), None)


@pytest.mark.parametrize(
    ("make", "said_"),
    [
        (lambda path: None, "is missing"),
        (lambda path: path.write_bytes(b"no bag"), "begins neither as MCAP nor as sqlite3"),
        (lambda path: path.write_bytes(b"\x89MCAP0\r\n"), "is cut off"),
        (lambda path: path.write_bytes(b"SQLite format 3\0" + bytes(100)), "is damaged"),
        (lambda path: path.mkdir(), "has no metadata.yaml"),
        (os.mkfifo, "is a FIFO"),
    ],
)
def test_what_is_no_bag_is_rejected(make: Callable[[Path], object], said_: str, tmp_path: Path) -> None:
    make(tmp_path / "bag")
    with pytest.raises(BagError, match=said_):
        open_bag(tmp_path / "bag")


def test_wrong_metadata_is_rejected(tmp_path: Path) -> None:
    names = ["*a", "[a.db3, *a]", "[[a.db3]]", "{a.db3: b.db3}", "[]", f"[{'a' * 2000}]", "&b [*b]", "[[1]]"]
    for metadata, said_ in (
        ("[", "is not YAML"),
        ("[" * 5000, "is not YAML"),
        ("!!python/object/apply:os.system [ls]", "lists no files"),
        ("[]", "bag reindex"),
        ("a: 1", "lists no files"),
        ("rosbag2_bagfile_information: {relative_file_paths: [x.mcap]}", "is missing"),
        ("rosbag2_bagfile_information: {relative_file_paths: [x.db3.zstd]}", "is missing"),
        *((f"a: &a [b.db3]\nb:\n  relative_file_paths: {files}\n", "lists no files") for files in names),
    ):
        (tmp_path / "metadata.yaml").write_text(metadata)
        with pytest.raises(BagError, match=said_):
            open_bag(tmp_path)


def test_a_topic_without_pictures_is_rejected(tmp_path: Path) -> None:
    bag = open_bag(write_bag(tmp_path / "bag", said()))
    with pytest.raises(BagError, match=r"Its topics are: /camera/image_raw \(sensor_msgs/msg/Image\), /words"):
        bag.check_pictures("/camera")
    with pytest.raises(BagError, match="type std_msgs/msg/String in cdr, expected sensor_msgs"):
        bag.check_pictures("/words")


def test_compressed_data_takes_no_more_memory_than_it_may() -> None:
    zeros = bytes(1 << 20)
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(zeros)
    for data in (zstandard.compress(zeros), unsized, lz4.frame.compress(zeros)):
        assert decompressed(data, 1 << 20) == zeros
        with pytest.raises(DamagedError, match=r"has more than|is damaged"):
            decompressed(data, (1 << 20) - 1)
        with pytest.raises(DamagedError, match="is damaged"):
            decompressed(data[: len(data) // 2], 1 << 20)
    # The head of a frame that states 2**60 bytes.
    with pytest.raises(DamagedError, match="has more than"):
        decompressed(b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 1 << 60) + bytes(8), 1 << 30)


@pytest.mark.parametrize("storage", STORAGES)
def test_wrong_bytes_are_read_or_rejected(storage: Storage, tmp_path: Path) -> None:
    """Whatever the bytes are, frames are decoded or fail, and reading ends with a report."""
    path, random = only_file(write_bag(tmp_path / "bag", said(), storage)), np.random.default_rng(7)
    whole = path.read_bytes()
    ends = {"rejected": 0, "damaged": 0, "whole": 0}
    for _ in range(80):
        wrong = bytearray(whole)
        for place in random.integers(0, len(wrong), random.integers(1, 9)):
            wrong[place : place + 4] = random.bytes(4) if random.integers(2) else b"\xff\xff\xff\x7f"
        path.write_bytes(wrong)
        try:
            bag = open_bag(path)
            kind = bag.check_pictures(TOPIC)
        except BagError:
            ends["rejected"] += 1
            continue
        for message in bag.messages(TOPIC):
            with suppress(ImageError):
                read_frame(kind, message.data)
        ends["damaged" if bag.damage else "whole"] += 1
    assert ends["whole"] and ends["damaged"] + ends["rejected"], ends


HEIGHT, WIDTH = 5, 7
RGB = np.random.default_rng(3).integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8)
ALPHA = np.full((HEIGHT, WIDTH, 1), 9, np.uint8)
DEEP = np.random.default_rng(4).integers(0, 65536, (HEIGHT, WIDTH), np.uint16)


def data_of(message: Any, little_endian: bool = True) -> bytes:
    return bytes(typestore().serialize_cdr(message, message.__msgtype__, little_endian=little_endian))


def pixels(message: Any, little_endian: bool = True) -> np.ndarray[Any, Any]:
    frame = read_frame(message.__msgtype__, data_of(message, little_endian))
    assert frame.picture.mode == "RGB" and frame.frame_id == "camera"
    assert frame.seconds * 10**9 + frame.nanoseconds == START_NS - 5_000_000
    return np.asarray(frame.picture)


@pytest.mark.parametrize("big", [False, True])
def test_every_encoding_has_its_pixels(big: bool) -> None:
    """Values of 16 bits are divided by 257. Padding at the end of rows is left out."""
    deep = DEEP.astype(">u2" if big else "<u2")
    grey, scaled = RGB[..., :1], ((DEEP.astype(np.uint32) + 128) // 257)[..., None]
    for encoding, given, expected in (
        ("rgb8", RGB, RGB),
        ("bgr8", RGB[..., ::-1], RGB),
        ("rgba8", np.concatenate([RGB, ALPHA], 2), RGB),
        ("bgra8", np.concatenate([RGB[..., ::-1], ALPHA], 2), RGB),
        ("mono8", RGB[..., 0], np.repeat(grey, 3, 2)),
        # What cv_bridge writes of a grey array without a name of an encoding
        ("8UC1", RGB[..., 0], np.repeat(grey, 3, 2)),
        ("mono16", deep, np.repeat(scaled, 3, 2)),
        ("16UC1", deep, np.repeat(scaled, 3, 2)),
    ):
        rows = np.ascontiguousarray(given).view(np.uint8).reshape(HEIGHT, -1)
        padded = np.pad(rows, ((0, 0), (0, 5)), constant_values=77)
        padding = {"step": padded.shape[1], "data": padded.ravel()}
        for fields in ({}, padding):
            message = raw_image(given, encoding, is_bigendian=int(big), **fields)
            assert all(np.array_equal(pixels(message, little), expected) for little in (True, False)), encoding
        is_deep = largest_of_16_bits(read_frame(IMAGE, data_of(message)).picture) is not None
        assert is_deep == encoding.startswith(("mono16", "16"))


def test_compressed_pictures(photo: Image.Image) -> None:
    small = photo.resize((64, 48))
    assert np.array_equal(pixels(compressed_image(small, "png")), np.asarray(small))
    assert np.array_equal(pixels(compressed_image(small, "png", name="png"), False), np.asarray(small))
    assert np.abs(pixels(compressed_image(small)).astype(int) - np.asarray(small)).mean() < 8


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (raw_image(RGB, "bayer_rggb8"), "the encoding is 'bayer_rggb8', expected one of rgb8, bgr8"),
        (raw_image(RGB, "rgb8", width=0), "0x5 pixels"),
        (raw_image(RGB, "rgb8", step=20), "rows of 20 bytes and 105 bytes in all, expected rows of 21 or more"),
        (raw_image(RGB, "rgb8", height=6), "7x6 pixels in rgb8, rows of 21 bytes and 105 bytes"),
        (raw_image(RGB, "rgb8", height=1_000_000_000), "7x1000000000 pixels, expected 1 to 67108864"),
        (raw_image(RGB, "rgb8", height=4), "105 bytes in all"),
        (raw_image(RGB, "x" * 1000), "has a text of 1001 bytes, expected at most 1000"),
        (compressed_image(Image.new("RGB", (4, 4)), "png", name="16UC1; compressedDepth png"), "compressedDepth"),
    ],
)
def test_a_wrong_picture_is_rejected(message: Any, said: str) -> None:
    data = data_of(message)
    tracemalloc.start()
    try:
        with pytest.raises(ImageError, match=re.escape(said)):
            read_frame(message.__msgtype__, data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_message_that_is_cut_off_or_no_cdr_is_rejected() -> None:
    whole = data_of(raw_image(RGB, "rgb8"))
    for length in range(len(whole)):
        with pytest.raises(ImageError, match=r"is cut off|is neither CDR"):
            read_frame(IMAGE, whole[:length])
    for head in (b"\0\2\0\0", b"\1\1\0\0"):
        with pytest.raises(ImageError, match="is neither CDR nor compressed"):
            read_frame(IMAGE, head + whole[4:])
    for damaged in (zstandard.compress(whole)[:-9], lz4.frame.compress(whole)[:-9], zstandard.compress(b"")):
        with pytest.raises(ImageError, match=r"the message is damaged|is neither CDR"):
            read_frame(IMAGE, damaged)
    # The length of the data says 4 GB.
    place = whole.rindex(struct.pack("<I", 105))
    with pytest.raises(ImageError, match="a field has 4294967295 bytes, and 105 are left"):
        read_frame(IMAGE, whole[:place] + b"\xff\xff\xff\xff" + whole[place + 4 :])
    jpeg = data_of(compressed_image(Image.new("RGB", (64, 64))))
    with pytest.raises(ImageError, match="is cut off"):
        read_frame(COMPRESSED, jpeg[:-40])
