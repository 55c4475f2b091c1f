"""Replays of bags: the usual question, and the messages of their outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mcap.reader import make_reader
from mcap_ros2.decoder import DecoderFactory

from support.models.bags import TOPIC

QUESTION = ("--topic", TOPIC, "--prompt", "What is this?", "--max-new-tokens", "3")
COUNT = 5
OVERLAY, FIGURES, ANSWER = "/sinkprune/overlay", "/sinkprune/figures", "/sinkprune/answer"


def messages(path: Path) -> dict[str, list[tuple[int, Any]]]:
    """Return the messages of every topic with their times, as mcap-ros2-support reads them."""
    found: dict[str, list[tuple[int, Any]]] = {}
    with path.open("rb") as file:
        reader = make_reader(file, decoder_factories=[DecoderFactory()], validate_crcs=True)
        for _, channel, message, decoded in reader.iter_decoded_messages():
            assert message.log_time == message.publish_time
            found.setdefault(channel.topic, []).append((message.log_time, decoded))
    return found
