"""Whether two bundles hold the same, graph by graph: exports of one checkpoint, before and after a change of ours.

What versions of sinkprune may differ in is left out: the manifest's older words, and where weights lie in their
files, with the sums of these.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import Message
from onnx.numpy_helper import to_array

from sinkprune.contract.manifest import MANIFEST

_OF_THE_VERSION = {"format_version", "sinkprune_version", "files"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what differs; returns 1 if anything does, else 0."""
    parser = argparse.ArgumentParser(description="Compare two bundles: manifest, graphs, weights value for value.")
    parser.add_argument("old", type=Path, metavar="OLD", help="a bundle, of any format that can be read")
    parser.add_argument("new", type=Path, metavar="NEW", help="the bundle that should hold the same")
    options = parser.parse_args(arguments)
    found = differences(options.old, options.new)
    for name, lines in found.items():
        more = f" (and {len(lines) - 1} more)" if lines[1:] else ""
        sys.stdout.write(f"{name}: {lines[0]}{more}\n")
    graphs = len(_manifest(options.new)["graphs"])
    sys.stdout.write(f"{options.new}: {graphs} graphs; {f'{len(found)} parts differ' if found else 'all the same'}\n")
    return 1 if found else 0


def differences(old: Path, new: Path) -> dict[str, list[str]]:
    """What differs, by the part of the bundle it is in: the manifest, a graph or another file."""
    bundles, manifests = (old, new), [_manifest(old), _manifest(new)]
    parts = {MANIFEST: _compared(*({k: m[k] for k in m.keys() - _OF_THE_VERSION} for m in manifests))}
    files = [{name: graph["file"] for name, graph in manifest["graphs"].items()} for manifest in manifests]
    for name in files[0].keys() & files[1].keys():
        parts[name] = _compared(*(_model(root / of[name]) for root, of in zip(bundles, files, strict=True)))
    others = {name for manifest in manifests for name in manifest["files"] if not name.startswith("graphs/")}
    for name in others:
        parts[name] = _compared(*({"sha256": _sha256(root / name)} for root in bundles))
    return {name: parts[name] for name in sorted(parts) if parts[name]}


def _manifest(bundle: Path) -> dict[str, Any]:
    return json.loads((bundle / MANIFEST).read_text(encoding="utf-8"))


def _model(path: Path) -> onnx.ModelProto:
    """The ONNX file, each initializer as its type, its shape and the sum of its values."""
    model = onnx.load(path, load_external_data=False)
    for tensor in model.graph.initializer:
        values = to_array(tensor, str(path.parent))
        plain = onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
        plain.raw_data = hashlib.sha256(values.tobytes()).digest()
        tensor.CopyFrom(plain)
    return model


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "no such file"


def _compared(old: Any, new: Any) -> list[str]:
    before, after = dict(_leaves(old)), dict(_leaves(new))
    places = [*before, *(place for place in after if place not in before)]
    return [
        f"{place.lstrip('.')} is {after.get(place, 'missing')}, was {before.get(place, 'missing')}"
        for place in places
        if before.get(place) != after.get(place)
    ]


def _leaves(value: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Everything that `value`, of JSON or protobuf, holds, by its place in it."""
    if isinstance(value, Message):
        value = {field.name: content for field, content in value.ListFields()}
    if isinstance(value, Mapping) and value:
        for name, content in value.items():
            yield from _leaves(content, f"{place}.{name}")
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)) and value:
        for number, content in enumerate(value):
            yield from _leaves(content, f"{place}[{number}]")
    else:
        yield place, repr(value)


if __name__ == "__main__":
    sys.exit(main())
