"""`engines.json`: anything altered, missing or unknown is an `EnginesError`, never another error."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sinkprune.contract.engines_manifest import (
    ENGINES,
    FORMAT_VERSION,
    EnginesManifest,
    EngineSpec,
    Limits,
    Range,
    read_engines,
)
from sinkprune.contract.errors import EnginesError
from sinkprune.contract.files.manifest_file import file_specs
from sinkprune.contract.manifest import ENGINES_MANIFEST
from support.models.manifests import changed, file_of

ENGINE = "engines/head.engine"


def write_engines(root: Path) -> EnginesManifest:
    """Write a folder of one made-up engine."""
    (root / "engines").mkdir(parents=True)
    (root / ENGINE).write_bytes(b"machine code")
    prefill = {"hidden": Range((1, 1, 64), (1, 40, 64), (1, 90, 64))}
    decode = {"hidden": Range((1, 1, 64), (1, 1, 64), (1, 1, 64))}
    manifest = EnginesManifest(
        format_version=FORMAT_VERSION,
        sinkprune_version="0.1.0",
        target="tensorrt-rtx",
        library_version="1.7.1.116",
        compute_capabilities=(86, 89),
        bundle_sha256="b" * 64,
        checkpoint_sha256="c" * 64,
        plugins={"TopRho": "d" * 64},
        flags={"strongly_typed": "true"},
        limits=Limits(prompt_tokens=50, new_tokens=20, images=1),
        engines={
            "head": EngineSpec(
                file=ENGINE,
                optimisation_profiles={"prefill": prefill, "decode": decode},
                nodes={"TopRho_node_0": "function"},
                device_memory=None,
                build_seconds=0.5,
            )
        },
        files={ENGINE: file_specs(root)[ENGINE]},
    )
    ENGINES.write(root, manifest)
    return manifest


def refusal(root: Path) -> str:
    with pytest.raises(EnginesError) as caught:
        read_engines(root).verify()
    message = str(caught.value)
    assert str(root) in message
    return message


def edit(root: Path, *place: str, value: Any) -> None:
    data = json.loads((root / ENGINES_MANIFEST).read_text())
    (root / ENGINES_MANIFEST).write_text(json.dumps(changed(data, place, lambda c, key: c.__setitem__(key, value))))


def test_engines_are_what_was_written(tmp_path: Path) -> None:
    message = refusal(tmp_path)
    assert "is not a folder of engines" in message
    assert "sinkprune-build BUNDLE -o NEW --target" in message
    written, progress = write_engines(tmp_path), list[tuple[object, ...]]()
    head = replace(written.engines["head"], optimisation_profiles={})
    for manifest in (replace(written, target="onnxruntime", engines={"head": head}), written):
        ENGINES.write(tmp_path, manifest)
        found = read_engines(str(tmp_path))
        assert found.manifest == manifest
    assert file_of(found, "head").read_bytes() == b"machine code"
    found.verify(lambda *given: progress.append(given))
    size = len(b"machine code") / 1e9
    assert progress == [("checking sums", size, size, "GB")]
    (tmp_path / ENGINE).write_bytes(b"machine cods")
    assert f"file '{ENGINE}' was altered" in refusal(tmp_path)
    (tmp_path / ENGINE).write_bytes(b"machine")
    message = refusal(tmp_path)
    assert f"file '{ENGINE}' has 7 bytes, expected 12" in message and "Build or copy the engines again." in message


PROFILES = ("engines", "head", "optimisation_profiles")


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("target",), "tensorflow", "expected one of 'onnxruntime', 'onnxruntime+openvino', 'openvino', 'tensorrt'"),
        (("target",), "onnxruntime", "2 optimisation profiles for 'head'"),
        (("compute_capabilities",), ["8.6"], "$.compute_capabilities[0]"),
        (("limits", "images"), None, "expected a whole number"),
        (("engines", "head", "file"), "../head.engine", "no size and sha256 for '../head.engine'"),
        (("engines", "head", "file"), "engines/tail.engine", "no size and sha256 for 'engines/tail.engine'"),
        (("engines", "head", "nodes", "TopRho_node_0"), "magic", "expected one of 'plugin', 'function', 'stripped'"),
        (PROFILES, {}, "0 optimisation profiles for 'head'"),
        ((*PROFILES, "prefill", "hidden", "min"), [1, 41, 64], "is no range"),
        ((*PROFILES, "prefill", "hidden", "max"), [1, 39, 64], "is no range"),
        ((*PROFILES, "decode", "hidden", "opt"), [1, 1], "optimisation profile 'decode' of 'head', input 'hidden'"),
    ],
)
def test_parts_that_do_not_fit(tmp_path: Path, place: tuple[str, ...], value: Any, said: str) -> None:
    write_engines(tmp_path)
    edit(tmp_path, *place, value=value)
    assert said in refusal(tmp_path)
