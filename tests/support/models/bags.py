"""Bags of rosbag2, written by the library rosbags, which the package does not use."""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from PIL import Image
from rosbags.rosbag2 import CompressionFormat, CompressionMode, StoragePlugin, Writer
from rosbags.typesys import Stores, get_typestore
from rosbags.typesys.store import Typestore

TOPIC = "/camera/image_raw"
START_NS = 1_700_000_000_123_456_789
"""The time of the first frame."""
PERIOD_NS = 100_000_000
IMAGE, COMPRESSED = "sensor_msgs/msg/Image", "sensor_msgs/msg/CompressedImage"
Storage = Literal["mcap", "sqlite3"]
_PLUGINS = {"mcap": StoragePlugin.MCAP, "sqlite3": StoragePlugin.SQLITE3}


class Said(NamedTuple):
    """A message, with the topic and the time it was recorded at."""

    topic: str
    time_ns: int
    message: Any


@cache
def typestore() -> Typestore:
    """Return the message types of ROS 2 Humble. Do not register others."""
    return get_typestore(Stores.ROS2_HUMBLE)


def header(time_ns: int = START_NS, frame_id: str = "camera") -> Any:
    """Return a header whose stamp is 5 ms before `time_ns`, as a driver's is."""
    types, stamp = typestore().types, time_ns - 5_000_000
    time = types["builtin_interfaces/msg/Time"](sec=stamp // 10**9, nanosec=stamp % 10**9)
    return types["std_msgs/msg/Header"](stamp=time, frame_id=frame_id)


def raw_image(pixels: np.ndarray[Any, Any], encoding: str, time_ns: int = START_NS, **fields: Any) -> Any:
    """Return an Image of the rows of `pixels`; `fields` replace its own."""
    data, (height, width) = np.frombuffer(np.ascontiguousarray(pixels).tobytes(), np.uint8), pixels.shape[:2]
    own = {"header": header(time_ns), "encoding": encoding, "is_bigendian": 0, "data": data}
    own |= {"height": height, "width": width, "step": len(data) // height}
    return typestore().types[IMAGE](**{**own, **fields})


def compressed_image(picture: Image.Image, kind: str = "jpeg", time_ns: int = START_NS, name: str = "") -> Any:
    """Return a CompressedImage in the format `kind`, which the message calls `name`."""
    file = io.BytesIO()
    picture.save(file, format=kind.upper())
    data = np.frombuffer(file.getvalue(), np.uint8)
    name = name or f"bgr8; {kind} compressed bgr8"
    return typestore().types[COMPRESSED](header=header(time_ns), format=name, data=data)


def text(words: str) -> Any:
    """Return a String."""
    return typestore().types["std_msgs/msg/String"](data=words)


def frames(pictures: Sequence[Image.Image], topic: str = TOPIC, start_ns: int = START_NS) -> list[Said]:
    """Return pictures as Images in bgr8, ten a second."""
    times = [start_ns + number * PERIOD_NS for number in range(len(pictures))]
    return [
        Said(topic, time_ns, raw_image(np.asarray(picture.convert("RGB"))[..., ::-1], "bgr8", time_ns))
        for picture, time_ns in zip(pictures, times, strict=True)
    ]


def write_bag(
    folder: Path,
    said: Sequence[Said],
    storage: Storage = "mcap",
    compression: CompressionMode = CompressionMode.NONE,
    little_endian: bool = True,
) -> Path:
    """Write messages in their order to a new bag; return its folder."""
    store = typestore()
    writer = Writer(folder, version=9, storage_plugin=_PLUGINS[storage])
    writer.set_compression(compression, CompressionFormat.ZSTD)
    with writer:
        connections = {}
        for topic, time_ns, message in said:
            kind = message.__msgtype__
            if topic not in connections:
                connections[topic] = writer.add_connection(topic, kind, typestore=store)
            writer.write(connections[topic], time_ns, store.serialize_cdr(message, kind, little_endian=little_endian))
    return folder
