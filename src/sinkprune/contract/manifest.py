"""`bundle.json`: what an exported bundle is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, TypeVar

from sinkprune.contract.budgets import BARLESS_TOWER, TOWER, UNPRUNED, Budget, Plan, is_tower
from sinkprune.contract.checks import OPTIONAL, Bounds, Count, Few, Imported, Size, Width, unknown_name
from sinkprune.contract.errors import BudgetError, BundleError
from sinkprune.contract.files.manifest_file import FileSpec, ManifestFile
from sinkprune.contract.precision import PrecisionName, WeightForms

if TYPE_CHECKING:
    from sinkprune.contract.policy_facts import PolicyFacts as PolicyFacts
else:
    PolicyFacts = Annotated[dict, Imported("sinkprune.contract.policy_facts:PolicyFacts")]

Side = Annotated[int, Bounds(1, 1 << 14)]
"""A number of pixels, patches or frames along one side."""


@dataclass(frozen=True)
class LanguageModel:
    """Facts of the decoder. Sizes are in elements."""

    hidden_size: Width
    intermediate_size: Width
    num_layers: Few
    num_heads: Few
    num_kv_heads: Few
    head_dim: Few
    vocab_size: Size
    max_positions: Size
    rope_theta: Annotated[float, Bounds(1, 1e12)]
    rope_sections: tuple[Count, ...] = ()
    """The number of consecutive rotary frequencies for each axis of a position in mRoPE: time, height, width, time
    again, and so on. Empty if a position is one number."""
    rope_factor: Annotated[float, Bounds(1, 1e6)] = field(default=1.0, metadata=OPTIONAL)
    """What positions are divided by: linear scaling of rotary positions."""


@dataclass(frozen=True)
class SquareTower:
    """A vision transformer on pictures of one size."""

    hidden_size: Width
    intermediate_size: Width
    num_heads: Few
    num_blocks: Few
    """The blocks up to the one whose output is the visual feature."""
    image_size: Side
    """Pixels along a side of the picture."""
    patch_size: Side
    """Pixels along a side of a patch."""
    layer_norm_eps: float
    activation: str
    tokens: Annotated[int, Bounds(1, 1 << 14)]
    """N, the visual tokens of a picture."""

    @property
    def patches_per_token(self) -> int:
        """Return the number of patches of one visual token."""
        return 1

    @cached_property
    def patches(self) -> int:
        """Return the number of patches of a picture."""
        return self.tokens * self.patches_per_token


@dataclass(frozen=True)
class ViTTower(SquareTower):
    """CLIP's vision transformer up to its feature layer, on square crops: LLaVA-1.5 and LLaVA-NeXT."""


@dataclass(frozen=True)
class InternVLTower(ViTTower):
    """InternVL's vision transformer on square tiles: `merge_size`**2 patches to a visual token."""

    merge_size: Side
    """Patches along a side of a visual token."""

    @property
    def patches_per_token(self) -> int:
        """Return the number of patches of one visual token."""
        return self.merge_size**2


@dataclass(frozen=True)
class SiglipTower(SquareTower):
    """SigLIP's vision transformer without its pooling head: pi0 and llava-interleave. It has no CLS token."""

    salience_block: Count
    """The 0-based block whose attention is the salience."""


@dataclass(frozen=True)
class FusedTower(SquareTower):
    """SigLIP's vision transformer, and DINOv2's on the same patches: OpenVLA. A token joins a row of each, DINOv2's
    first."""

    dino: SquareTower
    registers: Count
    """DINOv2's rows between CLS and the patches."""


@dataclass(frozen=True)
class QwenTower:
    """The vision tower of Qwen2-VL and Qwen2.5-VL: any resolution, `merge_size`**2 patches to a visual token."""

    hidden_size: Width
    intermediate_size: Width
    num_heads: Few
    num_blocks: Few
    full_attention_blocks: tuple[Count, ...]
    """0-based; all others attend within windows."""
    window_side: Annotated[int, Bounds(0, 1 << 10)]
    """Merged tokens along a window's side; 0 where no block has windows."""
    patch_size: Side
    """Pixels along a side of a patch."""
    temporal_patch_size: Side
    """The number of frames of a clip in a patch."""
    merge_size: Side
    """Patches along a side of a merged token."""
    rope_theta: Annotated[float, Bounds(1, 1e12)]
    out_size: Width
    """Width of the output tokens, which is the decoder's."""
    salience_block: Count
    """The 0-based block whose attention is the salience."""
    tokens_per_second: float | None
    """The positions in time of one second of a clip; None if positions count frames."""

    @property
    def patches_per_token(self) -> int:
        """Return the number of patches of one visual token."""
        return self.merge_size**2


@dataclass(frozen=True)
class Qwen3Tower(QwenTower):
    """The vision tower of Qwen3-VL: Qwen2-VL's with learned positions, and with features of blocks in between."""

    position_side: Side
    """Learned positions along each side of their square table, which is interpolated to every picture."""
    deepstack_blocks: tuple[Count, ...]
    """0-based, ascending: the blocks whose merged output is added to the visual rows after the decoder's first layers
    (DeepStack), the first block's after layer 0."""


Tower = ViTTower | InternVLTower | QwenTower | Qwen3Tower | SiglipTower | FusedTower
"""The facts of any tower; the fields identify the kind."""


Number = int | float
Scale = Annotated[Number, Bounds(1e-6, 1e3)]
"""A factor or divisor of pixel values."""
Colours = Annotated[list[Annotated[Number, Bounds(-1e3, 1e3)]], Bounds(3, 3)]
Scales = Annotated[list[Scale], Bounds(3, 3)]
Pixels = Annotated[int, Bounds(1, 1 << 28)]
LeastPixels = Annotated[int, Bounds(1, 1 << 24)]
"""The number of pixels that smaller pictures are enlarged to."""
Frames = Annotated[int, Bounds(1, 1 << 20)]
FrameRate = Annotated[Number, Bounds(1e-3, 1e3)]
Filter = Annotated[int, Bounds(0, 5)]
"""One of Pillow's filters (`PIL.Image.Resampling`)."""
Pinpoints = Annotated[list[Annotated[list[Side], Bounds(2, 2)]], Bounds(0, 1000)]
"""Heights and widths that an image may be resized to."""


class PixelSettings(TypedDict):
    """Conversion of 8-bit pixels to floats."""

    do_rescale: bool
    rescale_factor: Scale
    do_normalize: bool
    image_mean: Colours
    image_std: Scales
    resample: Filter


class SquareSettings(PixelSettings):
    """Conversion of an image to a square."""

    do_resize: bool
    size: dict[str, Side]
    do_center_crop: bool
    crop_size: dict[str, Side]
    do_pad: bool


Tiles = Annotated[int, Bounds(1, 64)]
"""A number of squares that an image is cut into."""


T = TypeVar("T")

FORMAT_VERSION = 6
MANIFEST = "bundle.json"
ENGINES_MANIFEST = "engines.json"
BUNDLE_FOLDER = "bundle"
"""The subfolder of engines with a bundle's files other than graphs, so that the engines run without the bundle."""
EMBEDDING = "weights/embedding.safetensors"
TOKENIZER = "weights/tokenizer.json"
CHAT_TEMPLATE = "weights/chat_template.jinja"
BESIDE_GRAPHS = (EMBEDDING, TOKENIZER, CHAT_TEMPLATE)
"""The files that the runtime reads besides graphs and their weights."""
EXPERT = "expert"
"""The graph of one denoising step of a policy."""
ACTION_HEAD = "action_head"
"""The graph from a policy's last rows to a chunk, where no expert denoises it."""
PLACEHOLDER_ROW, STATE_ROW, STOP_ROW = -1, -2, -3
"""Rows of a policy's prompt that are no text, in the place of token ids."""

Dtype = Literal["float32", "float16", "int64", "bool", "uint8"]
DialectName = Literal["opset24", "opset20"]
"""The operators of the graphs, by their ONNX opset. TensorRT 10.3 (JetPack 6) needs opset 20."""
RepetitionPenalty = Annotated[float, Bounds(0.01, 100.0)]
"""The factor by which tokens that the prompt or the answer has become less likely."""
CacheForm = Literal["in-place", "rows"]
"""The cache outputs of a decoder segment. `in-place`: all rows, the new ones in their places, so that input and
output may share a buffer. `rows`: the new rows only, which the owner of the cache writes."""


@dataclass(frozen=True)
class TensorSpec:
    """One input or output of a graph; a `str` dimension is dynamic."""

    name: str
    dtype: Dtype
    shape: tuple[Any, ...]

    def takes(self, shape: Sequence[Any]) -> bool:
        """Return whether a tensor of `shape` has this one's, where a text, on either side, is any size."""
        return len(shape) == len(self.shape) and all(
            size == own or isinstance(size, str) or isinstance(own, str)
            for size, own in zip(shape, self.shape, strict=True)
        )


@dataclass(frozen=True)
class GraphSpec:
    """One ONNX graph of the bundle: its file (relative to the bundle) and its typed interface."""

    file: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True)
class Tokens:
    """Ids and texts of the special tokens that the runtime uses."""

    image: Count
    stop: tuple[Count, ...]
    bos: str
    """The text of the BOS token, for chat templates that write it; empty if there is none."""
    eos: str
    video: Count | None = field(default=None, metadata=OPTIONAL)
    """The token of clips; None for a family without them."""


@dataclass(frozen=True)
class Checkpoint:
    """The source of a bundle."""

    source: str
    """The name of the hub repository, of the preset or of the local folder."""
    config_sha256: str
    random_weights: bool


@dataclass(frozen=True)
class Manifest:
    """The content of `bundle.json`: all facts of a bundle except its graphs, weights and texts."""

    format_version: int
    sinkprune_version: str
    family: str
    precision: PrecisionName
    """The type of hidden states and caches, and of weights without a form of their own."""
    weights: WeightForms
    """The storage forms of the matrices of linear layers."""
    dialect: DialectName
    cache: CacheForm
    checkpoint: Checkpoint
    language_model: LanguageModel
    vision: Tower
    """Facts of the vision tower, for the runtime's family module."""
    most_visual_tokens: Width
    """The largest number of visual tokens of a group. All groups have this number unless `any_resolution`."""
    max_images: Few
    """The largest number of images in a prompt."""
    projector: str | None
    """The graph from the tower's width to the decoder's; None if the tower's outputs have the decoder's width."""
    processor: dict[str, Any]
    """The image processor's settings, in the checkpoint's own words."""
    tokens: Tokens
    cut_after: tuple[Count, ...]
    """The 0-based decoder layers after which the decoder is cut into segments."""
    budgets: dict[str, Budget]
    plans: dict[str, dict[str, Plan]]
    """Plans by method, then by budget."""
    graphs: dict[str, GraphSpec]
    files: dict[str, FileSpec]
    both_ways: bool | None = field(default=None, metadata=OPTIONAL)
    """Whether a row of the prompt sees all rows of it, and not only earlier ones. A row of an answer sees those
    before it, so rows of an answer run one at a time."""
    policy: PolicyFacts | None = field(default=None, metadata=OPTIONAL)
    """Facts of a robot policy; None for a model that answers."""
    repetition_penalty: RepetitionPenalty | None = field(default=None, metadata=OPTIONAL)
    """The checkpoint's `repetition_penalty`, which greedy answers have too; None for none."""

    @property
    def policy_graphs(self) -> tuple[str, ...]:
        """Return the graphs of a policy besides the last one."""
        return self.policy.other_graphs if self.policy else ()

    @property
    def reads_caches(self) -> bool:
        """Return whether only the decoder's caches are read, and not the rows after its last layer."""
        return self.policy is not None and self.policy.expert is not None

    @property
    def acting(self) -> PolicyFacts:
        """Return the facts of a robot policy; raises `ValueError` for a model that answers questions."""
        if self.policy is None:
            raise ValueError("the bundle is no policy")
        return self.policy

    @property
    def last_graph(self) -> str:
        """Return the graph after the decoder: `head`, or `expert` or `action_head` in a policy."""
        return self.policy.last_graph if self.policy else "head"

    @property
    def decodes(self) -> bool:
        """Return whether tokens are decoded: those of an answer, or of a policy's actions."""
        return self.policy is None or self.policy.new_tokens > 0

    @property
    def segments(self) -> tuple[range, ...]:
        """Return the layers of `decoder_0`, `decoder_1`, ..."""
        return decoder_segments(self.cut_after, self.language_model.num_layers)

    @property
    def any_resolution(self) -> bool:
        """Return whether images differ in their number of visual tokens."""
        shapes = [tensor.shape for tensor in self.graphs["vision"].outputs if tensor.name == "norms"]
        return any(isinstance(size, str) for shape in shapes for size in shape[1:])

    @property
    def deepstack_width(self) -> int:
        """Return the width of the DeepStack features that `decoder_0` takes; 0 if it takes none."""
        taken = {tensor.name: tensor.shape for tensor in self.graphs["decoder_0"].inputs}
        return int(taken["deepstack"][-1]) if "deepstack" in taken else 0

    def tokens_of(self, plan: Plan) -> int:
        """Return the number of tokens of a group that the tower of a `plan` gives, at most."""
        if plan.tower in (None, BARLESS_TOWER):
            return self.most_visual_tokens
        sizes = (size for one in self.graphs[plan.tower].outputs if one.name == "norms" for size in one.shape[1:])
        return next((size for size in sizes if isinstance(size, int)), 0)

    def weight_bytes(self, graph: str) -> int:
        """Return the bytes of a graph's weights; 0 for the graphs of pruning plans."""
        spec = self.files.get(f"graphs/weights/{TOWER if is_tower(graph) else graph}.bin")
        return spec.size if spec else 0

    def plan(self, method: str, budget: str) -> Plan | None:
        """Return the plan of `method` at `budget`, None for the unpruned engines.

        Raises `BudgetError` with what the bundle holds.
        """
        plans = self.plans.get(method)
        if plans is None:
            raise BudgetError(
                unknown_name(f"this bundle holds no method '{method}'", method, self.plans, "It holds")
                + " Give one of these; others must be exported first, with sinkprune-export --methods."
            )
        if budget == UNPRUNED:
            return None
        if budget not in plans:
            found = f"this bundle holds no budget '{budget}' for method '{method}'"
            raise BudgetError(
                unknown_name(found, budget, [UNPRUNED, *plans], "It holds")
                + " Give one of these. Others must be exported first, with "
                "sinkprune-export --budgets, which reports what a method cannot reach."
            )
        return plans[budget]

    def reads_question(self, plan: Plan | None) -> bool:
        """Return whether the sanitizer of `plan` chooses tokens by the question."""
        sanitizer = plan.sanitizer if plan is not None else None
        return sanitizer is not None and any(one.name == "question" for one in self.graphs[sanitizer].inputs)

    def tower(self, kind: type[T]) -> T:
        """Return the facts of the vision tower as a `kind`. Raises `BundleError` if the tower is of another kind."""
        if not isinstance(self.vision, kind):
            raise BundleError(
                f"the bundle's `vision` holds the fields of {type(self.vision).__name__}, family '{self.family}' has "
                f"a {kind.__name__}. Export it again."
            )
        return self.vision


def decoder_segments(cut_after: Sequence[int], num_layers: int) -> tuple[range, ...]:
    """Return the layers of each segment, for cuts after the layers `cut_after` (0-based, ascending)."""
    starts = [0, *(layer + 1 for layer in cut_after)]
    return tuple(range(start, end) for start, end in zip(starts, [*starts[1:], num_layers], strict=True))


BUNDLE = ManifestFile(
    name=MANIFEST,
    format_version=FORMAT_VERSION,
    folder="bundle",
    a_folder="a bundle",
    error=BundleError,
    make="sinkprune-export CHECKPOINT -o {root}",
    again="Export or copy the bundle again.",
    upgrade="Upgrade sinkprune, or export the checkpoint again with this one.",
)
