"""Runs a bundle: loads its engines, chains them, generates and measures. Needs no torch, transformers or onnx."""

from sinkprune.runtime.answer import Answer
from sinkprune.runtime.pipeline import Pipeline

__all__ = ["Answer", "Pipeline"]
