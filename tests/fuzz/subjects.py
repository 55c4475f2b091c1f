"""The subjects of the fuzzer: small bundles, engines, checkpoints, pictures, and the commands that read them.

A subject's name is its task and its family, for example `run:llava`. Its commands work in a folder with `bundle/`,
`engines/`, `checkpoint/`, `photo.jpg` and `clip.mp4`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from PIL import Image
from safetensors import safe_open

from fuzz.worker import MEMORY_BYTES, Call, Outcome, Worker
from support.models.checkpoints import NextShape, Shape, make_checkpoint, make_llava_next_checkpoint
from support.models.quantised_checkpoints import Layout, make_quantised
from support.models.qwen_checkpoints import QwenShape, make_qwen_checkpoint
from support.models.video_files import write_video
from support.programs.commands import run

PHOTOS = Path(__file__).parents[2] / "demo" / "photos"
SECONDS = 10.0
"""The time limit of a call."""
_ADDRESSES = MEMORY_BYTES + (1 << 29)
"""Address space in addition to the honest input's; more than `MEMORY_BYTES`, as libraries reserve unused space."""
_RUN = "sinkprune.runtime.commands.run:main"
_EXPORT = "sinkprune.export.command:main"
_COMPILE = "sinkprune.engines.command:main"
_DOCTOR = "sinkprune.jetson.doctor:main"
_BUILD = ("--target", "onnxruntime", "--max-prompt", "128", "--max-new-tokens", "16")
_BUDGETS = {
    "llava": "retain-64",
    "llava_next": "retain-160",
    "qwen2_vl": "prune-80",
    "qwen2_5_vl": "prune-80",
    "qwen3_vl": "prune-80",
}
FAMILIES = tuple(_BUDGETS)
_VIDEO = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")


@dataclass(frozen=True)
class Step:
    """One command of a subject."""

    function: str
    arguments: tuple[str, ...]
    output: str | None = None
    """The file or folder that the command writes."""


@dataclass(frozen=True)
class Subject:
    """Files to change, and the commands that read them, until one fails."""

    name: str
    parts: tuple[str, ...]
    """The files and folders of the family that the commands need."""
    steps: tuple[Step, ...]


class Subjects:
    """All subjects in a folder, and the outcomes of their unchanged files."""

    def __init__(self, folder: Path, families: Sequence[str] = FAMILIES) -> None:
        """Read the folder that `make_families` wrote."""
        self._folder = folder
        made = [subject for family in families for subject in _subjects_of(family, folder / family)]
        self._subjects = {subject.name: subject for subject in made}
        self._honest: dict[str, list[Outcome]] = {}

    @property
    def names(self) -> list[str]:
        return list(self._subjects)

    def __getitem__(self, name: str) -> Subject:
        return self._subjects[name]

    def folder(self, name: str) -> Path:
        """Return the folder with the unchanged files of the subject `name`. Do not write there."""
        return self._folder / name.partition(":")[2]

    def copy(self, name: str, target: Path) -> None:
        """Copy the files of the subject `name` into the folder `target`."""
        for part in self[name].parts:
            source = self.folder(name) / part
            if source.is_dir():
                shutil.copytree(source, target / part, copy_function=shutil.copyfile)
            else:
                shutil.copyfile(source, target / part)

    def honest(self, name: str, worker: Worker, place: Path) -> list[Outcome]:
        """Return the outcome of each command on the unchanged files; the first call runs them in `place`."""
        if name not in self._honest:
            self.copy(name, place)
            outcomes = []
            for step in self[name].steps:
                outcome = worker(call_of(step, place, None))
                if outcome.code != 0 or outcome.timed_out:
                    raise RuntimeError(f"{name} without a change ended with {outcome}")
                outcomes.append(outcome)
            assert outcomes[-1].answer is not None
            self._honest[name] = outcomes
        return self._honest[name]


def call_of(step: Step, place: Path, honest: Outcome | None) -> Call:
    """Return the call of `step` in the folder `place`, with a limit of memory from the outcome `honest`."""
    most = honest.address_space + _ADDRESSES if honest and honest.address_space else None
    return Call(step.function, step.arguments, str(place), str(place / "home"), SECONDS, most)


def _subjects_of(family: str, made: Path) -> list[Subject]:
    asked = ("--prompt", "What?", "--budget", _BUDGETS[family], "--max-new-tokens", "4", "--threads", "1", "--json")
    export = ("checkpoint", "-o", "out", "--budgets", _BUDGETS[family], "--json")

    def ask(bundle: str, *more: str) -> Step:
        picture = () if "--video" in more else ("--image", "photo.jpg")
        return Step(_RUN, (bundle, *picture, *more, *asked))

    sums = (_sha256(made / "bundle/bundle.json"), _sha256(made / "engines/engines.json"))
    pinned = ("--engines", "engines", "--sha256", sums[0], "--engines-sha256", sums[1])
    # With --board, because for this machine the doctor starts processes to import libraries.
    doctor = Step(_DOCTOR, ("bundle", "--board", "orin-nano-8gb", "--json"))
    build = Step(_COMPILE, ("bundle", "-o", "built", *_BUILD), "built")
    tasks: dict[str, tuple[tuple[str, ...], tuple[Step, ...]]] = {
        "run": (("bundle",), (ask("bundle"),)),
        "export": (("checkpoint",), (Step(_EXPORT, export, "out"), ask("out"))),
        "engines": (("bundle", "engines"), (ask("bundle", "--engines", "engines"),)),
        "doctor": (("bundle",), (doctor, ask("bundle"))),
        "pinned": (("bundle", "engines"), (ask("bundle", *pinned),)),
        "build": (("bundle",), (build, ask("bundle", "--engines", "built"))),
    }
    subjects = [Subject(f"{task}:{family}", (*parts, "photo.jpg"), steps) for task, (parts, steps) in tasks.items()]
    if family in _VIDEO:
        subjects.append(Subject(f"video:{family}", ("bundle", "clip.mp4"), (ask("bundle", "--video", "clip.mp4"),)))
    return subjects


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@contextmanager
def silent_libraries() -> Iterator[None]:
    """Discard what libraries write to stderr in the block."""
    usual, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(usual, 2)
        os.close(usual)
        os.close(nowhere)


def make_families(folder: Path, families: Sequence[str] = FAMILIES) -> Path:
    """Write the files of the subjects of these families into `folder`, and return it."""
    for family in families:
        _make_family(folder / family, family)
    return folder


def _make_family(folder: Path, family: str) -> None:
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir(parents=True)
    frames = ("--max-frames", 4) if family in _VIDEO else ()
    with silent_libraries():
        _make_checkpoint(checkpoint, family)
        exported = run(
            "sinkprune-export", checkpoint, "-o", folder / "bundle", "--budgets", _BUDGETS[family], *frames
        )
        built = run("sinkprune-build", folder / "bundle", "-o", folder / "engines", *_BUILD)
    assert (exported.code, built.code) == (0, 0), (exported, built)
    photo = Image.open(PHOTOS / "coffee.jpg").resize((160, 112))
    photo.save(folder / "photo.jpg")
    write_video(folder / "clip.mp4", [photo.rotate(turn) for turn in (0, 5, 10, 15)])


def _make_checkpoint(checkpoint: Path, family: str) -> None:
    """Write a checkpoint. Each family has other files for its settings, template and weights."""
    if family == "llava":
        make_checkpoint(checkpoint, Shape(image_size=112, num_kv_heads=2, num_layers=4))
    elif family == "llava_next":
        make_llava_next_checkpoint(checkpoint, NextShape(num_layers=4))
    else:
        # The fewest layers with a cut after the third layer, as DeepStack needs.
        layers = 24 if family == "qwen3_vl" else 4
        make_qwen_checkpoint(checkpoint, QwenShape(kind=family, num_layers=layers, most_tokens=64))
    if family == "qwen2_5_vl":
        floats = checkpoint.rename(checkpoint.with_name("floats"))
        quantised = make_quantised(floats, checkpoint.with_name("made"), Layout(sym=False, desc_act=True))
        quantised.folder.rename(checkpoint)
    if family == "llava_next":
        settings, template = checkpoint / "preprocessor_config.json", checkpoint / "chat_template.jinja"
        nested = {"image_processor": json.loads(settings.read_bytes())}
        (checkpoint / "processor_config.json").write_text(json.dumps(nested), encoding="utf-8")
        in_json = {"chat_template": template.read_text(encoding="utf-8")}
        (checkpoint / "chat_template.json").write_text(json.dumps(in_json), encoding="utf-8")
        settings.unlink()
        template.unlink()
    if family in _VIDEO and family != "qwen3_vl":
        shutil.copyfile(checkpoint / "preprocessor_config.json", checkpoint / "video_preprocessor_config.json")
    if family == "qwen2_vl":
        shard = checkpoint / "model-00001-of-00001.safetensors"
        (checkpoint / "model.safetensors").rename(shard)
        with safe_open(shard, framework="np") as file:
            index = {"metadata": {}, "weight_map": dict.fromkeys(file.keys(), shard.name)}
        (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
