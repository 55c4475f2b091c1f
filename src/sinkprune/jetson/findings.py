"""What the doctor finds on a machine, what to do about it, and what to run next."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from sinkprune.contract.checks import install_command
from sinkprune.contract.manifest import DialectName
from sinkprune.contract.memory import compared_sizes, gigabytes
from sinkprune.jetson.boards import Board, Boards, JetPack
from sinkprune.jetson.fit import (
    BOARD_BACKEND,
    ModelFit,
    PolicyInputs,
    Recommendation,
    best_form,
    recommend,
    refused_by_backend,
    usable_forms,
)
from sinkprune.jetson.host import Machine
from sinkprune.runtime.backends.known import KNOWN, on_cpu
from sinkprune.runtime.steps.request import DEFAULT_METHOD

_BACKENDS = {
    library: tuple(name for name in (*on_cpu(), BOARD_BACKEND, "tensorrt-rtx") if library in KNOWN[name].libraries)
    for library in ("onnxruntime", "openvino", "tensorrt", "tensorrt_rtx")
}
"""The backends that need each engine library."""
_EXTRAS = {"onnxruntime": "cpu", "openvino": "openvino"}
"""The extra of this package that installs each library for CPUs."""
_GPU_ACCESS = ("cuda.bindings", "pycuda")
_OPSET24_FROM = (1, 25)
"""The first ONNX Runtime that runs dialect opset24: 1.23 rejects its IR version, and 1.24 lacks TensorScatter."""
_LITTLE_MEMORY_GB = 8
_LITTLE_DISK = 10_000_000_000
_VENV = "python{minor} -m venv --system-site-packages .venv"


@dataclass(frozen=True)
class Finding:
    """Something about a machine, a board or a model."""

    stops: bool
    """Whether a requested model cannot run until this is fixed."""
    found: str
    do: str
    backends: tuple[str, ...] = ()
    """The backends that cannot run until this is fixed; empty if it concerns all of them, or stops none."""
    model: str | None = None
    """The model that cannot run; None if the finding concerns the machine."""

    def blocks(self, model: ModelFit) -> bool:
        """Return whether this model cannot run on its backend until this is fixed."""
        return (
            self.stops and self.model in (None, model.name) and (not self.backends or model.backend in self.backends)
        )


def machine_findings(machine: Machine, boards: Boards) -> Iterator[Finding]:
    """Yield the findings about a machine, for any model."""
    board = boards.board(machine.board) if machine.board else None
    jetpack = boards.jetpack(machine.jetpack.l4t) if machine.jetpack.l4t else None
    for file in machine.unreadable:
        yield Finding(False, f"not readable: {file}", "run as root to read it: sudo $(command -v sinkprune-doctor)")
    if machine.chip:
        yield from _board_findings(machine, board, jetpack)
        yield from _tensorrt_findings(machine)
        yield from _speed_findings(machine)
        if board and board.memory_gb <= _LITTLE_MEMORY_GB and all(swap.compressed for swap in machine.swap):
            kind = "its only swap is zram, which is in the same memory" if machine.swap else "it has no swap"
            yield Finding(
                False,
                f"{kind}: a build of engines on {board.memory_gb} GB may be killed",
                "jetson/setup.sh --swap 8, or end other programs before a build",
            )
    yield from _library_findings(machine)
    if machine.disk_free_bytes is not None and machine.disk_free_bytes < _LITTLE_DISK:
        yield Finding(
            False,
            f"{gigabytes(machine.disk_free_bytes)} of disk are free at '{machine.disk}'",
            "bundle and engines of a 7B take 4 GB each in int4, 14 in fp16: free some, keep them on another disk, or "
            "build with --move, which leaves engines only",
        )


def model_findings(
    models: Sequence[ModelFit],
    memory: int,
    jetpacks: Sequence[JetPack] = (),
    onnxruntime: str | None = None,
    *,
    elsewhere: bool = False,
) -> Iterator[Finding]:
    """Yield the findings about models on a machine with `memory` free bytes; 0 means unknown.

    `jetpacks` are the installed one, or those of a board `elsewhere`. `onnxruntime` is the version of the installed
    library.
    """
    for model in models:
        fitting = [form for form, _ in model.fitting()]
        as_it_is = bool(fitting) and model.kind != "preset"
        forms = [form for form in model.forms if form.exported] if as_it_is else model.forms
        if any(form in fitting for form in forms):
            yield from _build_findings(model, memory)
        else:
            least = min(fit.memory_bytes for form in forms for fit in form.budgets.values())
            needed, free = compared_sizes(least, memory)
            found, do = f"needs at least {needed} as it is exported", _smaller(model)
            if not as_it_is:
                found = f"fits in no form: it needs at least {needed}"
                do = "use a smaller model or a board with more memory; if little is missing, end other programs there"
            yield _stop_model(model, f"'{model.name}' {found}, {free} are available", do)
        if model.kind == "bundle":
            if model.backend == BOARD_BACKEND:
                yield from _tensorrt_bundle_findings(model)
            limit = dialect_limit(model.backend, jetpacks, onnxruntime)
            if limit and model.dialect != "opset20":
                found = f"'{model.name}' has dialect {model.dialect}; {limit} supports opset20"
                again = "export it again with --dialect opset20"
                if elsewhere:
                    yield Finding(False, found, f"for a board with such a JetPack, {again}")
                else:
                    yield _stop_model(model, found, again)


def library_findings(machine: Machine, models: Sequence[ModelFit]) -> Iterator[Finding]:
    """Yield a finding for each library that a model's backend on CPUs needs, and that is not installed.

    `machine_findings` has the finding about a machine without any engine library.
    """
    if not any(name in machine.python.libraries for name in _BACKENDS):
        return
    for backend in dict.fromkeys(model.backend for model in models if model.backend in on_cpu()):
        for name in KNOWN[backend].libraries:
            if name not in machine.python.libraries:
                missing = f"'{backend}' needs {name}, which is not installed"
                yield Finding(True, missing, install_command(_EXTRAS[name]), (backend,))


def dialect_limit(backend: str, jetpacks: Sequence[JetPack], onnxruntime: str | None = None) -> str:
    """Return the library, in words, that runs no dialect above opset20 with `backend`; "" without one.

    It is the installed ONNX Runtime of this version, or a library of some of `jetpacks`.
    """
    found = re.match(r"(\d+)\.(\d+)", onnxruntime or "")
    if found and tuple(map(int, found.groups())) < _OPSET24_FROM and "onnxruntime" in KNOWN[backend].libraries:
        return f"the installed ONNX Runtime {onnxruntime}"
    if backend == BOARD_BACKEND:
        library, older = "TensorRT", [pack for pack in jetpacks if pack.dialect == "opset20"]
    else:
        # ONNX Runtime 1.23 is the last for Python 3.10.
        library, older = "ONNX Runtime for Python 3.10", [pack for pack in jetpacks if pack.python == "3.10"]
    limits = older and backend != "openvino"
    return f"{library} of JetPack {' and '.join(pack.version for pack in older)}" if limits else ""


def _stop_tensorrt(found: str, do: str) -> Finding:
    return Finding(True, found, do, (BOARD_BACKEND,))


def _stop_model(model: ModelFit, found: str, do: str) -> Finding:
    return Finding(True, found, do, model=model.name)


def _smaller(model: ModelFit) -> str:
    best, exported = best_form(model), {form.decoder_form for form in model.forms if form.exported}
    if best is None or best[0].decoder_form in exported:
        return "use a smaller model"
    return f"export it again with --weights {best[0].decoder_form}"


def _build_findings(model: ModelFit, memory: int) -> Iterator[Finding]:
    """Yield a finding if a model fits, but its engines cannot be built on this machine."""
    forms = [form for form, _ in model.fitting() if (form.exported or model.kind == "preset")]
    wanted = [form for form in forms if not refused_by_backend(model, form)]
    if not wanted or any(form in wanted for form in usable_forms(model)):
        return
    build = min((form.build for form in wanted if form.build), key=lambda build: build.memory_bytes)
    needed, free = compared_sizes(build.memory_bytes, memory)
    yield _stop_model(
        model,
        f"engines of '{model.name}' cannot be built here: a build needs about {needed} of "
        f"memory ({free} are free) and, with --move, {gigabytes(build.moving_disk_bytes)} of disk",
        f"end other programs and free disk, or {_smaller(model)}",
    )


def _board_findings(machine: Machine, board: Board | None, jetpack: JetPack | None) -> Iterator[Finding]:
    if board is None:
        yield Finding(
            False,
            f"this is a {machine.chip} with an unknown module: {machine.model}",
            "name the most similar board: sinkprune-doctor --board NAME",
        )
    if machine.jetpack.l4t is None:
        yield _stop_tensorrt("/etc/nv_tegra_release names no release of Jetson Linux", "install JetPack 6.2 or 7.2")
    elif jetpack is None:
        yield _stop_tensorrt(
            f"Jetson Linux {machine.jetpack.l4t} belongs to no JetPack that this sinkprune knows",
            "install JetPack 6.2 or 7.2, or upgrade sinkprune",
        )
    elif machine.python.minor != jetpack.python and not machine.jetpack.tensorrt_python:
        yield _stop_tensorrt(
            f"this Python is {machine.python.minor}; JetPack {jetpack.version} has {jetpack.python}",
            f"make the environment with the system's: {_VENV.format(minor=jetpack.python)}",
        )


def _tensorrt_findings(machine: Machine) -> Iterator[Finding]:
    installed, python = machine.jetpack, machine.python
    if not installed.tensorrt_python:
        yield _stop_tensorrt(
            "TensorRT's Python module is not installed for the system's Python",
            "sudo apt-get install nvidia-jetpack python3-libnvinfer",
        )
    elif python.minor not in installed.tensorrt_python:
        pythons = " and ".join(installed.tensorrt_python)
        yield _stop_tensorrt(
            f"TensorRT {installed.tensorrt or ''} is installed for Python {pythons}, this is {python.minor}",
            f"make the environment again: {_VENV.format(minor=installed.tensorrt_python[-1])}",
        )
    elif not python.sees_system:
        yield _stop_tensorrt(
            "this virtual environment does not see the system's packages, TensorRT among them",
            f"make it again: {_VENV.format(minor=python.minor)}",
        )
    if not any(map(python.imports, _GPU_ACCESS)):
        major = (installed.cuda or "12").split(".")[0]
        wanted = f"'cuda-python>={major},<{int(major) + 1}'" if major.isdecimal() else "cuda-python"
        yield _stop_tensorrt(
            "neither cuda-python nor pycuda can be imported; TensorRT engines need one of them",
            f"pip install {wanted}",
        )


def _speed_findings(machine: Machine) -> Iterator[Finding]:
    mode, clock = machine.power_mode, machine.gpu_clock
    if mode is None:
        yield Finding(False, "the power mode is unknown", "query it: sudo nvpmodel -q")
    elif not mode.is_fastest and mode.fastest:
        name, number = mode.fastest
        yield Finding(
            False,
            f"the power mode is {mode.name or mode.id}, not {name}",
            f"for the board's full speed: sudo nvpmodel -m {number} (more heat; it may ask to reboot)",
        )
    if clock and clock.least is not None and clock.most and clock.least < clock.most:
        yield Finding(
            False,
            f"the GPU's clock may fall to {clock.least} of {clock.most} MHz between requests",
            "for steady latency: sudo jetson_clocks (until the next boot)",
        )


def _library_findings(machine: Machine) -> Iterator[Finding]:
    libraries = machine.python.libraries
    for name, library in libraries.items():
        if library.error:
            yield Finding(
                name in _BACKENDS,
                f"{name} is installed but does not import: {library.error}",
                "reinstall it for this Python, or remove it",
                _BACKENDS.get(name, ()),
            )
    if not any(name in libraries for name in _BACKENDS):
        yield Finding(True, "no engine library is installed", install_command("cpu"))


def _tensorrt_bundle_findings(model: ModelFit) -> Iterator[Finding]:
    own = next(form for form in model.forms if form.exported)
    if own.precision != "fp16":
        yield _stop_model(
            model,
            f"'{model.name}' has states in {own.precision}, and TensorRT builds attention in fp16 only",
            "export it again with --precision fp16",
        )
    if "uint4" in own.weights:
        yield _stop_model(
            model,
            f"'{model.name}' has uint4 weights, which TensorRT does not support",
            "export it again with --weights int4",
        )


_OF_A_PRESET = "# true shapes; for its weights give the checkpoint, without --random-weights"
_REQUEST = '--image PICTURE.jpg --prompt "QUESTION"'


def recommendations(models: Sequence[ModelFit], findings: Sequence[Finding]) -> list[Recommendation]:
    """Return the recommendation for each model that can run, unchanged unless a finding forbids it."""
    forbidden = {finding.model for finding in findings if finding.stops}
    found = (recommend(model, as_it_is=model.name not in forbidden) for model in models)
    return [one for one in found if one is not None]


def first_steps(findings: Sequence[Finding], recommended: Sequence[Recommendation]) -> list[str]:
    """Return what to do before any command can run, for which model, in the order of the findings.

    A finding about a model is left out if `next_steps` has the command that fixes it.
    """
    fixed = {found.model for found in recommended}
    stops = (finding for finding in findings if finding.stops and finding.model not in fixed)
    return [f"for '{one.model}': {one.do}" if one.model is not None else one.do for one in stops]


def next_steps(
    models: Sequence[ModelFit],
    recommended: Sequence[Recommendation],
    findings: Sequence[Finding],
    dialect: DialectName,
) -> list[str]:
    """Return a command or two for each recommendation; for presets, only the export of the first.

    A model whose backend is blocked by a finding about the machine gets none. A new export has `dialect`.
    """
    by_name = {model.name: model for model in models}
    commands = (
        command
        for found in recommended
        if not any(finding.blocks(by_name[found.model]) and finding.model is None for finding in findings)
        for command in (
            _with_folder(by_name[found.model], found)
            if found.as_it_is
            else [_export(by_name[found.model], found, dialect)]
        )
    )
    if all(model.kind == "preset" for model in models):
        return [f"{command}  {_OF_A_PRESET}" for command in islice(commands, 1)]
    return list(commands)


def _with_folder(model: ModelFit, found: Recommendation) -> Iterator[str]:
    folder, runs = shlex.quote(model.name), "sinkprune-act" if model.policy else "sinkprune-run"
    request = _REQUEST if model.policy is None else _observation(model.policy)
    method = "" if model.method in ("", DEFAULT_METHOD) else f" --method {shlex.quote(model.method)}"
    plan = f"{method} --budget {found.budget}"
    if model.kind == "engines":
        yield f"{runs} {folder} {request}{plan}"
    elif model.backend == BOARD_BACKEND:
        engines = shlex.quote(f"{model.name.rstrip('/')}-engines")
        # A policy's engines are for its own prompts.
        text = f" --max-prompt {2 * model.prompt_tokens} --max-new-tokens {model.new_tokens}"
        limits = "" if model.policy else text
        own = next(form for form in model.forms if form.exported)
        move = " --move" if own.build and own.build.needs_move else ""
        yield f"sinkprune-build {folder} -o {engines} --target tensorrt{limits}{move}"
        yield f"{runs} {engines} {request}{plan}"
    else:
        yield f"{runs} {folder} --backend {model.backend} {request}{plan}"


def _observation(policy: PolicyInputs) -> str:
    """Return the options of `sinkprune-act` for a moment, with a state that the policy knows from its training."""
    cameras = " ".join(["--camera PICTURE.jpg"] * policy.cameras)
    return f'{cameras} --instruction "INSTRUCTION" --state {",".join(f"{number:.4g}" for number in policy.state)}'


def _export(model: ModelFit, found: Recommendation, dialect: DialectName) -> str:
    source = shlex.quote(model.source)
    if model.random_weights:
        source += " --random-weights"
    elif "/" not in model.source and not Path(model.source).is_dir():
        # A bundle has the name of its checkpoint's folder, not its path.
        source = shlex.quote(f"PATH/TO/{model.source}")
    place = f"{model.name.rstrip('/').rpartition('/')[2]}-{found.weights}"
    words = ["sinkprune-export", source, "-o", shlex.quote(place), "--precision", found.precision]
    if found.weights != found.precision:
        words += ["--weights", found.weights]
    # opset20 runs wherever opset24 runs.
    if "opset20" in (model.dialect, dialect):
        words += ["--dialect", "opset20"]
    if model.policy:
        words += ["--max-images", str(model.policy.cameras)]
    return " ".join(words)
