"""Checks that engines fit the bundle, backend and machine: compares `engines.json` before any engine is loaded."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace

from sinkprune.contract.bundle import Bundle
from sinkprune.contract.engines_manifest import (
    CHECKED,
    LIMIT_OPTIONS,
    MOST_TOKENS,
    Engines,
    EngineSpec,
    Limits,
    read_engines,
)
from sinkprune.contract.errors import EnginesError, UsageError
from sinkprune.contract.files.trust import ANY, Trust
from sinkprune.runtime.backends.known import KNOWN
from sinkprune.runtime.backends.models import Model
from sinkprune.runtime.processor import instructions


@dataclass(frozen=True)
class BuiltEngines:
    """Engines and the bundle that they run with.

    Each check raises an `EnginesError` that names both sides, and the command that builds matching engines.
    """

    engines: Engines
    bundle: Bundle

    def model(self, graph: str) -> Model:
        """Return the engine of the graph of that name, as a backend loads it."""
        model, engine = Model.of_bundle(self.bundle, graph), self.engines.manifest.engines[graph]
        return replace(model, name=engine.file, folder=self.engines.files, built=True)

    @property
    def limits(self) -> Limits | None:
        """The largest request that the engines accept; None if only the model limits requests.

        Engines that take any shape may have limits by the user. Their other limits are those of the bundle.
        """
        enforced = self.engines.manifest.enforced_limits
        unlimited = Limits(MOST_TOKENS, MOST_TOKENS, self.bundle.manifest.max_images)
        return replace(unlimited, **enforced) if enforced else None

    def checked(self) -> BuiltEngines:
        """Return these engines; raises `EnginesError` for another checkpoint or bundle, or some graphs only."""
        manifest, bundle = self.engines.manifest, self.bundle
        compared = {
            "checkpoint": (manifest.checkpoint_sha256, bundle.manifest.checkpoint.config_sha256),
            "bundle": (manifest.bundle_sha256, bundle.sha256),
        }
        for what, (built, found) in compared.items():
            if built != found:
                raise self._refusal(f"built from another {what} than '{bundle.path}': sha256 {built}, found {found}.")
        missing = [graph for graph in bundle.manifest.graphs if graph not in manifest.engines]
        if missing:
            raise self._refusal(f"built without the graph '{missing[0]}' of the bundle.")
        return self

    def own(self, name: str) -> EngineSpec:
        """Return the engine of a graph that the runtime writes itself; raises `EnginesError` if it is missing."""
        if name not in self.engines.manifest.engines:
            raise self._refusal(f"built by another version of sinkprune, without the graph '{name}'.")
        return self.engines.manifest.engines[name]

    def check_backend(self, backend: str) -> None:
        """Reject engines whose target is not that of `backend`, e.g. "ort-cpu"; raises `EnginesError`."""
        built, expected = self.engines.manifest.target, KNOWN[backend].target
        if built != expected:
            raise EnginesError(
                f"the engines in '{self.engines.path}' were built for target {built}, backend '{backend}' takes "
                f"target {expected}. Build others with: sinkprune-build {self._source} -o ENGINES --target {expected}"
            )

    def check_library(self, library: str, version: str) -> None:
        """Reject engines built by another version of the library than `version`; raises `EnginesError`."""
        built = self.engines.manifest.library_version
        if built != version:
            raise self._refusal(
                f"built by {library} {built}, {version} is installed here, and engines load only in the version that "
                "built them."
            )

    def check_processor(self, provider: str) -> None:
        """Reject models optimised for another `provider` of onnxruntime, or for another kind of processor.

        Their matrices are packed for the instructions of one processor. Raises `EnginesError`.
        """
        flags = self.engines.manifest.flags
        here = {"provider": provider, "machine": platform.machine(), "instructions": instructions()}
        for what, found in here.items():
            built = flags.get(what)
            if built != found:
                raise self._refusal(
                    f"optimised for {what} {built}, here it is {found}. The bundle itself runs on every one, without "
                    "engines."
                )

    def check_gpu(self, name: str, compute_capability: int) -> None:
        """Reject engines without code for this GPU, e.g. ("Orin", 87) for sm_87; raises `EnginesError`."""
        built = self.engines.manifest.compute_capabilities
        if compute_capability not in built:
            # Engines for target tensorrt are built on the GPU they are for.
            sm = f" --sm {compute_capability}" if self.engines.manifest.target == "tensorrt-rtx" else ""
            raise self._refusal(
                f"built for {', '.join(f'sm_{built_for}' for built_for in built)}, the GPU here is {name}, "
                f"sm_{compute_capability}.",
                sm,
            )

    def check_plugins(self, found: Mapping[str, str]) -> None:
        """Reject engines that need a plugin that is missing here, or has other kernels here.

        `found` is the sha256 of each plugin's kernels, by the plugin's name. Raises `EnginesError`.
        """
        for name, built in self.engines.manifest.plugins.items():
            if name not in found:
                raise self._refusal(
                    f"built with the plugin '{name}', registered here: {', '.join(found) or 'none'}. Install "
                    "sinkprune as it was where they were built, or build them again."
                )
            if found[name] != built:
                raise self._refusal(
                    f"built with kernels of sha256 {built} in plugin '{name}', here they are {found[name]}."
                )

    @property
    def rebuild(self) -> str:
        """The command that rebuilds these engines, as a sentence without its full stop."""
        path, manifest = self.engines.path, self.engines.manifest
        limits = [f" {LIMIT_OPTIONS[name]} {value}" for name, value in manifest.enforced_limits.items()]
        check = " --check PICTURE" if CHECKED in manifest.flags else ""
        return (
            f"Build them with: sinkprune-build {self._source} -o {path} --target {manifest.target}{''.join(limits)}"
            f"{check} --force"
        )

    @property
    def _source(self) -> str:
        return "BUNDLE" if self.bundle.engines else str(self.bundle.path)

    def _refusal(self, how: str, more: str = "") -> EnginesError:
        """Return the error for engines that were built as `how` says; `more` are options of the command."""
        return EnginesError(f"the engines in '{self.engines.path}' were {how} {self.rebuild}{more}")


def open_engines(path: str | os.PathLike[str], bundle: Bundle, trust: Trust = ANY) -> BuiltEngines:
    """Open the engines in the folder `path`, which must match `trust` and be built from `bundle`.

    The sums of their files are not compared: see `Engines.verify`. Raises `EnginesError`, and `UsageError` for
    engines without a pin or signature with a bundle that has one.
    """
    if bundle.trust != ANY and trust == ANY:
        raise UsageError(
            f"the bundle '{bundle.path}' is pinned, and the engines in '{path}', which would run in its place, are "
            "not. Give the engines' sum that sinkprune-build printed (--engines-sha256, engines_sha256=), or sign "
            "both."
        )
    if bundle.engines is not None:
        raise UsageError(f"'{bundle.path}' holds engines, and others were given in '{path}'. Leave those out.")
    return BuiltEngines(read_engines(path, trust), bundle).checked()


def own_engines(bundle: Bundle) -> BuiltEngines | None:
    """Return the engines that `bundle` came with, or None where it has graphs.

    Raises `EnginesError` if they lack one of the bundle's graphs.
    """
    return None if bundle.engines is None else BuiltEngines(bundle.engines, bundle).checked()
