"""Prepare frames by the graph of a backend and on the host: compare every value, and print both times.

Rounds alternate. The graph's times include the way of the bytes to the device, and end when the result is complete.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np
from PIL import Image

from sinkprune.contract.precision import Array
from sinkprune.runtime.backends import load_backend
from sinkprune.runtime.families.llava import SquareProcessor, pixel_table
from sinkprune.runtime.families.policies import ResizeWithPad
from sinkprune.runtime.frames import FrameGraph, bilinear_form, square_form
from sinkprune.runtime.media.frame import Frame

SIZES = ((640, 480), (1280, 720), (1920, 1080))
PIXELS: dict[str, Any] = {
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "resample": 3,
}


def square(side: int) -> dict[str, int]:
    return {"height": side, "width": side}


CLIP = {
    **PIXELS,
    "do_resize": True,
    "size": {"shortest_edge": 336},
    "do_center_crop": True,
    "crop_size": square(336),
    "do_pad": False,
}
LEROBOT = {**PIXELS, "pad_size": square(224), "image_processor_type": "resize_with_pad_torch"}


def _size(text: str) -> tuple[int, int]:
    width, height = text.split("x")
    return int(width), int(height)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="ort-cpu", choices=("ort-cpu", "ort-cuda"))
    parser.add_argument("--threads", type=int, help="CPU threads of ort-cpu")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--size", type=_size, nargs="+", default=SIZES, metavar="WIDTHxHEIGHT", help="of the frames")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every time too")
    options = parser.parse_args(arguments)
    backend = load_backend(options.backend, options.threads)
    clip, pad, lerobot = SquareProcessor(CLIP), SquareProcessor(CLIP).fitted("pad", 336), ResizeWithPad(LEROBOT)
    clip_form = square_form(336, pixel_table(CLIP, np.dtype(np.float32)), masked=False)
    cases: list[tuple[str, Any, Any]] = [
        ("LLaVA, crop", clip, clip_form),
        ("LLaVA, pad", pad, clip_form),
        ("LeRobot's pi0", lerobot, bilinear_form(224, np.dtype(np.float32), LEROBOT)),
    ]
    found = list[dict[str, Any]]()
    sys.stdout.write("| frame | processor | graph ms | host ms | largest difference |\n|---|---|---|---|---|\n")
    for name, processor, form in cases:
        graph = FrameGraph(backend, form)
        for size in options.size:
            pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), np.uint8)
            inputs = graph.planned(Frame.of_array(pixels), [processor.frame_plan(size)])
            assert inputs is not None

            def by_graph(inputs: Any = inputs) -> Array:
                return backend.numpy(inputs.prepared(backend)["pixel_values"])

            def on_host(processor: Any = processor, pixels: Array = pixels) -> Array:
                return processor(Image.fromarray(pixels))[None]

            difference = np.abs(by_graph() - on_host()).max()
            times, frame = measured([by_graph, on_host], options.rounds), f"{size[0]}x{size[1]}"
            graph_ms, host_ms = map(_spread, times)
            sys.stdout.write(f"| {frame} | {name} | {graph_ms} | {host_ms} | {difference:g} |\n")
            found.append(
                {"frame": frame, "processor": name, "difference": float(difference)}
                | dict(zip(("graph_ms", "host_ms"), times, strict=True))
            )
    if options.json:
        options.json.write_text(json.dumps(found), encoding="utf-8")


def _spread(ms: list[float]) -> str:
    """Return the median and the quartiles."""
    return f"{median(ms):.1f} ({quantiles(ms)[0]:.1f} to {quantiles(ms)[2]:.1f})"


def measured(runs: list[Callable[[], Array]], rounds: int) -> list[list[float]]:
    """Return the milliseconds of each of `runs`, in turns."""
    spent: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds):
        for own, run in zip(spent, runs, strict=True):
            began = time.perf_counter()
            run()
            own.append((time.perf_counter() - began) * 1e3)
    return spent


if __name__ == "__main__":
    main()
