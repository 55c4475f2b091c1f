"""Model families: one module each. A module reads a configuration and writes the weight graphs.

`FAMILY` of a module is its class, which `sinkprune.contract.families` names. How to add one: docs/new-family.md.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from importlib import import_module
from typing import Annotated, Any, Literal, Protocol, TypedDict

from sinkprune.contract.checks.fields import Bounds
from sinkprune.contract.errors import CheckpointError
from sinkprune.contract.families import FAMILIES
from sinkprune.contract.manifest import LanguageModel
from sinkprune.contract.towers import Tower
from sinkprune.export.checkpoint.folder import Name, read_fields
from sinkprune.export.checkpoint.text import SpecialTokens
from sinkprune.export.graph import WeightedGraph
from sinkprune.export.pruning.plan import UpTo

SalienceBlock = Literal["penultimate", "last"]
"""The block of a tower without a CLS token whose attention is the salience."""
WriteGraph = Callable[[WeightedGraph], None]
"""Writes one weight graph into an empty one."""


class _KnownBy(TypedDict, total=False):
    model_type: Name | None
    architectures: Annotated[list[Name], Bounds(0, 100)] | None


class Family(Protocol):
    """A checkpoint's configuration, understood."""

    name: str
    language_model: LanguageModel
    vision: Tower
    """Facts of the tower, for the runtime's module of the same name."""
    visual_width: int
    projector: str | None
    """The weight graph behind the tower; None where the tower ends in the decoder's width."""
    image_token: int
    chat_template: str
    """The template of checkpoints that bring none."""
    embedding: str
    """The name of the embedding table."""
    extra_rows: Mapping[str, str]
    """Learned rows [d] of the LLM's input that stand in no table: their names in the bundle and in the checkpoint."""
    groups_are_frames: bool
    """Whether the groups of a picture are the frames of a clip."""
    deepstack: int
    """How many sets of features beside its tokens the tower gives, each in the decoder's width; 0 where none."""
    processor_fields: type
    """The TypedDict of what is read of preprocessor_config.json, or of processor_config.json in its place."""
    video_fields: type | None = None
    """That of what is read of video_preprocessor_config.json."""

    @property
    def special_tokens(self) -> SpecialTokens:
        """What stands in the tokenizer of random weights, at the ids the configuration gives."""

    def graphs(self, segments: Sequence[range], held: Container[str]) -> Mapping[str, WriteGraph]:
        """The weight graphs of a decoder cut into `segments`, its layers, by name: `vision`, `projector` if there is
        one, `decoder_0`, ..., `head`. docs/graph-contract.md has them.

        `held` tells which tensors the checkpoint holds; `graph.parameter` reads them.
        """

    def processor(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The image processor's settings, given those of `processor_fields`; raises `CheckpointError`.

        With `max_frames` among them, families that take video add `video`, from the settings `video_processor`.
        """

    def tokens_of(self, processor: Mapping[str, Any]) -> int | UpTo:
        """N: the visual tokens of each group of an image that went through a processor of these settings."""

    def groups_of(self, processor: Mapping[str, Any]) -> int:
        """The most groups of a picture that went through a processor of these settings."""


def read_family(source: str, config: Mapping[str, Any], salience: SalienceBlock | None = None) -> Family:
    """The family of a parsed config.json; raises `CheckpointError` with the supported architectures.

    `salience` is the family's own unless given; raises `UsageError` where the family has no choice.
    """
    known = read_fields(_KnownBy, config, f"checkpoint '{source}': config.json")
    model_type = known.get("model_type")
    rows = {row.model_type: row for row in FAMILIES.values()}
    if model_type not in rows:
        found = ", ".join(known.get("architectures") or [str(model_type)])
        supported = ", ".join(row.architecture for row in rows.values())
        raise CheckpointError(
            f"checkpoint '{source}' is a {found}, which is not supported; supported architectures: {supported}."
        )
    module = import_module(f"{__name__}.{rows[model_type].module}")
    family: Family = module.FAMILY(source, config, salience)
    return family
