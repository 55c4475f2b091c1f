"""`sinkprune-calibrate norms`: the norms and the salience of a vision tower's tokens, and their outliers."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from sinkprune.calibration.norms import NormReport, TokenFeatures, bundle_features, summarise
from sinkprune.calibration.plots import plot_norms, write_heatmaps
from sinkprune.calibration.questions import (
    LIMIT,
    OWN_TEST_SETS,
    SUFFIXES,
    NamedPicture,
    check_answers,
    check_unpruned_memory,
    folder_pictures,
    task_pictures,
    until_interrupted,
)
from sinkprune.calibration.tasks import SCENES
from sinkprune.contract.bundle import read_runnable
from sinkprune.contract.checks import counted, escaped
from sinkprune.contract.command_line.command import entry_point
from sinkprune.contract.command_line.options import CommandParser, PathOrName
from sinkprune.contract.command_line.progress import status
from sinkprune.contract.errors import OutputError
from sinkprune.contract.files.output_files import OutputFile, check_outputs
from sinkprune.runtime.commands.options import Options, bundle_parser, load_pipeline
from sinkprune.runtime.commands.reports import (
    add_report_options,
    check_report_options,
    interrupted_warnings,
    note_many_pictures,
    progress_bar,
    write_measured,
)
from sinkprune.runtime.media.picture_warnings import unseen_warnings
from sinkprune.runtime.profiling.plot import import_matplotlib
from sinkprune.runtime.profiling.profile import model_name

_EXAMPLES = """\
examples:
  sinkprune-calibrate norms bundle
  sinkprune-calibrate norms bundle --data kitchen.jsonl --json norms.json --plot norms.png
  sinkprune-calibrate norms bundle --data photos/ --limit 50 --heatmaps maps
"""


@entry_point
def main(arguments: Sequence[str] | None) -> None:
    options = _parser().parse(arguments, Options)
    folder = Path(options.data) if Path(options.data).is_dir() else None
    check_report_options(options, [] if folder else [Path(options.data)])
    bundle = read_runnable(options.bundle, options.trust)
    check_answers(bundle)
    with status("checking the pictures"):
        pictures = (folder_pictures(folder) if folder else task_pictures(options.data))[: options.limit]
    read = [Path(picture.name) for picture in pictures]
    check_outputs([*options.outputs, *_heatmap_outputs(options, pictures)], read, options.folders)
    check_unpruned_memory(options, bundle, [pictures[0].load()])
    pipeline, model = load_pipeline(options, bundle), model_name(bundle.manifest.checkpoint.source)
    notes = note_many_pictures(pipeline.family, {picture.name: picture.facts for picture in pictures})
    shares = [pipeline.family.layout(picture.load()).seen_share for picture in pictures]

    def measure() -> Iterator[TokenFeatures]:
        with progress_bar("looking", len(pictures), "pictures") as count:
            for picture in pictures:
                yield bundle_features(pipeline, picture.load())
                count()

    nothing = "no whole picture was measured, so nothing was kept."
    measured, interrupted = until_interrupted(measure(), len(pictures), "picture", nothing)
    norms, salience = ([group for one in measured for group in getattr(one, name)] for name in ("norms", "salience"))
    report, shares = summarise(model, len(measured), norms, salience), shares[: len(measured)]
    warnings = (*interrupted_warnings(interrupted), *report.warnings, *unseen_warnings(shares, "cases"))
    report = replace(report, warnings=warnings, seen_share=min(shares))
    text = escaped(_text(report), keep="\n")

    def draw() -> None:
        if options.heatmaps:
            drawn = zip(_heatmap_files(options, pictures), pictures, measured, strict=False)
            titled = [(file, f"{model}: {Path(picture.name).name}", own) for file, picture, own in drawn]
            write_heatmaps(options.heatmaps, titled)

    write_measured(options, report, plot_norms, lambda: sys.stdout.write(text), notes, interrupted, last=draw)


def _parser() -> CommandParser:
    parser = bundle_parser(
        "sinkprune calibrate norms",
        "Measure the norms of a vision tower's tokens over pictures, and suggest how many outliers to remove.",
        _EXAMPLES,
    )
    add = parser.group("picture and question").add_argument
    add(
        "--data",
        type=PathOrName,
        default=SCENES,
        help=f"pictures: a folder (files ending in {', '.join(SUFFIXES)}), those of FILE.jsonl, {OWN_TEST_SETS}",
    )
    add("--limit", type=LIMIT, metavar="N", help="the first N pictures only (default: all)")
    parser.group("output").add_argument(
        "--heatmaps",
        type=Path,
        metavar="FOLDER",
        help="draw each picture with its norms and the attention its tokens receive, as a PNG in this folder",
    )
    add_report_options(parser, "the histogram of the norms")
    return parser


def _heatmap_outputs(options: Options, pictures: Sequence[NamedPicture]) -> list[OutputFile]:
    """Return the heat maps that will be written, or their folder if it does not exist yet.

    Raises `OutputError` for a file in the folder's place, and `UsageError` without matplotlib.
    """
    folder = options.heatmaps
    if folder is None:
        return []
    import_matplotlib()
    if not folder.is_dir():
        if folder.exists():
            raise OutputError(f"'{folder}' is no folder. Give --heatmaps another name.")
        return [(folder, (folder.suffix.lower(),))]
    if any(Path(picture.name).resolve().parent == folder.resolve() for picture in pictures):
        raise OutputError(f"'{folder}' holds the pictures. Give --heatmaps another folder.")
    return [(file, (".png",)) for file in _heatmap_files(options, pictures)]


def _heatmap_files(options: Options, pictures: Sequence[NamedPicture]) -> list[Path]:
    # Pictures of several folders may have the same name.
    stems = (Path(picture.name).stem for picture in pictures)
    return [options.heatmaps / f"{number:03d}-{stem}.png" for number, stem in enumerate(stems, start=1)]


def _text(report: NormReport) -> str:
    overlap, chance = 100 * report.top_overlap, 100 * report.chance_overlap
    return (
        f"{report.model}: {counted(report.pictures, 'picture')}, {report.tokens} visual tokens\n"
        f"{report.verdict}\n"
        f"Of the 1 % of largest norms, {overlap:.1f} % are among the most salient 1 % (by chance: {chance:.1f} %)\n"
        f"and take {100 * report.top_salience_share:.1f} % of the salience. Rank correlation of norm and salience: "
        f"{report.norm_salience_correlation:.2f}.\n"
        f"Suggested: {report.suggestion}\n"
    ) + "".join(f"{warning}\n" for warning in report.warnings)
