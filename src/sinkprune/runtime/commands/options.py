"""The options of commands that load a bundle."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from argparse import ArgumentError
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sinkprune.contract.budgets import UNPRUNED
from sinkprune.contract.bundle import Bundle, read_runnable
from sinkprune.contract.command_line.options import CommandParser, json_outputs
from sinkprune.contract.command_line.progress import status
from sinkprune.contract.errors import BackendError, UsageError
from sinkprune.contract.files.output_files import OutputFile
from sinkprune.contract.files.trust import Trust, add_trust_options
from sinkprune.contract.memory import LEAST_REPORTED_BYTES, available_bytes, memory_line, running_need
from sinkprune.contract.schedule import VisualLayout, schedule
from sinkprune.runtime.backends import THREADS
from sinkprune.runtime.backends.known import COMPUTES, KNOWN, Compute, usual_backend
from sinkprune.runtime.families import Fit, add_fit_option, load_family
from sinkprune.runtime.loading import check_kind, engines_of
from sinkprune.runtime.pipeline import Pipeline
from sinkprune.runtime.steps.chain import Wrap
from sinkprune.runtime.steps.request import DEFAULT_METHOD, MAX_NEW_TOKENS, check_texts
from sinkprune.runtime.stream import Stream

if TYPE_CHECKING:
    from sinkprune.runtime.media.video_file import VideoFile


_COSTS = (
    "costs of requests on this machine, from write_costs in Python (default: those that --warm-up of sinkprune-run "
    "kept)"
)
IMAGE_PLACE = "{image}"
"""The place of an image in a prompt."""


class Options(argparse.Namespace):
    """The options of a command, by the names of its parser, for `CommandParser.parse`.

    Commands may lack those that have a default here.
    """

    bundle: Path
    backend: str | None = None
    compute: Compute | None = None
    fit: Fit | None = None
    engines: Path | None = None
    threads: int | None = None
    sha256: str | None = None
    signed_by: Path | None = None
    engines_sha256: str | None = None
    skip_sums: bool = False
    json: Path | None
    plot: Path | None = None

    @property
    def trust(self) -> Trust:
        """The sum and key that the bundle must match; raises `UsageError` for a malformed sum."""
        return Trust(self.sha256, self.signed_by)

    @property
    def engines_trust(self) -> Trust:
        """The sum and key that engines must match; raises `UsageError` for a malformed sum."""
        return Trust(self.engines_sha256, self.signed_by)

    @property
    def key_files(self) -> list[Path]:
        """The file of the public key, if any."""
        return [self.signed_by] if self.signed_by else []

    @property
    def folders(self) -> list[Path]:
        """The folders that `load_pipeline` reads: the bundle's, and that of `--engines`."""
        return [folder for folder in (self.bundle, self.engines) if folder]

    @property
    def loading(self) -> dict[str, Any]:
        """The options of `Pipeline.load` and `Policy.load`, with progress on stderr."""
        names = ("backend", "threads", "engines", "compute", "engines_sha256", "signed_by")
        return {name: getattr(self, name) for name in names} | {"check_sums": not self.skip_sums, "during": status}

    @property
    def picture_files(self) -> list[Path]:
        """The files of `picture_sources`."""
        return self.image or self.video or []

    @property
    def form_files(self) -> list[Path]:
        """The files that `read_form` reads."""
        return [self.schema] if self.schema else []

    @property
    def outputs(self) -> list[OutputFile]:
        """The reports to write, each with its allowed suffixes."""
        if not self.plot:
            return json_outputs(self.json)
        from sinkprune.runtime.profiling.plot import PLOT_SUFFIXES

        return [*json_outputs(self.json), (self.plot, PLOT_SUFFIXES)]


def new_parser(
    name: str,
    description: str,
    examples: str,
    add_sources: Callable[[Any], None] = lambda group: None,
    prompt: Sequence[str] = ("--prompt",),
) -> CommandParser:
    """Return a parser with the arguments of commands that ask about images.

    `add_sources` adds options that may replace images to their group. `prompt` are the names of the prompt's option.
    """
    parser = engine_parser(name, description, examples)
    question = parser.group("picture and question")
    picture = question.add_mutually_exclusive_group(required=True)
    picture.add_argument("--image", type=Path, action="append", help="an image file to ask about; may be repeated")
    picture.add_argument("--video", type=Path, action="append", help="a video file to ask about; may be repeated")
    add_sources(picture)
    places = "{image} marks an image's place, for chat templates that keep the order (default: images first)"
    question.add_argument(*prompt, dest="prompt", required=True, help=f"the question; {places}")
    add_fit_option(question)
    return parser


def add_method(parser: CommandParser) -> None:
    """Add `--method`."""
    parser.group("budget").add_argument(
        "--method", default=DEFAULT_METHOD, help=f"pruning method (default: {DEFAULT_METHOD})"
    )


def bundle_parser(name: str, description: str, examples: str) -> CommandParser:
    """Return a parser with the arguments of commands that ask a bundle; `load_pipeline` reads them."""
    parser = engine_parser(name, description, examples)
    add_fit_option(parser.group("picture and question"))
    return parser


def chosen_backend(options: Options, bundle: Bundle) -> str:
    """Return the name of the backend that will run; raises what `engines_of` raises."""
    built = engines_of(bundle, options.engines, options.engines_trust)
    return options.backend or usual_backend(built.engines if built else None)


def engine_parser(name: str, description: str, examples: str) -> CommandParser:
    """Return a parser with the arguments of commands that run a bundle, without `--fit`."""
    parser = CommandParser(name, description, examples)
    parser.add_argument(
        "bundle", type=Path, metavar="BUNDLE", help="a folder written by sinkprune-export or sinkprune-build"
    )
    add = parser.group("backend").add_argument
    add(
        "--backend", choices=[*KNOWN], help="engine library (default: the quickest installed, or that of the engines)"
    )
    add(
        "--compute",
        choices=COMPUTES,
        help="fastest: activations in 8 bits for int8 and int4 weights, and on openvino in bf16 where the processor "
        "has it (openvino-gpu: fp16); fp32: neither, and not for engines of onnxruntime; bf16: openvino only "
        "(default: fastest)",
    )
    add("--engines", type=Path, metavar="ENGINES", help="a folder written by sinkprune-build; TensorRT needs one")
    add("--threads", type=THREADS, help="CPU threads (default: all cores)")
    add_trust_options(parser.group("trust"))
    add = parser.group("trust").add_argument
    add("--engines-sha256", metavar="SUM", help="the sha256 that sinkprune-build printed; other engines are rejected")
    add("--skip-sums", action="store_true", help="compare file sizes only, not their sha256")
    return parser


def open_bundle(options: Options, budgets: list[str], *, may_act: bool = False) -> Bundle:
    """Open the bundle, and check early that it takes videos, if given, and has the method and the budgets.

    Raises `VideoError` and `BudgetError`, and `UsageError` for a robot policy, unless it `may_act`.
    """
    bundle = read_runnable(options.bundle, options.trust)
    if not may_act:
        check_kind(bundle, acts=False)
    if options.video:
        load_family(bundle.manifest, options.fit).check_video()
    for budget in [UNPRUNED, *budgets]:
        bundle.manifest.plan(options.method, budget)
    return bundle


def load_pipeline(options: Options, bundle: Bundle, wrap: Wrap | None = None) -> Pipeline:
    """Load `bundle` on the chosen backend, with progress on stderr."""
    return Pipeline.load(bundle, wrap=wrap, fit=options.fit, **options.loading)


def picture_sources(options: Options) -> list[Path | VideoFile]:
    """Return the image files, or the opened video files.

    Prints a note about each long video that must be decoded as a whole. Raises `VideoError` with the file's name.
    """
    if not options.video:
        return [*(options.image or ())]
    from sinkprune.runtime.media.video_file import VideoFile, note_slow

    videos = [VideoFile(path) for path in options.video]
    for path, video in zip(options.video, videos, strict=True):
        note_slow(path, video)
    return [*(options.image or ()), *videos]


def prompt_pieces(prompt: str) -> str | list[str]:
    """Return the prompt, or the texts around its places for images; raises `PromptError` for an empty prompt."""
    pieces = prompt.split(IMAGE_PLACE)
    check_texts(pieces, len(pieces) - 1)
    return pieces if len(pieces) > 1 else prompt


def add_most_tokens(parser: CommandParser, default: int) -> None:
    """Add `--max-new-tokens`, which is None unless it is given; `default` is for the help."""
    parser.group("answer").add_argument(
        "--max-new-tokens", type=MAX_NEW_TOKENS, help=f"longest answer (default: {default}, or the engines' limit)"
    )


def add_system(parser: CommandParser) -> None:
    """Add `--system`."""
    parser.group("picture and question").add_argument(
        "--system", metavar="TEXT", help="a system message; '' removes that of the checkpoint's chat template"
    )


def add_costs(parser: CommandParser, note: str = _COSTS) -> None:
    """Add `--costs`; `note` is for the help."""
    parser.group("budget").add_argument("--costs", type=Path, metavar="FILE.json", help=note)


NO_COSTS = "no costs were kept: they need all rounds of the measurement."


@contextmanager
def ended_by_interrupt(stream: Stream) -> Iterator[None]:
    """End `stream` after the present token at the first Ctrl-C of the block; the second raises `KeyboardInterrupt`.

    The answer then has the finish reason `cancelled`. Without effect where Ctrl-C is ignored, and outside of the main
    thread.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return

    def end(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, previous)
        stream.cancel()

    previous = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


@contextmanager
def explain_interrupt(kept: str) -> Iterator[None]:
    """Raise Ctrl-C in the block with the sentence `kept` about what was kept, unless it has one."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        raise KeyboardInterrupt(str(interrupt) or kept) from interrupt


_TEMPLATE_TOKENS = 64
"""A generous estimate of what a chat template adds to a question."""
_LETTERS_A_TOKEN = 2
_WAY_OUT = "give fewer or smaller pictures and fewer new tokens"


class MemoryCheck(NamedTuple):
    """The memory that a command needs, and the free memory."""

    needed_bytes: int
    free_bytes: int | None
    """None where it is unknown."""


def check_memory(
    options: Options,
    bundle: Bundle,
    layouts: Sequence[VisualLayout],
    method: str,
    budgets: Sequence[str],
    prompt: str | Sequence[str],
    new_tokens: int,
) -> MemoryCheck:
    """Check that the memory for a request at the largest of `budgets` is free, and print the need if it is large.

    `layouts` are those of its pictures. Raises `TooLittleMemoryError`, and what `engines_of` raises.
    """
    manifest, backend = bundle.manifest, chosen_backend(options, bundle)
    letters = len(prompt) if isinstance(prompt, str) else sum(map(len, prompt))
    tokens = letters // _LETTERS_A_TOKEN + _TEMPLATE_TOKENS + new_tokens
    # A longer request is rejected for its length, not for its memory.
    tokens = min(tokens, manifest.language_model.max_positions)
    built = options.engines is not None or bundle.engines is not None
    schedules = [schedule(manifest, method, budget, layouts) for budget in budgets]
    needs = [
        running_need(manifest, KNOWN[backend].memory, built=built, layouts=layouts, planned=planned, tokens=tokens)
        for planned in schedules
    ]
    need, free = max(needs, key=lambda need: need.bytes), free_bytes(backend)
    smaller = "" if "int4" in manifest.weights.decoder else ", or export with --weights int4"
    need.check(f"'{bundle.path}' on {backend}", free, _WAY_OUT + smaller)
    # Without the fixed part, because libraries need that for any bundle.
    if need.bytes - need.fixed >= LEAST_REPORTED_BYTES:
        sys.stderr.write(f"{memory_line(need, free)}\n")
    return MemoryCheck(need.bytes, free or None)


def free_bytes(backend: str) -> int:
    """Return the free bytes of the memory that a backend computes in, by the backend's name; 0 where unknown.

    For a GPU this opens its library, and ignores errors: opening the backend raises them later.
    """
    if not KNOWN[backend].on_gpu:
        return available_bytes()
    try:
        if KNOWN[backend].target == "openvino":
            from sinkprune.runtime.backends.openvino.backend import Gpu, import_openvino
            from sinkprune.runtime.backends.openvino.graphs import reader_of

            return Gpu(reader_of(import_openvino(backend)).core, backend, None, "fastest").free_bytes()
        from sinkprune.runtime.device.cuda import open_device

        return open_device().memory()[0]
    except BackendError:
        return 0


def add_extensions(parser: CommandParser, extensions: Mapping[str, Any]) -> None:
    """Add the options of every extension; raises `UsageError` for one that the command has already."""
    for name, extension in extensions.items():
        try:
            extension.add_options(parser)
        except ArgumentError as error:
            raise UsageError(
                f"the extension '{name}' ({extension.__module__}) adds an option that the command has: {error}. "
                "Uninstall one of the packages."
            ) from error
