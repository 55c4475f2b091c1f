"""Write answers as an MCAP file of ROS 2 messages, which Foxglove opens."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sinkprune.contract.files.output_files import whole_file
from sinkprune.contract.reports.report import PARTS
from sinkprune.jetson.bags.cdr import CdrWriter
from sinkprune.jetson.bags.journal import FrameResult

ANSWER = "/sinkprune/answer"
FIGURES = "/sinkprune/figures"
OVERLAY = "/sinkprune/overlay"
METADATA_NAME = "sinkprune"
"""The name of the record of metadata."""

_TIME = "int32 sec\nuint32 nanosec\n"
_HEADER = "builtin_interfaces/Time stamp\nstring frame_id\n"
_DEFINITIONS = {
    "std_msgs/Header": _HEADER,
    "builtin_interfaces/Time": _TIME,
}
"""The messages inside other messages."""
_FIGURES = (
    "std_msgs/Header header\nuint32 frame\nstring budget\nstring finish\nuint32 prompt_tokens\n"
    "uint32 visual_tokens\nuint32 kept_after_sanitizer\nuint32[] tokens_per_layer\nuint64 kv_bytes\n"
    "float64 confidence\n" + "".join(f"float64 {part}_ms\n" for part in PARTS)
)
_TYPES = {
    ANSWER: ("std_msgs/msg/String", "string data\n"),
    FIGURES: ("sinkprune_msgs/msg/Figures", _FIGURES),
    OVERLAY: ("sensor_msgs/msg/CompressedImage", "std_msgs/Header header\nstring format\nuint8[] data\n"),
}


def write_answers(path: Path, results: Iterable[FrameResult], metadata: Mapping[str, str]) -> None:
    """Write the answers among `results` to an MCAP file at `path`, whole or not at all. Raises `OutputError`.

    Messages have the times of their frames, and their headers those of the frames' headers. A topic without messages
    is left out.
    """
    from mcap.well_known import MessageEncoding, Profile, SchemaEncoding
    from mcap.writer import Writer

    with whole_file(path) as file:
        writer = Writer(file)
        writer.start(profile=Profile.ROS2, library="sinkprune")
        channels: dict[str, int] = {}
        for result in results:
            for topic, data in _messages(result).items():
                if topic not in channels:
                    name, definition = _TYPES[topic]
                    schema = writer.register_schema(name, SchemaEncoding.ROS2, _whole_definition(definition))
                    channels[topic] = writer.register_channel(
                        topic, MessageEncoding.CDR, schema, {"offered_qos_profiles": ""}
                    )
                writer.add_message(channels[topic], result.time_ns, data, result.time_ns, result.number)
        writer.add_metadata(METADATA_NAME, dict(metadata))
        writer.finish()  # type: ignore[no-untyped-call]


def _messages(result: FrameResult) -> dict[str, bytes]:
    """Return the messages about a frame by their topics; none for a frame that failed."""
    if result.failure is not None:
        return {}
    messages = {ANSWER: CdrWriter().text(result.text).message(), FIGURES: _figures(result)}
    if result.overlay:
        messages[OVERLAY] = _with_header(result).text("jpeg").data(result.overlay).message()
    return messages


def _figures(result: FrameResult) -> bytes:
    ms: Mapping[str, Any] = result.ms or {}
    times = [math.nan if (value := ms.get(part)) is None else value for part in PARTS]
    return (
        _with_header(result)
        .u32(result.number)
        .text(result.budget)
        .text(result.finish)
        .u32(result.prompt_tokens, result.visual_tokens, result.tokens_per_layer[0])
        .u32_sequence(result.tokens_per_layer)
        .u64(result.kv_bytes)
        .f64(math.nan if result.confidence is None else result.confidence, *times)
        .message()
    )


def _with_header(result: FrameResult) -> CdrWriter:
    return CdrWriter().u32(result.seconds, result.nanoseconds).text(result.frame_id)


def _whole_definition(definition: str) -> bytes:
    """Return a definition followed by those of the messages inside, as ros2 bag writes them."""
    if "Header" not in definition:
        return definition.encode()
    others = (f"{'=' * 80}\nMSG: {name}\n{fields}" for name, fields in _DEFINITIONS.items())
    return "".join((definition, *others)).encode()
