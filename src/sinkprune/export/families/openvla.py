"""OpenVLA and OpenVLA-OFT: two towers and a Llama decoder (arXiv 2406.09246, 2502.19645).

OpenVLA decodes a token for each number of an action. OpenVLA-OFT attends in both directions, and an L1 head reads a
chunk from rows. transformers has no class for them: their code is that of openvla/openvla and moojink/openvla-oft.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Annotated, Any, TypedDict

from sinkprune.contract.checks import Bounds
from sinkprune.contract.errors import UsageError
from sinkprune.contract.manifest import Colours, FusedTower, Number, Scales, Side, SquareTower
from sinkprune.contract.policy_facts import ActionRows, ActionTokens, PolicyFacts
from sinkprune.export.checkpoint.folder import Name
from sinkprune.export.checkpoint.text import SpecialTokens
from sinkprune.export.families import WriteGraph
from sinkprune.export.families.llama_shaped import (
    Heads,
    Hidden,
    LlamaShaped,
    Setting,
    TextFields,
    Token,
    head_dim,
    read_language_model,
)
from sinkprune.export.families.pi0 import statistics_of
from sinkprune.export.graph import WeightedGraph
from sinkprune.export.models.actions import ActionHead, build_action_head, build_state_projector
from sinkprune.export.models.fused_vit import build_fused
from sinkprune.export.models.llama import Llama, build_head

_EMPTY, _STOP = 29871, 2
"""Llama's tokens of a lone space, which ends every prompt of the training, and of the end of a text."""
_PATCH = 14
_TOWERS = (
    {"embed_dim": 1024, "depth": 24, "num_heads": 16, "mlp_ratio": 4.0, "reg_tokens": 4},
    {"embed_dim": 1152, "depth": 27, "num_heads": 16, "mlp_ratio": 3.7362, "reg_tokens": 0},
)
"""timm's arguments of the towers in `timm_model_ids`."""
_CHANNELS = (
    {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]},
    {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]},
)


class _TimmFields(TypedDict, total=False):
    embed_dim: Hidden
    depth: Heads
    num_heads: Heads
    mlp_ratio: Annotated[Number, Bounds(0.01, 100)]
    reg_tokens: Annotated[int, Bounds(0, 64)]


class _HeadFields(TypedDict):
    chunk: Annotated[int, Bounds(1, 1 << 10)]
    action_dim: Annotated[int, Bounds(1, 1 << 10)]
    blocks: Annotated[int, Bounds(0, 64)]
    state_dim: Annotated[int, Bounds(0, 1 << 10)]


class _OpenVlaFields(TypedDict, total=False):
    arch_specifier: Name
    vision_backbone_id: Name
    use_fused_vision_backbone: bool
    image_resize_strategy: Name
    image_sizes: Annotated[list[Side], Bounds(2, 2)]
    timm_model_ids: Annotated[list[Name], Bounds(1, 4)]
    timm_override_act_layers: Annotated[list[Name | None], Bounds(1, 4)]
    timm_model_args: Annotated[list[_TimmFields], Bounds(2, 2)]
    pad_token_id: Token
    pad_to_multiple_of: Annotated[int, Bounds(0, 1 << 14)]
    n_action_bins: Annotated[int, Bounds(2, 1 << 14)]
    text_config: TextFields


class _TokenFields(_OpenVlaFields, total=False):
    action_dim: Annotated[int, Bounds(1, 1 << 10)]


class _OftFields(_OpenVlaFields, total=False):
    action_head: _HeadFields


class _Resize(TypedDict, total=False):
    interpolation: Annotated[int, Bounds(0, 5)]
    size: Annotated[list[Side], Bounds(2, 2)]


class _Channels(TypedDict):
    mean: Colours
    std: Scales


class _ProcessorFields(TypedDict, total=False):
    """Fields of PrismaticImageProcessor. It computes those with `tvf`, which come from the others."""

    image_processor_type: Name | None
    image_resize_strategy: Name
    use_fused_vision_backbone: bool
    input_sizes: Annotated[list[Annotated[list[Side], Bounds(3, 3)]], Bounds(1, 4)]
    interpolations: Annotated[list[Name], Bounds(1, 4)]
    means: Annotated[list[Colours], Bounds(1, 4)]
    stds: Annotated[list[Scales], Bounds(1, 4)]
    tvf_resize_params: Annotated[list[_Resize], Bounds(1, 4)]
    tvf_normalize_params: Annotated[list[_Channels], Bounds(1, 4)]
    tvf_do_letterbox: bool


class OpenVla(LlamaShaped):
    """A configuration of OpenVLA, as `sinkprune.export.checkpoint.openvla` completes it."""

    name = "openvla"
    completed_by = "action_dim"
    """The field that the checkpoint's folder gives."""
    attends_forward = False
    """Whether rows see later rows."""
    configured_as = "llava"
    projector = "projector"
    adds_bos = False
    config_fields: type = _TokenFields
    processor_fields: type = _ProcessorFields
    chat_template = (
        "{{ bos_token }}{% for message in messages %}"
        "{% for content in message['content'] if content['type'] == 'image' %}{{ '<PAD>' }}{% endfor %}"
        "{{ 'In: What action should the robot take to ' }}"
        "{% for content in message['content'] if content['type'] == 'text' %}"
        "{{ content['text'] }}{% endfor %}"
        "{{ '?\nOut:' }}{% endfor %}"
    )

    def __init__(self, source: str, config: Mapping[str, Any], salience: str | None = None) -> None:
        super().__init__(source, config)
        if salience is not None:
            raise UsageError(f"family '{self.name}' takes salience from its CLS token: leave out --salience.")
        given: Any = getattr(self._config, "timm_model_args", ({}, {}))
        dino, siglip = ({**usual, **own} for usual, own in zip(_TOWERS, given, strict=True))
        self.vision = FusedTower(
            **self._timm_tower(siglip), dino=SquareTower(**self._timm_tower(dino)), registers=dino["reg_tokens"]
        )
        self.visual_width = self.vision.hidden_size + self.vision.dino.hidden_size
        completed = getattr(self._config, self.completed_by, None)
        self._check([(f"{self.completed_by} is given", completed is not None, completed)])
        self._completed: Any = completed

    @property
    def special_tokens(self) -> SpecialTokens:
        texts = {0: "<unk>", 1: "<s>", 2: "</s>", self.image_token: "<PAD>"}
        return SpecialTokens(self._special_tokens(texts, 4), bos="<s>", eos="</s>", unknown="<unk>")

    def graphs(self, segments: Sequence[range], held: Container[str]) -> dict[str, WriteGraph]:
        return {
            "vision": partial(build_fused, tower=self.vision),
            "projector": self._build_projector,
            **self._decoder(segments),
            **self._ends(),
        }

    def processor(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        side, two = self.vision.image_size, [_CHANNELS[0], _CHANNELS[1]]
        if "means" in settings and "stds" in settings:
            two = [{"mean": mean, "std": std} for mean, std in zip(settings["means"], settings["stds"], strict=False)]
        two = settings.get("tvf_normalize_params", two)
        resizes = settings.get("tvf_resize_params", [{"interpolation": 3}] * 2)
        kind = settings.get("image_processor_type") or "PrismaticImageProcessor"
        self._check_settings(
            [
                ("image_processor_type", kind, ("PrismaticImageProcessor",)),
                ("image_resize_strategy", settings.get("image_resize_strategy", "resize-naive"), ("resize-naive",)),
                ("tvf_do_letterbox", settings.get("tvf_do_letterbox", False), (False,)),
                ("use_fused_vision_backbone", settings.get("use_fused_vision_backbone", True), (True,)),
                ("input_sizes", settings.get("input_sizes", [[3, side, side]] * 2), ([[3, side, side]] * 2,)),
                ("interpolations", settings.get("interpolations", ["bicubic"] * 2), (["bicubic"] * 2,)),
                ("sizes of tvf_resize_params", [one.get("size", [side] * 2) for one in resizes], ([[side] * 2] * 2,)),
                ("tvf_resize_params", [one.get("interpolation", 3) for one in resizes], ([3, 3],)),
                ("the number of tvf_normalize_params", len(two), (2,)),
            ]
        )
        return {
            "image_processor_type": kind,
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": two[0]["mean"],
            "image_std": two[0]["std"],
            "resample": 3,
            "size": {"height": side, "width": side},
            "second_mean": two[1]["mean"],
            "second_std": two[1]["std"],
        }

    def policy(self, settings: Mapping[str, Any]) -> PolicyFacts:
        config, text = self._config, self._text_config
        end = text.vocab_size - config.pad_to_multiple_of
        tokens = ActionTokens(end, config.n_action_bins, _STOP)
        return self._facts(settings, 1, 0, self._completed, tokens=tokens, camera="full_image")

    def _ends(self) -> dict[str, WriteGraph]:
        """Return the writers of the graphs after the decoder."""
        return {"head": partial(build_head, llama=self._llama, lm_head="lm_head")}

    def _facts(
        self,
        settings: Mapping[str, Any],
        chunk: int,
        state_dim: int,
        action_dim: int,
        camera: str | None = None,
        **own: Any,
    ) -> PolicyFacts:
        numbers = statistics_of(self._source, settings, {"state": state_dim, "actions": action_dim})
        numbers["cameras"] = (camera,) if camera else None
        return PolicyFacts(
            None, chunk, state_dim, action_dim, 1, None, None, **numbers, **own, prompt_end=_EMPTY, lowercase=True
        )

    def _timm_tower(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        width, depth = arguments["embed_dim"], arguments["depth"]
        self._check([("the towers have two blocks at least", depth >= 2, depth)])
        vision = SimpleNamespace(
            hidden_size=width,
            intermediate_size=int(width * arguments["mlp_ratio"]),
            num_attention_heads=arguments["num_heads"],
            image_size=self._config.image_sizes[0],
            patch_size=_PATCH,
            layer_norm_eps=1e-6,
            hidden_act="gelu",
        )
        # Features are those before the last block.
        return self._square_tower(vision, depth - 1)

    def _build_projector(self, graph: WeightedGraph) -> None:
        op, d, width = graph.op, self.visual_width, self.language_model.hidden_size
        x = graph.input("tokens", ["G", "n", d])
        for layer, (inputs, outputs) in enumerate(((d, 4 * d), (4 * d, width), (width, width)), 1):
            x = op.Gelu(x) if layer > 1 else x
            x = graph.linear(x, f"projector.fc{layer}", inputs, outputs, bias=True)
        graph.output("embeddings", x, ["G", "n", width])

    @property
    def _image_token(self) -> int:
        # The prompt has no token for a picture. The padding marks its place in the template.
        return self._config.pad_token_id

    def _settings(self) -> list[Setting]:
        config, text = self._config, self._config.text_config
        sizes = config.image_sizes
        return [
            ("arch_specifier", config.arch_specifier, ("no-align+fused-gelu-mlp",)),
            ("vision_backbone_id", config.vision_backbone_id, ("dinosiglip-vit-so-224px",)),
            ("use_fused_vision_backbone", config.use_fused_vision_backbone, (True,)),
            ("image_resize_strategy", config.image_resize_strategy, ("resize-naive",)),
            ("image_sizes", sizes, ([sizes[0]] * 2,)),
            (
                "timm_model_ids",
                config.timm_model_ids,
                (["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"],),
            ),
            ("timm_override_act_layers", config.timm_override_act_layers, ([None, None],)),
            ("text_config.model_type", text.model_type, ("llama",)),
        ]

    def _read_llama(self, text: Any) -> Llama:
        # One section of all frequencies: kept rows keep their positions.
        facts, bias = read_language_model(text, [head_dim(text) // 2]), text.attention_bias
        llama = Llama(facts, text.rms_norm_eps, qkv_bias=bias, output_bias=bias, mlp_bias=text.mlp_bias)
        return replace(llama, causal=not self.attends_forward)


class OpenVlaOft(OpenVla):
    """A configuration of OpenVLA-OFT with an L1 head."""

    name = "openvla-oft"
    completed_by = "action_head"
    attends_forward = True
    config_fields: type = _OftFields

    def policy(self, settings: Mapping[str, Any]) -> PolicyFacts:
        head = self._action_head
        own: dict[str, Any] = {
            "rows": ActionRows(_STOP, head.blocks),
            "clips_state": True if head.state_dim else None,
        }
        return self._facts(settings, head.chunk, head.state_dim, head.action_dim, **own)

    def _ends(self) -> dict[str, WriteGraph]:
        ends = {"action_head": build_action_head}
        if self._action_head.state_dim:
            ends["state_projector"] = build_state_projector
        return {name: partial(build, llama=self._llama, head=self._action_head) for name, build in ends.items()}

    @property
    def _action_head(self) -> ActionHead:
        return ActionHead(**self._completed)
