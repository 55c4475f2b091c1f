"""`sinkprune-act`: moments, folders of frames, states in files, deadlines, costs, overlays, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageChops

from sinkprune import ActionCosts, ActionReport, Policy, overlay, write_costs
from sinkprune.deadlines.costs import cache_file
from sinkprune.runtime.profiling.other_load import OtherLoad
from support.models.manifests import name_cameras
from support.programs.commands import Outcome, assert_refused, interrupt_after, run

BUDGETS = ("prune-77.8", "prune-88.9")
STATE = (-0.5, 0.1, -0.2, 0.3, 0.4)
STATE_WORD = ",".join(map(str, STATE))
FRAMES = 3
CAMERAS = ("base", "wrist")


@pytest.fixture(scope="module")
def path(bundle: Callable[..., Path]) -> Path:
    """A small policy of two cameras, whose state has five numbers."""
    return bundle("pi0", budgets=BUDGETS, max_images=2)


@pytest.fixture(scope="module")
def policy(path: Path) -> Policy:
    """The same, loaded."""
    return Policy.load(path)


@pytest.fixture(scope="module")
def folder(photo: Image.Image, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Frames of two cameras, in folders and alone, and files of states."""
    root = tmp_path_factory.mktemp("robot")
    for camera, left in (("base", 0), ("wrist", 200)):
        (root / camera).mkdir()
        for number in range(FRAMES):
            photo.crop((left + 40 * number, 0, left + 300, 250)).save(root / camera / f"{number}.png")
        (root / f"{camera}.png").write_bytes((root / camera / "0.png").read_bytes())
    (root / "base" / ".hidden").touch()
    photo.resize((1, 500)).save(root / "thin.png")
    lines = [STATE_WORD, "[0.1, 0.2, 0.3, 0.4, 1e-1]", "", "  1 ,2,3,4,5"]
    (root / "states.csv").write_text("\n".join(lines) + "\n", encoding="utf-8-sig")
    (root / "short.csv").write_text(f"{STATE_WORD}\n{STATE_WORD}\n")
    (root / "one.json").write_text(json.dumps(STATE))
    for name in ("few", "empty"):
        (root / name).mkdir()
    shutil.copyfile(root / "base.png", root / "few" / "0.png")
    wide = f"{STATE_WORD}\n{STATE_WORD},1\n{STATE_WORD}\n"
    wrong = {"header.csv": "1,y\n1,2\n", "nan.json": "[1, NaN]\n", "wide.csv": wide, "blank.csv": "\n\n"}
    for name, text in wrong.items():
        (root / name).write_text(text)
    return root


STATES = (STATE, (0.1, 0.2, 0.3, 0.4, 0.1), (1.0, 2.0, 3.0, 4.0, 5.0))
"""What states.csv says."""


def act(path: Path, folder: Path, *words: object, cameras: tuple[str, ...] = ("base.png", "wrist.png")) -> Outcome:
    """Runs the command, with a state of which the first number is negative."""
    given = [word for name in cameras for word in ("--camera", "none" if name == "none" else folder / name)]
    words = words if "--state" in words else (*words, "--state", STATE_WORD)
    return run("sinkprune-act", path, *given, "--instruction", "pick up the cup", *words)


def expected(
    policy: Policy, folder: Path, names: tuple[str, ...], state: Any = STATE, **options: Any
) -> ActionReport:
    """The chunk from Python."""
    frames = [None if name == "none" else folder / name for name in names]
    return policy.act(frames, "pick up the cup", state, **{"seed": 3, **options})


@pytest.mark.parametrize("cameras", [("base.png", "wrist.png"), ("base.png", "none"), ("none", "wrist.png")])
def test_the_json_has_the_chunk_of_python(cameras: tuple[str, ...], path: Path, folder: Path, policy: Policy) -> None:
    outcome = act(path, folder, "--seed", 3, "--budget", "prune-77.8", "--steps", 4, "--json", cameras=cameras)
    assert outcome.code == 0, outcome.stderr
    found, own = json.loads(outcome.stdout), expected(policy, folder, cameras, budget="prune-77.8", steps=4)
    (chunk,) = found["chunks"]
    np.testing.assert_allclose(chunk["actions"], own.actions, atol=1e-6)
    assert chunk["cameras"] == [None if name == "none" else str(folder / name) for name in cameras]
    # Python logs the same.
    logged = json.loads(json.dumps(own.as_json()))
    assert {"cameras", *logged} == chunk.keys() and logged["kept"] == chunk["kept"]
    assert (chunk["budget"], chunk["steps"], len(chunk["step_ms"])) == ("prune-77.8", 4, 4)
    assert chunk["tokens_per_layer"] == own.tokens_per_layer
    assert chunk["flops"] == {**vars(own.flops), "total": own.flops.total}
    assert chunk["rate_hz"] == pytest.approx(1e3 / chunk["ms"]["latency"])
    assert chunk["kept"] == [each.as_json() for each in own.images]
    assert (found["backend"], found["method"], found["interrupted"]) == ("ort-cpu", "sinkpruner", None)


@pytest.mark.parametrize(("source", "states"), [("states.csv", STATES), ("one.json", [STATE] * FRAMES)])
def test_folders_run_frame_by_frame(source: str, states: Any, path: Path, folder: Path, policy: Policy) -> None:
    options = ("--seed", 3, "--steps", 2, "--state", folder / source, "--json", folder / "x.json")
    outcome = act(path, folder, *options, cameras=CAMERAS)
    chunks = json.loads((folder / "x.json").read_text())["chunks"]
    assert len(chunks) == FRAMES and len(outcome.stdout.splitlines()) == FRAMES
    for number, (chunk, state) in enumerate(zip(chunks, states, strict=True)):
        names = (f"base/{number}.png", f"wrist/{number}.png")
        own = expected(policy, folder, names, state, steps=2)
        np.testing.assert_allclose(chunk["actions"], own.actions, atol=1e-6)
        assert outcome.stdout.splitlines()[number].startswith(f"{number + 1}/{FRAMES} [none] TTFA ")


def test_cameras_are_given_by_name(
    path: Path, folder: Path, policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = [f"observation.images.{camera}" for camera in CAMERAS]
    files = [folder / f"{camera}.png" for camera in CAMERAS]
    words = (name_cameras(path, tmp_path / "policy", *names), "--instruction", "go", "--state", STATE_WORD)

    def act_by_name(base: str, wrist: str) -> Outcome:
        options = ("--camera", wrist, "--camera", base, "--steps", 1, "--seed", 3, "--json", "x.json")
        return run("sinkprune-act", *words, *options)

    for base, given in ((files[0], files), ("none", [None, files[1]])):
        outcome = act_by_name(f"observation.images.base={base}", f"wrist={files[1]}")
        assert outcome.code == 0, outcome.stderr
        assert f"cameras: base={base}, wrist={files[1]}\n" in outcome.stderr
        (chunk,) = json.loads(Path("x.json").read_text())["chunks"]
        own = policy.act(given, "go", STATE, seed=3, steps=1)
        np.testing.assert_allclose(chunk["actions"], own.actions, atol=1e-6)
        assert chunk["camera_names"] == names[base == "none" :] and len(chunk["kept"]) == len(own.images)
    Path("base=1.png").write_bytes(files[0].read_bytes())
    for base, wrist, said in (
        (str(files[0]), f"wrist={files[1]}", "Name all cameras or none of them."),
        (f"wrist={files[0]}", f"wrist={files[1]}", "--camera names 'wrist' twice"),
        (f"base={files[0]}", "wrist=", "--camera 'wrist=' has no picture, expected NAME=PICTURE"),
        # A file of this name is given as ./base=1.png.
        ("base=1.png", f"wrist={files[1]}", "1.png"),
    ):
        assert_refused(act_by_name(base, wrist), said)


def test_an_overlay_has_every_camera(
    bundle: Callable[..., Path], path: Path, folder: Path, policy: Policy, tmp_path: Path
) -> None:
    file = tmp_path / "kept.png"
    for cameras in (("base.png", "wrist.png"), ("none", "wrist.png")):
        outcome = act(path, folder, "--seed", 3, "--budget", "prune-88.9", "--overlay", file, cameras=cameras)
        assert outcome.code == 0, outcome.stderr
        own = expected(policy, folder, cameras, budget="prune-88.9")
        drawn = overlay(own, [None if name == "none" else folder / name for name in cameras], "pick up the cup")
        assert ImageChops.difference(Image.open(file).convert("RGB"), drawn).getbbox() is None
    assert_refused(act(bundle("gqa-112"), folder), "expected a robot policy. Use sinkprune-run")


def test_a_deadline_chooses_budget_and_steps(path: Path, folder: Path) -> None:
    """With an hour the checkpoint's own run, and with a millisecond the fastest."""
    outcome = act(path, folder, "--deadline-ms", 3_600_000, cameras=CAMERAS)
    assert outcome.code == 0, outcome.stderr
    *lines, last = outcome.stdout.splitlines()
    assert all("[none]" in line and "10 steps" in line for line in lines) and len(lines) == FRAMES
    assert last.startswith("deadline 3.6e+06 ms: 3 of 3 chunks in time; the last took ")
    assert "late:" not in outcome.stderr
    outcome = act(path, folder, "--deadline-ms", 1, "--min-steps", 2, "--json", cameras=CAMERAS)
    assert "late: 3 of 3 chunks; the last of them: " in outcome.stderr
    assert "No budget was expected to bring a chunk sooner than in " in outcome.stderr
    late = json.loads(outcome.stdout)["chunks"][0]
    deadline = late["deadline"]
    assert (deadline["can_meet"], deadline["met"], deadline["steps"]) == (False, False, 2)
    assert deadline["budget"] == late["budget"] and late["steps"] == 2


def test_a_rate_plays_the_moments_in_a_loop(path: Path, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "loop.json"
    options = ("--state", folder / "states.csv", "--rate", 5, "--budget", BUDGETS[0], "--threads", 1, "--json", file)
    found = act(path, folder, *options, "--max-age-ms", 60_000, cameras=CAMERAS)
    assert found.code == 0 and f"{FRAMES} ticks at 5 Hz" in found.stdout
    stored = json.loads(file.read_text())
    assert stored["loop"]["ticks"] == len(stored["actions"]) == FRAMES and stored["loop"]["fault"] is None
    stale = act(path, folder, *options[:-2], "--max-age-ms", 1, cameras=CAMERAS)
    assert stale.code == 2 and "the loop stopped at tick 0 (stale frame): " in stale.stderr


@pytest.mark.parametrize("damaged", [False, True])
def test_what_ends_the_command_leaves_the_chunks_so_far(
    damaged: bool, path: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C, or a frame that cannot be read."""
    for camera in CAMERAS:
        shutil.copytree(folder / camera, tmp_path / camera)
    if damaged:
        frame = tmp_path / "wrist" / "2.png"
        frame.write_bytes(frame.read_bytes()[:5000])
    else:
        monkeypatch.setattr(Policy, "act", interrupt_after(2, Policy.act))
    report, kept = tmp_path / "x.json", tmp_path / "x.interrupted.json"
    report.write_text("precious")
    outcome = act(path, tmp_path, "--steps", 1, "--json", report, cameras=CAMERAS)
    assert (outcome.code, report.read_text()) == (2 if damaged else 130, "precious")
    found = json.loads(kept.read_text())
    assert len(outcome.stdout.splitlines()) == len(found["chunks"]) == 2
    assert found["interrupted"] == "there are 2 of 3 chunks."
    *_, last = outcome.stderr.splitlines()
    assert "here are 2 of 3 chunks. Earlier files stay; these results are in" in last
    assert last.startswith("error: moment 3 of 3: " if damaged else "interrupted; ")
    assert not damaged or "wrist/2.png" in last


@pytest.mark.parametrize(
    ("cameras", "words", "said"),
    [
        ("none none", "", "no camera has a frame"),
        ("base wrist.png", "", "is a folder of frames, and "),
        ("base few", "", "has 3 frames and "),
        ("empty none", "", "holds no files"),
        ("thin.png none", "", "thin.png': the image has 1x500 pixels, of which nothing is left in a square"),
        ("base.png none", "--state 1,2,3,4", "the state has the shape [4], expected 5 numbers"),
        ("base.png none", "--state 1,2,3,4,nan", "'nan' at place 5 is not finite, and as a file it is missing."),
        ("base none", "--state FOLDER/short.csv", "has 2 states, and the cameras have 3 moments"),
        ("base.png none", "--state FOLDER/header.csv", "line 1: found '1,y': 'y' at place 2 is no number."),
        ("base.png none", "--state FOLDER/nan.json", "it is no JSON list of finite numbers."),
        ("base none", "--state FOLDER/wide.csv", "moment 2 of 3: the state has the shape [6]"),
        ("base.png none", "--state FOLDER/blank.csv", "is empty, expected a line for each moment"),
        ("base.png none", "--min-steps 3", "--min-steps is for a deadline"),
        ("base.png none", "--min-steps 20 --deadline-ms 9", "--min-steps is 20 and --steps 10, expected"),
        ("base.png none", "--overlay x.png", "Give a --budget other than none"),
        ("base none", "--overlay x.png --budget prune-88.9", "there are 3 moments"),
        ("base none", "--json FOLDER/base/x.json", "which is read. Choose a place outside it."),
        ("base.png none", "--json FOLDER/one.json --state FOLDER/one.json", "would be overwritten"),
        ("base.png wrist.png", "--rate 10", "--rate plays recorded moments, and there is one"),
        ("base wrist", "--rate 10 --seed 3", "--seed is for single chunks, and --rate computes many"),
        ("base.png wrist.png", "--join blend", "--join is for --rate, which is not given"),
        ("base wrist", "--rate 0", "--rate is 0.0, expected 0.1 to 1000 ticks a second"),
    ],
)
def test_wrong_options_are_refused(cameras: str, words: str, said: str, path: Path, folder: Path) -> None:
    given = words.replace("FOLDER", str(folder)).split()
    assert_refused(act(path, folder, *given, cameras=tuple(cameras.split())), said)


def test_costs_are_kept_and_measured_anew_where_they_must_be(
    policy: Policy, photo_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an empty cache, on a machine that does nothing else, and costs that are measured no longer than needed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(OtherLoad, "share", lambda self: 0.0)
    measured, plain = list[str](), Policy.warm_up

    def noting(self: Policy, *given: Any, **options: Any) -> ActionCosts:
        measured.append(options["budget"])
        return plain(self, *given, **options, seconds=0.0)

    monkeypatch.setattr(Policy, "warm_up", noting)

    def timed(*words: object, cameras: int = 1) -> Outcome:
        given = ("--camera", photo_file, "--camera", photo_file if cameras == 2 else "none", "--instruction", "go")
        state = ("--state", "0,0,0,0,0", "--deadline-ms", 60_000, "--json")
        return run("sinkprune-act", policy.bundle.path, *given, *state, *words)

    def kept() -> ActionCosts:
        costs = ActionCosts.cached(policy.place, "sinkpruner")
        assert costs is not None
        return costs

    first = timed()
    assert first.code == 0 and f"kept in '{cache_file(policy.place, 'sinkpruner')}'.\n" in first.stderr
    assert list(kept().budgets) == ["none", *BUDGETS] and len(kept().recent.first) == 1
    assert timed().code == 0
    assert (measured, len(kept().recent.first)) == (["none"], 2)
    deadline = json.loads(timed("--warm-up").stdout)["chunks"][0]["deadline"]
    assert len(measured) == 2 and len(kept().recent.first) == 1
    assert 0 <= deadline["costs_age_s"] < 600 and deadline["costs_load"] == 0.0
    # A file is read and left.
    file = tmp_path / "costs.json"
    write_costs(file, replace(kept(), load=0.125))
    assert json.loads(timed("--costs", file).stdout)["chunks"][0]["deadline"]["costs_load"] == 0.125
    assert kept().load == 0.0 and len(kept().recent.first) == 1
    assert_refused(timed("--costs", file, cameras=2), "the costs were measured with 1", "--warm-up")
    assert_refused(timed("--costs", tmp_path / "none.json"), "none.json")
    # Kept costs are of as many cameras, and of all budgets that may be chosen.
    for cameras, budget in ((2, "prune-77.8"), (2, "none")):
        assert timed("--budget", budget, cameras=cameras).code == 0
        assert (kept().frames, "none" in kept().budgets) == (cameras, budget == "none")
    assert len(measured) == 4
