"""`sinkprune-build`: builds engines from a bundle."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sinkprune.contract.checks import WholeNumber, counted, escaped
from sinkprune.contract.command_line.command import entry_point
from sinkprune.contract.command_line.options import CommandParser, json_outputs, write_result
from sinkprune.contract.errors import UsageError
from sinkprune.contract.files.output_files import check_outputs
from sinkprune.contract.files.trust import Trust, add_sign_option, add_trust_options, sum_lines

if TYPE_CHECKING:
    from sinkprune.contract.engines_manifest import EnginesManifest, Realisation

_EXAMPLES = """\
examples:
  sinkprune-build llava-7b -o engines --target tensorrt                     # on the machine that will run them
  sinkprune-build llava-7b -o engines --target tensorrt-rtx --sm 86,89,120  # anywhere, without a GPU
  sinkprune-build llava-7b -o engines --target tensorrt --max-prompt 128 --max-new-tokens 64
  sinkprune-build pocket -o engines --target onnxruntime                    # optimised for this processor
  sinkprune-build pocket -o engines --target onnxruntime+openvino           # with OpenVINO's vision tower
  sinkprune-build pocket -o engines --target openvino
  sinkprune-build pocket -o engines --target openvino --check photo.jpg     # rejects engines that differ from graphs

ENGINES runs by itself, as in `sinkprune-run ENGINES --image ...`; copy it where you want. After a kill, the same
command resumes the build. TensorRT needs fp16 bundles; before 10.15 (JetPack 6) export them with --dialect opset20.

Engines of every target reject a request above --max-prompt, --max-new-tokens or --max-images. The defaults limit
engines of TensorRT only; the other targets accept what the model accepts.
"""

_SM = WholeNumber("--sm", 10, 999)


@entry_point
def main(arguments: Sequence[str] | None) -> None:
    options = _parser().parse_args(arguments)
    # Libraries are slow to import. Before `run_command` starts, an interrupt would end in a traceback.
    from sinkprune.contract.bundle import read_bundle
    from sinkprune.contract.engines_manifest import ENGINES, enforced_limits
    from sinkprune.contract.files.folders import check_outside, check_replaceable
    from sinkprune.contract.files.signature import read_private_key
    from sinkprune.engines.build import build_engines, is_begun
    from sinkprune.engines.gate import PROMPT
    from sinkprune.engines.gate.comparing import Gate
    from sinkprune.engines.gate.recording import check_prompt_limit, picture_files, read_question
    from sinkprune.engines.profiles import resolve_limits
    from sinkprune.engines.progress import TerminalProgress
    from sinkprune.engines.targets import new_builder
    from sinkprune.runtime.commands.run import note_pictures
    from sinkprune.runtime.families import load_family

    if len(options.check or ()) > 1:
        raise UsageError(
            f"--check takes one picture, found {len(options.check)}. Give one, and the others to sinkprune-check."
        )
    read = [path for path in (*(options.check or ()), options.sign, options.signed_by) if path]
    check_outputs(json_outputs(options.json), read, [options.bundle, options.output])
    check_replaceable(options.output, ENGINES, force=options.force)
    # An earlier build with --move may have removed graphs.
    bundle = read_bundle(options.bundle, Trust(options.sha256, options.signed_by), whole=not is_begun(options.output))
    check_outside(options.output, bundle.path, ENGINES)
    sign = read_private_key(options.sign) if options.sign else None
    most = (options.max_prompt, options.max_new_tokens, options.max_images)
    asked = dict(zip(("prompt_tokens", "new_tokens", "images"), most, strict=True))
    limits = resolve_limits(bundle.manifest, **asked)
    given = [name for name, value in asked.items() if value is not None]
    enforced = enforced_limits(limits, options.target, given)
    if "prompt_tokens" in enforced:
        check_prompt_limit(bundle, limits.prompt_tokens)
    if options.check is None and options.check_prompt is not None:
        raise UsageError("--check-prompt is the question of --check about its picture. Add --check, or leave it out.")
    if options.check is None and options.fit is not None:
        raise UsageError("--fit is how the picture of --check becomes a square. Add --check, or leave it out.")
    place = options.output.absolute()
    builder = new_builder(options.target, options.sm, place.with_name(f"{place.name}.timing-cache"))
    builder.check_bundle(bundle)
    question = PROMPT if options.check_prompt is None else options.check_prompt
    gate, seen_shares = None, tuple[float, ...]()
    if options.check is not None:
        files = picture_files(options.check, bundle.manifest)
        checked = read_question(files, question, bundle, enforced, options.fit)
        note_pictures(load_family(bundle.manifest, options.fit), files, checked.images)
        gate, seen_shares = Gate(checked), checked.seen_shares(bundle.manifest)
    with TerminalProgress() as progress:
        bundle.verify(progress.part)
        manifest = build_engines(
            bundle,
            options.output,
            builder,
            limits,
            asked_limits=given,
            force=options.force,
            move=options.move,
            sign=sign,
            gate=gate,
            progress=progress,
        )
    text = _text(options.output, manifest, None if options.move else options.bundle, options.sign)
    write_result(options.json, _summary(options.output, manifest, seen_shares), lambda: sys.stdout.write(text))


def _summary(output: Path, manifest: EnginesManifest, seen_shares: Sequence[float]) -> dict[str, object]:
    from sinkprune.contract.engines_manifest import CHECKED, ENGINES

    return {
        "engines": str(output),
        "bytes": sum(spec.size for spec in manifest.files.values()),
        "sha256": ENGINES.sha256(manifest),
        "target": manifest.target,
        "library_version": manifest.library_version,
        "compute_capabilities": list(manifest.compute_capabilities),
        "limits": vars(manifest.limits),
        "enforced_limits": list(manifest.enforced_limits),
        "build_seconds": {graph: engine.build_seconds for graph, engine in manifest.engines.items()},
        "nodes": {graph: engine.nodes for graph, engine in manifest.engines.items() if engine.nodes},
        "checked": CHECKED in manifest.flags,
        "seen_share": list(seen_shares),
    }


_REALISED: Mapping[Realisation, str] = {
    "plugin": "run by our plugins",
    "function": "run by {library}",
    "stripped": "run by our plugins",
}


def _text(output: Path, manifest: EnginesManifest, bundle: Path | None, key: Path | None = None) -> str:
    """Return the printed summary: engines, limits, the result of --check, what runs the sanitizer, the sum.

    `bundle` has the graphs of the engines; None if --move has removed it. `key` has signed the engines, if any.
    """
    from sinkprune.contract.engines_manifest import CHECKED, ENGINES

    size = sum(spec.size for spec in manifest.files.values()) / 1e6
    command = f"sinkprune-check {escaped(str(bundle))} {escaped(str(output))} --image PICTURE --prompt QUESTION"
    how = f"on the machine that runs them: {command}" if bundle else "in another build: --check PICTURE"
    not_checked = f"not checked. Compare the engines with their graphs {how}\n"
    gpus = "".join(f", sm_{capability}" for capability in manifest.compute_capabilities)
    library = f"{manifest.target} {manifest.library_version}"
    nodes = Counter(_REALISED[found] for engine in manifest.engines.values() for found in engine.nodes.values())
    words = {"prompt_tokens": "prompts of {} tokens", "new_tokens": "answers of {}", "images": "images: {}"}
    enforced = manifest.enforced_limits
    limits = ", ".join(text.format(enforced[name]) for name, text in words.items() if name in enforced)
    realised = ", ".join(f"{count} {how.format(library=manifest.target)}" for how, count in nodes.items()) or "none"
    return (
        f"{escaped(str(output))}: {counted(len(manifest.engines), 'engine')}, {size:.2f} MB, {library}{gpus}; "
        f"{limits or 'no limits of their own'}\n"
        + (f"check passed: {len(manifest.engines)} engines\n" if CHECKED in manifest.flags else not_checked)
        + f"operators of the sanitizer: {realised}\n"
        + sum_lines(ENGINES.sha256(manifest), key)
    )


def _compute_capabilities(text: str) -> tuple[int, ...]:
    found = {_SM(part.strip().removeprefix("sm_")) for part in text.split(",") if part.strip()}
    if not found:
        raise argparse.ArgumentTypeError(f"'{text}' names no GPUs; expected numbers, as in 86,89,120")
    return tuple(sorted(found))


def _parser() -> CommandParser:
    # Imports numpy, as the imports of `main` do.
    from sinkprune.engines.gate import PROMPT
    from sinkprune.engines.profiles import MAX_IMAGES, MAX_NEW_TOKENS, MAX_PROMPT
    from sinkprune.engines.targets import TARGETS
    from sinkprune.runtime.families import add_fit_option

    parser = CommandParser(
        "sinkprune build",
        "Compile the graphs of a bundle into engines, for one library on one kind of machine.",
        _EXAMPLES,
    )
    add = parser.add_argument
    add("bundle", type=Path, metavar="BUNDLE", help="a folder written by sinkprune-export")
    add("-o", "--output", type=Path, required=True, metavar="ENGINES", help="the folder to write")
    add("--target", required=True, help=f"{', '.join(TARGETS)}: the library that will run the engines")
    words = "tensorrt-rtx: compute capabilities to compile for, as in 86,89,120 (default: this machine's GPU)"
    add("--sm", type=_compute_capabilities, help=words)
    words = (
        "most text tokens of a prompt (TensorRT's default: 512, or what the model takes; a policy's: as in training)"
    )
    add("--max-prompt", type=MAX_PROMPT, metavar="N", help=words)
    words = "most tokens of an answer (TensorRT's default: 512, or what the model takes); not for a policy"
    add("--max-new-tokens", type=MAX_NEW_TOKENS, metavar="N", help=words)
    words = "most images of a prompt (TensorRT's default: 1, or a policy's cameras)"
    add("--max-images", type=MAX_IMAGES, metavar="N", help=words)
    words = "compare engines with their graphs on this picture, and reject those that differ: see sinkprune-check"
    # The second names are those of sinkprune-check.
    add("--check", "--image", type=Path, action="append", metavar="PICTURE", help=words)
    add("--check-prompt", "--prompt", metavar="TEXT", help=f"the question that --check asks (default: {PROMPT})")
    add_fit_option(parser.group("picture and question"))
    add("--force", action="store_true", help="replace existing engines")
    words = "for small disks: remove each graph from BUNDLE when its engine is complete, and BUNDLE at the end"
    add("--move", action="store_true", help=words)
    add_trust_options(parser.group("trust"))
    add_sign_option(parser, "the engines")
    parser.add_json("the summary")
    return parser
