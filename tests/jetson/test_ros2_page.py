"""The node of docs/ros2.md, with stand-ins for rclpy and cv_bridge."""

from __future__ import annotations

import queue
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sinkprune import Pipeline
from support.programs.printed_commands import blocks

COUNT = 3


def test_the_node_answers_each_frame(
    bundle: Callable[..., Path], photo: Image.Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (snippet,) = (block for block in blocks() if block.page == "ros2.md" and block.language == "py")
    assert snippet.text.count("\n") <= 50
    (tmp_path / "llava-7b").symlink_to(bundle("gqa-112", budgets=("retain-64", "retain-32")))
    monkeypatch.chdir(tmp_path)
    views = [np.asarray(photo.crop((100 * number, 0, 100 * number + 200, 200))) for number in range(COUNT)]
    published: queue.Queue[str] = queue.Queue()
    found: list[str] = []

    class Node:
        def __init__(self, name: str) -> None:
            assert name == "sinkprune"

        def create_publisher(self, kind: Any, topic: str, depth: int) -> Any:
            return SimpleNamespace(publish=lambda message: published.put(message.data))

        def create_subscription(self, kind: Any, topic: str, callback: Any, qos: Any) -> None:
            assert topic == "image"
            self.callback = callback

    def spin(node: Node) -> None:
        for view in views:
            node.callback(SimpleNamespace(pixels=view))
            found.append(published.get(timeout=200))

    def in_rgb(message: Any, encoding: str) -> Any:
        assert encoding == "rgb8"
        return message.pixels

    for name, content in {
        "rclpy": {"init": lambda: None, "spin": spin},
        "rclpy.node": {"Node": Node},
        "rclpy.qos": {"qos_profile_sensor_data": None},
        "cv_bridge": {"CvBridge": lambda: SimpleNamespace(imgmsg_to_cv2=in_rgb)},
        "sensor_msgs": {},
        "sensor_msgs.msg": {"Image": None},
        "std_msgs": {},
        "std_msgs.msg": {"String": SimpleNamespace},
    }.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**content))
    exec(compile(snippet.text, "docs/ros2.md", "exec"), {})
    pipeline = Pipeline.load("llava-7b")
    options: dict[str, Any] = {"budget": "retain-32", "max_new_tokens": 8}
    assert found == [pipeline.generate(view, "Is the way clear?", **options).text for view in views]
