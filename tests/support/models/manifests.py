"""The manifest of a bundle, read, changed and written back, and what a refusal must look like."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sinkprune.contract.bundle import Bundle, read_bundle
from sinkprune.contract.engines_manifest import Engines
from sinkprune.contract.errors import BundleError
from sinkprune.contract.manifest import MANIFEST


def manifest_data(root: Path) -> dict[str, Any]:
    return json.loads((root / MANIFEST).read_text(encoding="utf-8"))


def write_data(root: Path, data: Any) -> None:
    (root / MANIFEST).write_text(json.dumps(data), encoding="utf-8")


def name_cameras(bundle: Path, folder: Path, *names: str) -> Path:
    """Write `bundle` again into the new `folder`, as of a checkpoint whose cameras have `names`, or have none."""
    return change_policy(bundle, folder, cameras=names or None)


def change_policy(bundle: Path, folder: Path, **facts: Any) -> Path:
    """Write `bundle` again into the new `folder`, as of a policy with other `facts`."""
    shutil.copytree(bundle, folder)
    data = manifest_data(folder)
    data["policy"] |= facts
    write_data(folder, data)
    return folder


def file_of(folder: Bundle | Engines, graph: str) -> Path:
    """The file of a graph of a bundle, or of its engine."""
    specs = folder.manifest.graphs if isinstance(folder, Bundle) else folder.manifest.engines
    return folder.path / specs[graph].file


def refusal(root: Path) -> str:
    """The message a bundle is refused with, which names the bundle."""
    with pytest.raises(BundleError) as caught:
        read_bundle(root).verify()
    message = str(caught.value)
    assert str(root) in message
    return message


def changed(data: Any, place: tuple[Any, ...], change: Callable[[Any, Any], None]) -> Any:
    """A copy of `data` on whose container at `place` `change(container, key)` was called."""
    result = copy.deepcopy(data)
    container = result
    for key in place[:-1]:
        container = container[key]
    change(container, place[-1])
    return result
