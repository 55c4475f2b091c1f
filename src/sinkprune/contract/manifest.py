"""`bundle.json`: what an exported bundle is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypedDict, TypeVar

from sinkprune.contract.budgets import BARLESS_TOWER, TOWER, UNPRUNED, Budget, Plan, is_tower
from sinkprune.contract.checks import OPTIONAL, Bounds, Count, Few, Size, Width, unknown_name
from sinkprune.contract.errors import BudgetError, BundleError
from sinkprune.contract.files.manifest_file import FileSpec, ManifestFile
from sinkprune.contract.precision import PrecisionName, WeightForms

Side = Annotated[int, Bounds(1, 1 << 14)]
"""A number of pixels, patches or frames along one side."""


CAMERA_PREFIX = "observation.images."
"""What LeRobot writes before the name of a camera."""


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

    @property
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


Tower = ViTTower | InternVLTower | QwenTower | Qwen3Tower | SiglipTower
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


class PaddedSettings(PixelSettings):
    """Conversion of an image to a part of a square."""

    size: dict[str, Side]
    pad_size: dict[str, Side]


LeRobotResize = Literal["resize_with_pad_torch", "resize_with_pad"]
"""LeRobot's functions that turn an image into a part of a square: in its middle, or at its right and lower edges."""


class LeRobotSettings(PixelSettings):
    """Conversion of an image to a part of a square by LeRobot."""

    image_processor_type: LeRobotResize
    pad_size: dict[str, Side]


class TileSettings(SquareSettings):
    """Conversion of an image to several squares."""

    image_grid_pinpoints: Pinpoints


Tiles = Annotated[int, Bounds(1, 64)]
"""A number of squares that an image is cut into."""


class ClipSettings(PixelSettings):
    """Conversion of a clip's frames to squares."""

    max_frames: Frames


class _Clip(TypedDict, total=False):
    video: ClipSettings | None


class GridSettings(PixelSettings, _Clip):
    """Conversion of an image to a grid of squares, and with `video` of a clip's frames to one square each."""

    min_patches: Tiles
    max_patches: Tiles


class VideoSettings(TypedDict):
    """The choice of a clip's frames, and their size."""

    min_pixels: LeastPixels
    max_pixels: Pixels
    most_tokens: Pixels
    fps: FrameRate
    min_frames: Frames
    max_frames: Frames


class _Video(TypedDict, total=False):
    video: VideoSettings | None


class PatchSettings(PixelSettings, _Video):
    """Conversion of an image of any size, and with `video` of a clip, to patches."""

    min_pixels: LeastPixels
    max_pixels: Pixels
    patch_size: Side
    temporal_patch_size: Side
    merge_size: Side


T = TypeVar("T")

FORMAT_VERSION = 6
MANIFEST = "bundle.json"
EMBEDDING = "weights/embedding.safetensors"
TOKENIZER = "weights/tokenizer.json"
CHAT_TEMPLATE = "weights/chat_template.jinja"
BESIDE_GRAPHS = (EMBEDDING, TOKENIZER, CHAT_TEMPLATE)
"""The files that the runtime reads besides graphs and their weights."""
EXPERT = "expert"
"""The graph of one denoising step of a policy."""
MODULATION = "modulation"
"""The graph of what a policy's expert reads of a step's time, where that is much."""

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


@dataclass(frozen=True)
class GraphSpec:
    """One ONNX graph of the bundle: its file (relative to the bundle) and its typed interface."""

    file: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


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
class NumberRanges:
    """What becomes -1 and 1 in normalised states or actions, for each of their numbers."""

    low: tuple[float, ...]
    high: tuple[float, ...]


@dataclass(frozen=True)
class PolicyFacts:
    """Facts of a robot policy, whose action expert reads the decoder's caches (pi0, arXiv 2410.24164)."""

    expert: LanguageModel
    """The action expert. It has the decoder's layers, key-value heads and `head_dim`."""
    chunk: Few
    """The number of actions of a chunk."""
    state_dim: Few
    """The width of the expert's input for the robot's state: the most numbers that a state has."""
    action_dim: Few
    """The width of the expert's actions."""
    steps: Few
    """The usual number of denoising steps."""
    min_period: Annotated[float, Bounds(1e-6, 1e6)]
    """The shortest period of the time embedding; time runs from 1 to 0."""
    max_period: Annotated[float, Bounds(1e-6, 1e6)]
    state_mean: tuple[float, ...]
    """The mean of each number of the state in the training data; empty if the checkpoint has none. Then states are
    not normalised."""
    state_std: tuple[float, ...]
    action_mean: tuple[float, ...]
    """The mean of each number of an action, likewise."""
    action_std: tuple[float, ...]
    state_range: NumberRanges | None = field(default=None, metadata=OPTIONAL)
    """The ranges of states that are normalised by ranges and not by `state_mean`, which is then empty."""
    action_range: NumberRanges | None = field(default=None, metadata=OPTIONAL)
    """The ranges of actions, likewise."""
    state_numbers: Few | None = field(default=None, metadata=OPTIONAL)
    """How many numbers a state without statistics has; None: `state_dim`."""
    action_numbers: Few | None = field(default=None, metadata=OPTIONAL)
    """How many numbers an action without statistics has; None: `action_dim`."""
    cameras: tuple[Annotated[str, Bounds(1, 200)], ...] | None = field(default=None, metadata=OPTIONAL)
    """The names of the cameras, in their order; None if the checkpoint has no names."""
    most_prompt_tokens: Few | None = field(default=None, metadata=OPTIONAL)
    """The most text tokens of a prompt in the training; None if the checkpoint does not have this number."""
    state_in_prompt: bool | None = field(default=None, metadata=OPTIONAL)
    """Whether the state is text of the prompt (pi0.5, arXiv 2504.16054) and no input of the expert."""
    relative_actions: tuple[bool, ...] | None = field(default=None, metadata=OPTIONAL)
    """Which numbers of an action the expert gives relative to the state's number at the same place (LeRobot's
    `relative_actions_processor`); None for none. Statistics of actions are of these differences."""
    most_held: Few | None = field(default=None, metadata=OPTIONAL)
    """The most actions at the start of a chunk that were held in the training (LeRobot's `rtc_training_max_delay`,
    arXiv 2512.05964). Their time is 0 in each step. None if the training held none."""

    @property
    def expert_rows(self) -> int:
        """The rows of the expert: the actions of a chunk, and the state where the expert takes it."""
        return self.chunk + (0 if self.state_in_prompt else 1)

    @property
    def normalised(self) -> tuple[str, ...]:
        """Which of "states" and "actions" have no statistics, so that they stay normalised."""
        without = {
            "states": not (self.state_mean or self.state_range),
            "actions": not (self.action_mean or self.action_range),
        }
        return tuple(name for name, lacks in without.items() if lacks)

    @property
    def units_note(self) -> str | None:
        """A sentence about what stays normalised; None if all numbers are in the robot's units."""
        if not self.normalised:
            return None
        what = " and ".join(self.normalised)
        return (
            f"the checkpoint has no statistics of {what}, so {what} are normalised numbers and not in the robot's "
            "units. Do not send them to a robot."
        )

    @property
    def in_robots_units(self) -> bool:
        """Whether states and actions are in the robot's units: the bundle has the statistics of both."""
        return not self.normalised

    @property
    def action_width(self) -> int:
        """The numbers of an action that `Policy.act` returns."""
        if self.action_range:
            return len(self.action_range.low)
        return len(self.action_mean) or self.action_numbers or self.action_dim

    @property
    def usual_state(self) -> tuple[float, ...]:
        """A state in the middle of the training data, in the robot's units; its length is that of every state."""
        if self.state_range:
            return tuple(
                (low + high) / 2 for low, high in zip(self.state_range.low, self.state_range.high, strict=True)
            )
        return self.state_mean or (0.0,) * (self.state_numbers or self.state_dim)


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
    policy: PolicyFacts | None = field(default=None, metadata=OPTIONAL)
    """Facts of a robot policy; None for a model that answers."""
    repetition_penalty: RepetitionPenalty | None = field(default=None, metadata=OPTIONAL)
    """The checkpoint's `repetition_penalty`, which greedy answers have too; None for none."""

    @property
    def modulates(self) -> bool:
        """Return whether the expert's norms read the graph `modulation`, which runs once for each time."""
        return self.policy is not None and bool(self.policy.state_in_prompt)

    @property
    def acting(self) -> PolicyFacts:
        """Return the facts of a robot policy; raises `ValueError` for a model that answers questions."""
        if self.policy is None:
            raise ValueError("the bundle is no policy")
        return self.policy

    @property
    def last_graph(self) -> str:
        """Return the graph after the decoder: `head`, or `expert` in a policy."""
        return EXPERT if self.policy else "head"

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
            raise BudgetError(
                unknown_name(
                    f"this bundle holds no budget '{budget}' for method '{method}'",
                    budget,
                    [UNPRUNED, *plans],
                    "It holds",
                )
                + " Give one of these. Others must be exported first, with "
                "sinkprune-export --budgets, which reports what a method cannot reach, or be found for this machine, "
                "with sinkprune-calibrate schedule."
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
