"""Opens a bundle or engines with a backend, and loads the parts that requests run on."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from sinkprune.contract.budgets import UNPRUNED, Plan
from sinkprune.contract.bundle import Bundle, read_runnable
from sinkprune.contract.checks import check_callable, check_path, check_type, creation_checks_options
from sinkprune.contract.errors import UsageError
from sinkprune.contract.files.trust import ANY, Trust
from sinkprune.contract.manifest import EMBEDDING, Manifest
from sinkprune.contract.precision import Array
from sinkprune.contract.progress import OnProgress, reporting
from sinkprune.contract.schedule import VisualLayout
from sinkprune.runtime.backends import Backend, Decoder, Engine, TokenDecoder, load_backend
from sinkprune.runtime.backends.known import Compute, usual_backend
from sinkprune.runtime.backends.models import Model
from sinkprune.runtime.families import Family, Fit, load_family
from sinkprune.runtime.media.frame import Frame, Picture, SampledFrames
from sinkprune.runtime.media.images import check_array
from sinkprune.runtime.media.picture_warnings import PictureWarnings
from sinkprune.runtime.steps.chain import Chain, Wrap
from sinkprune.runtime.steps.pictures import PictureLike, pixels_of
from sinkprune.runtime.steps.prompt_rows import Embedding
from sinkprune.runtime.steps.request import Request
from sinkprune.runtime.text.answer_tokens import Sampler
from sinkprune.runtime.text.prompt import Prompt, PromptEncoder

if TYPE_CHECKING:
    from sinkprune.contract.engines_manifest import Limits
    from sinkprune.runtime.backends.compatibility import BuiltEngines
    from sinkprune.runtime.frames import FrameGraph, FrameInputs

_LOADING_PLANS = "loading the budgets' graphs"
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
    place. On ort-cpu+openvino-prefill, the engine `tokens` of all decoder segments and the head computes tokens."""
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


class LoadedModel(NamedTuple):
    """A bundle on a backend: what preprocesses, tokenizes, embeds and computes."""

    manifest: Manifest
    limits: Limits | None
    """Limits of the engines; None for graphs, which have none."""
    family: Family
    prompts: PromptEncoder
    embedding: Embedding
    chain: Chain
    warnings: PictureWarnings
    frames: FrameGraph | None = None
    """The graph that prepares frames where the tower runs; None where the host does."""

    def for_plan(self, plan: Plan | None) -> LoadedModel:
        """Return the model that sees pictures in the size of a `plan`, and counts the FLOPs of its tower."""
        if plan is not None and plan.tower is not None:
            return self._replace(family=self.family.for_tower(plan.tower))
        share = plan.picture_share if plan is not None else None
        return self if share is None else self._replace(family=self.family.smaller(share))

    def picture_of(self, source: PictureLike) -> Picture:
        """Return what `pixels_of` does, and an array as it is where a graph prepares frames; raises `ImageError`."""
        if self.frames is not None and isinstance(source, np.ndarray):
            check_array(source)
            return Frame.of_array(source)
        return pixels_of(source, self.family)

    def tower_inputs(self, picture: Picture) -> dict[str, Array] | FrameInputs:
        """Return `Family.inputs`, or what the device computes them from; raises `ImageError`."""
        if self.frames is not None and not isinstance(picture, SampledFrames):
            frame = picture if isinstance(picture, Frame) else Frame(np.asarray(picture))
            plans, tables = self.family.frame_plans(frame.size), self.family.tables(frame)
            inputs = self.frames.planned(frame, plans, tables)
            if inputs is not None:
                return inputs
        return self.family.inputs(picture)

    def load_plans(self, method: str, progress: OnProgress) -> None:
        """Load the pruning graphs of all budgets of a method; as `Pipeline.load_plans`."""
        self.manifest.plan(method, UNPRUNED)
        plans = self.manifest.plans[method]
        for done, plan in enumerate(plans.values()):
            progress(_LOADING_PLANS, done, len(plans), "budgets")
            self.chain.load_plan(plan)
        progress(_LOADING_PLANS, len(plans), len(plans), "budgets")

    def check_text_length(self, request: Request) -> None:
        """Raise `PromptError` for texts that cannot fit into the context; called before they are tokenized."""
        turns = [request.texts, *(turn.texts for turn in request.history), (request.system or "",)]
        calls = [json.dumps(dict(call.arguments)) for turn in request.history for call in turn.tool_calls]
        texts = itertools.chain(*turns, calls)
        self.prompts.check_length(texts, self.manifest.language_model.max_positions)

    def encode_prompt(self, request: Request, layouts: Sequence[VisualLayout]) -> Prompt:
        """Return the tokens of a request with pictures of these `layouts`; raises `PromptError`."""
        visual = [layout.texts for layout in layouts]
        return self.prompts.encode(
            request.texts, visual, request.system, request.history, request.tools, request.tool_call_id
        )

    def new_sampler(self, request: Request, prompt: Prompt, layouts: Sequence[VisualLayout]) -> Sampler:
        """Return the sampler of an answer to `prompt`, with the checkpoint's own penalty unless `request` has one."""
        tokens = self.manifest.tokens
        # In transformers' prompts, these tokens stand in the places of visual tokens.
        visual = [tokens.image if tokens.video is None or not one.frame_indices else tokens.video for one in layouts]
        return request.new_sampler(itertools.chain(visual, *prompt.texts), self.manifest.repetition_penalty)

    def question_ids(self, request: Request, prompt: Prompt, plan: Plan | None) -> list[int]:
        """Return the token ids of what the sanitizer of `plan` reads: the words of the user's last turn, if any.

        They are those of the user alone, not of the template, which is the same for all questions. A turn without
        words stands for all text after the pictures.
        """
        if not self.manifest.reads_question(plan):
            return []
        asked = [turn.texts for turn in request.history if turn.role == "user"]
        asked += [request.texts] if request.tool_call_id is None else []
        return self.prompts.question_ids(asked[-1] if asked else ()) or prompt.texts[-1]


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

    def wrapped(name: str, engine: Engine) -> Engine:
        return engine if wrap is None else wrap(name, engine, backend)

    def load(graph: str) -> Engine:
        return wrapped(graph, backend.load(model(graph)))

    def load_decoder(graph: str) -> Decoder:
        return backend.load_decoder(model(graph), manifest.cache, partial(wrapped, graph))

    def load_token_decoder(name: str) -> TokenDecoder:
        graphs = [*(f"decoder_{segment}" for segment in range(len(manifest.segments))), manifest.last_graph]
        return backend.load_token_decoder(map(model, graphs), manifest.cache, partial(wrapped, name))

    family, frames = load_family(manifest, fit), None
    if backend.prepares_frames and (form := family.frame_form()) is not None:
        from sinkprune.runtime.frames import FrameGraph

        frames = FrameGraph(backend, form)
    return LoadedModel(
        manifest,
        built.limits if built else None,
        family,
        PromptEncoder.of_bundle(bundle),
        Embedding(bundle.files[EMBEDDING], manifest),
        Chain(manifest, backend, load, load_decoder, load_token_decoder, progress),
        PictureWarnings(),
        frames,
    )
