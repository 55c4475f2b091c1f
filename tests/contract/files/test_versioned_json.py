"""Files that Python users keep between runs, as by `write_costs`: what they must not replace stays."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from sinkprune import OutputError
from sinkprune.contract.files.manifest_file import write_versioned


@dataclass(frozen=True)
class _Kept:
    ms: float
    kept_version: int = 1


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("link.json", "is a link"),
        ("folder.json", "a folder stands there"),
        ("pipe.json", "is a FIFO, a socket or a device"),
        ("none/kept.json", "there is no folder"),
        ("bundle/bundle.json", "lies in '.*bundle', whose bundle.json lists"),
        ("bundle/kept.json", "lies in '.*bundle', whose bundle.json lists"),
        ("bundle/graphs/kept.json", "lies in '.*bundle', whose bundle.json lists"),
        ("named/graphs/kept.json", "lies in '.*bundle', whose bundle.json lists"),
        ("engines/kept.json", "lies in '.*engines', whose engines.json lists"),
    ],
)
def test_links_devices_and_files_of_bundles_are_not_replaced(name: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "bundle" / "graphs").mkdir(parents=True)
    (tmp_path / "bundle" / "bundle.json").write_text("precious")
    (tmp_path / "named").symlink_to("bundle")
    (tmp_path / "engines").mkdir()
    (tmp_path / "engines" / "engines.json").write_text("precious")
    (tmp_path / "link.json").symlink_to("bundle/bundle.json")
    (tmp_path / "folder.json").mkdir()
    os.mkfifo(tmp_path / "pipe.json")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(OutputError, match=said):
        write_versioned(tmp_path / name, _Kept(3.0))
    assert sorted(tmp_path.rglob("*")) == before and (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "bundle" / "bundle.json").read_text() == "precious"
