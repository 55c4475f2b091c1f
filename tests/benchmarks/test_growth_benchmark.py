"""What of the benchmarks of growth and of flatness needs no minutes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import flat
import growth
from flat import Drift
from growth import Growth
from support.programs.commands import BIN


@pytest.mark.parametrize("exponent", [1.0, 1.7, 2.0])
def test_the_exponent_of_a_power_is_found(exponent: float) -> None:
    line = growth.fitted([(size, 3 * size**exponent) for size in (144, 576, 2304, 9216)])
    assert line.exponent == pytest.approx(exponent)
    assert line.interval == pytest.approx((exponent, exponent))


@pytest.mark.slow
def test_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--tokens", "144,196", "--prompts", "4,16", "--new", "2,3", "--pictures", "1,2", "--width", "128")
    files = ("--json", str(tmp_path / "growth.json"), "--plot", str(tmp_path / "growth.png"))
    assert growth.main([*sizes, "--rounds", "2", *files]) == 0
    found = {(one["axis"], one["part"]): one for one in json.loads((tmp_path / "growth.json").read_text())}
    assert set(found) == {(axis, part) for axis in growth.AXES for part in growth.PARTS}
    assert found["visual tokens", "vision"]["sizes"] == [144, 196]
    assert [len(values) for values in found["pictures", "sanitizer"]["ms"]] == [2, 2]
    assert found["pictures", "prefill"]["last_exponent"] == pytest.approx(
        Growth(**{key: found["pictures", "prefill"][key] for key in ("axis", "part", "sizes", "ms")}).last_exponent
    )
    assert (tmp_path / "growth.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.count("\n") == len(found)


@pytest.mark.parametrize("wrong", [("--tokens", "144,200"), ("--tokens", "144,100000000"), ("--width", "100")])
def test_nonsense_is_refused(wrong: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert growth.main([*wrong]) == 2
    assert capsys.readouterr().err.startswith("error: --")


def test_drift_is_of_the_ends() -> None:
    assert flat.drift([5.0] * 90) == Drift(5.0, 0.0)
    grown = flat.drift([float(number) for number in range(900)])
    assert grown.first == pytest.approx(149.5)
    assert grown.added == pytest.approx(900)
    spikes = [1.0] * 90
    spikes[3] = spikes[80] = 100.0
    assert flat.drift(spikes) == Drift(1.0, 0.0)


@pytest.mark.parametrize(
    ("memory", "seconds", "expected"),
    [
        (Drift(1e8, 4e6), Drift(1, 0.1), True),
        (Drift(1e8, 5e6), Drift(1, 0.0), False),
        (Drift(1e9, 9e6), Drift(1, -0.5), True),
        (Drift(1e9, 11e6), Drift(1, 0.0), False),
        (Drift(1e8, -1e7), Drift(1, 0.11), False),
    ],
)
def test_what_is_flat(memory: Drift, seconds: Drift, expected: bool) -> None:
    assert flat.is_flat(memory, seconds) == expected


@pytest.mark.slow
def test_many_requests_are_flat(tmp_path: Path) -> None:
    """Alone in a process: what other tests left is given back at times of its own.

    After 100 requests memory still grows by some MB, and after 300 no more.
    """

    root = Path(flat.__file__).parent.parent
    subprocess.run([BIN / "sinkprune-export", root / "demo" / "pocket", "-o", tmp_path / "pocket"], check=True)
    done = subprocess.run(
        [sys.executable, flat.__file__, tmp_path / "pocket", "--requests", "1500"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
