"""`sinkprune-run`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from sinkprune.contract.budgets import UNPRUNED
from sinkprune.contract.bundle import Bundle
from sinkprune.contract.checks import counted, escaped, to_json
from sinkprune.contract.command_line.command import entry_point
from sinkprune.contract.command_line.options import (
    CommandParser,
    RunningOutput,
    json_outputs,
    write_each,
    write_json,
    write_output,
)
from sinkprune.contract.errors import UsageError
from sinkprune.contract.files.output_files import check_outputs
from sinkprune.contract.precision import Array
from sinkprune.contract.progress import OnProgress
from sinkprune.contract.registry import Registry
from sinkprune.runtime.commands.options import (
    IMAGE_PLACE,
    MemoryCheck,
    Options,
    add_extensions,
    add_method,
    add_most_tokens,
    add_system,
    check_memory,
    ended_by_interrupt,
    new_parser,
    open_bundle,
    picture_sources,
    prompt_pieces,
)
from sinkprune.runtime.families import Family, load_family
from sinkprune.runtime.hooks import Observer
from sinkprune.runtime.media.frame import Picture
from sinkprune.runtime.media.images import PICTURE_SUFFIXES, FileFacts
from sinkprune.runtime.media.picture_warnings import divided, first_of, picture_facts, unseen_notes
from sinkprune.runtime.pipeline import Pipeline
from sinkprune.runtime.steps.answer import Answer
from sinkprune.runtime.steps.context_length import check_picture_count
from sinkprune.runtime.steps.pictures import PictureLike, decoded, named_in_errors
from sinkprune.runtime.steps.request import DEFAULT_NEW_TOKENS, Request
from sinkprune.runtime.system import usable_cores
from sinkprune.runtime.text.answer_tokens import PENALTIES, SEED, TEMPERATURE, TOP_P


def note_pictures(family: Family, files: Sequence[Path], pictures: Sequence[Picture]) -> list[str]:
    """Print the notes of `note_files` and of `note_sizes`, and return them.

    `pictures` are those read from `files`, in the same order. Raises `ImageError` for what the family rejects.
    """
    return note_files(decoded_facts(files, pictures)) + note_sizes(family, files, pictures)


def note_sizes(family: Family, files: Sequence[Path], pictures: Sequence[Picture]) -> list[str]:
    """Print notes on the first picture of each size that is cropped, scaled down, or a clip shown with fewer frames.

    Returns them. `pictures` are those read from `files`, in the same order. Raises `ImageError` for what the family
    rejects.
    """
    notes = list[str]()
    first: dict[tuple[float, ...], tuple[Path, Picture]] = {}
    for file, picture in zip(files, pictures, strict=True):
        first.setdefault(picture.size, (file, picture))
    for file, picture in first.values():
        notes += [_note(file, text) for text in unseen(family, file, picture)]
    return notes


def decoded_facts(files: Sequence[Path], pictures: Sequence[Picture]) -> dict[Path, FileFacts]:
    """Return the facts of image files; `pictures` are those read from `files`, in the same order."""
    pairs = zip(files, pictures, strict=True)
    return {file: picture_facts(image).of_file for file, image in pairs if isinstance(image, Image.Image)}


def note_files(facts: Mapping[Path, FileFacts]) -> list[str]:
    """Print notes, and return them: on the darkest picture of 16 bits, and on the first file with several frames.

    The second has the number of the other such files.
    """
    wide = [(file, own.largest) for file, own in facts.items() if own.largest is not None]
    darkest = [(file, divided(largest)) for file, largest in sorted(wide, key=lambda each: each[1])]
    several = [(file, first_of(own.frames)) for file, own in facts.items() if own.frames > 1]
    return [
        *note_first(darkest, "file has 16 bits", "files have 16 bits"),
        *note_first(several, "file has several frames", "files have several frames"),
    ]


def unseen(family: Family, file: str | Path, picture: Picture) -> list[str]:
    """Return what `unseen_notes` does; raises `ImageError` with the file's name for what the family rejects."""
    with named_in_errors(file):
        return unseen_notes(family.layout(picture))


def note_first(found: Sequence[tuple[Path, str]], one: str, several: str) -> list[str]:
    """Print a note on the first file, with the number of the others, and return it in a list; none without files."""
    if not found:
        return []
    (file, text), others = found[0], len(found) - 1
    return [_note(file, f"{text} {others} more {several if others > 1 else one}." if others else text)]


def _note(file: Path, text: str) -> str:
    # The command has succeeded, also where stderr is closed.
    with suppress(OSError):
        sys.stderr.write(f"{escaped(str(file))}: {text}\n")
    return f"{file}: {text}"


CUT_OFF = {"length": "--max-new-tokens", "deadline": "--deadline-ms"}
"""The option that ended an answer, by `Answer.finish`, of an answer that was cut off."""


_COLD = "cold: the first request of a process is slower; sinkprune-profile measures warm ones\n"


def result_lines(answer: Answer, backend: str, *, cold: bool) -> str:
    """Return the times of an answer, as they stand below its text, and whether they are `cold`."""
    per_token, ended = answer.ms["per_token"], ""
    if answer.finish in CUT_OFF:
        tokens = counted(1 if answer.choices else len(answer.token_ids), "token")
        ended = f"; cut off after {tokens} ({CUT_OFF[answer.finish]})"
    return (
        f"\n[{answer.budget}] TTFT {answer.ms['ttft']:.0f} ms ("
        + ", ".join(f"{part} {answer.ms[part]:.0f}" for part in ("preprocess", "vision", "prefill"))
        + "), "
        + (f"{per_token:.1f} ms a token, " if per_token is not None else "")
        + f"{answer.ms['latency']:.0f} ms in all on {backend}; visual tokens {answer.visual_tokens} -> "
        f"{answer.tokens_per_layer[0]} -> {answer.tokens_per_layer[-1]}{ended}\n{_COLD if cold else ''}"
    )


def stop_text(word: str) -> str:
    """Return a text of `--stop`; raises `UsageError` if it is empty."""
    if not word:
        raise UsageError("--stop is '', expected text. Leave the option out to stop at the end only.")
    return word


def readable(text: str) -> str:
    """Return text for stdout: escaped on a terminal, unchanged for a program."""
    return escaped(text, keep="\n\t") if sys.stdout.isatty() else text


_EXAMPLES = """\
examples:
  sinkprune-run bundle --image photo.jpg --prompt "What is on the table?" --budget retain-64
  sinkprune-run bundle --image photo.jpg --prompt "Is the door open?" --budget retain-64 --overlay kept.png
  sinkprune-run bundle --image a.jpg --image b.jpg --prompt "Before: {image} After: {image} What has changed?"
  sinkprune-run bundle --image wide.jpg --prompt "Is there a cup at the edge?" --fit pad
  sinkprune-run bundle --video clip.mp4 --prompt "What happens?" --budget prune-80
  sinkprune-run bundle --image photo.jpg --prompt "Is the door open?" --choice yes --choice no
  sinkprune-run bundle --image photo.jpg --prompt "Describe the cup." --schema cup.json
  sinkprune-run bundle --image photo.jpg --prompt "How many cups are there?" --regex "[0-9]{1,2}"
  sinkprune-run bundle --image photo.jpg --prompt "Is the door open?" --deadline-ms 300 --max-new-tokens 8 --warm-up
"""
_PENALTIES = tuple(penalty.name for penalty, _ in PENALTIES)
_REQUEST = (*("budget", "method", "max_new_tokens", "temperature", "top_p", "seed"), *("system", "stop", *_PENALTIES))
"""The options that are fields of a request."""


class RunExtension:
    """What another package adds to `sinkprune-run`, by an entry point in the group `sinkprune.run`.

    There is one for each run. The defaults add nothing.
    """

    reads: Sequence[Path] = ()
    """The files that its options name."""
    chooses_budget = False
    """Whether another budget than the given one may run."""
    warms_up = False
    """Whether `loaded` runs requests, so that the answer is not the first of the process."""

    def __init__(self, options: Options) -> None:
        self.options = options

    def check(self) -> None:
        """Raise `UsageError` for wrong options, before anything is loaded."""

    @staticmethod
    def add_options(parser: CommandParser) -> None:
        """Add options to the command."""

    def fields(self) -> dict[str, Any]:
        """Return fields of the request."""
        return {}

    def opened(self, bundle: Bundle) -> type[Pipeline]:
        """Check what can be checked before anything is loaded, and return the kind of the pipeline."""
        return Pipeline

    def loaded(self, pipeline: Pipeline, request: Request, sources: Sequence[PictureLike]) -> Request:
        """Do what comes before the request, and return it; `sources` are its pictures, not decoded."""
        return request

    def shown(self, piece: str) -> str:
        """Return a piece of the answer's text as the terminal shows it."""
        return piece

    def lines(self, answer: Answer) -> str:
        """Return what stands below the answer's times."""
        return ""

    def answered(self, pipeline: Pipeline, answer: Answer) -> None:
        """Print and keep what comes after the answer."""


RUN_EXTENSIONS = Registry[type[RunExtension]]("sinkprune.run")
"""Every extension of `sinkprune-run` that an installed package registers."""


@entry_point
def main(arguments: Sequence[str] | None) -> None:
    options = _parser().parse(arguments, Options)
    extensions = [extension(options) for extension in RUN_EXTENSIONS.values()]
    _check_options(options, extensions)
    for extension in extensions:
        extension.check()
    prompt = prompt_pieces(options.prompt)
    bundle = open_bundle(options, [options.budget])
    kinds = {extension.opened(bundle) for extension in extensions} - {Pipeline}
    if len(kinds) > 1:
        names = " and ".join(sorted(f"{kind.__module__}.{kind.__name__}" for kind in kinds))
        raise UsageError(f"the given options need two kinds of pipeline, {names}. Give options for one of them.")
    kind = kinds.pop() if kinds else Pipeline
    family = load_family(bundle.manifest, options.fit)
    sources = picture_sources(options)
    check_picture_count(bundle.manifest, None, len(sources))
    images = [decoded(source, family) for source in sources]
    texts = [options.system or "", *([prompt] if isinstance(prompt, str) else prompt)]
    new_tokens = options.max_new_tokens or DEFAULT_NEW_TOKENS
    layouts = [*map(family.layout, images)]
    memory = check_memory(options, bundle, layouts, options.method, [options.budget], texts, new_tokens)

    pipeline = kind.load(bundle, fit=options.fit, **options.loading)
    fields = _given_fields(options)
    for extension in extensions:
        fields |= extension.fields()
    if fields.get("choice"):
        # `_unused_options` reports them.
        fields = {name: value for name, value in fields.items() if name not in _PENALTIES}
    request = pipeline.new_request(images, prompt, **fields)
    # Before a long answer.
    notes = note_pictures(family, options.picture_files, images)
    for extension in extensions:
        request = extension.loaded(pipeline, request, sources)
    output = RunningOutput(options.json, options.overlay)
    answer = _answered(pipeline, request, extensions, output)

    earlier = ""
    if answer.finish == "cancelled":
        from sinkprune.runtime.commands.interrupted import beside_earlier

        options, earlier = beside_earlier(options, "json", "overlay")
    cold = not any(extension.warms_up for extension in extensions)
    output.write(result_lines(answer, pipeline.backend.name, cold=cold))
    for extension in extensions:
        output.write(readable(extension.lines(answer)))
    if not answer.text and answer.finish == "stop":
        sys.stderr.write("note: the answer is empty: the model or a stop string ended it at once.\n")
    unused = _unused_options(options, request, answer.budget)
    if any(request.texts[:-1]) and not pipeline.prompts.places.keeps_order:
        unused.append(
            f"{IMAGE_PLACE} moved no image, because the model's chat template writes images before the text "
            "(docs/pictures.md)."
        )
    drawn = options.overlay if answer.budget != UNPRUNED else None
    write_each(
        lambda: write_json(options.json, _summary(pipeline, answer, memory, notes + unused, cold=cold)),
        *(partial(extension.answered, pipeline, answer) for extension in extensions),
        *([lambda: write_output(drawn, _overlay(answer, images, options.prompt, drawn))] if drawn else []),
        lambda: sys.stderr.write("".join(f"note: {note}\n" for note in unused)),
    )
    if answer.finish == "cancelled":
        raise KeyboardInterrupt(f"the answer has {counted(len(answer.token_ids), 'token')} so far.{earlier}")
    output.end()


def _overlay(answer: Answer, images: Sequence[Picture], question: str, file: Path) -> bytes:
    from sinkprune.runtime.overlay import overlay, picture_bytes

    return picture_bytes(overlay(answer, images, question), file)


def _check_options(options: Options, extensions: Sequence[RunExtension]) -> None:
    """Reject options that exclude each other, and outputs that cannot be written."""
    overlays = [(options.overlay, PICTURE_SUFFIXES)] if options.overlay else []
    read = [*options.picture_files, *options.key_files, *(path for one in extensions for path in one.reads)]
    check_outputs([*json_outputs(options.json), *overlays], read, options.folders)
    if options.overlay and options.budget == UNPRUNED and not any(one.chooses_budget for one in extensions):
        raise UsageError("--overlay draws what pruning kept. Give a --budget other than none, or --deadline-ms.")


def _given_fields(options: Options) -> dict[str, Any]:
    fields = {name: getattr(options, name) for name in _REQUEST}
    if options.max_new_tokens is None:
        del fields["max_new_tokens"]
    if not options.temperature:
        # `_unused_options` reports them.
        del fields["top_p"], fields["seed"]
    return fields


def _answered(
    pipeline: Pipeline, request: Request, extensions: Sequence[RunExtension], output: RunningOutput
) -> Answer:
    """Return the answer, and write its text to `output` while it is decoded. Ctrl-C ends it."""

    def write(piece: str) -> None:
        for extension in extensions:
            piece = extension.shown(piece)
        output.write(readable(piece))

    with output.until_written("answering") as progress:
        stream = pipeline.answer(request, _TokenCount(progress, request.max_new_tokens))
        with ended_by_interrupt(stream):
            return stream.rest(write)


class _TokenCount(Observer):
    def __init__(self, progress: OnProgress, most: int) -> None:
        self._progress, self._most, self._count = progress, most, 0

    def chose(self, token: int, logits: Array) -> None:
        self._count += 1
        self._progress("writing", self._count, self._most, "tokens")


def _unused_options(options: Options, request: Request, budget: str) -> list[str]:
    """Return a note for each option without effect: sampling of a greedy answer, threads without a core, overlay."""
    notes = []
    if options.overlay and budget == UNPRUNED:
        notes.append(f"--overlay drew nothing, because budget {UNPRUNED} ran, which drops no tokens.")
    sampling = [*(["--seed"] if options.seed is not None else []), *(["--top-p"] if options.top_p < 1 else [])]
    if sampling and not options.temperature:
        notes.append(f"{' and '.join(sampling)} changed nothing, because this answer is greedy. Add --temperature.")
    unscored = ["--max-new-tokens"] if options.max_new_tokens else []
    for penalty, neutral in PENALTIES:
        if getattr(options, penalty.name) not in (None, neutral):
            unscored.append(f"--{penalty.name.replace('_', '-')}")
    if request.choice and unscored:
        notes.append(f"{' and '.join(unscored)} changed nothing, because --choice scores its whole texts.")
    cores = usable_cores()
    if options.threads and options.threads > cores:
        notes.append(f"this process may use {cores} of {options.threads} threads at once. Give --threads {cores}.")
    return notes


def _summary(
    pipeline: Pipeline, answer: Answer, memory: MemoryCheck, notes: list[str], *, cold: bool
) -> dict[str, Any]:
    return {
        **answer.as_json(),
        "cold": cold,
        "backend": pipeline.backend.name,
        "precision": pipeline.bundle.manifest.precision,
        "load_ms": pipeline.load_ms,
        "memory": memory._asdict(),
        "captured": to_json(pipeline.backend.captured()),
        "notes": notes,
    }


def _parser() -> CommandParser:
    parser = new_parser("sinkprune run", "Answer a question about images or a video.", _EXAMPLES)
    parser.group("budget").add_argument(
        "--budget",
        default=UNPRUNED,
        help="a budget of the bundle, or none; with --deadline-ms the largest that may be chosen (default: none)",
    )
    add_method(parser)
    add_most_tokens(parser, DEFAULT_NEW_TOKENS)
    add = parser.group("answer").add_argument
    add("--temperature", type=TEMPERATURE, default=0.0, help="0 is greedy (default: 0)")
    add(
        "--top-p",
        type=TOP_P,
        default=1.0,
        help="sample from the likeliest tokens only, with --temperature above 0 (default: 1)",
    )
    add("--seed", type=SEED, help="repeat the same sampling, with --temperature above 0")
    (repetition, _), *others = PENALTIES
    add(
        "--repetition-penalty",
        type=repetition,
        metavar="FACTOR",
        help="above 1, tokens of the prompt and the answer become less likely; 1 changes nothing (default: the "
        "checkpoint's)",
    )
    for (penalty, _), times in zip(others, ("once", "each time"), strict=True):
        add(
            f"--{penalty.name.replace('_', '-')}",
            type=penalty,
            default=0.0,
            metavar="NUMBER",
            help=f"lower the logits of tokens that the answer has by this, {times}; -2 to 2 (default: 0)",
        )
    add_system(parser)
    add(
        "--stop",
        action="append",
        type=stop_text,
        default=[],
        metavar="TEXT",
        help="end the answer before this text; may be repeated",
    )
    add_extensions(parser, RUN_EXTENSIONS)
    add = parser.group("output").add_argument
    add("--overlay", type=Path, metavar="FILE.png", help="draw the kept and dropped tokens on the image")
    parser.add_json("the answer and its figures")
    return parser
