"""Opens a bundle or engines with a backend, and loads what requests run on."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from sinkprune.contract.bundle import Bundle, read_runnable
from sinkprune.contract.checks import check_callable, check_path, check_type, creation_checks_options
from sinkprune.contract.errors import UsageError
from sinkprune.contract.files.trust import ANY, Trust
from sinkprune.contract.manifest import EMBEDDING
from sinkprune.contract.progress import OnProgress, reporting
from sinkprune.runtime.backends import Backend, Decoder, Engine, load_backend
from sinkprune.runtime.backends.known import Compute, usual_backend
from sinkprune.runtime.backends.models import Model
from sinkprune.runtime.families import Family, Fit, load_family
from sinkprune.runtime.media.picture_warnings import PictureWarnings
from sinkprune.runtime.steps.chain import Chain, Wrap
from sinkprune.runtime.steps.loaded_model import LoadedModel
from sinkprune.runtime.steps.prompt_rows import Embedding
from sinkprune.runtime.text.prompt import PromptEncoder

if TYPE_CHECKING:
    from sinkprune.runtime.backends.compatibility import BuiltEngines
    from sinkprune.runtime.frames import FrameGraph

During = Callable[[str], AbstractContextManager[Any]]
"""Returns a context that is entered with the name of a slow part. What it yields is called with the progress, if it
can be (`OnProgress`)."""


class StaysInProcess:
    """What holds engines, which no other process can have, and no copy."""

    def __reduce__(self) -> NoReturn:
        """Raise `TypeError`, for modules pickle, copy and multiprocessing."""
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or sent to another process: its engines belong to this one. "
            "Load the bundle in the other process, or share the object between threads."
        )


@creation_checks_options
@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How a bundle is loaded, for answers and for actions. A bundle that does not match a sum or a key is rejected.

    Raises `TypeError` for a value of a wrong type, and `OptionError` for an unknown name.
    """

    backend: str | None = None
    """The name of a backend (default: the quickest installed, or that of the engines)."""
    threads: int | None = None
    """The number of CPU threads (default: all cores)."""
    engines: str | os.PathLike[str] | None = None
    """A folder of engines that were built from the bundle; None runs its graphs."""
    compute: Compute | None = None
    """What openvino (fastest, bf16, fp32) and the other backends but ort-cuda and TensorRT (fastest, fp32) compute in
    (default: fastest)."""
    check_sums: bool = True
    """Whether every file is compared with its sha256 first; sizes are always compared. For a bundle that was already
    read, `read_runnable` has compared `bundle.json`."""
    sha256: str | None = None
    """The expected sum of `bundle.json`."""
    engines_sha256: str | None = None
    """The expected sum of `engines.json`."""
    signed_by: str | os.PathLike[str] | None = None
    """A file with the public key of both signatures (`sinkprune-export --sign`)."""
    wrap: Wrap | None = None
    """Takes a graph's name, its engine and the backend when the engine is loaded, and returns what runs in its
    place."""
    during: During = nullcontext
    """A context that is entered with the name of each slow part."""

    def __post_init__(self) -> None:
        for name in ("engines", "signed_by"):
            if (path := getattr(self, name)) is not None:
                check_path(name, path)
        check_type("check_sums", self.check_sums, (bool, np.bool_), "True or False")
        check_callable("during", self.during)
        if self.wrap is not None:
            check_callable("wrap", self.wrap)

    def open(
        self, bundle: str | os.PathLike[str] | Bundle, *, acts: bool
    ) -> tuple[Bundle, Backend, BuiltEngines | None]:
        """Return a bundle, its backend and the engines built from it, None for its graphs, after comparing sums.

        `acts` says whether a robot policy is expected. Raises `BundleError`, `EnginesError`, `BackendError`,
        `UsageError` (also for a bundle of the other kind), and `TypeError` for a bundle that is no path.
        """
        if not isinstance(bundle, Bundle):
            check_path("bundle", bundle)
        key = Path(self.signed_by) if self.signed_by is not None else None
        pinned, engines_pinned = Trust(self.sha256, key), Trust(self.engines_sha256, key)
        if self.engines is None and self.engines_sha256 is not None:
            raise UsageError("a sum of engines was given, and no engines. Give both, or leave out the sum.")
        opened = bundle if isinstance(bundle, Bundle) else read_runnable(bundle, pinned)
        trusted = opened.trust
        if self.sha256 not in (None, trusted.sha256) or key not in (None, trusted.signed_by):
            raise UsageError(
                f"the bundle '{opened.path}' was read already, and not compared with this sum or key. Give them to "
                "read_runnable, as in read_runnable(path, Trust(sha256, key))."
            )
        check_kind(opened, acts=acts)
        if not self.check_sums and (trusted != ANY or engines_pinned != ANY):
            raise UsageError(
                f"the bundle '{opened.path}' or its engines are pinned by a sum or a key, and their files were not "
                "to be compared with it. Leave out --skip-sums (check_sums=False)."
            )
        built = engines_of(opened, self.engines, engines_pinned)
        # Before the sums, which are slow: an error should come early.
        with self.during("loading packages"):
            name = usual_backend(built.engines if built else None) if self.backend is None else self.backend
            library = load_backend(name, self.threads, built, self.compute)
        if self.check_sums:
            with self.during("checking sums") as progress:
                opened.verify(reporting(progress))
                if built is not None and opened.engines is None:
                    built.engines.verify(reporting(progress))
        return opened, library, built


LOAD_OPTIONS = tuple(field.name for field in fields(LoadOptions))
"""Options of loading, as `Pipeline.load` and `Policy.load` take them."""


def engines_of(bundle: Bundle, path: str | os.PathLike[str] | None = None, trust: Trust = ANY) -> BuiltEngines | None:
    """Return the engines in the folder `path`, or those that `bundle` came with; None where its graphs run.

    Raises what `open_engines` raises.
    """
    if path is None and bundle.engines is None:
        return None
    from sinkprune.runtime.backends.compatibility import open_engines, own_engines

    return own_engines(bundle) if path is None else open_engines(path, bundle, trust)


def check_kind(bundle: Bundle, *, acts: bool, instead: str = "sinkprune-act or Policy.load") -> None:
    """Raise `UsageError` unless the bundle is a robot policy, with `acts`, or a model that answers, without.

    The message advises a robot policy's user to take something else `instead`.
    """
    manifest, path = bundle.manifest, bundle.path
    if acts and manifest.policy is None:
        raise UsageError(
            f"'{path}' is a model that answers questions (family '{manifest.family}'), expected a robot policy. Use "
            "sinkprune-run or Pipeline.load."
        )
    if not acts and manifest.policy is not None:
        raise UsageError(
            f"'{path}' is a robot policy (family '{manifest.family}'), which gives actions and no text. Use "
            f"{instead}."
        )


def load_model(
    bundle: Bundle,
    backend: Backend,
    built: BuiltEngines | None,
    wrap: Wrap | None,
    fit: Fit | None,
    progress: OnProgress,
) -> LoadedModel:
    """Load the bundle's graphs on `backend`, or the engines `built` from them; `wrap` may replace each engine.

    Raises `BundleError`, `BackendError` and `UsageError`.
    """
    manifest = bundle.manifest

    def model(graph: str) -> Model:
        return built.model(graph) if built else Model.of_bundle(bundle, graph)

    def load(graph: str) -> Engine:
        engine = backend.load(model(graph))
        return engine if wrap is None else wrap(graph, engine, backend)

    def load_decoder(graph: str) -> Decoder:
        own = (lambda engine: engine) if wrap is None else (lambda engine: wrap(graph, engine, backend))
        return backend.load_decoder(model(graph), manifest.cache, own)

    family = load_family(manifest, fit)
    return LoadedModel(
        manifest,
        built.limits if built else None,
        family,
        PromptEncoder.of_bundle(bundle),
        Embedding(bundle.files[EMBEDDING], manifest),
        Chain(manifest, backend, load, load_decoder, progress),
        PictureWarnings(),
        _load_frames(backend, family),
    )


def _load_frames(backend: Backend, family: Family) -> FrameGraph | None:
    if not backend.prepares_frames:
        return None
    from sinkprune.runtime.frames import FrameGraph

    form = family.frame_form()
    return None if form is None else FrameGraph(backend, form)
