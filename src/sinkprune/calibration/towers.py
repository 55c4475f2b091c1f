"""Vision towers without an LLM, loaded by transformers: CLIP, SigLIP and DINOv2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from sinkprune.calibration.norms import TokenFeatures
from sinkprune.contract.budgets import FAMILIES
from sinkprune.contract.checks import format_value, needs_package
from sinkprune.contract.errors import CheckpointError, NumericsError, SinkpruneError, UsageError
from sinkprune.contract.files.untrusted import UnreadableError, read_json
from sinkprune.contract.schedule import grid_boxes

CONFIG = "config.json"
"""A checkpoint's configuration file."""
_INSTALL = "pip install 'sinkprune[towers]' (Python 3.11 or later)."


class _TowerClasses(NamedTuple):
    """The names of classes of transformers, and whether the first token is a CLS token."""

    model: str
    processor: str
    has_cls: bool


_CLIP = _TowerClasses("CLIPVisionModel", "CLIPImageProcessorPil", True)
_SIGLIP = _TowerClasses("SiglipVisionModel", "SiglipImageProcessorPil", False)
_KINDS = {
    "clip": _CLIP,
    "clip_vision_model": _CLIP,
    "siglip": _SIGLIP,
    "siglip_vision_model": _SIGLIP,
    "dinov2": _TowerClasses("Dinov2Model", "BitImageProcessorPil", True),
    "dinov2_with_registers": _TowerClasses("Dinov2WithRegistersModel", "BitImageProcessorPil", True),
}
"""By the `model_type` of a checkpoint's config.json."""


class VisionTower:
    """A tower in torch, in fp32 on the CPU."""

    def __init__(self, folder: Path, layer: int, threads: int | None = None) -> None:
        """Load the checkpoint in `folder` (Hugging Face format, safetensors), and its image processor.

        Tokens are the hidden states `layer`, counted from the last block's, -1. `threads` are torch's (default: its
        own choice). Raises `CheckpointError`, `UsageError` for a layer out of range, and `SinkpruneError` without
        torch or transformers.
        """
        kind = _kind(folder)
        with needs_package("measuring a tower without an LLM", _INSTALL, SinkpruneError):
            import torch
            import transformers
        if threads is not None:
            torch.set_num_threads(threads)
        with _as_checkpoint_error(folder):
            transformers.utils.logging.set_verbosity_error()
            transformers.utils.logging.disable_progress_bar()
            # No pickles, no code from the checkpoint, no hub.
            options = {"local_files_only": True, "use_safetensors": True, "attn_implementation": "eager"}
            self._model, info = getattr(transformers, kind.model).from_pretrained(
                folder, dtype=torch.float32, output_loading_info=True, **options
            )
            self._processor = getattr(transformers, kind.processor).from_pretrained(folder, local_files_only=True)
        missing = sorted([*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])])
        if missing:
            raise CheckpointError(
                f"'{folder}': {len(missing)} weights of the tower are missing or of another shape, {missing[0]} "
                "among them. Download the checkpoint again."
            )
        self._model.eval()
        config = self._model.config
        if not -config.num_hidden_layers <= layer <= -1:
            raise UsageError(
                f"--layer is {layer}, expected -{config.num_hidden_layers} to -1: the tower has "
                f"{config.num_hidden_layers} blocks, counted from the last."
            )
        self._layer, self._torch, self._folder, self._has_cls = layer, torch, folder, kind.has_cls
        self._in_front = int(kind.has_cls) + getattr(config, "num_register_tokens", 0)

    def features(self, image: Image.Image) -> TokenFeatures:
        """Return the norms and the salience of one RGB image's patches, and the picture that they are on.

        Salience is the attention from the CLS token in the chosen layer's block, mean over heads. Without a CLS token
        it is the mean over heads and all queries. Raises `CheckpointError` if processor and tower do not fit, and
        `NumericsError`.
        """
        with _as_checkpoint_error(self._folder), self._torch.no_grad():
            pixels = self._processor(image, return_tensors="pt")["pixel_values"]
            outputs = self._model(pixels, output_hidden_states=True, output_attentions=True)
        tokens = outputs.hidden_states[self._layer][0, self._in_front :].numpy()
        received = outputs.attentions[self._layer][0, :, :, self._in_front :].mean(dim=0).numpy()
        salience = received[0] if self._has_cls else received.mean(axis=0)
        if not (np.isfinite(tokens).all() and np.isfinite(salience).all()):
            raise NumericsError(f"'{self._folder}': the tower gives values that are not finite. Check its weights.")
        picture = self._picture(pixels[0].numpy())
        columns, rows = (size // self._model.config.patch_size for size in picture.size)
        norms = np.linalg.norm(tokens, axis=1)
        boxes = grid_boxes((0, 0, *picture.size), rows, columns)
        return TokenFeatures(picture, boxes, (range(len(tokens)),), norms[None], salience[None])

    def _picture(self, pixels: Any) -> Image.Image:
        """Return the RGB picture of which `pixels` [3,height,width] are the normalised values."""
        processor = self._processor
        if processor.do_normalize:
            mean, deviation = (np.reshape(v, (3, 1, 1)) for v in (processor.image_mean, processor.image_std))
            pixels = pixels * deviation + mean
        if processor.do_rescale:
            pixels = pixels / processor.rescale_factor
        return Image.fromarray(np.clip(np.rint(pixels), 0, 255).astype(np.uint8).transpose(1, 2, 0))


def _kind(folder: Path) -> _TowerClasses:
    try:
        config = read_json(folder / CONFIG)
    except UnreadableError as error:
        raise CheckpointError(
            f"'{folder / CONFIG}' {error}. Give a checkpoint folder in Hugging Face format."
        ) from error
    model_type = config.get("model_type") if isinstance(config, dict) else None
    if isinstance(model_type, str) and model_type in _KINDS:
        return _KINDS[model_type]
    whole = model_type in {row.model_type for row in FAMILIES.values()}
    remedy = f"Export it first: sinkprune-export {folder} -o BUNDLE" if whole else "Give one of those, or a bundle"
    raise CheckpointError(
        f"'{folder}' is a checkpoint of model_type {format_value(model_type)}, expected a vision tower's: "
        f"{', '.join(_KINDS)}. {remedy}."
    )


@contextmanager
def _as_checkpoint_error(folder: Path) -> Iterator[None]:
    """Turn all errors of transformers and torch over an untrusted checkpoint into a `CheckpointError`."""
    try:
        yield
    except Exception as error:
        # Configurations, processors and models raise errors without a common base class.
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")
        raise CheckpointError(
            f"'{folder}' cannot be loaded or run as a vision tower: {reason}. Give a checkpoint folder with "
            "config.json, preprocessor_config.json and safetensors that belong together."
        ) from error
