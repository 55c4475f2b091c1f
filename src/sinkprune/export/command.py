"""`sinkprune-export`: a checkpoint in, a bundle out."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from sinkprune.contract.budgets import FAMILIES, OPTIONS
from sinkprune.contract.checks import escaped
from sinkprune.contract.command_line.command import entry_point
from sinkprune.contract.command_line.options import CommandParser, PathOrName, json_outputs, write_result
from sinkprune.contract.command_line.progress import status
from sinkprune.contract.files.output_files import check_outputs
from sinkprune.contract.files.trust import add_sign_option, sum_lines
from sinkprune.export import (
    CHUNK,
    CLIP_TOKENS,
    IMAGE_TOKENS,
    MAX_FRAMES,
    MAX_IMAGES,
    MAX_PIXELS,
    MIN_PIXELS,
    report_missing_package,
)

if TYPE_CHECKING:
    from sinkprune.contract.manifest import Manifest
    from sinkprune.export.planning import Unreachable
    from sinkprune.export.weights.quantised_weights import Requantised

_EXAMPLES = """\
examples:
  sinkprune-export llava-hf/llava-1.5-7b-hf -o llava-7b --precision fp16
  sinkprune-export llava-hf/llava-1.5-7b-hf -o llava-int4 --weights int4                        # 4 GB
  sinkprune-export ./my-checkpoint -o bundle --budgets retain-128,retain-64+compact
  sinkprune-export ./my-checkpoint -o orin --precision fp16 --dialect opset20      # for JetPack 6
  sinkprune-export Qwen/Qwen2.5-VL-7B-Instruct -o qwen-7b --weights int4 --max-pixels 376320    # 480 visual tokens
  sinkprune-export llava-1.1b --random-weights -o sizing      # true shapes, no download

Every bundle also runs unpruned.
"""


@entry_point
def main(arguments: Sequence[str] | None) -> None:
    options = _parser().parse_args(arguments)
    tokenizer = Path(options.tokenizer) if options.tokenizer else None
    read = [path for path in (Path(options.source), tokenizer, options.sign) if path]
    check_outputs(json_outputs(options.json), read, [Path(options.source), options.output])
    # Before the first import of transformers and its hub client, which read them once.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # The hub gets the name of a checkpoint, and no telemetry.
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    from sinkprune.contract.manifest import BUNDLE

    unreachable: list[Unreachable] = []
    requantised: list[Requantised] = []
    unused: dict[str, Any] = {}
    with report_missing_package("exporting"):
        with status("loading packages"):
            from sinkprune.export.bundle_writer import export_bundle
            from sinkprune.export.source import ExportRequest

        given = {field.name: getattr(options, field.name) for field in dataclasses.fields(ExportRequest)}
        request = ExportRequest(**given)
        sign = None
        if options.sign:
            from sinkprune.contract.files.signature import read_private_key

            sign = read_private_key(options.sign)
        with status("reading") as progress:
            manifest = export_bundle(
                request,
                options.output,
                force=options.force,
                sign=sign,
                progress=progress,
                needs=_write_needs,
                left_out=unreachable.append,
                requantised=requantised.append,
                unused_settings=unused.update,
            )
    rounded_again = None
    if requantised:
        from sinkprune.export.weights.quantised_weights import in_words, summary

        rounded_again = summary(requantised)
        sys.stderr.write(in_words(rounded_again))
    for plan in unreachable:
        sys.stderr.write(f"left out: method '{plan.method}' at budget '{plan.budget}': {plan.why}.\n")
    if options.max_pixels is None and "max_pixels" in manifest.processor:
        sys.stderr.write(_usual_size(manifest))
    if unused:
        sys.stderr.write(_unused_settings(unused))
    policy = manifest.policy
    if policy and policy.units_note and not manifest.checkpoint.random_weights:
        sys.stderr.write(f"warning: {policy.units_note}\n")
    if policy and policy.rows and not options.random_weights and None in (options.chunk, options.bounds):
        sys.stderr.write(
            f"assumed: chunks of {policy.chunk} actions, with statistics as those of the robot with as many numbers "
            "(LIBERO, BRIDGE or ALOHA). If the training had others, give --chunk and --bounds.\n"
        )
    size = sum(spec.size for spec in manifest.files.values())
    budgets = ", ".join(["none", *manifest.budgets])
    shown = f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.2f} MB"
    methods = f", methods {', '.join(manifest.plans)}" if len(manifest.plans) > 1 else ""
    numbers = manifest.weights.beside(manifest.precision)
    text = f"{escaped(str(options.output))}: {shown}, {numbers}, budgets {budgets}{methods}\n" + sum_lines(
        BUNDLE.sha256(manifest), options.sign
    )
    write_result(
        options.json,
        {
            "bundle": str(options.output),
            "bytes": size,
            "sha256": BUNDLE.sha256(manifest),
            "budgets": list(manifest.budgets),
            "methods": list(manifest.plans),
            "unreachable": [dataclasses.asdict(plan) for plan in unreachable],
            "cut_after": list(manifest.cut_after),
            "precision": manifest.precision,
            "weights": manifest.weights.decoder,
            "vision_weights": manifest.weights.vision,
            "block_size": manifest.weights.block_size,
            "requantised": rounded_again,
            "repetition_penalty": manifest.repetition_penalty,
            "unused_settings": unused,
            "dialect": manifest.dialect,
            "max_pixels": manifest.processor.get("max_pixels"),
            "in_robots_units": policy.in_robots_units if policy else None,
        },
        lambda: sys.stdout.write(text),
    )


def _write_needs(memory: int, disk: int) -> None:
    from sinkprune.contract.memory import LEAST_REPORTED_BYTES, available_bytes, gigabytes

    if disk >= LEAST_REPORTED_BYTES:
        free = available_bytes()
        known = f", of which {gigabytes(free)} are free," if free else ""
        sys.stderr.write(f"needs about {gigabytes(memory)} of memory{known} and {gigabytes(disk)} of disk\n")


def _usual_size(manifest: Manifest) -> str:
    pixels: int = manifest.processor["max_pixels"]
    token = manifest.vision.patch_size**2 * manifest.vision.patches_per_token
    video = manifest.processor.get("video")
    frames = f"; frames of clips: up to {video['max_pixels'] // token}" if video else ""
    return (
        f"images: up to {pixels // token} visual tokens ({pixels} pixels){frames}. Larger ones are scaled down; "
        "change this with --max-pixels\n"
    )


def _unused_settings(settings: dict[str, Any]) -> str:
    listed = ", ".join(f"{name} {json.dumps(value, ensure_ascii=False)}" for name, value in settings.items())
    return (
        f"not applied: {escaped(listed)} of the checkpoint's generation settings. Answers are greedy unless a "
        "request has a temperature.\n"
    )


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise argparse.ArgumentTypeError(f"'{text}' names nothing")
    return names


def _parser() -> CommandParser:
    # These import numpy. Before `run_command`, an interrupt would end in a traceback.
    from sinkprune.contract.manifest import DialectName
    from sinkprune.contract.precision import BLOCK_SIZES, DTYPES, WeightsName

    budgets = "".join(f"  {family}: {', '.join(row.budgets)}\n" for family, row in FAMILIES.items())
    names = (
        f"budgets:\n{budgets}"
        f"options, after a budget's name (retain-64+raster+visual-keys):\n  {', '.join(OPTIONS)},\n"
        "  rho-N (N of 1000 tokens are outliers), from-BUDGET (with the sanitizer of another budget)\n"
    )
    parser = CommandParser(
        "sinkprune export",
        "Export a multimodal LLM to ONNX graphs that prune visual tokens.",
        f"{_EXAMPLES}\n{names}",
    )
    add = parser.add_argument
    add("source", type=PathOrName, metavar="CHECKPOINT", help="a local folder or a hub name, in Hugging Face format")
    add("-o", "--output", type=Path, required=True, metavar="BUNDLE", help="the folder to write")
    add("--budgets", type=_names, help="comma-separated budget names (default: all of the family)")
    add(
        "--methods",
        type=_names,
        default=("sinkpruner",),
        help="comma-separated, e.g. sinkpruner,fastv,visionzip+filter; a wrong name lists all (default: sinkpruner)",
    )
    add(
        "--precision", choices=list(DTYPES), default="fp32", help="type of states, caches and weights (default: fp32)"
    )
    add(
        "--weights",
        choices=get_args(WeightsName),
        help="the form of the matrices of decoder, projector and head; uint4 is not for TensorRT (default: as "
        "the checkpoint has quantised them, else as --precision)",
    )
    add(
        "--vision-weights",
        choices=get_args(WeightsName),
        help="the form of the vision tower's matrices (default: int8 with --weights int8, int4 or uint4, else "
        "as --weights; as --precision if the checkpoint is quantised)",
    )
    add(
        "--block-size",
        type=int,
        choices=BLOCK_SIZES,
        help="int4 and uint4: the most inputs that share a scale (default: 128, or the checkpoint's own)",
    )
    add(
        "--dialect",
        choices=get_args(DialectName),
        default="opset24",
        help="operators of the graphs: opset20 for TensorRT 10.3, as on JetPack 6 (default: opset24)",
    )
    add(
        "--random-weights",
        action="store_true",
        help="use seeded random weights: CHECKPOINT is a config.json, a folder with one, or a preset, as llava-1.1b; "
        "a wrong name lists all",
    )
    add(
        "--tokenizer",
        metavar="FOLDER",
        help="a local folder or a hub name with the tokenizer, as LeRobot's checkpoints need (default: CHECKPOINT)",
    )
    add(
        "--max-images",
        type=MAX_IMAGES,
        help="most images of a prompt (default: the cameras of a policy in LeRobot's form, else 1)",
    )
    add("--max-frames", type=MAX_FRAMES, default=0, help="accept clips of up to this many frames (default: no video)")
    add("--min-pixels", type=MIN_PIXELS, help="enlarge images with fewer pixels (default: the checkpoint's)")
    add(
        "--max-pixels",
        type=MAX_PIXELS,
        help=f"scale down images and frames with more pixels (default: those of {IMAGE_TOKENS} visual tokens, and of "
        f"{CLIP_TOKENS} for all frames of a clip, or the checkpoint's if that is less)",
    )
    add(
        "--salience",
        choices=["penultimate", "last"],
        help="the vision block whose attention ranks tokens, in towers without a CLS token (default: penultimate)",
    )
    add(
        "--unnorm-key",
        metavar="DATASET",
        help="OpenVLA: the data set whose statistics count (default: the checkpoint's only one)",
    )
    add("--chunk", type=CHUNK, help="OpenVLA-OFT: actions of a chunk (default: those of LIBERO, BRIDGE or ALOHA)")
    add(
        "--bounds",
        choices=["q01-q99", "min-max"],
        help="OpenVLA-OFT: the statistics that become -1 and 1 (default: those of LIBERO, BRIDGE or ALOHA)",
    )
    add(
        "--action-tokenizer",
        metavar="FOLDER",
        help="pi0-FAST: a local folder or a hub name with the FAST tokenizer, such as lerobot/fast-action-tokenizer",
    )
    add("--force", action="store_true", help="replace an existing bundle")
    add_sign_option(parser, "the bundle")
    parser.add_json("the summary")
    return parser
