"""The Dockerfiles and the unit agree with `setup.sh`. They have not been built on a board."""

from __future__ import annotations

import configparser
import re
import shlex

import pytest

from sinkprune.jetson.boards import read_boards
from support.programs.repository import ROOT

JETSON = ROOT / "jetson"


def dockerfile(generation: str) -> list[str]:
    """The instructions of a Dockerfile, each on a line."""
    text = (JETSON / f"Dockerfile.jetpack{generation}").read_text(encoding="utf-8")
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [line for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize("generation", ["6", "7"])
def test_an_image_holds_what_the_set_up_installs(generation: str) -> None:
    installs = next(line for line in dockerfile(generation) if "pip install" in line)
    words = [word for word in shlex.split(installs) if re.match(r"(cuda-python|onnx)\W", word)]
    setup = (JETSON / "setup.sh").read_text(encoding="utf-8")
    assert len(words) == 2
    assert all(word in setup for word in words)
    assert "--system-site-packages" in installs


@pytest.mark.parametrize("generation", ["6", "7"])
def test_an_image_is_of_the_vendor_and_of_one_version(generation: str) -> None:
    bases = [line.split()[1] for line in dockerfile(generation) if line.startswith("FROM")]
    assert len(bases) == 1
    assert re.fullmatch(r"nvcr\.io/nvidia/[a-z0-9-]+:[a-z0-9.-]*\d[a-z0-9.-]*", bases[0])
    assert "USER robot" in dockerfile(generation)


def test_the_tensorrt_of_an_image_is_the_jetpack_s() -> None:
    jetpack = next(known for known in read_boards().jetpacks if known.version == "7.2")
    lines = dockerfile("7")
    assert any(line.startswith(f"ARG TENSORRT={jetpack.tensorrt}.") for line in lines)
    assert any(line.startswith("FROM") and f":{jetpack.cuda}." in line for line in lines)


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
