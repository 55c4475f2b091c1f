"""Boards: every fact has a source, and the device tree identifies a board."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from sinkprune.contract.checks import SchemaError
from sinkprune.contract.errors import UnknownBoardError
from sinkprune.jetson.boards import parse_boards, read_boards
from support.models.manifests import changed
from support.programs.repository import ROOT

DATA: dict[str, Any] = json.loads((ROOT / "jetson" / "boards.json").read_text(encoding="utf-8"))
NANO = ("boards", "orin-nano-8gb")


def set_to(value: Any) -> Any:
    def change(container: Any, key: Any) -> None:
        container[key] = value

    return change


def remove(container: Any, key: Any) -> None:
    del container[key]


def test_every_module_of_orin_and_thor_is_there() -> None:
    boards = read_boards().boards
    orins = ("orin-nano-4gb", "orin-nano-8gb", "orin-nx-8gb", "orin-nx-16gb", "agx-orin-32gb", "agx-orin-64gb")
    for name in orins:
        assert boards[name].sm == 87 and name.endswith(f"-{boards[name].memory_gb}gb")
    assert boards["thor-t4000"].sm == boards["thor-t5000"].sm == 110


def test_a_board_is_found_by_its_device_tree() -> None:
    boards = read_boards()
    words = ["nvidia,p3768-0000+p3767-0005-super", "nvidia,p3767-0005", "nvidia,tegra234", ""]
    assert boards.name_of(words) == "orin-nano-8gb"
    assert boards.name_of(["nvidia,tegra234"]) is None
    assert boards.name_of([]) is None
    named = [word for board in boards.boards.values() for word in board.compatible]
    assert len(named) == len(set(named))


def test_an_unknown_board_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnknownBoardError, match=r"unknown board 'nano'; known boards: orin-nano-4gb, .*thor-t5000"):
        read_boards().board("nano")


@pytest.mark.parametrize(
    ("l4t", "version"),
    [
        ("36.4", "6.1"),
        ("36.4.0", "6.1"),
        ("36.4.3", "6.2"),
        ("36.4.4", "6.2"),
        ("36.5.0", "6.2"),
        ("38.2.1", "7.0"),
        ("38.4.0", "7.1"),
        ("39.2", "7.2"),
        ("39.2.1", "7.2"),
        ("35.6.2", None),
        ("36.3.0", None),
        ("38.1", None),
        ("40.0", None),
    ],
)
def test_the_jetpack_of_a_release_of_linux(l4t: str, version: str | None) -> None:
    found = read_boards().jetpack(l4t)
    assert (found and found.version) == version


def test_programs_have_less_memory_than_the_module() -> None:
    boards = read_boards()
    # 7620 MiB of 8192 are seen, and 779 are taken: what was recorded.
    usable = boards.usable_bytes(boards.board("orin-nano-8gb"))
    assert usable == pytest.approx((7620 - 779) << 20, rel=0.01)


@pytest.mark.parametrize(
    ("place", "change", "complaint"),
    [
        ((*NANO, "sm"), set_to("87"), "found '87', expected a whole number"),
        ((*NANO, "gb_per_s"), set_to(0), "expected a number from 0.1 to"),
        ((*NANO, "fp16_tflops"), remove, "missing field 'fp16_tflops'"),
        ((*NANO, "speed"), set_to(1), "unknown field 'speed'"),
        ((*NANO, "sources", "gb_per_s"), remove, "look at 'gb_per_s'"),
        ((*NANO, "sources", "colour"), set_to("modules"), "look at 'colour'"),
        ((*NANO, "sources", "gb_per_s"), set_to("hearsay"), "'hearsay' is none of the sources"),
        (("boards", "thor-t5000", "sources", "int8_tops"), set_to("modules"), "look at 'int8_tops'"),
        (("system_memory", "sources", "system_takes_mb"), set_to("hearsay"), "none of the sources"),
        (("jetpacks", 0, "source"), set_to("hearsay"), "none of the sources"),
        (("jetpacks", 0, "dialect"), set_to("opset99"), "expected one of 'opset24', 'opset20'"),
        (("jetpacks", 0, "first_l4t"), set_to("39.9"), "expected the oldest first"),
    ],
)
def test_malformed_facts_are_rejected(place: tuple[Any, ...], change: Any, complaint: str) -> None:
    with pytest.raises(SchemaError, match=complaint):
        parse_boards(changed(DATA, place, change))


def test_the_file_is_read_as_it_stands() -> None:
    assert parse_boards(DATA) == read_boards()


def test_unverified_figures_are_marked() -> None:
    sources = read_boards().sources
    used = {source for board in read_boards().boards.values() for source in board.sources.values()}
    assert all(source.url.startswith("https://") for source in sources.values())
    figures = {board.sources["fp16_tflops"] for board in read_boards().boards.values()}
    assert all("verify before quoting" in sources[source].checked for source in figures)
    assert used <= set(sources)


def test_the_page_names_every_board() -> None:
    page = (ROOT / "docs/doctor.md").read_text(encoding="utf-8")
    sentence = page[page.index("\nBoards: ") :].split("jetson/boards.json")[0]
    assert re.findall(r"`([a-z0-9-]+)`", sentence) == [*read_boards().boards]
