"""The request of an export, and its checkpoint, opened and checked before anything is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from sinkprune.contract.budgets import FAMILIES
from sinkprune.contract.checks import counted
from sinkprune.contract.errors import CheckpointError, UsageError
from sinkprune.contract.manifest import Checkpoint, DialectName, PolicyFacts
from sinkprune.contract.precision import WeightsName
from sinkprune.contract.registry import load_object
from sinkprune.export import CHUNK, CLIP_TOKENS, IMAGE_TOKENS, MAX_FRAMES, MAX_IMAGES, MAX_PIXELS, MIN_PIXELS
from sinkprune.export.checkpoint.folder import (
    TOKENIZER_FILES,
    Name,
    ReadFolder,
    SafetensorsWeights,
    check_kind,
    config_sha256,
    has_entry,
    locate,
    read_fields,
    read_json,
)
from sinkprune.export.checkpoint.text import Text, read_checkpoint_text, without_added_tokens
from sinkprune.export.families import Family, SalienceBlock, read_family

if TYPE_CHECKING:
    from sinkprune.export.checkpoint.presets import RandomWeights
    from sinkprune.export.weights.quantised_weights import Quantisation, QuantisedWeights

_SINGLE = "preprocessor_config.json"
_NESTED = "processor_config.json"
_VIDEO = "video_preprocessor_config.json"
_FOLDER_OPTIONS = ("unnorm_key", "chunk", "bounds", "action_tokenizer")
"""The options of a request about policies whose folders leave something out."""


class _NamesWeights(TypedDict, total=False):
    transformers_weights: Name | None


@dataclass(frozen=True)
class ExportRequest:
    """What to export. Raises `UsageError` for counts and names out of range."""

    source: str
    """A local folder, a hub name, or with `random_weights` a config.json, a folder holding one, or a preset."""
    budgets: tuple[str, ...] | None = None
    """Budget names. None means every budget of the family."""
    methods: tuple[str, ...] = ("sinkpruner",)
    precision: str = "fp32"
    dialect: DialectName = "opset24"
    random_weights: bool = False
    min_pixels: int | None = None
    """Smaller images are enlarged to this many. None means the checkpoint's setting."""
    max_pixels: int | None = None
    """Larger images are scaled down to this many. None means those of 1280 visual tokens, and that frames of a clip
    have 7680 together, or the checkpoint's setting where that is less."""
    salience: SalienceBlock | None = None
    """The vision block whose attention is the salience. None means the default of the family."""
    max_images: int | None = None
    """The most images a prompt may have. None means the cameras that the checkpoint of a policy names, else 1."""
    max_frames: int = 0
    """The most frames of a clip; 0 means no video."""
    weights: WeightsName | None = None
    """The form of the matrices of decoder, projector and head.

    None means the checkpoint's own form for matrices that it has quantised, and that of `precision` for others.
    """
    vision_weights: WeightsName | None = None
    """The form of the tower's matrices.

    None means int8 if `weights` is a quantised form, else the form `weights`; and that of `precision` if `weights` is
    None and the checkpoint is quantised.
    """
    block_size: int | None = None
    """The most inputs that share a scale in blocks. None means 128, or the checkpoint's own block size."""
    tokenizer: str | None = None
    """A local folder or a hub name with the tokenizer, for checkpoints without one. None means the checkpoint's."""
    unnorm_key: str | None = None
    """The data set whose statistics a policy's bundle has, where the checkpoint has several. None means its only
    one."""
    chunk: int | None = None
    """The number of actions of a chunk, where no file of the checkpoint has it. None means the usual one."""
    bounds: str | None = None
    """The statistics that become -1 and 1 where no file names them: `q01-q99` or `min-max`. None means the usual."""
    action_tokenizer: str | None = None
    """A local folder or a hub name with the FAST tokenizer, which pi0-FAST needs."""

    def __post_init__(self) -> None:
        for what, name in (("checkpoint", self.source), ("tokenizer", self.tokenizer or "")):
            if "\0" in name or any("\ud800" <= character <= "\udfff" for character in name):
                raise UsageError(
                    f"the {what}'s name {name!r} is not UTF-8, as a bundle that names it must be. Rename it."
                )
        if self.tokenizer and self.random_weights:
            raise UsageError(
                "found --tokenizer, and random weights come with a tokenizer of their own. Leave it out."
            )
        if self.random_weights and any(getattr(self, name) for name in _FOLDER_OPTIONS):
            raise UsageError(
                "random weights have no statistics: leave out --unnorm-key, --chunk, --bounds and --action-tokenizer."
            )
        if self.max_images is not None:
            MAX_IMAGES.check(self.max_images)
        MAX_FRAMES.check(self.max_frames)
        if self.chunk is not None:
            CHUNK.check(self.chunk)
        for limit, count in ((MIN_PIXELS, self.min_pixels), (MAX_PIXELS, self.max_pixels)):
            if count is not None:
                limit.check(count)


@dataclass(frozen=True)
class OpenCheckpoint:
    """A checkpoint, opened and checked."""

    family: Family
    weights: SafetensorsWeights | QuantisedWeights | RandomWeights
    text: Text
    processor: dict[str, Any]
    checkpoint: Checkpoint
    max_images: int
    """The most images a prompt may have."""
    policy: PolicyFacts | None = None
    """Facts of a robot policy; None for other models."""
    quantisation: Quantisation | None = None
    """How the checkpoint has quantised its matrices; None where it has not."""


def open_source(request: ExportRequest) -> OpenCheckpoint:
    """Open the checkpoint of `request`. The caller closes its weights. Raises `CheckpointError` and `UsageError`."""
    if request.random_weights:
        return _open_random(request)
    folder = locate(request.source)
    files = _ConfigurationFiles(request, folder)
    config = files.read("config.json")
    family = read_family(request.source, config, request.salience)
    processor = _processor(family, _processor_settings(request.source, files, family), request)
    tokenizer = locate(request.tokenizer, TOKENIZER_FILES) if request.tokenizer else files.tokenizer_folder()
    text = read_checkpoint_text(folder, family.image_token, family.chat_template, tokenizer)
    # A bundle goes to other machines, so it does not name the folders of this one.
    name = folder.resolve().name if Path(request.source).is_dir() else request.source
    checkpoint = Checkpoint(name, config_sha256(config), random_weights=False)
    quantisation = _quantisation(request.source, config)
    named = read_fields(_NamesWeights, config, f"checkpoint '{request.source}': config.json")
    stored = SafetensorsWeights(folder, named.get("transformers_weights"), files.parts)
    weights: SafetensorsWeights | QuantisedWeights = stored
    if quantisation:
        from sinkprune.export.weights.quantised_weights import QuantisedWeights

        weights = QuantisedWeights(stored, quantisation)
    policy = family.policy(files.read(_NESTED) if _NESTED in files else {})
    if policy is not None:
        # A policy's prompt is that of its training, and a tokenizer's template that of a chat.
        text = replace(text, chat_template=family.chat_template)
    images = _images(request, policy)
    return OpenCheckpoint(family, weights, _formed(text, family), processor, checkpoint, images, policy, quantisation)


def _formed(text: Text, family: Family) -> Text:
    """Return `text` with a tokenizer that adds nothing to prompts, where templates of `family` write all of them."""
    return text if family.adds_bos else replace(text, tokenizer_json=without_added_tokens(text.tokenizer_json))


def _images(request: ExportRequest, policy: PolicyFacts | None) -> int:
    """Return the most images of a prompt. A policy with names of cameras takes one of each."""
    names = policy.cameras if policy else None
    if names and request.max_images not in (None, len(names)):
        raise UsageError(
            f"--max-images is {request.max_images}, and '{request.source}' has {counted(len(names), 'camera')}: "
            f"{', '.join(names)}. Leave --max-images out; a camera may have no frame later."
        )
    return len(names) if names else request.max_images or 1


class _ConfigurationFiles:
    """The JSON files of a checkpoint folder by name. Those of other forms are translated to transformers'."""

    def __init__(self, request: ExportRequest, folder: Path) -> None:
        source = self._source = request.source
        self._folder = folder
        self.parts: Mapping[str, str] = {}
        """`FolderContent.parts`."""
        config = read_json(folder, "config.json") if has_entry(folder, "config.json") else {}
        if "model_type" not in config:
            # LeRobot's form, or a folder around it.
            from sinkprune.export.checkpoint.lerobot import check_folder

            check_folder(source, folder, config)
        check_kind(source, folder)
        self._read = {"config.json": config or read_json(folder, "config.json")}
        self._lerobot = _is_lerobot(config)
        if self._lerobot:
            from sinkprune.export.checkpoint.lerobot import translated_files

            self._read = translated_files(source, folder, config, request.action_tokenizer)
        kinds = {row.model_type: row.folder for row in FAMILIES.values() if row.folder}
        reader = kinds.get(str(config.get("model_type")))
        if reader is not None:
            read: ReadFolder = load_object(reader)
            content = read(request, folder, config)
            self._read, self.parts = {**self._read, **content.files}, content.parts
        own = {"unnorm_key", "chunk", "bounds"} if reader else set[str]()
        own |= {"action_tokenizer"} if self._lerobot else set()
        if unread := {name for name in _FOLDER_OPTIONS if getattr(request, name) is not None} - own:
            raise UsageError(
                f"--{min(unread).replace('_', '-')} is for policies whose folders lack it, such as OpenVLA-OFT's or "
                f"pi0-FAST's, and '{source}' is none. Leave it out."
            )

    def __contains__(self, name: object) -> bool:
        return name in self._read or (isinstance(name, str) and has_entry(self._folder, name))

    def read(self, name: str) -> dict[str, Any]:
        return self._read[name] if name in self._read else read_json(self._folder, name)

    def tokenizer_folder(self) -> Path:
        """Return the folder of the tokenizer; raises `CheckpointError` for a tokenizer that is somewhere else."""
        if not self._lerobot:
            return self._folder
        from sinkprune.export.checkpoint.lerobot import tokenizer_folder

        return tokenizer_folder(self._source, self._folder)


def _processor_settings(source: str, files: _ConfigurationFiles, family: Family) -> dict[str, Any]:
    """Return the settings of the checkpoint's image processor, and of its video processor if the family has one."""
    nested = files.read(_NESTED) if _NESTED in files else {}

    def read(kind: type, file: str, own: str) -> dict[str, Any]:
        # transformers prefers what processor_config.json nests to files of former versions next to it.
        data, place = (nested[own], f"{own} of {_NESTED}") if own in nested else (files.read(file), file)
        return dict(read_fields(kind, data, f"checkpoint '{source}': {place}"))

    settings = read(family.processor_fields, _SINGLE, "image_processor")
    if family.video_fields and ("video_processor" in nested or _VIDEO in files):
        settings["video_processor"] = read(family.video_fields, _VIDEO, "video_processor")
    return settings


def _processor(family: Family, settings: Mapping[str, Any], request: ExportRequest) -> dict[str, Any]:
    """Return the image processor's settings, with the pixel counts of `request`."""
    limits = {"min_pixels": request.min_pixels, "max_pixels": request.max_pixels}
    given = {name: count for name, count in limits.items() if count is not None}
    frames = {"max_frames": request.max_frames} if request.max_frames else {}
    processor = family.processor({**settings, **given, **frames})
    if request.max_pixels is None and "max_pixels" in processor:
        # The limits of published checkpoints are for scanned pages: up to 16384 tokens.
        token = family.pixels_each
        most = max(processor["min_pixels"], min(processor["max_pixels"], IMAGE_TOKENS * token))
        usual = {"max_pixels": most, "clip_pixels": CLIP_TOKENS * token}
        processor = family.processor({**settings, **given, **frames, **usual})
    if frames and "video" not in processor:
        raise UsageError(f"family '{family.name}' takes no video: leave out --max-frames.")
    if not given.keys() <= processor.keys():
        raise UsageError(
            f"family '{family.name}' resizes every image to one size: leave out --min-pixels and --max-pixels."
        )
    return processor


def _quantisation(source: str, config: Mapping[str, Any]) -> Quantisation | None:
    """Return how the checkpoint has quantised its matrices; None if it has not."""
    text = config.get("text_config")
    places = (config, text if isinstance(text, dict) else {})
    if not any(name in place for place in places for name in ("quantization_config", "quantization")):
        return None
    from sinkprune.export.weights.quantised_weights import read_quantisation

    return read_quantisation(source, config)


def _open_random(request: ExportRequest) -> OpenCheckpoint:
    from sinkprune.export.checkpoint.presets import RandomWeights, preset_or_file, small_text

    source = request.source
    config = preset_or_file(source)
    if _is_lerobot(config):
        from sinkprune.export.checkpoint.lerobot import translated_config

        config = translated_config(source, config)
    if _quantisation(source, config):
        raise CheckpointError(
            f"'{source}' has a quantization_config, and random weights are floats. Take it out, and add "
            "--weights int4 for the size of 4-bit weights."
        )
    family = read_family(source, config, request.salience)
    text = small_text(family.language_model.vocab_size, family.special_tokens, family.chat_template)
    checkpoint = Checkpoint(source, config_sha256(config), random_weights=True)
    processor, images = _processor(family, {}, request), request.max_images or 1
    return OpenCheckpoint(
        family, RandomWeights(), _formed(text, family), processor, checkpoint, images, family.policy({})
    )


def _is_lerobot(config: Mapping[str, Any]) -> bool:
    return "type" in config and "model_type" not in config
