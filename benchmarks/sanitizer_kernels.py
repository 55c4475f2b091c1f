"""Times the two plugins of the sanitizer on a CUDA GPU: our kernels, plain PyTorch, the function bodies.

    python benchmarks/sanitizer_kernels.py
    python benchmarks/sanitizer_kernels.py --tokens 2880 --reserve 320 --diverse 320 --dtype bfloat16

CUDA events time `TopRho` and `DiversitySelect` together, from tokens on the device to indices on the device. The ways
take turns in every round; tokens are as warm in the cache as after a vision tower. GB/s counts the rows of tokens
that the kernels read, mostly from L2.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from sinkprune.contract.budgets import diversity_group
from sinkprune.contract.command_line.command import entry_point
from sinkprune.contract.errors import BackendError, UsageError
from sinkprune.contract.files.output_files import check_writable, write_whole
from sinkprune.engines.plugins import launches
from sinkprune.engines.plugins.launches import KernelRunner
from sinkprune.export.dialects import opset24
from sinkprune.export.graph import Graph
from sinkprune.export.pruning.functions import diversity_select, top_rho
from sinkprune.export.weights import PRECISIONS
from sinkprune.runtime.backends.onnxruntime.library import import_onnxruntime
from sinkprune.runtime.device.cuda import open_device

PER_MILLE = 10
WARM_UP = 20
NAMES = {"float32": "fp32", "float16": "fp16"}
"""The precisions of bundles."""


@dataclass(frozen=True)
class Shape:
    """The sizes of the timed sanitizer."""

    groups: int
    tokens: int
    width: int
    reserve: int
    diverse: int
    rounds: int
    dtype: str

    @property
    def outliers(self) -> int:
        """The tokens of a group whose mean is the sink."""
        return max(1, -(-self.tokens * PER_MILLE // 1000))

    @property
    def group(self) -> int:
        """The diverse tokens of a round."""
        return diversity_group(self.diverse, self.rounds)

    def traffic(self) -> int:
        """Return the bytes of tokens that the kernels read: rows twice, then once for each tile of kept rows."""
        # A round compares rows with at most a tile.
        tiles = -(-self.reserve // 32) + -(-self.diverse // self.group) - 1
        row = self.width * getattr(torch, self.dtype).itemsize
        return self.groups * row * (self.outliers + self.tokens * (2 + tiles))


def plain_selection(
    tokens: torch.Tensor, norms: torch.Tensor, reserved: torch.Tensor, shape: Shape
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same selection by plain operations: sink [G,D] and chosen [G,diverse], ascending.

    Tokens [G,N,D], norms [G,N], reserved [G,R]. torch.topk may break ties in another way.
    """
    top = norms.topk(shape.outliers).indices
    sink = _rows(tokens.float(), top).mean(dim=1).to(tokens.dtype)
    unit = torch.nn.functional.normalize(tokens.float(), dim=-1)
    closeness = (unit @ _rows(unit, reserved).transpose(1, 2)).amax(dim=-1)
    closeness = closeness.scatter(1, top, torch.inf).scatter(1, reserved, torch.inf)
    chosen = []
    for taken in range(0, shape.diverse, shape.group):
        fresh = closeness.topk(min(shape.group, shape.diverse - taken), largest=False).indices
        chosen.append(fresh)
        closeness = torch.maximum(closeness, (unit @ _rows(unit, fresh).transpose(1, 2)).amax(dim=-1))
        closeness = closeness.scatter(1, fresh, torch.inf)
    return sink, torch.cat(chosen, dim=1).sort(dim=1).values


def bodies(shape: Shape) -> Graph:
    """Return both function bodies as one graph: tokens, norms, candidate, reserved to sink, outlier, chosen."""
    graph = Graph("bodies", PRECISIONS[NAMES[shape.dtype]], opset24)
    op, n, fp32, flag, integer = graph.op, shape.tokens, ir.DataType.FLOAT, ir.DataType.BOOL, ir.DataType.INT64
    tokens = graph.input("tokens", ["G", n, shape.width])
    norms = graph.input("norms", ["G", n], fp32)
    candidate = graph.input("candidate", ["G", n], flag)
    reserved = graph.input("reserved", ["G", shape.reserve], integer)
    sink, outlier = op.call(top_rho(opset24.OPSET), norms, tokens, per_mille=PER_MILLE)
    select = diversity_select(-(-shape.diverse // shape.group), opset24.OPSET)
    chosen = op.call(select, tokens, candidate, reserved, [shape.diverse], rounds=shape.rounds)
    graph.output("sink", sink, ["G", 1, shape.width])
    graph.output("outlier", outlier, ["G", n], flag)
    graph.output("chosen", chosen, ["G", shape.diverse], integer)
    return graph


def bodies_on_cuda(shape: Shape, stream: int) -> Any:
    """Return an ONNX Runtime session of `bodies` on a CUDA stream; raises `BackendError` without CUDA."""
    if shape.dtype not in NAMES:
        raise BackendError(f"no bundle has {shape.dtype} tokens.")
    onnxruntime = import_onnxruntime("benchmark")
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        raise BackendError("this ONNX Runtime has no CUDAExecutionProvider.")
    # Silence a warning for each of many small operators without known shapes.
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    provider = ("CUDAExecutionProvider", {"user_compute_stream": str(stream)})
    with tempfile.TemporaryDirectory() as folder:
        spec = bodies(shape).save(Path(folder), "bodies.onnx")
        session = onnxruntime.InferenceSession(Path(folder, spec.file), options, providers=[provider])
    if "CUDAExecutionProvider" not in session.get_providers():
        raise BackendError(
            f"its CUDA provider did not start; ONNX Runtime took {', '.join(session.get_providers())}."
        )
    return session


def report(microseconds: dict[str, list[float]], traffic: int) -> str:
    """Return a table: median, 5th and 95th percentile in microseconds, GB/s, and the ratio to the first way."""
    first = statistics.median(next(iter(microseconds.values())))
    lines = [f"{'':28}{'us':>9}{'p5':>9}{'p95':>9}{'GB/s':>9}{'ratio':>9}"]
    for way, times in microseconds.items():
        median, parts = statistics.median(times), statistics.quantiles(times, n=20)
        gbps = traffic / median / 1e3
        lines.append(f"{way:28}{median:9.1f}{parts[0]:9.1f}{parts[-1]:9.1f}{gbps:9.1f}{median / first:9.2f}")
    return "\n".join(lines) + "\n"


def _rows(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return values.gather(1, index[..., None].expand(-1, -1, values.shape[-1]))


@entry_point
def main(arguments: Sequence[str] | None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=576)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--reserve", type=int, default=64)
    parser.add_argument("--diverse", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--dtype", choices=["float16", "bfloat16", "float32"], default="float16")
    parser.add_argument("--repeat", type=int, default=200)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every time too")
    options = parser.parse_args(arguments)
    sizes = (options.groups, options.tokens, options.width, options.reserve, options.diverse, options.rounds)
    shape = Shape(*sizes, options.dtype)
    if min(sizes) < 1 or options.repeat < 2 or shape.outliers + shape.reserve + shape.diverse > shape.tokens:
        raise UsageError(
            f"sizes must be at least 1, --repeat at least 2, and {shape.outliers} outliers, --reserve and --diverse "
            f"at most --tokens together; found {shape} and --repeat {options.repeat}."
        )
    if options.json:
        check_writable(options.json, (".json",))
    device = open_device()
    if not torch.cuda.is_available():
        raise BackendError(f"this PyTorch, {torch.__version__}, reaches no GPU. Install one that is built for CUDA.")
    generator = torch.Generator("cuda").manual_seed(0)
    tokens = torch.randn(shape.groups, shape.tokens, shape.width, device="cuda", generator=generator)
    tokens = tokens.to(getattr(torch, shape.dtype))
    norms = tokens.float().norm(dim=-1)
    outlier = torch.zeros_like(norms, dtype=torch.bool).scatter(1, norms.topk(shape.outliers).indices, True)
    salience = torch.rand(norms.shape, device="cuda", generator=generator).masked_fill(outlier, -torch.inf)
    reserved = salience.topk(shape.reserve).indices
    candidate = (~outlier).scatter(1, reserved, False)
    # Wait, because torch uses a stream of its own.
    torch.cuda.synchronize()

    ways: dict[str, Callable[[], float]] = {}
    enqueue, chosen = _kernels(device, tokens, norms, candidate, reserved, shape)
    enqueue()
    device.synchronize()
    expected = plain_selection(tokens, norms, reserved, shape)[1]
    same = sum(len(set(a) & set(b)) for a, b in zip(chosen.tolist(), expected.tolist(), strict=True))
    sys.stdout.write(f"kernels: {same} of {expected.numel()} chosen as by plain PyTorch\n")
    ways["kernels"] = _timed_on(device, enqueue)
    if device.has_graphs:
        device.begin_capture()
        enqueue()
        graph = device.end_capture()
        ways["kernels, graph"] = _timed_on(device, lambda: device.replay(graph))
    stream = torch.cuda.Stream()
    ways["plain PyTorch"] = _timed_by_torch(stream, lambda: plain_selection(tokens, norms, reserved, shape))
    try:
        run = _bodies(stream, tokens, norms, candidate, reserved, shape)
        ways["function bodies, ORT CUDA"] = _timed_by_torch(stream, run)
    except BackendError as error:
        sys.stdout.write(f"function bodies: left out, {error}\n")

    microseconds: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(WARM_UP + options.repeat):
        for way, timed in ways.items():
            passed = timed()
            if turn >= WARM_UP:
                microseconds[way].append(passed)
    sys.stdout.write(f"{device.name}, sm_{device.compute_capability}, {shape}\n")
    sys.stdout.write(report(microseconds, shape.traffic()))
    if options.json:
        write_whole(options.json, json.dumps({"device": device.name, "us": microseconds}).encode())


def _kernels(
    device: Any,
    tokens: torch.Tensor,
    norms: torch.Tensor,
    candidate: torch.Tensor,
    reserved: torch.Tensor,
    shape: Shape,
) -> tuple[Callable[[], None], torch.Tensor]:
    """What enqueues both plugins' launches, and where the chosen will be."""
    sink, outlier = torch.empty_like(tokens[:, :1]), torch.empty_like(candidate, dtype=torch.int32)
    mask, index = candidate.to(torch.int32), reserved.contiguous()
    chosen = torch.empty(shape.groups, shape.diverse, dtype=torch.int64, device="cuda")
    workspace = torch.empty(
        launches.diversity_workspace(shape.groups, shape.tokens), dtype=torch.uint8, device="cuda"
    )
    given = {"norms": norms, "tokens": tokens, "candidate": mask, "reserved": index}
    filled = {"sink": sink, "outlier": outlier, "chosen": chosen, "workspace": workspace}
    addresses = {name: tensor.data_ptr() for name, tensor in {**given, **filled}.items()}
    sizes = {"G": shape.groups, "N": shape.tokens, "D": shape.width}
    top = launches.top_rho_launches(addresses, {**sizes, "count": shape.outliers}, shape.dtype)
    sizes |= {"R": shape.reserve, "count": shape.diverse, "rounds": shape.rounds}
    diverse = launches.diversity_launches(addresses, sizes, shape.dtype)
    torch.cuda.synchronize()
    both = [*top, *diverse]
    runner = KernelRunner()
    runner.prepare(both)
    # Held by what is returned, so that their memory is not given out again.
    held = (given, filled)

    def enqueue() -> None:
        runner.run(both, device.stream)
        assert held

    return enqueue, chosen


def _timed_on(device: Any, enqueue: Callable[[], None]) -> Callable[[], float]:
    def timed() -> float:
        start = device.record_event()
        enqueue()
        end = device.record_event()
        return 1e3 * float(device.elapsed_ms(start, end))

    return timed


def _timed_by_torch(stream: Any, enqueue: Callable[[], object]) -> Callable[[], float]:
    def timed() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(stream):
            start.record()
            enqueue()
            end.record()
        end.synchronize()
        return 1e3 * float(start.elapsed_time(end))

    return timed


def _bodies(
    stream: Any,
    tokens: torch.Tensor,
    norms: torch.Tensor,
    candidate: torch.Tensor,
    reserved: torch.Tensor,
    shape: Shape,
) -> Callable[[], None]:
    """What runs the function bodies on `stream`, from and to device memory."""
    session = bodies_on_cuda(shape, stream.cuda_stream)
    binding = session.io_binding()
    given = {"tokens": tokens, "norms": norms, "candidate": candidate, "reserved": reserved.contiguous()}
    for name, tensor in given.items():
        element = str(tensor.dtype).removeprefix("torch.")
        binding.bind_input(name, "cuda", 0, element, list(tensor.shape), tensor.data_ptr())
    for output in session.get_outputs():
        binding.bind_output(output.name, "cuda")

    def run() -> None:
        session.run_with_iobinding(binding)
        # What is bound must live as long.
        assert given

    return run


if __name__ == "__main__":
    sys.exit(main())
