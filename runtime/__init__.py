"""Runs a bundle: loads its engines, chains them, generates and measures. Needs no torch, transformers or onnx."""

from sinkprune.runtime.answer import Answer
from sinkprune.runtime.clip import Clip
from sinkprune.runtime.pipeline import Pipeline
from sinkprune.runtime.video_file import VideoFile

__all__ = ["Answer", "Clip", "Pipeline", "VideoFile"]
