"""Small folders like bundles: files, and a manifest that lists them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sinkprune.contract.checks import to_json
from sinkprune.contract.errors import BundleError
from sinkprune.contract.files.folders import replacing
from sinkprune.contract.files.manifest_file import ManifestFile, file_specs, sha256

KIND = ManifestFile(
    name="bundle.json",
    format_version=4,
    folder="bundle",
    a_folder="a bundle",
    error=BundleError,
    make="sinkprune-export CHECKPOINT -o {root}",
    again="Export or copy the bundle again.",
    upgrade="Upgrade sinkprune.",
)
"""The kind of a bundle, without numpy, whose import would delay a program that is killed often."""


def write_folder(root: Path, version: int, *, format_version: int = 4) -> Path:
    """Write the files of a `version`, some in folders, and the manifest."""
    for name in ("graphs/vision.onnx", f"graphs/plan-{version}/select.onnx", "weights/table.bin", "license"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{name} of version {version}")
    files = to_json(file_specs(root))
    manifest = {"format_version": format_version, "sinkprune_version": str(version), "files": files}
    (root / KIND.name).write_text(json.dumps(manifest))
    return root


def whole_version(root: Path) -> int:
    """Return the version of a folder, which must hold exactly the listed files, with their sums."""
    manifest = json.loads((root / KIND.name).read_text())
    found = {str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir()}
    assert found - {KIND.name} == set(manifest["files"])
    for name, spec in manifest["files"].items():
        assert sha256(root / name) == spec["sha256"]
    return int(manifest["sinkprune_version"])


@contextmanager
def replaced(output: Path, *, force: bool = True) -> Iterator[Path]:
    """Run `replacing` on such a folder."""
    with replacing(output, KIND, 0, "free some", force=force) as root:
        yield root


def replace(output: Path, version: int, **options: Any) -> None:
    """Replace `output` by the files of a `version`."""
    with replaced(output, **options) as root:
        write_folder(root, version)
