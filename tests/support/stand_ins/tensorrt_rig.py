"""A pipeline on fakes of TensorRT and of a device; the chain and the backend are the real ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sinkprune import Pipeline
from sinkprune.contract.bundle import Bundle, read_bundle
from sinkprune.runtime.backends.compatibility import open_engines
from sinkprune.runtime.backends.tensorrt import TensorRTBackend
from support.stand_ins.fake_device import FakeDevice
from support.stand_ins.fake_tensorrt import FakeContext, FakeTensorRT, build_fake_engines


class Rig:
    """A pipeline on fake engines and a fake device."""

    def __init__(
        self, bundle: Bundle, engines: Path, library: type[FakeTensorRT] = FakeTensorRT, **device: Any
    ) -> None:
        self.device = FakeDevice(**device)
        self.library = library(self.device)
        built = open_engines(engines, bundle)
        self.backend = TensorRTBackend("tensorrt", self.library, self.device, built)
        self.pipeline = Pipeline(bundle, self.backend, built)

    def contexts(self, graph: str) -> list[FakeContext]:
        return self.library.engines[graph].contexts

    @property
    def decoders(self) -> list[str]:
        return [f"decoder_{segment}" for segment in range(len(self.pipeline.chain.decoders))]

    def decode_calls(self) -> set[int]:
        """Return the number of decode calls of each decoder, without replays."""
        return self.calls(1)

    def calls(self, profile: int) -> set[int]:
        """Return the number of calls of each decoder with an optimisation profile, without replays."""
        return {
            sum(len(context.enqueued) for context in self.contexts(graph) if context.optimisation_profile == profile)
            for graph in self.decoders
        }

    def enqueued(self) -> int:
        """Return the number of calls of engines, without replays."""
        return sum(len(context.enqueued) for engine in self.library.engines.values() for context in engine.contexts)

    def clear(self) -> None:
        self.device.calls.clear()
        for engine in self.library.engines.values():
            for context in engine.contexts:
                context.enqueued.clear()


def rig_of(bundle: Path, engines: Path) -> Rig:
    """Write fake engines of a bundle to a new folder, and return a rig of them."""
    opened = read_bundle(bundle)
    build_fake_engines(opened, engines)
    return Rig(opened, engines)
