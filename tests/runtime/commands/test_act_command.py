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
from sinkprune.contract.errors import UsageError
from sinkprune.deadlines.costs import cache_file
from sinkprune.runtime.profiling.other_load import OtherLoad
from support.models.manifests import name_cameras
from support.programs.commands import Outcome, assert_refused, run

BUDGETS = ("prune-77.8", "prune-88.9")
STATE = (-0.5, 0.1, -0.2, 0.3, 0.4)
STATE_WORD = ",".join(map(str, STATE))
FRAMES = 3
Act = Callable[..., Outcome]


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
    shutil.copytree(root / "base", root / "sorted" / "later")
    shutil.copyfile(root / "base.png", root / "sorted" / "first.png")
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


@pytest.mark.parametrize(
    ("source", "states"), [("states.csv", STATES), ("one.json", [STATE] * FRAMES), (STATE_WORD, [STATE] * FRAMES)]
)
def test_folders_run_frame_by_frame(source: str, states: Any, path: Path, folder: Path, policy: Policy) -> None:
    word = folder / source if source.endswith(("csv", "json")) else source
    options = ("--seed", 3, "--steps", 2, "--state", word, "--json", folder / "x.json")
    outcome = act(path, folder, *options, cameras=("base", "wrist"))
    chunks = json.loads((folder / "x.json").read_text())["chunks"]
    assert len(chunks) == FRAMES and len(outcome.stdout.splitlines()) == FRAMES
    for number, (chunk, state) in enumerate(zip(chunks, states, strict=True)):
        names = (f"base/{number}.png", f"wrist/{number}.png")
        own = expected(policy, folder, names, state, steps=2)
        np.testing.assert_allclose(chunk["actions"], own.actions, atol=1e-6)
        assert outcome.stdout.splitlines()[number].startswith(f"{number + 1}/{FRAMES} [none] TTFA ")


@pytest.fixture(scope="module")
def named(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The policy, with names of its cameras."""
    names = "observation.images.base", "observation.images.wrist"
    return name_cameras(path, tmp_path_factory.mktemp("named") / "policy", *names)


def act_by_name(path: Path, folder: Path, *words: object, cameras: tuple[str, ...]) -> Outcome:
    """Runs the command with values of --camera, in which FOLDER is a folder."""
    given = [word for each in cameras for word in ("--camera", each.replace("FOLDER", str(folder)))]
    return run("sinkprune-act", path, *given, "--instruction", "go", "--steps", 1, "--state", STATE_WORD, *words)


@pytest.mark.parametrize(
    "cameras",
    [
        ("base=FOLDER/base.png", "wrist=FOLDER/wrist.png"),
        ("wrist=FOLDER/wrist.png", "observation.images.base=FOLDER/base.png"),
        ("FOLDER/base.png", "FOLDER/wrist.png"),
        ("wrist=FOLDER/wrist.png", "base=none"),
    ],
)
def test_cameras_are_given_by_name(
    cameras: tuple[str, ...], named: Path, folder: Path, policy: Policy, tmp_path: Path
) -> None:
    report, blind = tmp_path / "x.json", "base=none" in cameras
    outcome = act_by_name(named, folder, "--seed", 3, "--json", report, cameras=cameras)
    assert outcome.code == 0, outcome.stderr
    base = "none" if blind else f"{folder}/base.png"
    assert f"cameras: base={base}, wrist={folder}/wrist.png\n" in outcome.stderr
    (chunk,) = json.loads(report.read_text())["chunks"]
    files = [None if blind else folder / "base.png", folder / "wrist.png"]
    np.testing.assert_allclose(chunk["actions"], policy.act(files, "go", STATE, seed=3, steps=1).actions, atol=1e-6)
    names = ["observation.images.base", "observation.images.wrist"][blind:]
    assert chunk["camera_names"] == names and len(chunk["kept"]) == len(names)


@pytest.mark.parametrize(
    ("cameras", "said"),
    [
        (("wrist=FOLDER/wrist.png",), "found the cameras wrist, expected base, wrist."),
        (("FOLDER/base.png", "wrist=FOLDER/wrist.png"), "Name all cameras or none of them."),
        (("wrist=FOLDER/wrist.png", "wrist=FOLDER/base.png"), "--camera names 'wrist' twice"),
        (("wrist=", "base=FOLDER/base.png"), "--camera 'wrist=' has no picture, expected NAME=PICTURE"),
        # A file of this name is given as ./base=1.png.
        (("base=1.png", "wrist=FOLDER/wrist.png"), "1.png"),
    ],
)
def test_other_names_of_cameras_are_refused(
    cameras: tuple[str, ...], said: str, named: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base=1.png").write_bytes((folder / "base.png").read_bytes())
    assert_refused(act_by_name(named, folder, cameras=cameras), said)


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
    with pytest.raises(UsageError, match="found 2 pictures, the answer is about 1"):
        overlay(own, [folder / "base.png", folder / "wrist.png"])
    assert_refused(act(bundle("gqa-112"), folder), "expected a robot policy. Use sinkprune-run")


def test_a_deadline_chooses_budget_and_steps(path: Path, folder: Path) -> None:
    """With an hour the checkpoint's own run, and with a millisecond the fastest."""
    outcome = act(path, folder, "--deadline-ms", 3_600_000, cameras=("base", "wrist"))
    assert outcome.code == 0, outcome.stderr
    *lines, last = outcome.stdout.splitlines()
    assert all("[none]" in line and "10 steps" in line for line in lines) and len(lines) == FRAMES
    assert last.startswith("deadline 3.6e+06 ms: 3 of 3 chunks in time; the last took ")
    late = json.loads(act(path, folder, "--deadline-ms", 1, "--min-steps", 2, "--json").stdout)
    deadline = late["chunks"][0]["deadline"]
    assert (deadline["can_meet"], deadline["met"], deadline["steps"]) == (False, False, 2)
    assert deadline["budget"] == late["chunks"][0]["budget"] and late["chunks"][0]["steps"] == 2


def test_a_rate_plays_the_moments_in_a_loop(path: Path, folder: Path, tmp_path: Path) -> None:
    moments, file = ("base", "wrist"), tmp_path / "loop.json"
    options = ("--state", folder / "states.csv", "--rate", 5, "--budget", BUDGETS[0], "--threads", 1, "--json", file)
    found = act(path, folder, *options, "--max-age-ms", 60_000, cameras=moments)
    assert found.code == 0 and f"{FRAMES} ticks at 5 Hz" in found.stdout
    stored = json.loads(file.read_text())
    assert stored["loop"]["ticks"] == len(stored["actions"]) == FRAMES and stored["loop"]["fault"] is None
    stale = act(path, folder, *options[:-2], "--max-age-ms", 1, cameras=moments)
    assert stale.code == 2 and "the loop stopped at tick 0 (stale frame): " in stale.stderr


@pytest.mark.parametrize("complete", [0, 2])
@pytest.mark.parametrize("damaged", [False, True])
def test_what_ends_the_command_leaves_the_chunks_so_far(
    complete: int, damaged: bool, path: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C, or a frame that cannot be read."""
    left, plain = iter(range(complete)), Policy.act

    def interrupted(*given: Any, **options: Any) -> ActionReport:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return plain(*given, **options)

    for camera in ("base", "wrist"):
        shutil.copytree(folder / camera, tmp_path / camera)
    if damaged:
        frame = tmp_path / "wrist" / f"{complete}.png"
        frame.write_bytes(frame.read_bytes()[:5000])
    else:
        monkeypatch.setattr(Policy, "act", interrupted)
    report, kept = tmp_path / "x.json", tmp_path / "x.interrupted.json"
    report.write_text("precious")
    outcome = act(path, tmp_path, "--steps", 1, "--json", report, cameras=("base", "wrist"))
    assert (outcome.code, report.read_text()) == (2 if damaged else 130, "precious")
    assert len(outcome.stdout.splitlines()) == complete and kept.exists() == bool(complete)
    *_, last = outcome.stderr.splitlines()
    if complete:
        found = json.loads(kept.read_text())
        assert len(found["chunks"]) == complete and found["interrupted"] == "there are 2 of 3 chunks."
        assert "here are 2 of 3 chunks. Earlier files stay; these results are in" in last
        assert last.startswith("error: moment 3 of 3: " if damaged else "interrupted; ")
    elif not damaged:
        assert last == "interrupted; no whole chunk was computed, so nothing was kept."
    assert not damaged or f"wrist/{complete}.png" in last


@pytest.mark.parametrize(
    ("words", "cameras", "said"),
    [
        ((), ("none", "none"), "no camera has a frame"),
        ((), ("base", "wrist.png"), "is a folder of frames, and "),
        ((), ("base", "few"), "has 3 frames and "),
        ((), ("empty", "none"), "holds no files"),
        ((), ("thin.png", "none"), "thin.png': the image has 1x500 pixels, of which nothing is left in a square"),
        (("--state", "1,2,3,4"), ("base.png", "none"), "the state has the shape [4], expected 5 numbers"),
        (
            ("--state", "1,2,3,4,nan"),
            ("base.png", "none"),
            "'nan' at place 5 is not finite, and as a file it is missing. Expected numbers",
        ),
        (("--state", "FOLDER/short.csv"), ("base", "none"), "has 2 states, and the cameras have 3 moments"),
        (
            ("--state", "FOLDER/header.csv"),
            ("base.png", "none"),
            "header.csv', line 1: found '1,y': 'y' at place 2 is no number.",
        ),
        (
            ("--state", "FOLDER/nan.json"),
            ("base.png", "none"),
            "nan.json', line 1: found '[1, NaN]': it is no JSON list of finite numbers.",
        ),
        (("--state", "FOLDER/wide.csv"), ("base", "none"), "moment 2 of 3: the state has the shape [6]"),
        (("--state", "FOLDER/blank.csv"), ("base.png", "none"), "is empty, expected a line for each moment"),
        (("--min-steps", "3"), ("base.png", "none"), "--min-steps is for a deadline"),
        (
            ("--min-steps", "20", "--deadline-ms", "9"),
            ("base.png", "none"),
            "--min-steps is 20 and --steps 10, expected a minimum that is no larger. Lower --min-steps, or raise --",
        ),
        (("--overlay", "x.png"), ("base.png", "none"), "Give a --budget other than none"),
        (("--overlay", "x.png", "--budget", "prune-88.9"), ("base", "none"), "there are 3 moments"),
        (("--json", "FOLDER/base/x.json"), ("base", "none"), "which is read. Choose a place outside it."),
        (("--rate", "10"), ("base.png", "wrist.png"), "--rate plays recorded moments, and there is one"),
        (("--rate", "10", "--seed", "3"), ("base", "wrist"), "--seed is for single chunks, and --rate computes many"),
        (("--join", "blend"), ("base.png", "wrist.png"), "--join is for --rate, which is not given"),
        (("--rate", "0"), ("base", "wrist"), "--rate is 0.0, expected 0.1 to 1000 ticks a second"),
        (("--json", "FOLDER/one.json", "--state", "FOLDER/one.json"), ("base.png", "none"), "would be overwritten"),
    ],
)
def test_wrong_options_are_refused(
    words: tuple[str, ...], cameras: tuple[str, ...], said: str, path: Path, folder: Path
) -> None:
    given = [word.replace("FOLDER", str(folder)) for word in words]
    assert_refused(act(path, folder, *given, cameras=cameras), said)


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The budgets of every measurement from now on, with an empty cache, on a machine that does nothing else."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(OtherLoad, "share", lambda self: 0.0)
    found, plain = list[str](), Policy.warm_up

    def noting(self: Policy, *given: Any, **options: Any) -> ActionCosts:
        found.append(options["budget"])
        return plain(self, *given, **options, seconds=0.0)

    monkeypatch.setattr(Policy, "warm_up", noting)
    return found


@pytest.fixture
def timed(policy: Policy, photo_file: Path, measurements: list[str]) -> Act:
    """Runs the command with a deadline of a minute; it measures costs no longer than it must."""

    def command(
        *words: object, cameras: int = 1, deadline: tuple[object, ...] = ("--deadline-ms", 60_000)
    ) -> Outcome:
        given = ["--camera", photo_file, "--camera", photo_file if cameras == 2 else "none"]
        state = ("--instruction", "pick up the cup", "--state", "0,0,0,0,0")
        outcome = run("sinkprune-act", policy.bundle.path, *given, *state, *deadline, *words)
        # The order of the cameras has tests of its own.
        order, end, rest = outcome.stderr.partition("\n")
        return replace(outcome, stderr=rest) if order.startswith("cameras: ") and end else outcome

    return command


def kept(policy: Policy) -> ActionCosts:
    costs = ActionCosts.cached(policy.place, "sinkpruner")
    assert costs is not None
    return costs


def test_costs_are_measured_once_and_again_if_wanted(timed: Act, policy: Policy, measurements: list[str]) -> None:
    assert timed().code == 0
    first = kept(policy)
    assert list(first.budgets) == ["none", *BUDGETS] and len(first.recent.first) == 1
    assert timed("--json").code == 0
    assert (measurements, len(kept(policy).recent.first)) == (["none"], 2)
    deadline = json.loads(timed("--warm-up", "--json").stdout)["chunks"][0]["deadline"]
    assert len(measurements) == 2 and len(kept(policy).recent.first) == 1
    assert 0 <= deadline["costs_age_s"] < 600 and deadline["costs_load"] == 0.0


@pytest.mark.parametrize("changed", [{"cameras": 2}, {"budget": "none"}])
def test_kept_costs_of_other_chunks_are_measured_anew(
    changed: dict[str, Any], timed: Act, policy: Policy, measurements: list[str]
) -> None:
    assert timed("--budget", "prune-77.8").code == 0
    outcome = timed("--budget", changed.get("budget", "prune-77.8"), cameras=changed.get("cameras", 1))
    file = cache_file(policy.place, "sinkpruner")
    of = "" if "budget" in changed else " of 'prune-77.8' and smaller budgets"
    assert (outcome.code, outcome.stderr) == (0, f"note: the costs{of} are kept in '{file}'.\n")
    assert len(measurements) == 2
    assert (kept(policy).frames, "none" in kept(policy).budgets) == (changed.get("cameras", 1), "budget" in changed)


def test_a_file_of_costs_is_read_and_left(
    timed: Act, policy: Policy, measurements: list[str], tmp_path: Path
) -> None:
    assert timed().code == 0
    file, costs = tmp_path / "costs.json", replace(kept(policy), load=0.125)
    write_costs(file, costs)
    before = file.read_bytes()
    deadline = json.loads(timed("--costs", file, "--json").stdout)["chunks"][0]["deadline"]
    assert deadline["costs_load"] == 0.125
    assert file.read_bytes() == before and kept(policy).load == 0.0 and len(kept(policy).recent.first) == 1
    assert len(measurements) == 1
    assert_refused(timed("--costs", file, cameras=2), "the costs were measured with 1", "--warm-up")
    write_costs(file, replace(costs, place=replace(policy.place, threads=99)))
    assert_refused(timed("--costs", file), "of another place: their 'threads' is 99")
    assert_refused(timed("--costs", tmp_path / "none.json"), "none.json")


def test_late_chunks_are_reported_on_stderr(timed: Act, path: Path, folder: Path) -> None:
    late = timed(deadline=("--deadline-ms", 1))
    assert late.code == 0 and "late:" not in late.stdout
    (line,) = [line for line in late.stderr.splitlines() if line.startswith("late: ")]
    assert " ms where 1 were given, at budget " in line
    assert "No budget was expected to bring a chunk sooner than in " in line
    assert "late:" not in timed().stderr
    found = act(path, folder, "--deadline-ms", 1, "--json", cameras=("base", "none"))
    assert "late: 3 of 3 chunks; the last of them: " in found.stderr
