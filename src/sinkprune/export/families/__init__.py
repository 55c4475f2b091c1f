"""Model families, one module each. A module reads a configuration and writes the weight graphs.

`sinkprune.contract.budgets` names the modules; `FAMILY` of a module is its class. docs/new-family.md shows how to
add a family.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal, Protocol, TypedDict

from sinkprune.contract.budgets import FAMILIES
from sinkprune.contract.checks import Bounds
from sinkprune.contract.errors import CheckpointError
from sinkprune.contract.manifest import LanguageModel, PolicyFacts, Tower
from sinkprune.contract.registry import load_object
from sinkprune.export.checkpoint.folder import Name, read_fields
from sinkprune.export.checkpoint.text import SpecialTokens
from sinkprune.export.graph import WeightedGraph
from sinkprune.export.pruning.plan import VariableTokens

SalienceBlock = Literal["penultimate", "last"]
"""The block whose attention is the salience, in a tower without a CLS token."""
WriteGraph = Callable[[WeightedGraph], None]
"""Writes one weight graph into an empty graph."""


class _KnownBy(TypedDict, total=False):
    model_type: Name | None
    architectures: Annotated[list[Name], Bounds(0, 100)] | None
    # Of LLaVA's own format.
    mm_vision_tower: Name | None


class Family(Protocol):
    """A checkpoint's configuration, read and checked."""

    name: str
    language_model: LanguageModel
    vision: Tower
    """The tower's facts, which the runtime's module of the same name reads."""
    visual_width: int
    projector: str | None = None
    """The weight graph after the tower; None if the tower's output has the decoder's width."""
    image_token: int
    video_token: int | None = None
    """The token of clips in prompts."""
    chat_template: str
    """The chat template of checkpoints without one."""
    adds_bos: bool = True
    """Whether the tokenizer adds special tokens to a prompt whose template does not begin with BOS."""
    causal: bool
    """Whether a row of the decoder sees the rows up to its own, and not all rows."""
    embedding: str
    """The name of the embedding table."""
    embedding_scale: float = 1.0
    """What the decoder multiplies rows of the embedding table by."""
    extra_rows: Mapping[str, str] = MappingProxyType({})
    """Learned rows [d] of the LLM's input outside the embedding table: names in the bundle and in the checkpoint."""
    groups_are_frames: bool = False
    """Whether the groups of a picture are the frames of a clip."""
    deepstack: int = 0
    """The number of sets of DeepStack features that the tower outputs, each in the decoder's width."""
    processor_fields: type
    """The TypedDict of the fields read from preprocessor_config.json, or else from processor_config.json."""
    video_fields: type | None = None
    """The TypedDict of the fields read from video_preprocessor_config.json."""

    other_towers: Mapping[str, WriteGraph] = MappingProxyType({})
    """Write the tower's other forms, with the weights of `vision`, by graph: `OTHER_TOWERS` as far as it has them."""

    @property
    def special_tokens(self) -> SpecialTokens:
        """The special tokens, at the configuration's ids, of the tokenizer that random weights get."""

    def graphs(self, segments: Sequence[range], held: Container[str]) -> Mapping[str, WriteGraph]:
        """Return the weight graphs by name: `vision`, `projector` if any, `decoder_0`, ..., `head` or `expert`.

        docs/graph-contract.md describes them. `segments` are the layers of the decoder's segments, and `held` the
        tensors of the checkpoint.
        """

    def processor(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return all settings of the image processor from the checkpoint's; raises `CheckpointError`.

        `settings` has the fields of `processor_fields`. If it has `max_frames`, families that take video add `video`,
        made from the settings `video_processor`; no clip has more than `clip_pixels`, if any, in all.
        """

    def policy(self, settings: Mapping[str, Any]) -> PolicyFacts | None:
        """Return the facts of a robot policy, or None for other models; raises `CheckpointError`.

        `settings` is the checkpoint's processor_config.json, empty if there is none.
        """
        return None

    @property
    def pixels_each(self) -> int:
        """The pixels of a visual token, in families whose images differ in size."""

    def tokens_of(self, processor: Mapping[str, Any]) -> int | VariableTokens:
        """Return N, the visual tokens of each group of an image, with these settings of the processor."""

    def groups_of(self, processor: Mapping[str, Any]) -> int:
        """Return the most groups of a picture, with these settings of the processor."""


def read_family(source: str, config: Mapping[str, Any], salience: SalienceBlock | None = None) -> Family:
    """Return the family of a parsed config.json; raises `CheckpointError` with the supported architectures.

    `salience` defaults to the family's own block; raises `UsageError` if the family offers no choice.
    """
    known = read_fields(_KnownBy, config, f"checkpoint '{source}': config.json")
    model_type, architectures = known.get("model_type"), known.get("architectures") or []
    if known.get("mm_vision_tower"):
        raise CheckpointError(
            f"checkpoint '{source}' has the format of LLaVA's own repository (mm_vision_tower), expected "
            "transformers' format. Export the same model from huggingface.co/llava-hf, such as "
            "llava-hf/llava-1.5-7b-hf. A fine-tuned one is converted by convert_llava_weights_to_hf.py, or for "
            "LLaVA-NeXT by convert_llava_next_weights_to_hf.py, both in transformers' repository."
        )
    rows = {name: row for row in FAMILIES.values() for name in (row.model_type, *row.also)}
    row, found = rows.get(model_type or ""), ", ".join(architectures or [str(model_type)])
    # A class of another name computes other things, such as embeddings, of the same layers. pi0.5 may have pi0's.
    # PyTorch's FSDP puts its name before that of the class, and trainers save both.
    classes = {name.removeprefix("FSDP") for name in architectures}
    if row is None or (classes and classes.isdisjoint({*rows, *(one.architecture for one in rows.values())})):
        supported = ", ".join(row.architecture for row in FAMILIES.values())
        text_only = any(name.endswith("ForCausalLM") for name in architectures) and "vision_config" not in config
        kind = ", a text model without a vision tower," if text_only else ","
        raise CheckpointError(
            f"checkpoint '{source}' is a {found}{kind} which is not supported; supported architectures: {supported}."
        )
    family: Family = load_object(row.export)(source, config, salience)
    return family
