"""Correct engines of a bundle, and the recording that the gate compares them with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from sinkprune.contract.bundle import Bundle
from sinkprune.engines.build import build_engines
from sinkprune.engines.gate.comparing import compare_engine
from sinkprune.engines.gate.recording import GateQuestion, Recording, record
from sinkprune.engines.gate.report import GraphReport
from sinkprune.engines.profiles import resolve_limits
from sinkprune.engines.progress import SILENT
from sinkprune.engines.targets import new_builder
from sinkprune.runtime.backends import load_backend
from sinkprune.runtime.backends.compatibility import open_engines
from sinkprune.runtime.backends.known import Compute, backend_of


class Honest:
    """A small bundle, the recording of its graphs on `images`, and correct engines."""

    def __init__(self, bundle: Bundle, folder: Path, images: Sequence[Image.Image], prompt: str) -> None:
        self.bundle, self._folder = bundle, folder
        self.question = GateQuestion(images, prompt)
        self.recording: Recording = record(bundle, self.question, folder / "recording", SILENT)

    def engines(self, target: str) -> Path:
        """Return the folder of engines for `target`, built once."""
        output = self._folder / target
        if not output.exists():
            builder = new_builder(target, None, self._folder / "timing-cache")
            limits = resolve_limits(self.bundle.manifest, prompt_tokens=None, new_tokens=None, images=None)
            build_engines(self.bundle, output, builder, limits)
        return output

    def compare(self, engines: Path, graph: str, compute: Compute | None = None) -> GraphReport:
        """Compare one engine of a folder with its graph."""
        built = open_engines(engines, self.bundle)
        backend = load_backend(backend_of(built.engines.manifest.target), 1, built, compute)
        return compare_engine(graph, built, backend, self.recording)
