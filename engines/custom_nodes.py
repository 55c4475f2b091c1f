"""The nodes of domain `sinkprune` in a graph: what a plugin may stand in for."""

from __future__ import annotations

from pathlib import Path

from sinkprune.errors import BackendError

DOMAIN = "sinkprune"


def custom_nodes(model: Path) -> tuple[str, ...]:
    """The names of the nodes of domain `sinkprune` in an ONNX file; raises `BackendError` if onnx is missing."""
    try:
        import onnx
    except ImportError as error:
        raise BackendError(
            "building engines needs the package onnx, which is not installed. Install it with: pip install onnx"
        ) from error
    graph = onnx.load(model, load_external_data=False).graph
    return tuple(node.name for node in graph.node if node.domain == DOMAIN)
