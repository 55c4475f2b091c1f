"""`sinkprune-doctor`, as it is called."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sinkprune.jetson import doctor as doctor_command
from sinkprune.jetson.boards import read_boards
from support.models.preset_facts import ANSWERING
from support.programs.commands import assert_refused, own_process, run
from support.programs.doctor_runs import doctor, set_python, told
from support.stand_ins.board_trees import (
    PYTHON_OF_JETPACK_6,
    agx_orin_jetpack_7_2,
    changed,
    orin_nano_jetpack_6_2,
    workstation,
)

# The same for bundles and for engines.
REQUEST = '--image PICTURE.jpg --prompt "QUESTION" --budget retain-192'


def test_this_machine() -> None:
    done = doctor()
    assert done.code == 0, done.stderr
    for words in ("machine ", "Python ", "libraries ", "onnxruntime ", "memory ", "swap ", "disk ", *ANSWERING):
        assert words in done.stdout
    assert "datasheet" not in done.stdout


def test_a_board_from_a_workstation() -> None:
    done = doctor("--board", "orin-nano-8gb", "llava-1.5-7b")
    assert done.code == 0, done.stderr
    for words in ("Jetson Orin Nano 8GB (Super), sm_87", "102 GB/s", "verify before quoting", "about 7.1 GB"):
        assert words in done.stdout
    rows = [
        line.split() for line in done.stdout.splitlines() if re.search(r"^(fp16|int8|int4)? +(none|retain-)", line)
    ]
    assert rows[0] == ["fp16", "none", "576>576>576", "21.4!", "500", "523", "133", "0"]
    assert rows[4] == ["retain-32", "576>65>22", "21.4!", "130w", "151", "130", "0"]
    assert rows[11] == ["retain-192", "576>385>138", "6.5", "206", "228", "35", "1365"]
    assert [row[0] for row in rows if len(row) == 8] == ["fp16", "int8", "int4"]
    builds = [line.split() for line in done.stdout.splitlines() if line.endswith((" no", " yes"))]
    assert [(row[0], row[-1]) for row in builds] == [("fp16", "no"), ("int8", "no"), ("int4", "yes")]
    assert re.search(r"^weights .* disk GB with --move +build fits$", done.stdout, re.MULTILINE)
    assert re.search(r"^power modes +7W, 15W, 25W, MAXN$", done.stdout, re.MULTILINE)
    assert "llava-1.5-7b: int4 at retain-192 on tensorrt. Only int4 fits.\n" in done.stdout
    assert "libraries" not in done.stdout
    assert not re.search(r" $", done.stdout, re.MULTILINE)


def test_without_times_no_table_speaks_of_times() -> None:
    done = doctor("--board", "orin-nano-8gb", "--backend", "ort-cpu")
    assert done.code == 0, done.stderr
    assert "Bounds of times are known only for TensorRT on a board." in done.stdout


def test_what_to_do_first_names_the_model() -> None:
    done = doctor("--board", "orin-nano-8gb", "llava-1.5-13b", "qwen2.5-vl-3b")
    assert done.code == 0, done.stderr
    first = done.stdout.partition("\nFirst:\n")[2].splitlines()[0]
    assert first.startswith("  for 'llava-1.5-13b': use a smaller model or a board with more memory;")


@pytest.mark.parametrize("board", ["orin-nano-8gb", "thor-t5000"])
def test_tables_fit_into_100_columns(board: str) -> None:
    for models in ([], ["llava-1.5-13b", "qwen2.5-vl-7b"]):
        done = doctor("--board", board, *models, "--picture", "1280x720")
        tables = re.split("\n(?=preset |weights )", done.stdout, maxsplit=1)[1]
        tables = re.split("\n(Recommended|First|Next):", tables)[0]
        assert max(map(len, tables.splitlines())) <= 100
        assert "\N{HORIZONTAL ELLIPSIS}" not in tables


def test_json_has_every_budget_of_every_preset_in_every_form() -> None:
    report = told("--board", "thor-t5000")
    assert report["machine"] is None
    assert report["board"] == "thor-t5000"
    assert report["board_facts"]["memory_gb"] == 128
    assert set(report["board_facts"]["sources"].values()) == set(report["sources"])
    assert [model["name"] for model in report["models"]] == ANSWERING
    for model in report["models"]:
        assert [form["weights"] for form in model["forms"]] == ["fp16", "int8", "int4, vision int8"]
        for form in model["forms"]:
            assert list(form["budgets"]) == list(model["rows"])
            for budget in form["budgets"].values():
                assert budget["fits"] is True
                assert budget["memory_bytes"] > budget["memory"]["weights"] > 0
                assert budget["bounds"]["token_ms"] > 0


def test_a_recorded_board_is_described(tmp_path: Path) -> None:
    report = told("--root", orin_nano_jetpack_6_2(tmp_path), "llava-1.1b")
    assert report["board"] == "orin-nano-8gb"
    assert report["jetpack"]["version"] == "6.2"
    assert report["backend"] == "tensorrt"
    assert report["machine"]["power_mode"] == {
        "id": 0,
        "name": "15W",
        "modes": {"15W": 0, "25W": 1, "MAXN_SUPER": 2, "7W": 3},
    }
    # This Python is none of the board's.
    assert any("is installed for Python 3.10" in finding["found"] for finding in report["findings"])
    assert any(finding["stops"] for finding in report["findings"])
    assert report["usable_bytes"] == report["machine"]["free_bytes"]
    (model,) = report["models"]
    assert model["forms"][0]["budgets"]["none"]["bounds"]["token_ms"] > 0


def test_the_command_shows_progress(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The line of progress covers the imports of libraries and the computation."""
    said: list[str] = []

    @contextmanager
    def recorded(text: str) -> Iterator[None]:
        said.append(text)
        yield
        said.append("done")

    computed = doctor_command.report_on_machine

    def watched(*arguments: Any) -> Any:
        said.append("computing")
        return computed(*arguments)

    monkeypatch.setattr(doctor_command, "status", recorded)
    monkeypatch.setattr(doctor_command, "report_on_machine", watched)
    monkeypatch.setattr(doctor_command, "this_environment", lambda: said.append("importing") or PYTHON_OF_JETPACK_6)
    doctor("--root", orin_nano_jetpack_6_2(tmp_path), "llava-1.1b")
    assert said == ["looking at this machine", "importing", "computing", "done"]


def test_findings_come_with_what_to_do(tmp_path: Path) -> None:
    done = doctor("--root", orin_nano_jetpack_6_2(tmp_path), "llava-1.1b")
    assert done.code == 0
    assert "stop: TensorRT 10.3.0.30 is installed for Python 3.10" in done.stdout
    assert (
        "note: the power mode is 15W, not MAXN_SUPER\n      for the board's full speed: sudo nvpmodel -m 2"
        in done.stdout
    )


def test_text_of_a_machine_is_escaped(tmp_path: Path) -> None:
    root = changed(orin_nano_jetpack_6_2(tmp_path), {"proc/device-tree/model": "[bold]Evil\x1b[2J"})
    assert "machine       [bold]Evil\\x1b[2J\n" in doctor("--root", root, "llava-1.1b").stdout


def test_jetpack_7_2_takes_the_default_dialect(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    set_python(monkeypatch, "3.12.3")
    report = told("--root", agx_orin_jetpack_7_2(tmp_path), "llava-1.5-7b")
    assert report["jetpack"]["version"] == "7.2"
    assert "--dialect" not in report["next"][0]
    assert report["models"][0]["dialect"] == "opset24"


@pytest.mark.parametrize("tree", [orin_nano_jetpack_6_2, workstation])
def test_a_bundle_comes_with_the_commands_that_run_it(
    tree: Callable[[Path], Path],
    monkeypatch: pytest.MonkeyPatch,
    bundle: Callable[..., Path],
    tmp_path: Path,
) -> None:
    set_python(monkeypatch, "3.10.12")
    path = bundle("mha-336", "fp16", dialect="opset20")
    report = told("--root", tree(tmp_path), path)
    (model,) = report["models"]
    assert (model["name"], model["kind"]) == (str(path), "bundle")
    own = [form for form in model["forms"] if form["exported"]]
    assert len(own) == 1
    weights = (path / "graphs" / "weights").iterdir()
    assert own[0]["weight_bytes"] == sum(file.stat().st_size for file in weights)
    commands = [shlex.split(command) for command in report["next"]]
    if report["machine"]["board"]:
        build, ask = commands
        assert build[:5] == ["sinkprune-build", str(path), "-o", f"{path}-engines", "--target"]
        assert ask[:3] == ["sinkprune-run", f"{path}-engines", "--image"]
    else:
        (ask,) = commands
        assert ask[:4] == ["sinkprune-run", str(path), "--backend", "ort-cpu"]
    assert ask[-2:] == ["--budget", "retain-192"]
    (found,) = report["recommendations"]
    assert (found["weights"], found["budget"], found["as_it_is"]) == (own[0]["weights"], "retain-192", True)
    assert found["why"] == f"'{path}' fits as it is. sinkprune-run compares the sums of its files."
    assert re.match(r"Weights in int\d would .* these .*: export with --weights int\d\.", found["faster"])


def test_the_printed_command_runs(bundle: Callable[..., Path], photo_file: Path) -> None:
    (command,) = told(bundle("gqa-112"))["next"]
    assert command.endswith(REQUEST)
    name, *words = shlex.split(command.replace("PICTURE.jpg", shlex.quote(str(photo_file))))
    done = run(name, *words)
    assert done.code == 0, done.stderr


def test_engines_are_for_their_own_backend(bundle: Callable[..., Path], photo_file: Path, tmp_path: Path) -> None:
    engines = tmp_path / "engines"
    assert run("sinkprune-build", bundle("gqa-112"), "-o", engines, "--target", "onnxruntime").code == 0
    report = told(engines)
    (model,) = report["models"]
    assert (model["kind"], model["backend"]) == ("engines", "ort-cpu")
    refused = doctor("--backend", "openvino", engines)
    assert_refused(refused, "built for target onnxruntime", "backend 'openvino' takes target openvino", "Leave out")
    assert told("--backend", "ort-cpu", engines)["models"][0]["backend"] == "ort-cpu"
    # What is packed is mapped: nothing is packed while it loads.
    own = next(form for form in model["forms"] if form["exported"])
    assert own["budgets"]["none"]["memory"]["loading"] == 0
    (command,) = report["next"]
    assert command.endswith(REQUEST)
    name, *words = shlex.split(command.replace("PICTURE.jpg", shlex.quote(str(photo_file))))
    assert words[0] == str(engines)
    assert run(name, *words).code == 0
    manifest = json.loads((engines / "engines.json").read_text())
    for machine in ("x86_64", "aarch64"):
        manifest["flags"]["machine"] = machine
        (engines / "engines.json").write_text(json.dumps(manifest))
        if machine == "x86_64":
            assert_refused(doctor("--board", "orin-nano-8gb", engines), "built on x86_64, and boards have aarch64")
    on_board = told("--board", "orin-nano-8gb", engines)["models"][0]
    assert on_board["backend"] == "ort-cpu"
    assert on_board["forms"][0]["budgets"]["none"]["bounds"] is None


def test_engines_of_a_gpu_need_its_memory(bundle: Callable[..., Path], tmp_path: Path) -> None:
    engines = tmp_path / "engines"
    built = run("sinkprune-build", bundle("gqa-112"), "-o", engines, "--target", "onnxruntime")
    assert built.code == 0
    told_of = json.loads((engines / "engines.json").read_text())
    told_of["target"] = "tensorrt"
    del told_of["flags"]["machine"]
    told_of["limits"].update(prompt_tokens=77, new_tokens=20)
    for engine in told_of["engines"].values():
        engine["optimisation_profiles"] = {"any": {}}
    (engines / "engines.json").write_text(json.dumps(told_of))
    assert_refused(doctor(engines), "are for tensorrt", "--board NAME")
    on_board = told("--board", "orin-nano-8gb", engines)
    (command,) = on_board["next"]
    assert command.startswith(f"sinkprune-run {engines} --image")
    # The engines accept no longer text, whatever memory and model would.
    own = next(form for form in on_board["models"][0]["forms"] if form["exported"])
    assert own["budgets"]["none"]["longest_text"] == 77 + 20
    assert "a prompt of 64 tokens and 20 new tokens" in doctor("--board", "orin-nano-8gb", engines).stdout
    assert own["build"] is None


@pytest.mark.parametrize("elsewhere", [True, False])
def test_a_board_may_run_on_its_processor(elsewhere: bool, tmp_path: Path) -> None:
    place = ("--board", "orin-nano-8gb") if elsewhere else ("--root", orin_nano_jetpack_6_2(tmp_path))
    report = told(*place, "llava-1.1b", "--backend", "ort-cpu")
    (model,) = report["models"]
    assert model["backend"] == "ort-cpu"
    assert model["forms"][0]["budgets"]["none"]["bounds"] is None
    assert model["forms"][0]["precision"] == "fp32"


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (("--board", "nano"), ("unknown board 'nano'", "orin-nano-4gb", "thor-t5000")),
        (("llava-9b",), ("'llava-9b' is no folder and no preset", "llava-1.5-7b")),
        (
            ("--backend", "tensorrt"),
            ("--backend is 'tensorrt'", "a library for CPUs: ort-cpu, ", "--board NAME"),
        ),
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


def test_the_help_names_boards_and_presets() -> None:
    done = subprocess.run(own_process("sinkprune-doctor", "--help"), capture_output=True, text=True)
    assert done.returncode == 0
    for words in ("--board", "--picture", "--json", "examples:", *read_boards().boards, *ANSWERING):
        assert words in done.stdout
    assert "--root" not in done.stdout


def test_a_policy_is_refused(bundle: Callable[..., Path]) -> None:
    policy = bundle("pi0", budgets=("prune-77.8",), max_images=1)
    assert_refused(doctor(policy), "is a robot policy (family 'pi0')", "sinkprune-profile measures it")
