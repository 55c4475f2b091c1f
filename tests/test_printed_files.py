"""Files and bundles that printed commands read exist when a reader runs the commands in the order of the pages.

A reader has the files of `make demo` in `demo-output`, and the files that the commands of the README and earlier
commands of the page have made. Modules that pages name are in the repository.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from sinkprune.calibration.commands.calibrate import VERBS
from sinkprune.demo.example_files import write_example_files
from sinkprune.demo.write_scenes import write_scenes
from support.programs.printed_commands import ALL, PAGES
from support.programs.repository import ROOT

READ = ("--camera", "--image", "--video", "--frames", "--check", "--data", "--sign", "--signed-by")
VERBS_OF_BUNDLES = ("run", "act", "profile", "evaluate", "calibrate", "build", "doctor")
MADE = ("-o", "-out")
WRITERS = {
    r"python demo/photo\.py (\S+)": "",
    r"python -m sinkprune\.demo\.write_scenes (\S+)": "/scenes.jsonl",
    r"python benchmarks/robot/write_moments\.py (\S+)": "/moments.jsonl",
}
"""By a pattern of programs that write files: the file in the folder that they are given."""
TEST_SETS = ("scenes", "wide-scenes", "varied-scenes")
READERS_OWN = ("./my-checkpoint", "my-gptq-or-awq-checkpoint", "./clip-vit-large-patch14-336", "key.pem")
ELSEWHERE = ("doctor.md", "jetson.md", "savings.md")
"""Pages whose commands run on another machine or in another folder, without the files of the README's commands."""
LINK = "README.md#a-worked-example"


@pytest.fixture(scope="module")
def demo_output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the pictures, questions and clip of `demo/demo.sh`."""
    folder = tmp_path_factory.mktemp("demo-output")
    write_scenes(folder, 12)
    write_example_files(folder)
    return folder


def named(page: str) -> list[str]:
    """Return the commands of a page, in order."""
    return [text for place, text in ALL if place.startswith(f"{page}:")]


def values(text: str, options: tuple[str, ...]) -> Iterator[str]:
    """Yield the value of each of the options, without the name of a camera."""
    words = shlex.split(text)
    for option, value in pairwise(words):
        if option in options:
            yield value.rpartition("=")[2] if option == "--camera" else value


def made_by(text: str) -> set[str]:
    """Return the names of files and folders that a command makes."""
    written = {f"{found[1]}{file}" for program, file in WRITERS.items() if (found := re.match(program, text))}
    costs = values(text, ("--costs",)) if text.startswith("sinkprune-calibrate") else ()
    return {*values(text, MADE), *costs, *written}


def read_by(text: str) -> set[str]:
    """Return the bundles and engines that a command reads, without presets, placeholders and a reader's own."""
    command, *words = shlex.split(text)
    if command.removeprefix("sinkprune-") not in VERBS_OF_BUNDLES:
        return {*words[:2]} if command == "sinkprune-check" else set()
    if command == "sinkprune-calibrate" and words[0] in VERBS:
        del words[0]
    return {word for word in words[:1] if not word.startswith("--") and not word.isupper()}


PRINTING = [page.name for page in PAGES if any(text.startswith("sinkprune-") for text in named(page.name))]


@pytest.mark.parametrize("page", PRINTING)
def test_what_commands_read_is_there(page: str, demo_output: Path) -> None:
    before = [] if page in ("README.md", *ELSEWHERE) else named("README.md")
    there = {"bundle", "robot", *READERS_OWN}.union(*map(made_by, before))
    if page == "doctor.md":
        there.add("llava-7b")
    from_demo = False
    for text in named(page):
        files = {
            name for name in values(text, READ) if not name.isupper() and name != "none" and name not in TEST_SETS
        }
        files |= {*values(text, ("--costs",))} - made_by(text)
        of_demo = {name for name in files if (demo_output / name).exists()}
        from_demo |= bool(of_demo)
        missing = (files - of_demo | read_by(text)) - there
        assert not missing, f"{page}: {text}: nothing made {missing}"
        there |= made_by(text)
    if from_demo and page != "README.md":
        assert LINK in next(path for path in PAGES if path.name == page).read_text(), (
            f"{page} must say where its files come from"
        )


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "docs/architecture.svg"], ids=lambda page: page.name
)
def test_modules_that_a_page_names_exist(page: Path) -> None:
    found = [f"/{path}" for folder in ("src", "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    for name in re.findall(r"(?<![\w/.*>-])([a-z_0-9]+(?:/[a-z_0-9]+)*\.py)\b", page.read_text(encoding="utf-8")):
        assert any(path.endswith(f"/{name}") for path in found), f"{page.name} names {name}, which is nowhere"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_can_be_read_standing_and_its_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.count("\n") <= (90 if page.name == "README.md" else 150)
    for link in re.findall(r"\]\(((?!https?:)[^)#\s]*)(?:#[^)]*)?\)", text):
        assert (page.parent / link).exists(), f"{page.name} links to {link}"
