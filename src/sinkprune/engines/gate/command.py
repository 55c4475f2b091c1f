"""`sinkprune-check`: compares engines with the graphs they were built from."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from sinkprune.contract.command_line.command import entry_point
from sinkprune.contract.command_line.options import CommandParser, json_outputs, prints_json, write_result
from sinkprune.contract.files.output_files import check_outputs
from sinkprune.contract.files.trust import Trust, add_trust_options

_EXAMPLES = """\
examples:
  sinkprune-check llava-7b engines --image photo.jpg
  sinkprune-check llava-7b engines --image photo.jpg --backend openvino-gpu
  sinkprune-check llava-7b engines --image photo.jpg --prompt "What is on the table?" --json > checked.json

Each engine of ENGINES gets the inputs of its ONNX graph in BUNDLE. It must return the same outputs, within rounding.
Then all engines together answer, unpruned and at every budget. Exit code 0: all passed. 2: some were rejected.
A robot policy acts: --image is the frame of a camera, or of all, and --prompt the instruction.
"""


@entry_point
def main(arguments: Sequence[str] | None) -> None:
    options = _parser().parse_args(arguments)
    # Libraries are slow to import. Before `run_command` starts, an interrupt would end in a traceback.
    from tempfile import TemporaryDirectory

    from sinkprune.contract.bundle import read_bundle
    from sinkprune.contract.checks import to_json
    from sinkprune.contract.errors import EnginesError
    from sinkprune.engines.gate.comparing import check_engines, engines_alone
    from sinkprune.engines.gate.recording import picture_files, read_question, record
    from sinkprune.engines.gate.report import first_refusal, print_report
    from sinkprune.engines.progress import TerminalProgress
    from sinkprune.runtime.backends import load_backend
    from sinkprune.runtime.backends.compatibility import open_engines
    from sinkprune.runtime.backends.known import backend_of
    from sinkprune.runtime.commands.options import explain_interrupt
    from sinkprune.runtime.commands.run import note_pictures
    from sinkprune.runtime.families import load_family

    read = [*options.image, *([options.signed_by] if options.signed_by else [])]
    check_outputs(json_outputs(options.json), read, [options.bundle, options.engines])
    bundle = read_bundle(options.bundle, Trust(options.sha256, options.signed_by))
    trust = Trust(options.engines_sha256, options.signed_by)
    built = open_engines(options.engines, bundle, trust)
    files = picture_files(options.image, bundle.manifest)
    question = read_question(files, options.prompt, bundle, built.engines.manifest.enforced_limits, options.fit)
    note_pictures(load_family(bundle.manifest, options.fit), files, question.images)
    name = options.backend or backend_of(built.engines.manifest.target)
    backend = load_backend(name, options.threads, built, options.compute)
    with (
        explain_interrupt("the check is not complete, and nothing was written."),
        TerminalProgress() as progress,
        TemporaryDirectory(prefix="sinkprune-check-") as folder,
    ):
        bundle.verify(progress.part)
        built.engines.verify(progress.part)
        recording = record(bundle, question, Path(folder) / "recording", progress)
        own = engines_alone(options.engines, trust)
        report = check_engines(built, own, backend, recording, progress)
    write_result(options.json, to_json(report), lambda: print_report(report))
    refused = first_refusal(report, built.engines.manifest)
    if refused is not None:
        raise EnginesError(refused)
    if not prints_json(options.json):
        together = f"{len(report.chunks)} chunks of actions" if report.chunks else f"{len(report.texts)} answers"
        free = sum(text.gap_limit is None for text in report.texts) + sum(one.limit is None for one in report.chunks)
        more = f"; {free} of them kept other tokens and {'have' if free > 1 else 'has'} no limit" if free else ""
        sys.stdout.write(f"passed: {len(report.graphs)} engines, {together}{more}\n")


def _parser() -> CommandParser:
    # Imports numpy, as the imports of `main` do.
    from sinkprune.engines.gate import PROMPT
    from sinkprune.runtime.backends import THREADS
    from sinkprune.runtime.backends.known import COMPUTES, KNOWN
    from sinkprune.runtime.families import add_fit_option

    parser = CommandParser(
        "sinkprune check",
        "Compare every engine with the ONNX graph that it was built from, and reject engines that differ.",
        _EXAMPLES,
    )
    add = parser.add_argument
    add("bundle", type=Path, metavar="BUNDLE", help="the folder that the engines were built from")
    add("engines", type=Path, metavar="ENGINES", help="a folder written by sinkprune-build")
    words = "an image file to ask about, or a camera's frame; may be repeated"
    add("--image", type=Path, action="append", required=True, help=words)
    add("--prompt", default=PROMPT, help=f"the question, or a policy's instruction (default: {PROMPT})")
    add("--backend", choices=[*KNOWN], help="the backend of the engines (default: the one they are built for)")
    add("--compute", choices=COMPUTES, help="openvino, openvino-gpu: the type of the computation (default: fastest)")
    add_fit_option(parser.group("picture and question"))
    add("--threads", type=THREADS, help="CPU threads of the engines (default: all cores)")
    add_trust_options(parser.group("trust"))
    add("--engines-sha256", metavar="SUM", help="the sha256 that sinkprune-build printed; other engines are rejected")
    parser.add_json("every output of every engine")
    return parser
