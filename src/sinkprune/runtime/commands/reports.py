"""What commands that measure have in common: options, folders of frames, reports, progress, and what Ctrl-C keeps."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from PIL import Image

from sinkprune.contract.checks import format_value, to_json
from sinkprune.contract.command_line.options import CommandParser, write_each, write_output, write_result
from sinkprune.contract.command_line.progress import status
from sinkprune.contract.errors import ImageError
from sinkprune.contract.files.numbered_files import by_number
from sinkprune.contract.files.output_files import OutputFile, check_outputs
from sinkprune.runtime.commands.interrupted import beside_earlier
from sinkprune.runtime.commands.options import Options
from sinkprune.runtime.commands.run import note_files, note_first, unseen
from sinkprune.runtime.families import Family
from sinkprune.runtime.media.picture_warnings import PictureFacts
from sinkprune.runtime.steps.request import MAX_NEW_TOKENS

R = TypeVar("R")
NO_QUESTION = "no whole question was measured, so nothing was kept."


def add_new_tokens(parser: CommandParser, default: int, note: str = "") -> None:
    """Add `--new-tokens`, the length of every measured answer."""
    parser.group("answer").add_argument(
        "--new-tokens",
        # The name that run, evaluate and build have for it.
        "--max-new-tokens",
        dest="new_tokens",
        type=MAX_NEW_TOKENS.named("--new-tokens"),
        default=default,
        metavar="N",
        help=f"tokens of every answer (default: {default}{note})",
    )


def add_report_options(parser: CommandParser, drawn: str) -> None:
    """Add `--json` and `--plot`; `check_report_options` and `write_report` read them."""
    parser.add_json("the report")
    parser.group("output").add_argument("--plot", type=Path, metavar="FILE.png", help=f"draw {drawn}")


def check_report_options(options: Options, read: Iterable[Path], *others: OutputFile) -> None:
    """Reject outputs that cannot be written, or that the command reads; `others` are outputs besides reports.

    Raises `OutputError`, and `UsageError` without matplotlib.
    """
    check_outputs([*options.outputs, *others], [*read, *options.key_files], options.folders)
    if options.plot:
        from sinkprune.runtime.profiling.plot import import_matplotlib

        import_matplotlib()


def write_report(
    options: Options,
    report: R,
    plot: Callable[[R, str], bytes],
    in_words: Callable[[], object],
    more: Mapping[str, object] = MappingProxyType({}),
) -> None:
    """Write a report as the requested plot and as `write_result` does; the JSON also has the keys of `more`."""

    def draw() -> None:
        if options.plot:
            write_output(options.plot, plot(report, options.plot.suffix))

    write_each(draw, lambda: write_result(options.json, {**to_json(report), **more}, in_words))


def frame_files(folder: Path) -> list[Path]:
    """Return what a folder of frames holds, without hidden files, in the order of `by_number`.

    A folder among them is rejected when it is read, as a file that is no picture. Raises `ImageError`, and
    `UsageError` for an unclear order.
    """
    if not folder.is_dir():
        raise ImageError(
            f"'{folder}' is no folder. --frames takes a folder of pictures; give single ones by --image."
        )
    files = by_number(path for path in folder.iterdir() if not path.name.startswith("."))
    if not files:
        raise ImageError(f"'{folder}' holds no files, expected pictures.")
    return files


def note_many_pictures(family: Family, pictures: Mapping[str, PictureFacts]) -> list[str]:
    """Print the notes of `note_files`, and one on the first picture that is cropped or scaled down; return them.

    It has the number of the other such pictures. `pictures` are all pictures by name. Raises `ImageError` for the
    first that the family rejects.
    """
    notes = note_files({Path(name): facts.of_file for name, facts in pictures.items()})
    of_size: dict[tuple[int, int], list[str]] = {}
    for name, facts in pictures.items():
        of_size.setdefault(facts.size, []).append(name)
    found = list[tuple[Path, str]]()
    for size, names in of_size.items():
        # A layout depends on the size alone, and data has thousands of pictures.
        texts = unseen(family, names[0], Image.new("L", size))
        found += [(Path(name), texts[0]) for name in names if texts]
    return notes + note_first(found, "picture is seen in part or smaller", "pictures are seen in part or smaller")


def name_list(words: str) -> list[str]:
    """Return the names in a comma-separated option; raises `ArgumentTypeError` if there is none."""
    names = [name.strip() for name in words.split(",") if name.strip()]
    if not names:
        raise argparse.ArgumentTypeError(f"found {format_value(words)}, expected names with commas between them")
    return names


def until_interrupt(
    measure: Callable[[Callable[..., None]], object], total: int, unit: str
) -> KeyboardInterrupt | None:
    """Call `measure` with a bar of progress; returns Ctrl-C where that ended it.

    `measure` takes a function that it calls with the name of what was measured, and the number of new steps (default:
    one). There are `total` steps, each a `unit`.
    """
    try:
        with progress_bar("measuring", total, unit) as count:
            measure(lambda name, steps=1: count(f"measuring {name}", steps))
    except KeyboardInterrupt as interrupt:
        return interrupt
    return None


def write_measured(
    options: Options,
    report: R,
    plot: Callable[[R, str], bytes],
    in_words: Callable[[], object],
    notes: Sequence[str],
    interrupted: str,
    *,
    first: Callable[[Options], object] = lambda options: None,
    last: Callable[[], object] = lambda: None,
    outputs: Sequence[str] = ("json", "plot"),
) -> None:
    """Write a report as `write_report` does, with the keys `interrupted` and `notes`.

    `interrupted` is what the report counts after Ctrl-C, else "". After Ctrl-C the files of the options `outputs`
    replace none that are there, and this raises `KeyboardInterrupt` in the end. `first` is called before the report,
    with the options after their files were renamed, and `last` after it.
    """
    moved, earlier = beside_earlier(options, *outputs) if interrupted else (options, "")
    more = {"interrupted": interrupted or None, "notes": notes}
    write_each(lambda: first(moved), lambda: write_report(moved, report, plot, in_words, more), last)
    if interrupted:
        raise KeyboardInterrupt(interrupted + earlier)


def interrupted_warnings(counts: str) -> tuple[str, ...]:
    """Return the warning of a report on a part of a measurement, and none where `counts`, what it counts, is ""."""
    return (f"Interrupted: {counts}",) if counts else ()


@contextmanager
def progress_bar(text: str, total: float, unit: str) -> Iterator[Callable[..., None]]:
    """Show `text` and steps, each a `unit`, as `status` does.

    Yields a function that counts steps, by default one; its first argument, if any, names the work from then on.
    """
    done = 0.0
    with status(text) as report:

        def count(name: str = text, steps: float = 1) -> None:
            nonlocal done
            done += steps
            report(name, done, total, unit)

        yield count
