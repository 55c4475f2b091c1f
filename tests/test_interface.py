"""The common interface of all commands: names, `--help`, `--version`, `--json`, `--data` and `--limit`."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest

from sinkprune import __version__, entry_points
from sinkprune.calibration.commands.calibrate import VERBS as CALIBRATE
from sinkprune.command import VERBS
from sinkprune.contract.command_line.options import Verb
from support.programs.commands import Outcome, assert_refused, check_options, run

_QUESTION = ("--image", "x.jpg", "--prompt", "What?")
COMMANDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "run": (("BUNDLE",), _QUESTION),
    "serve": (("BUNDLE",), ()),
    "act": (("BUNDLE",), ("--camera", "x.jpg", "--instruction", "Go", "--state", "0.5")),
    "replay": (("BUNDLE", "BAG"), ("--topic", "/x", "--prompt", "What?", "-o", "x.mcap")),
    "profile": (("BUNDLE",), _QUESTION),
    "export": (("CHECKPOINT",), ("-o", "bundle")),
    "build": (("BUNDLE",), ("-o", "engines", "--target", "openvino")),
    "check": (("BUNDLE", "ENGINES"), ("--image", "x.jpg")),
    "evaluate": (("BUNDLE",), ()),
    "doctor": (("MODEL",), ()),
    "calibrate norms": (("BUNDLE",), ()),
    "calibrate attention": (("BUNDLE",), ()),
    "calibrate quantize": (("BUNDLE",), ("--data", "x.jsonl", "-o", "small", "--weights", "int4")),
}
"""The positionals and the required options of every command, by its verbs."""
MEASURING = ("evaluate", "calibrate norms", "calibrate attention")
"""The commands whose `--data` may be a test set."""


def parse(command: str, *words: str) -> argparse.Namespace:
    """Return what a command's parser makes of the words."""
    verb, *rest = command.split()
    return check_options(f"sinkprune-{verb}", *rest, *words)


def given(options: argparse.Namespace) -> tuple[list[str], Path | None]:
    """Return the positionals, and the value of `--json`."""
    if "models" in options:
        return options.models, options.json
    places = (getattr(options, name, None) for name in ("source", "bundle", "bag", "engines"))
    return [str(place) for place in places if place is not None], options.json


@pytest.mark.parametrize("command", COMMANDS)
def test_json_means_the_same_in_every_command(command: str) -> None:
    positionals, needed = COMMANDS[command]
    assert given(parse(command, *positionals, *needed)) == ([*positionals], None)
    for option in (["--json"], ["--json", "-"], ["--json=-"], ["--js"], ["--json", "x.json"], ["--json=x.json"]):
        expected = Path("x.json" if "x.json" in option[-1] else "-")
        orders = [[*positionals, *needed, *option], [*positionals, *option, *needed]]
        # In front of a bundle, `--json` alone would take its name.
        orders += [[*option, *positionals, *needed]] if option[-1] not in ("--json", "--js") else []
        for words in orders:
            assert given(parse(command, *words)) == ([*positionals], expected), words


def test_another_ending_is_refused(tmp_path: Path) -> None:
    for words in (("--json", "x.txt", tmp_path), (tmp_path, "--json", "x.txt"), ("--json=x.txt", tmp_path)):
        assert_refused(run("sinkprune-run", *words, *_QUESTION), "ends in '.txt', expected .json")
    for command, (positionals, needed) in COMMANDS.items():
        verb, *rest = command.split()
        outcome = run(f"sinkprune-{verb}", *rest, *positionals, *needed, "--json", tmp_path / "none" / "x.json")
        assert_refused(outcome, "x.json", "there is no folder")


def test_json_is_a_file_or_all_that_is_printed(tmp_path: Path) -> None:
    asked = ("--board", "orin-nano-8gb", "llava-1.5-7b")
    file = tmp_path / "out.json"
    text, alone, both = (run("sinkprune-doctor", *asked, *words) for words in ((), ("--json",), ("--json", file)))
    assert [outcome.code for outcome in (text, alone, both)] == [0, 0, 0]
    assert alone.stdout.count("\n") == 1
    assert json.loads(alone.stdout) == json.loads(file.read_text())
    assert both.stdout == text.stdout != ""


@pytest.fixture
def sinkprune(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Return a function that runs an entry point, by default that of `sinkprune`."""
    # At the end an entry point makes its process ignore signals.
    monkeypatch.setattr(signal, "signal", lambda number, handler: signal.SIG_DFL)

    def called(*words: str, script: Callable[[], int] = entry_points.sinkprune) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["script", *words])
        try:
            code = script()
        except SystemExit as ended:
            assert isinstance(ended.code, int)
            code = ended.code
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return called


@pytest.mark.parametrize("command", COMMANDS)
def test_help_and_version_of_every_command(command: str, sinkprune: Callable[..., Outcome]) -> None:
    verb, *rest = command.split()
    version = Outcome(0, f"sinkprune {__version__}\n", "")
    assert sinkprune(*command.split(), "--version") == version
    assert sinkprune(*rest, "--version", script=getattr(entry_points, verb)) == version
    assert sinkprune(*command.split(), *COMMANDS[command][0], "--version") == version
    printed = sinkprune(*command.split(), "--help")
    assert printed.stdout.startswith(f"usage: sinkprune {command} [-h]")
    assert "--json [FILE.json]" in printed.stdout
    assert (command in MEASURING) == ("--data DATA" in printed.stdout)


@pytest.mark.parametrize(("words", "verbs"), [((), VERBS), (("calibrate",), CALIBRATE)])
def test_verbs_are_listed(
    words: tuple[str, ...], verbs: Mapping[str, Verb], sinkprune: Callable[..., Outcome]
) -> None:
    printed = sinkprune(*words, "--help")
    assert (printed.code, printed.stderr) == (0, "")
    assert printed.stdout.startswith(f"usage: {' '.join(('sinkprune', *words))} [-h] [--version] VERB\n")
    for name, verb in verbs.items():
        assert f"  {name} " in printed.stdout
        assert f" {verb.summary}\n" in printed.stdout
        assert find_spec(verb.module) is not None
    assert sinkprune(*words) == Outcome(2, "", printed.stdout)
    assert words or sinkprune("help") == printed
    assert sinkprune(*words, "--version") == Outcome(0, f"sinkprune {__version__}\n", "")


def test_an_unknown_verb_is_refused_with_a_list_of_verbs(sinkprune: Callable[..., Outcome]) -> None:
    assert_refused(sinkprune("ewaluate", "x"), "no verb 'ewaluate'", "export, profile", "did you mean 'evaluate'?")
    assert_refused(sinkprune("norm", "x", script=entry_points.calibrate), "attention, quantize", "mean 'norms'?")
    assert "did you mean" not in sinkprune("42").stderr
    assert_refused(sinkprune("calibrate", "./llava-7b"), "no verb './llava-7b'", "norms, attention")


_EMPTY = "it is empty, as an unset shell variable is; expected a path"
_ACT = ("act", "robot", "--camera", "", "--instruction", "go", "--state", "0,0")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("run", "bundle", *_QUESTION, "--buget", "x"), "unrecognized arguments: --buget x. Did you mean --budget?"),
        (
            ("run", "bundle", *_QUESTION, "--backend", "OpenVINO"),
            "argument --backend: invalid choice: 'OpenVINO'; did you mean 'openvino'? Choices are: openvino, ",
        ),
        (("run", "bundle", *_QUESTION, "--image", ""), f"argument --image: {_EMPTY}."),
        (("run", "bundle", *_QUESTION, "--signed-by="), f"argument --signed-by: {_EMPTY}."),
        (("run", "", *_QUESTION), f"argument BUNDLE: {_EMPTY}"),
        (_ACT, f"argument --camera: {_EMPTY}"),
        (("calibrate", "norms", "bundle", "--data", ""), f"argument --data: {_EMPTY}"),
        (("export", "", "-o", "bundle"), f"argument CHECKPOINT: {_EMPTY}"),
        (("doctor", ""), f"argument MODEL: {_EMPTY}"),
    ],
)
def test_a_wrong_or_empty_option_is_one_line_that_names_the_help(
    words: tuple[str, ...], message: str, sinkprune: Callable[..., Outcome]
) -> None:
    outcome = sinkprune(*words)
    command = "calibrate norms" if words[0] == "calibrate" else words[0]
    assert (outcome.code, outcome.stderr.count("\n")) == (2, 1)
    assert outcome.stderr.startswith(f"error: {message}")
    assert outcome.stderr.endswith(f" See sinkprune {command} --help.\n")
