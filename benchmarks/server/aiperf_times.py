"""Compares AIPerf's times and answers with the server's own times and with `Pipeline.generate`.

    python -m venv aiperf && aiperf/bin/pip install aiperf
    python benchmarks/server/aiperf_times.py demo-output/bundle --aiperf aiperf/bin/aiperf

AIPerf sends streamed questions about random pictures of 640x480 pixels to a `sinkprune-serve` of its own. No picture
is sent twice. Of each request, AIPerf's time to the first token is compared with the server's: `read_ms`, `queued_ms`
and `ttft`, from the last chunk of the same response. Then the pipeline answers the same requests, one by one.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from serving import served
from sinkprune import Pipeline
from sinkprune.contract.command_line.command import entry_point
from sinkprune.contract.command_line.options import json_outputs, write_json
from sinkprune.contract.files.output_files import check_outputs

WARM_UP = 3
NAME = "m"


class Measured(NamedTuple):
    """One request of AIPerf, with what both sides measured."""

    payload: dict[str, Any]
    text: str
    aiperf_ms: float
    server_ms: float


def profile(aiperf: Path, bundle: Path, url: str, concurrency: int, requests: int, tokens: int) -> list[Measured]:
    """Run `aiperf profile`, and return its requests without those of the warm-up."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(str(aiperf), "profile", "--model", NAME, "--url", url.removesuffix("/v1"), "--endpoint-type", "chat"),
            *("--streaming", "--tokenizer", str(bundle / "weights"), "--use-server-token-count"),
            *("--image-width-mean", "640", "--image-height-mean", "480", "--image-format", "jpeg"),
            *("--isl", "16", "--osl", str(tokens), "--extra-inputs", f"min_tokens:{tokens}"),
            *("--concurrency", str(concurrency), "--request-count", str(requests)),
            *("--warmup-request-count", str(WARM_UP), "--num-dataset-entries", str(requests + WARM_UP)),
            # Every run has its own pictures, because the server's session remembers them.
            *("--random-seed", str(concurrency), "--ui", "none", "--export-level", "raw"),
            *("--output-artifact-dir", folder),
        ]
        own = {**os.environ, "TMPDIR": folder}
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=own)
        if done.returncode != 0:
            sys.stderr.write(done.stdout)
            raise RuntimeError(f"aiperf ended with exit code {done.returncode}. Its output is above.")
        raw, found = _lines(Path(folder) / "profile_export_raw.jsonl"), _lines(Path(folder) / "profile_export.jsonl")
    metrics = {each["metadata"]["x_request_id"]: each["metrics"] for each in found}
    return [
        _measured(each, metrics[each["metadata"]["x_request_id"]])
        for each in raw
        if each["metadata"]["benchmark_phase"] == "profiling"
    ]


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _measured(raw: dict[str, Any], metrics: dict[str, Any]) -> Measured:
    packets = [packet["value"] for response in raw["responses"] for packet in response["packets"]]
    chunks = [json.loads(packet) for packet in packets if packet != "[DONE]"]
    [details] = [chunk["sinkprune"] for chunk in chunks if "sinkprune" in chunk]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    return Measured(
        raw["payload"],
        "".join(delta.get("content") or "" for delta in deltas),
        metrics["time_to_first_token"]["value"],
        details["read_ms"] + details["queued_ms"] + details["ms"]["ttft"],
    )


def expected(pipeline: Pipeline, payload: dict[str, Any], budget: str) -> str:
    """Return the pipeline's answer to a request of AIPerf."""
    [message] = payload["messages"]
    pictures, texts = [], [""]
    for part in message["content"]:
        if part["type"] == "text":
            texts[-1] += part["text"]
        else:
            file = io.BytesIO(base64.b64decode(part["image_url"]["url"].partition(",")[2]))
            pictures.append(Image.open(file).convert("RGB"))
            texts.append("")
    tokens = {"max_new_tokens": payload["max_completion_tokens"], "min_new_tokens": payload["min_tokens"]}
    return pipeline.generate(pictures, texts, budget=budget, **tokens).text


@entry_point
def main(arguments: Sequence[str] | None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--aiperf", type=Path, required=True, help="the installed command")
    parser.add_argument("--budget", default="retain-64")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    check_outputs(json_outputs(options.json), [])
    with served(options.bundle, ["--backend", "ort-cpu", "--budget", options.budget, "--name", NAME]) as server:
        runs = {
            number: profile(options.aiperf, options.bundle, server["url"], number, options.requests, options.tokens)
            for number in options.concurrency
        }
    pipeline = Pipeline.load(options.bundle, backend="ort-cpu")
    for number, run in runs.items():
        equal = sum(each.text == expected(pipeline, each.payload, options.budget) for each in run)
        rows = {
            "aiperf ms": [each.aiperf_ms for each in run],
            "server ms": [each.server_ms for each in run],
            "more %": [(each.aiperf_ms / each.server_ms - 1) * 100 for each in run],
        }
        sys.stdout.write(f"concurrency {number}: {equal} of {len(run)} answers equal those of Pipeline.generate\n")
        for row, values in rows.items():
            middle = statistics.median(values)
            sys.stdout.write(f"  {row:10} {middle:8.1f} ({min(values):.1f} to {max(values):.1f})\n")
    times = {number: [(each.aiperf_ms, each.server_ms) for each in run] for number, run in runs.items()}
    write_json(options.json, times)


if __name__ == "__main__":
    sys.exit(main())
