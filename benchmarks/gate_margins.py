"""Compares the errors of correct engines with the gate's limits: exports, builds and checks checkpoints.

    python benchmarks/gate_margins.py demo/pocket --image demo/photos/coffee.jpg
    python benchmarks/gate_margins.py CHECKPOINT CHECKPOINT --image photo.jpg --forms fp32,fp16,int8,int4

Prints a line for each rounding and kind of output: the largest errors of a median row and of a worst row, the limits,
and the engine with the largest error. docs/gate.md has the figures of the repository's own checkpoints.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.command_line.command import entry_point
from sinkprune.contract.engines_manifest import Target
from sinkprune.contract.precision import WeightsName
from sinkprune.engines.build import build_engines
from sinkprune.engines.gate import PROMPT
from sinkprune.engines.gate.comparing import check_engines, engines_alone
from sinkprune.engines.gate.recording import picture_files, read_question, record
from sinkprune.engines.gate.report import ROUNDINGS, GateReport
from sinkprune.engines.profiles import resolve_limits
from sinkprune.engines.progress import SILENT
from sinkprune.engines.targets import new_builder
from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.source import ExportRequest
from sinkprune.runtime.backends import load_backend
from sinkprune.runtime.backends.compatibility import open_engines
from sinkprune.runtime.backends.known import Compute, backend_of

COMPUTES: dict[Target, tuple[Compute | None, ...]] = {"onnxruntime": (None,), "openvino": ("fastest", "fp32")}
"""The ways of computing that each target's engines are run with."""


def reports(checkpoint: str, form: str, image: Path, folder: Path) -> Iterator[GateReport]:
    """Yield the gate's report of a checkpoint's engines in one form, for every target and compute."""
    weights = next((name for name in get_args(WeightsName) if name == form and form not in ("fp32", "fp16")), None)
    precision = "fp16" if form == "fp16" else "fp32"
    export_bundle(ExportRequest(checkpoint, precision=precision, weights=weights), folder / "bundle")
    bundle = read_bundle(folder / "bundle")
    question = read_question(picture_files([image], bundle.manifest), PROMPT, bundle)
    recording = record(bundle, question, folder / "recording", SILENT)
    limits = resolve_limits(bundle.manifest, prompt_tokens=None, new_tokens=None, images=None)
    for target, computes in COMPUTES.items():
        build_engines(bundle, folder / target, new_builder(target, None, folder / "timing-cache"), limits)
        for compute in computes:
            built = open_engines(folder / target, bundle)
            backend = load_backend(backend_of(target), None, built, compute)
            yield check_engines(built, engines_alone(folder / target), backend, recording)


@entry_point
def main(arguments: Sequence[str] | None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="+")
    parser.add_argument("--image", type=Path, required=True)
    parser.add_argument("--forms", default="fp32,fp16,int8,int4")
    options = parser.parse_args(arguments)
    largest: dict[tuple[str, str], tuple[float, float, float, float, str]] = {}
    for checkpoint in options.checkpoints:
        for form in options.forms.split(","):
            with tempfile.TemporaryDirectory() as folder:
                for report in reports(checkpoint, form, options.image, Path(folder)):
                    engine = f"{Path(checkpoint).name} {form} {report.target}, {report.compute}"
                    sys.stdout.write(f"{engine}: {'passed' if report.passed else 'REJECTED'}\n")
                    _update(largest, report, engine)
    for (rounding, kind), (typical, worst, typical_limit, worst_limit, whose) in sorted(largest.items()):
        sys.stdout.write(
            f"{rounding:5} {kind:8} median {typical:.2g} of {typical_limit:g}, worst {worst:.2g} of {worst_limit:g} "
            f"({whose})\n"
        )


def _update(
    largest: dict[tuple[str, str], tuple[float, float, float, float, str]], report: GateReport, engine: str
) -> None:
    """Update the largest errors, by rounding and kind of output, with those of an engine."""
    for own in report.graphs.values():
        for output in own.outputs.values():
            typical, worst = (float("inf") if found is None else found for found in (output.typical, output.worst))
            known = largest.get((own.rounding, output.kind), (0.0, 0.0, 0.0, 0.0, ""))
            largest[own.rounding, output.kind] = (
                *(max(known[0], typical), max(known[1], worst), output.typical_limit, output.worst_limit),
                engine if worst >= known[1] else known[4],
            )
    rounding = max((own.rounding for own in report.graphs.values()), key=ROUNDINGS.index)
    for chunk in report.chunks:
        known = largest.get((rounding, "chunks"), (0.0, 0.0, 0.0, 0.0, ""))
        if chunk.limit is not None and chunk.difference >= known[1]:
            found = (chunk.difference, chunk.difference, chunk.limit, chunk.limit)
            largest[rounding, "chunks"] = (*found, f"{engine}, {chunk.budget}")
    for text in report.texts:
        known = largest.get(("text", ""), (0.0, 0.0, 0.0, 0.0, ""))
        if text.gap_limit is not None and text.gap / text.gap_limit >= (known[1] / known[3] if known[3] else 0.0):
            largest["text", ""] = (text.gap, text.gap, text.gap_limit, text.gap_limit, f"{engine}, {text.budget}")


if __name__ == "__main__":
    sys.exit(main())
