"""`sinkprune-doctor`, as it is called."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.programs.commands import assert_refused, succeed
from support.programs.doctor_runs import doctor, set_python, told
from support.stand_ins.board_trees import changed, orin_nano_jetpack_6_2, workstation

# The same for bundles and for engines.
REQUEST = '--image PICTURE.jpg --prompt "QUESTION" --budget retain-192'


def test_a_board_from_a_workstation() -> None:
    done = doctor("--board", "orin-nano-8gb", "llava-1.5-7b")
    assert done.code == 0, done.stderr
    # The verdict comes first.
    assert done.stdout.startswith("llava-1.5-7b fits: int4 at retain-192 on tensorrt, in 6.5 GB. Only int4 fits.\n")
    for words in ("Jetson Orin Nano 8GB (Super), sm_87", "102 GB/s", "verify before quoting", "7W, 15W, 25W, MAXN\n"):
        assert words in done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if re.match(r"(fp16|int8|int4)? +(none|retain-)", line)]
    assert rows[0] == ["fp16", "none", "576>576>576", "21.4!", "500", "523", "133", "0"]
    assert rows[4] == ["retain-32", "576>65>31", "21.4!", "130w", "151", "130", "0"]
    assert rows[11] == ["retain-192", "576>385>184", "6.5", "206", "228", "35", "1365"]
    builds = [line.split() for line in done.stdout.splitlines() if line.endswith((" no", " yes"))]
    assert [(row[0], row[-1]) for row in builds] == [("fp16", "no"), ("int8", "no"), ("int4", "yes")]
    assert "libraries" not in done.stdout


def test_a_recorded_board_is_described(tmp_path: Path) -> None:
    report = told("--root", orin_nano_jetpack_6_2(tmp_path), "llava-1.1b")
    assert (report["board"], report["jetpack"]["version"], report["backend"]) == ("orin-nano-8gb", "6.2", "tensorrt")
    modes = {"15W": 0, "25W": 1, "MAXN_SUPER": 2, "7W": 3}
    assert report["machine"]["power_mode"] == {"id": 0, "name": "15W", "modes": modes}
    # This Python is none of the board's.
    assert any("for Python 3.10" in finding["found"] and finding["stops"] for finding in report["findings"])
    assert report["usable_bytes"] == report["machine"]["free_bytes"]
    (model,) = report["models"]
    assert model["forms"][0]["budgets"]["none"]["bounds"]["token_ms"] > 0
    # Its text is escaped.
    root = changed(tmp_path, {"proc/device-tree/model": "[bold]Evil\x1b[2J"})
    assert "machine       [bold]Evil\\x1b[2J\n" in doctor("--root", root, "llava-1.1b").stdout


@pytest.mark.parametrize("tree", [orin_nano_jetpack_6_2, workstation])
def test_a_bundle_comes_with_the_commands_that_run_it(
    tree: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch, bundle: Callable[..., Path], tmp_path: Path
) -> None:
    set_python(monkeypatch, "3.10.12")
    path = bundle("mha-336", "fp16", dialect="opset20")
    report = told("--root", tree(tmp_path), path)
    (model,) = report["models"]
    assert (model["name"], model["kind"]) == (str(path), "bundle")
    (own,) = (form for form in model["forms"] if form["exported"])
    assert own["weight_bytes"] == sum(file.stat().st_size for file in (path / "graphs" / "weights").iterdir())
    *builds, ask = (shlex.split(command) for command in report["next"])
    if report["machine"]["board"]:
        assert [build[:5] for build in builds] == [
            ["sinkprune-build", str(path), "-o", f"{path}-engines", "--target"]
        ]
        assert ask[:3] == ["sinkprune-run", f"{path}-engines", "--image"]
    else:
        assert builds == [] and ask[:4] == ["sinkprune-run", str(path), "--backend", "ort-cpu"]
    assert ask[-2:] == ["--budget", "retain-192"]
    (found,) = report["recommendations"]
    assert (found["weights"], found["budget"], found["as_it_is"]) == (own["weights"], "retain-192", True)
    assert re.match(r"Weights in int\d would .* these .*: export with --weights int\d\.", found["faster"])


def run_printed(report: Any, photo_file: Path) -> tuple[str, list[str]]:
    """Run the only command of a report, and return its name and words."""
    (command,) = report["next"]
    name, *words = shlex.split(command.replace("PICTURE.jpg", shlex.quote(str(photo_file))))
    succeed(name, *words)
    return name, words


def test_engines_are_for_their_own_backend(bundle: Callable[..., Path], photo_file: Path, tmp_path: Path) -> None:
    engines = tmp_path / "engines"
    run_printed(told(bundle("gqa-112")), photo_file)
    succeed("sinkprune-build", bundle("gqa-112"), "-o", engines, "--target", "onnxruntime")
    report = told(engines)
    (model,) = report["models"]
    assert (model["kind"], model["backend"]) == ("engines", "ort-cpu")
    assert report["next"][0].endswith(REQUEST) and run_printed(report, photo_file)[1][0] == str(engines)
    refused = doctor("--backend", "openvino", engines)
    assert_refused(refused, "built for target onnxruntime", "backend 'openvino' takes target openvino", "Leave out")
    assert told("--backend", "ort-cpu", engines)["models"][0]["backend"] == "ort-cpu"
    # What is packed is mapped: nothing is packed while it loads.
    own = next(form for form in model["forms"] if form["exported"])
    assert own["budgets"]["none"]["memory"]["loading"] == 0
    file = engines / "engines.json"
    manifest = json.loads(file.read_text())
    for machine in ("x86_64", "aarch64"):
        manifest["flags"]["machine"] = machine
        file.write_text(json.dumps(manifest))
        if machine == "x86_64":
            assert_refused(doctor("--board", "orin-nano-8gb", engines), "built on x86_64, and boards have aarch64")
    on_board = told("--board", "orin-nano-8gb", engines)["models"][0]
    assert (on_board["backend"], on_board["forms"][0]["budgets"]["none"]["bounds"]) == ("ort-cpu", None)
    # Engines of a GPU need its memory.
    manifest["target"] = "tensorrt"
    del manifest["flags"]["machine"]
    manifest["limits"].update(prompt_tokens=77, new_tokens=20)
    for engine in manifest["engines"].values():
        engine["optimisation_profiles"] = {"any": {}}
    file.write_text(json.dumps(manifest))
    assert_refused(doctor(engines), "are for tensorrt", "--board NAME")
    report = told("--board", "orin-nano-8gb", engines)
    (command,) = report["next"]
    assert command.startswith(f"sinkprune-run {engines} --image")
    # The engines accept no longer text, whatever memory and model would.
    own = next(form for form in report["models"][0]["forms"] if form["exported"])
    assert (own["budgets"]["none"]["longest_text"], own["build"]) == (77 + 20, None)


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (("--board", "Orin_Nano-8GB"), ("did you mean 'orin-nano-8gb'? Known boards: ", "thor-t5000")),
        (("llava-9b",), ("'llava-9b' is no folder and no preset", "llava-1.5-7b")),
        (("--backend", "tensorrt"), ("--backend is 'tensorrt'", "a library for CPUs: openvino, ", "--board NAME")),
        (("--picture", "big"), ("--picture is 'big'", "as in 640x480")),
        (("--picture", "0x480"), ("a side of --picture is 0",)),
        (("--board", "orin-nano-8gb", "qwen2.5-vl-3b", "--picture", "16384x16"), ("16384",)),
        (("empty",), ("empty", "holds no bundle.json", "sinkprune-export")),
        (("damaged",), ("bundle.json", "format version")),
    ],
)
def test_wrong_input_is_rejected(
    arguments: tuple[str, ...], messages: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "bundle.json").write_text("{}")
    assert_refused(doctor(*arguments), *messages)


@pytest.mark.parametrize("kind", ["pi0", "pi0.5"])
def test_a_policy_comes_with_the_commands_that_run_it(
    kind: str, bundle: Callable[..., Path], photo_file: Path
) -> None:
    folder = bundle(kind, budgets=("prune-77.8",), max_images=2)
    report = told(folder)
    (model,) = report["models"]
    assert model["policy"]["cameras"] == 2 and model["rows"]["none"]["step_flops"] > 0
    name, words = run_printed(report, photo_file)
    assert name == "sinkprune-act" and words[-2:] == ["--budget", "prune-77.8"]
    on_board = doctor("--board", "agx-orin-64gb", folder, kind)
    assert f"sinkprune-export {kind} --random-weights -o {kind}-int4" in on_board.stdout
    assert " --max-images 3\n" in on_board.stdout
    assert "takes at least" in on_board.stdout and "a bound, no forecast" in on_board.stdout


FIT = "sinkprune-run --fit pad shows it all (docs/pictures.md)"
PIXELS = "for small things export with a larger --max-pixels (docs/pictures.md)"


@pytest.mark.parametrize(
    ("model", "picture", "tokens", "share", "size", "note", "do"),
    [
        ("llava-1.5-7b", "1280x720", 576, 0.5625, None, "56 % of the picture (the middle 720x720 of 1280x720)", FIT),
        ("llava-1.5-7b", "480x480", 576, 1, None, None, None),
        ("qwen2.5-vl-7b", "4000x3000", 41 * 30, 1, [1148, 840], "the 4000x3000 picture at 1148x840 pixels", PIXELS),
    ],
)
def test_what_is_not_seen_is_noted(
    model: str, picture: str, tokens: int, share: float, size: list[int] | None, note: str | None, do: str | None
) -> None:
    words = ("--board", "agx-orin-64gb", model, "--picture", picture)
    (found,) = told(*words)["models"]
    assert found["seen_share"] == pytest.approx(share, abs=1e-3)
    assert (found["seen_size"], found["visual_tokens"]) == (size, tokens)
    text = doctor(*words).stdout
    assert text.count(f"the model sees {note}") == (note is not None) == text.count(f"      {do}\n")
