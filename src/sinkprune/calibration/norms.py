"""The norms of a tower's tokens, the outliers among them, and what is measured: moments of a robot, and lone towers.

A file of moments has one JSON object a line, with `cameras`, an object of paths by the names of the bundle's cameras,
or a list of paths in the order of the policy's training; `instruction`; and `state`, a list of numbers in the robot's
units. Paths are relative to the file, and null is a camera without a frame. The default of `id` is the line's number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from sinkprune.calibration.evaluation.statistics import mean_warnings
from sinkprune.calibration.tasks import read_jsonl
from sinkprune.contract.budgets import FAMILIES, Budget
from sinkprune.contract.checks import format_value, needs_package
from sinkprune.contract.errors import (
    CheckpointError,
    ImageError,
    NumericsError,
    SinkpruneError,
    TaskError,
    UsageError,
)
from sinkprune.contract.files.untrusted import UnreadableError, read_json
from sinkprune.contract.manifest import Manifest
from sinkprune.contract.precision import Array
from sinkprune.contract.schedule import grid_boxes
from sinkprune.policies.observation import in_trained_order, observed
from sinkprune.runtime.device.stopwatch import Stopwatch
from sinkprune.runtime.media.images import read_image
from sinkprune.runtime.pipeline import Pipeline
from sinkprune.runtime.steps.chain import run_tower


@dataclass(frozen=True)
class TokenFeatures:
    """Norms and salience of G groups of N tokens, and the place of each on the picture."""

    picture: Image.Image
    """The RGB picture; boxes are in its pixels."""
    boxes: Array
    """[G*N,4] float: left, top, right, bottom of each token."""
    views: tuple[range, ...]
    """Sets of tokens that cover the picture once, for drawing."""
    norms: Array
    """[G,N] fp32: the norm of each token."""
    salience: Array
    """[G,N] fp32: the attention each token receives."""


def bundle_features(pipeline: Pipeline, image: Image.Image) -> TokenFeatures:
    """Return the features of an RGB image in a bundle's tower; raises `ImageError` and `NumericsError`."""
    layout = pipeline.family.layout(image)
    tower = run_tower(pipeline.chain, pipeline.family.inputs(image), Stopwatch(pipeline.backend))
    return TokenFeatures(image, layout.boxes, layout.views, tower.norms, tower.salience)


OUTLIER_PER_MILLE = Budget.outlier_per_mille
"""rho: the sink tokens in 1000 tokens of a group, rounded up."""


def sink_tokens(norms: Array) -> Array:
    """Return [G,N] bool: the ceil(rho*N) largest `norms` [G,N] of each group, ties to the earlier token."""
    return mark_largest(norms, -(-norms.shape[1] * OUTLIER_PER_MILLE // 1000))


def mark_largest(values: Array, count: int) -> Array:
    """Return [G,N] bool: the `count` largest of each row, ties to the earlier."""
    marked = np.zeros(values.shape, bool)
    np.put_along_axis(marked, np.argsort(-values, axis=1, kind="stable")[:, :count], True, axis=1)
    return marked


_FIELDS = "cameras, instruction, state, id (optional)"


@dataclass(frozen=True)
class Moment:
    """A moment of a file, as `Item` is a question of one."""

    id: str
    cameras: tuple[Path | None, ...]
    prompt: str
    """The instruction."""
    state: tuple[float, ...]

    @property
    def picture(self) -> str:
        """The frames' names; moments with the same frames have the same."""
        return " ".join(map(str, self.cameras))

    @property
    def files(self) -> list[Path]:
        return [path for path in self.cameras if path is not None]

    def load_images(self) -> list[Image.Image]:
        return [read_image(path) for path in self.files]

    def asked_as(self, other: Moment) -> Moment:
        """Return this moment with the instruction of another."""
        return replace(self, prompt=other.prompt)


def load_moments(manifest: Manifest, data: Path, limit: int | None = None) -> list[Moment]:
    """Return the first `limit` moments of a JSONL file, for the policy of `manifest`.

    Every moment and its frames are checked. Raises `TaskError` with the number of the first bad line.
    """
    if data.suffix.lower() != ".jsonl":
        raise TaskError(
            f"--data is '{data}', and the bundle is a robot policy: expected a file of moments that ends in .jsonl, "
            f"one JSON object a line: {_FIELDS}."
        )
    known = set[Path]()

    def read(found: dict[str, Any], number: int) -> Moment:
        moment = _moment(manifest, found, data.parent, number)
        for path in moment.files:
            if not path.is_file():
                raise ImageError(f"'{path}' is no file, expected a frame. Paths are relative to the file of moments.")
        observed(manifest, moment.cameras, moment.prompt, moment.state)
        for path in set(moment.files) - known:
            read_image(path)
        known.update(moment.files)
        return moment

    return [*islice(read_jsonl(data, "moments", _FIELDS, read), limit)]


def _moment(manifest: Manifest, found: dict[str, Any], folder: Path, number: int) -> Moment:
    if not {"cameras", "instruction", "state"} <= found.keys() <= {*_FIELDS.removesuffix(" (optional)").split(", ")}:
        raise TaskError(f"found {', '.join(found) or 'no field'}, expected an object with the fields {_FIELDS}.")
    cameras, instruction, state = (found[name] for name in ("cameras", "instruction", "state"))
    if isinstance(cameras, dict):
        cameras = in_trained_order(manifest.acting, cameras)
    if not isinstance(cameras, list) or not all(path is None or isinstance(path, str) for path in cameras):
        raise TaskError(f"'cameras' is {cameras!r}, expected a list of paths, and null for a camera without a frame.")
    # A JSON number may be an integer that no float holds.
    if not isinstance(state, list) or not all(type(one) in (int, float) and abs(one) < 1e30 for one in state):
        raise TaskError(f"'state' is {state!r}, expected a list of numbers.")
    if not isinstance(instruction, str):
        raise TaskError(f"'instruction' is {instruction!r}, expected words.")
    paths = tuple(None if path is None else folder / path for path in cameras)
    return Moment(str(found.get("id", number)), paths, instruction, tuple(map(float, state)))


OUTLIER = 2.0
"""Norm, in median norms of its group, from which a token counts as an outlier."""
GAP = 1.25
"""The least ratio of the smallest outlier's norm to the next smaller norm."""
MOST = 0.05
"""The largest share of outliers in a group: five times the paper's share."""


class OutlierGap(NamedTuple):
    """The gap between one group's outliers and its other tokens; norms in medians of the group."""

    outliers: int
    below: float
    """The largest norm of the others."""
    above: float
    """The smallest norm of the outliers."""


def find_gap(norms: Array) -> OutlierGap | None:
    """Return the lowest gap among the largest norms of one group [N], or None.

    A gap is below a token with a norm of at least `OUTLIER` medians and at least `GAP` times the next smaller norm.
    At most a share of `MOST` of the tokens, or one token, is above the gap.
    """
    ordered = np.sort(norms) / np.median(norms)
    most = min(max(1, int(MOST * ordered.size)), ordered.size - 1)
    for place in range(ordered.size - most, ordered.size):
        below, above = float(ordered[place - 1]), float(ordered[place])
        if above >= OUTLIER and above >= GAP * below:
            return OutlierGap(ordered.size - place, below, above)
    return None


def suggest_rho(norms: Sequence[Array]) -> tuple[int, str]:
    """Return rho in per mille, 0 to remove none, and why, from the `norms` [N] of all groups with medians above 0.

    If half of the groups or more have a gap, rho is the share of all tokens above one. It is rounded down to a whole
    per mille, because a budget rounds its count up. Groups of up to 1000 tokens with as many outliers each lose
    exactly those.
    """
    found = [find_gap(group) for group in norms]
    gaps = [gap for gap in found if gap is not None]
    where = f"outliers in {len(gaps)} of {len(norms)} groups of tokens"
    if 2 * len(gaps) < len(norms):
        rule = (
            f"norms of {OUTLIER:g} medians or more, {GAP:g} times the next, of at most {100 * MOST:g} % of the tokens"
        )
        return (0, f"remove no token (budgets with +keep-outliers); found {where} ({rule}).")
    share = sum(gap.outliers for gap in gaps) / sum(group.size for group in norms)
    per_mille = max(1, int(1000 * share))
    below, above = (float(np.median([getattr(gap, side) for gap in gaps])) for side in ("below", "above"))
    options = f"with +rho-{per_mille}" if per_mille != 10 else "as they are"
    return (
        per_mille,
        f"rho {per_mille / 10:g} % (budgets {options}); found {where}, {100 * share:.2f} % of all tokens, above a "
        f"gap from {below:.1f} to {above:.1f} medians.",
    )


_BINS = 60
_FEW = 0.05


@dataclass(frozen=True)
class NormReport:
    """Norms of a tower's tokens over some pictures, each group's in units of its median."""

    model: str
    """The checkpoint's name."""
    pictures: int
    """Measured pictures."""
    tokens: int
    """Visual tokens of all pictures."""
    histogram: tuple[int, ...]
    """Tokens with a norm between each two `edges`."""
    edges: tuple[float, ...]
    """The bounds of the histogram's bins, ascending, one more than bins; in median norms."""
    largest: float
    """The largest norm, in median norms of its group."""
    outlier_share: float
    """The fraction of the tokens whose norm is at least `OUTLIER` medians."""
    top_overlap: float
    """Of the 1 % of a group's tokens with the largest norms, the share that is in the most salient 1 % too."""
    chance_overlap: float
    """What `top_overlap` would be if norm and salience had nothing to do with each other."""
    top_salience_share: float
    """The share of the salience on the 1 % of tokens with the largest norms."""
    norm_salience_correlation: float
    """Spearman's rank correlation of a group's norms and salience, mean over groups of two tokens or more."""
    verdict: str
    """Whether the tower has the outliers that the paper describes, in words."""
    suggested_per_mille: int
    """rho for the tower's budgets, from a gap in its norms (`outlier_gap.suggest_rho`); 0 removes none."""
    suggestion: str
    """The same in words, with the reason."""
    warnings: tuple[str, ...]
    """Sentences: why the figures say little, for example too few pictures."""
    seen_share: float = 1.0
    """The share of its area that the model sees of the picture that it sees least of."""


def summarise(
    model: str, pictures: int, norms: Sequence[NDArray[np.float32]], salience: Sequence[NDArray[np.float32]]
) -> NormReport:
    """Return the report of `norms` and `salience` [N] of all groups of some pictures; groups may differ in N.

    Raises `NumericsError` for values that are not finite, and for a group whose norms or salience are zero.
    """
    for what, groups, middle in (("norms", norms, np.median), ("salience", salience, np.sum)):
        if not all(np.isfinite(group).all() and middle(group) > 0 for group in groups):
            raise NumericsError(
                f"the vision tower's {what} are not finite, or nothing but zeros, so there are no outliers to "
                "look for. Check the checkpoint's weights."
            )
    scaled = np.concatenate([group / np.median(group) for group in norms])
    # As many of the most salient tokens as there are sink tokens.
    sinks, salient = ([sink_tokens(group[None])[0] for group in groups] for groups in (norms, salience))
    overlap = float(np.mean([(a & b).sum() / a.sum() for a, b in zip(sinks, salient, strict=True)]))
    chance = float(np.mean([marked.mean() for marked in sinks]))
    share, top = float((scaled >= OUTLIER).mean()), float(scaled.max())
    ranked = [_spearman(*pair) for pair in zip(norms, salience, strict=True) if len(pair[0]) > 1]
    received = [group[marked].sum() / group.sum() for group, marked in zip(salience, sinks, strict=True)]
    per_mille, reason = suggest_rho(norms)
    histogram, edges = np.histogram(scaled, bins=_BINS, range=(0.0, max(3.0, top)))
    return NormReport(
        model=model,
        pictures=pictures,
        tokens=scaled.size,
        histogram=tuple(histogram.tolist()),
        edges=tuple(edges.tolist()),
        largest=top,
        outlier_share=share,
        top_overlap=overlap,
        chance_overlap=chance,
        top_salience_share=float(np.mean(received)),
        norm_salience_correlation=float(np.mean(ranked)) if ranked else 0.0,
        verdict=_verdict(share, top, attended=overlap > 2 * chance),
        suggested_per_mille=per_mille,
        suggestion=reason,
        warnings=mean_warnings(pictures),
    )


def _verdict(share: float, largest: float, *, attended: bool) -> str:
    if share == 0:
        return f"No outliers: no token reaches {OUTLIER:g} times its picture's median norm (largest {largest:.1f})."
    found = (
        f"{100 * share:.2f} % of the tokens have {OUTLIER:g} times their picture's median norm or more (largest "
        f"{largest:.1f})"
    )
    if attended and share <= _FEW:
        return f"Outliers as the paper describes them: {found}, and they draw the tower's attention."
    why = "they are too many to be outliers" if attended else "they do not draw the tower's attention"
    return f"Not the outliers the paper describes: {found}, but {why}."


def _spearman(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    """Return the rank correlation. Ties, which are rare among floats, are broken by position."""
    ranks = [np.argsort(np.argsort(x, kind="stable"), kind="stable") for x in (a, b)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


CONFIG = "config.json"
"""A checkpoint's configuration file."""
_INSTALL = "pip install 'sinkprune[towers]' (Python 3.11 or later)."


_KINDS = {
    "clip": ("CLIPVisionModel", "CLIPImageProcessorPil", True),
    "clip_vision_model": ("CLIPVisionModel", "CLIPImageProcessorPil", True),
    "siglip": ("SiglipVisionModel", "SiglipImageProcessorPil", False),
    "siglip_vision_model": ("SiglipVisionModel", "SiglipImageProcessorPil", False),
    "dinov2": ("Dinov2Model", "BitImageProcessorPil", True),
    "dinov2_with_registers": ("Dinov2WithRegistersModel", "BitImageProcessorPil", True),
}
"""Names of transformers' classes of model and processor, and whether the first token is a CLS token, by the
`model_type` of a checkpoint's config.json."""


class VisionTower:
    """A tower in torch, in fp32 on the CPU."""

    def __init__(self, folder: Path, layer: int, threads: int | None = None) -> None:
        """Load the checkpoint in `folder` (Hugging Face format, safetensors), and its image processor.

        Tokens are the hidden states `layer`, counted from the last block's, -1. `threads` are torch's (default: its
        own choice). Raises `CheckpointError`, `UsageError` for a layer out of range, and `SinkpruneError` without
        torch or transformers.
        """
        model, processor, self._has_cls = _kind(folder)
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
            self._model, info = getattr(transformers, model).from_pretrained(
                folder, dtype=torch.float32, output_loading_info=True, **options
            )
            self._processor = getattr(transformers, processor).from_pretrained(folder, local_files_only=True)
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
        self._layer, self._torch, self._folder = layer, torch, folder
        self._in_front = int(self._has_cls) + getattr(config, "num_register_tokens", 0)

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


def _kind(folder: Path) -> tuple[str, str, bool]:
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
