"""The images and the unit of boards agree with `setup.sh`. They have not been built on a board."""

from __future__ import annotations

import configparser
import re

import pytest
from packaging.requirements import Requirement

from sinkprune.jetson.boards import read_boards
from support.programs.dockerfiles import JETPACK_6, JETPACK_7, arguments, instructions, values
from support.programs.repository import ROOT

JETSON = ROOT / "jetson"


@pytest.mark.parametrize("path", [JETPACK_6, JETPACK_7])
def test_an_image_holds_what_the_set_up_installs(path: str) -> None:
    extras = re.search(r"^readonly extras=(\S+)$", (JETSON / "setup.sh").read_text(encoding="utf-8"), re.MULTILINE)
    assert extras is not None
    assert {*extras[1].split(",")} <= {*arguments(path)["EXTRAS"].split(",")}
    assert any("python3 -m venv --system-site-packages" in rest for rest in values(path, "RUN"))


def test_the_extra_follows_the_cuda_of_each_jetpack() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    [requirements] = re.findall(r"^jetpack = \[(.*?)^\]", project, re.MULTILINE | re.DOTALL)
    found = [Requirement(text) for text in re.findall(r'"(.*?)"', requirements) if "cuda-python" in text]
    for jetpack in (known for known in read_boards().jetpacks if known.version in ("6.2", "7.2")):
        [cuda] = [each for each in found if each.marker and each.marker.evaluate({"python_version": jetpack.python})]
        major = jetpack.cuda.split(".")[0]
        assert cuda.specifier.contains(f"{major}.9") and not cuda.specifier.contains(f"{int(major) + 1}.0")


@pytest.mark.parametrize("path", [JETPACK_6, JETPACK_7])
def test_an_image_is_of_the_vendor_and_of_one_version(path: str) -> None:
    assert re.fullmatch(r"nvcr\.io/nvidia/[a-z0-9-]+:[a-z0-9.-]*\d[a-z0-9.-]*", arguments(path)["BASE"])
    # The builder of JetPack's Docker has no --mount.
    assert not any("--mount" in rest for rest in values(path, "RUN"))


def test_both_images_are_the_same_above_tensorrt() -> None:
    lists = [instructions(path) for path in (JETPACK_6, JETPACK_7)]
    six, seven = (found[[rest[:7] for _, rest in found].index("EXTRAS=") :] for found in lists)
    assert six == seven


def test_the_tensorrt_of_an_image_is_the_jetpack_s() -> None:
    jetpack = next(known for known in read_boards().jetpacks if known.version == "7.2")
    assert arguments(JETPACK_7)["TENSORRT"].startswith(f"{jetpack.tensorrt}.")
    assert f":{jetpack.cuda}." in arguments(JETPACK_7)["BASE"]


def test_the_unit_writes_what_the_machine_is() -> None:
    text = (JETSON / "sinkprune-doctor.service").read_text(encoding="utf-8")
    unit = configparser.ConfigParser(allow_no_value=True, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string(text)
    service = unit["Service"]
    assert service["Type"] == "oneshot"
    assert service["ExecStart"] == "@VENV@/bin/sinkprune-doctor --json"
    assert service["StandardOutput"] == f"truncate:/var/lib/{service['StateDirectory']}/machine.json"
    assert unit["Install"]["WantedBy"] == "multi-user.target"
