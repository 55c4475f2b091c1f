"""Names every millisecond of a request up to its first token: matrix products, other operators, and the host's work.

    python benchmarks/request_parts.py BUNDLE --image coffee.jpg --budget retain-64
    python benchmarks/request_parts.py BUNDLE --image coffee.jpg --backend ort-cpu --repeat 5 --json parts.json

Matrix products are what FLOPs and bytes bound: linear layers, convolutions and attention. All else is beyond them:
other operators by their type, what a library does around its operators, and the host's work between graphs. Cells are
medians. The libraries' own profilers are on, so a request takes some per cent longer than without. Lines of at least
`SHARE` of TTFT beyond the products are marked: these are worth a look.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

from sinkprune import Pipeline
from sinkprune.contract.command_line.command import entry_point
from sinkprune.contract.command_line.options import json_outputs, write_json
from sinkprune.contract.files.output_files import check_outputs
from sinkprune.runtime.backends import THREADS, Backend, Engine
from sinkprune.runtime.backends.known import on_cpu
from sinkprune.runtime.backends.onnxruntime import backend as onnxruntime
from sinkprune.runtime.backends.openvino import backend as openvino
from sinkprune.runtime.backends.openvino.backend import Cpu

SHARE = 0.02
_PRODUCTS = ("MatMul", "FullyConnected", "Gemm", "Conv", "Attention", "MultiHeadAttention", "QAttention", "Subgraph")
"""Types of operators, or what they begin with or hold. OpenVINO's `Subgraph` has attention in it."""
PRODUCTS, AROUND = "matrix products", "around operators"
Parts = dict[str, float]
"""Milliseconds of a request by part, as in `vision: Softmax`."""


class OperatorTimes:
    """The milliseconds of each operator of each graph, one `Counter` by type for each call."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._sessions = folder, dict[str, Any]()
        self._sums = defaultdict[str, Counter[str]](Counter)
        self._calls = Counter[str]()
        self.of_openvino = defaultdict[str, list[Counter[str]]](list)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Turn the profilers on for engines that are loaded in the block, and read OpenVINO's after each call."""
        properties, options = Cpu.properties, onnxruntime.session_options
        opened, called = onnxruntime.OrtBackend._open, openvino._OpenVinoEngine.__call__

        def with_counters(cpu: Cpu, read: Any, *, weights: bool) -> dict[str, Any]:
            return {**properties(cpu, read, weights=weights), "PERF_COUNT": True}

        def with_profile(library: Any) -> Any:
            made = options(library)
            made.enable_profiling, made.profile_file_prefix = True, str(self._folder / "session")
            return made

        def noting(backend: Any, model: Any, *others: Any) -> Any:
            session, held = opened(backend, model, *others)
            self._sessions[model.graph] = session
            return session, held

        @wraps(called)
        def read(engine: Any, inputs: Mapping[str, Any]) -> Any:
            outputs = called(engine, inputs)
            self._read_openvino(engine)
            return outputs

        Cpu.properties = with_counters  # type: ignore[method-assign]
        onnxruntime.session_options = with_profile
        onnxruntime.OrtBackend._open, openvino._OpenVinoEngine.__call__ = noting, read  # type: ignore[method-assign]
        try:
            yield
        finally:
            Cpu.properties, onnxruntime.session_options = properties, options  # type: ignore[method-assign]
            onnxruntime.OrtBackend._open = opened  # type: ignore[method-assign]
            openvino._OpenVinoEngine.__call__ = called  # type: ignore[method-assign]

    def _read_openvino(self, engine: Any) -> None:
        """Note the operators of the call that just ended: OpenVINO reports the mean of all, with that of loading."""
        graph = engine._compiled.graph
        self._calls[graph] += 1
        count, sums = self._calls[graph] + 1, Counter[str]()
        for node in engine._request.get_profiling_info():
            sums[node.node_type] += node.real_time.total_seconds() * 1e3 * count
        before, self._sums[graph] = self._sums[graph], sums
        self.of_openvino[graph].append(Counter({kind: ms - before[kind] for kind, ms in sums.items()}))

    def all(self) -> dict[str, list[Counter[str]]]:
        """Return the operators of each call of each graph; ends the profiles of ONNX Runtime."""
        # A graph that both libraries hold ran in one of them.
        ended = {graph: _calls(own.end_profiling()) for graph, own in self._sessions.items()}
        return self.of_openvino | {graph: own for graph, own in ended.items() if own}


def _calls(file: str) -> list[Counter[str]]:
    events = json.loads(Path(file).read_text(encoding="utf-8"))
    runs = sorted((event["ts"], event["ts"] + event["dur"]) for event in events if event["name"] == "model_run")
    found = [Counter[str]() for _ in runs]
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            place = next(number for number, (start, end) in enumerate(runs) if start <= event["ts"] <= end)
            found[place][event["args"]["op_name"]] += event["dur"] / 1e3
    return found


def measure(load: Callable[..., Pipeline], ask: Callable[[Pipeline], Any], repeat: int) -> tuple[str, list[Parts]]:
    """Return the backend's name, and the parts of `repeat` requests after one that does not count."""
    spans = list[tuple[str, float]]()

    def wrap(graph: str, engine: Engine, _: Backend) -> Engine:
        def run(inputs: Mapping[str, Any]) -> dict[str, Any]:
            began = time.perf_counter()
            outputs = engine(inputs)
            spans.append((graph, (time.perf_counter() - began) * 1e3))
            return outputs

        return run

    with tempfile.TemporaryDirectory() as folder:
        times, requests = OperatorTimes(Path(folder)), list[tuple[Parts, list[tuple[str, float]]]]()
        with times.recording():
            pipeline = load(wrap=wrap)
            for _ in range(repeat + 1):
                spans.clear()
                answer = ask(pipeline)
                requests.append((answer.ms, [*spans]))
        operators = times.all()
    calls = {graph: iter(own) for graph, own in operators.items()}
    return pipeline.backend.name, [_parts(ms, ran, calls) for ms, ran in requests][1:]


def _parts(ms: Parts, spans: Sequence[tuple[str, float]], calls: Mapping[str, Iterator[Counter[str]]]) -> Parts:
    parts = Counter[str]({"host: preprocess and tokenize": ms["preprocess"]})
    for graph, wall in spans:
        # All selects and the sanitizer of a plan are one part.
        part = graph.rsplit("/", 1)[-1].split("_")[0]
        own = next(calls[graph])
        for kind, spent in own.items():
            parts[f"{part}: {PRODUCTS if any(each in kind for each in _PRODUCTS) else kind}"] += spent
        parts[f"{part}: {AROUND}"] += wall - own.total()
    parts["host: between graphs"] = ms["ttft"] - ms["preprocess"] - sum(wall for _, wall in spans)
    return {**parts, "TTFT": ms["ttft"]}


@entry_point
def main(arguments: Sequence[str] | None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--image", type=Path, required=True)
    parser.add_argument("--prompt", default="What is in the cup, and what lies on the saucer?")
    parser.add_argument("--budget", default="retain-64")
    parser.add_argument("--backend", choices=on_cpu())
    parser.add_argument("--threads", type=THREADS)
    parser.add_argument("--repeat", type=int, default=5, help="requests after the first (default: 5)")
    parser.add_argument("--json", type=Path, metavar="FILE.json", help="write every measurement")
    options = parser.parse_args(arguments)
    check_outputs(json_outputs(options.json), [options.image], [options.bundle])

    def load(**given: Any) -> Pipeline:
        return Pipeline.load(options.bundle, backend=options.backend, threads=options.threads, fit="pad", **given)

    def ask(pipeline: Pipeline) -> Any:
        return pipeline.generate(options.image, options.prompt, budget=options.budget, max_new_tokens=1)

    backend, found = measure(load, ask, options.repeat)
    names = sorted({name for parts in found for name in parts}, key=lambda name: -_median(found, name))
    whole = _median(found, "TTFT")
    sys.stdout.write(f"{options.budget} on {backend}, {len(found)} requests\n")
    for name in names:
        ms = _median(found, name)
        mark = " <-" if ms >= SHARE * whole and PRODUCTS not in name and name != "TTFT" else ""
        if ms >= 0.001 * whole:
            sys.stdout.write(f"{name:48} {ms:9.1f} ms {100 * ms / whole:6.1f} %{mark}\n")
    write_json(options.json, {"backend": backend, "budget": options.budget, "ms": found})


def _median(found: Sequence[Parts], name: str) -> float:
    return statistics.median(parts.get(name, 0.0) for parts in found)


if __name__ == "__main__":
    main()
