"""Checkpoint to bundle, all or nothing: written next to its destination, then renamed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import save_file

from sinkprune.contract.budgets import BARLESS_TOWER, MERGING_TOWER, OTHER_TOWERS, TOWER, Plan, decoder_cuts, is_tower
from sinkprune.contract.errors import CheckpointError
from sinkprune.contract.files.folders import check_replaceable, replacing
from sinkprune.contract.files.manifest_file import file_specs
from sinkprune.contract.files.output_files import check_in_no_bundle
from sinkprune.contract.files.trust import Sign
from sinkprune.contract.manifest import (
    BUNDLE,
    CHAT_TEMPLATE,
    EMBEDDING,
    FORMAT_VERSION,
    TOKENIZER,
    Manifest,
    SquareTower,
    Tokens,
    decoder_segments,
)
from sinkprune.contract.memory import available_bytes, compared_sizes
from sinkprune.contract.precision import Array
from sinkprune.contract.progress import OnProgress, unreported
from sinkprune.contract.schedule import merges_of
from sinkprune.export.dialects import load_dialect
from sinkprune.export.families import Family
from sinkprune.export.graph import ReadTensor, WeightedGraph
from sinkprune.export.planning import Unreachable, parse_budgets, plan_graphs, save_plan
from sinkprune.export.pruning.plan import PlanFacts
from sinkprune.export.source import ExportRequest, OpenCheckpoint, open_source
from sinkprune.export.weights import PRECISIONS, Precision, WeightForm, chosen_forms, form_of

if TYPE_CHECKING:
    from sinkprune.export.weights.quantised_weights import Requantised

# A generous bound of graphs, tokenizer and manifest.
_SMALL_FILES_BYTES = 64 << 20
# transformers, onnx and their dependencies.
_LIBRARIES_BYTES = 300 << 20


def export_bundle(
    request: ExportRequest,
    output: Path,
    *,
    force: bool = False,
    sign: Sign | None = None,
    progress: OnProgress = unreported,
    needs: Callable[[int, int], None] = lambda memory, disk: None,
    left_out: Callable[[Unreachable], None] = lambda plan: None,
    requantised: Callable[[Requantised], None] = lambda layer: None,
    unused_settings: Callable[[Mapping[str, Any]], None] = lambda settings: None,
) -> Manifest:
    """Export `request` into the new folder `output`; with `force` an existing bundle there is replaced.

    `sign` signs its manifest (`sinkprune.contract.files.signature.read_private_key`).
    `needs` receives, before anything is written, about how many bytes of memory and of disk the export takes.
    `left_out` receives each budget that a method cannot reach. If it reaches none, that is a `BudgetError`.
    `requantised` receives each matrix that the checkpoint had quantised and that is rounded a second time.
    `unused_settings` receives the settings of generation_config.json that the bundle does not apply, unless it is a
    policy's.
    The export checks the request before it writes anything. After a later error, `output` is as it was.
    """
    check_replaceable(output, BUNDLE, force=force)
    check_in_no_bundle(output)
    source = open_source(request)
    with closing(source.weights):
        export = _Export(request, source, progress, requantised)
        family, lm, precision = source.family, source.family.language_model, export.precision
        if source.policy is None:
            unused_settings(source.text.left_out)
        budgets = parse_budgets(family.name, request.budgets)
        planned = plan_graphs(export.facts, request.methods, budgets, left_out)
        plans_of_all = [plan for plans in planned.values() for plan in plans.values()]
        stages = {layer for plan in plans_of_all for layer in plan.select_after}
        cut_after = decoder_cuts(stages, lm.num_layers) if stages else ()
        # The last layers: of a policy's last one only keys and values are exported.
        depth = lm.num_layers
        shallow = [list(export.weight_graphs([range(max(0, depth - layers), depth)])) for layers in (1, 2)]
        memory = _check_memory(family, shallow[-1], precision)
        needed = weight_bytes_of(family, shallow, precision) + _SMALL_FILES_BYTES
        way_out = "take a smaller model" if "int4" in export.forms.decoder else "export with --weights int4"
        with replacing(output, BUNDLE, needed, way_out, force=force) as root:
            needs(memory, needed)
            export.expected = _whole(family, shallow, lambda graph: graph.values) + _table_size(family)
            graphs = {}
            others = dict.fromkeys(OTHER_TOWERS[plan.kept.tower] for plan in plans_of_all if plan.kept.tower)
            for graph in export.weight_graphs(decoder_segments(cut_after, lm.num_layers)):
                graphs[graph.name] = graph.save(root, f"graphs/{graph.name}.onnx")
                for name in others if graph.name == TOWER else ():
                    other = export.other_tower(name)
                    graphs[name] = other.save_with_weights_of(graph, root, f"graphs/{name}.onnx")
            plans: dict[str, dict[str, Plan]] = {method: {} for method in planned}
            for method, by_budget in planned.items():
                for name, plan in by_budget.items():
                    plans[method][name], own = save_plan(root, export.facts, method, name, plan)
                    graphs |= own
            _save_embedding(root / EMBEDDING, family, precision, export.read)
            text = source.text
            (root / TOKENIZER).write_text(text.tokenizer_json, encoding="utf-8")
            (root / CHAT_TEMPLATE).write_text(text.chat_template, encoding="utf-8")
            manifest = Manifest(
                format_version=FORMAT_VERSION,
                sinkprune_version=version("sinkprune"),
                family=family.name,
                precision=precision.name,
                weights=export.forms,
                dialect=request.dialect,
                cache=export.dialect.CACHE,
                checkpoint=source.checkpoint,
                language_model=lm,
                vision=family.vision,
                most_visual_tokens=export.facts.most_in_group,
                max_images=source.max_images,
                projector=family.projector,
                processor=source.processor,
                tokens=Tokens(family.image_token, text.stop, text.bos, text.eos, family.video_token),
                cut_after=cut_after,
                budgets=budgets,
                plans=plans,
                graphs=graphs,
                files=file_specs(root, progress=progress),
                both_ways=not family.causal or None,
                policy=source.policy,
                repetition_penalty=None if source.policy else text.repetition_penalty,
            )
            BUNDLE.write(root, manifest, sign)
        return manifest


class _Export:
    """An opened checkpoint, with the choices of a request."""

    def __init__(
        self,
        request: ExportRequest,
        source: OpenCheckpoint,
        progress: OnProgress,
        requantised: Callable[[Requantised], None],
    ) -> None:
        """Raise `UsageError` for forms of weights that conflict with each other or the dialect."""
        self._request, self._source, self._progress, self._requantised = request, source, progress, requantised
        self.precision, self.dialect = PRECISIONS[request.precision], load_dialect(request.dialect)
        self.expected = self._read = 0
        """The weights that the export reads, for `progress`; 0 until they are known."""
        quantisation = source.quantisation
        self.forms = chosen_forms(
            self.precision, request.weights, request.vision_weights, request.block_size, quantisation
        )
        repacked = quantisation if quantisation and quantisation.repacks(request.weights) else None
        self.dialect.check_forms(self.forms, repacked)
        family, tower = source.family, source.family.vision
        groups = family.groups_of(source.processor)
        self.facts = PlanFacts(
            language_model=family.language_model,
            tokens=family.tokens_of(source.processor),
            visual_width=family.visual_width,
            precision=self.precision,
            dialect=self.dialect,
            groups=groups,
            images=source.max_images,
            joined=family.groups_are_frames and groups > 1,
            deepstack=family.deepstack,
            causal=family.causal,
            action_rows=source.policy is not None and source.policy.rows is not None,
            merged=sum(merges_of(tower).values())
            if MERGING_TOWER in family.other_towers and isinstance(tower, SquareTower)
            else 0,
            padded=BARLESS_TOWER in family.other_towers,
        )

    def weight_graphs(self, segments: Sequence[range]) -> Iterator[WeightedGraph]:
        """Build the graphs with weights one at a time."""
        for name, write in self._source.family.graphs(segments, self._source.weights).items():
            graph = self._new_graph(name)
            write(graph)
            yield graph

    def other_tower(self, name: str) -> WeightedGraph:
        """Build the form `name` of the tower."""
        graph = self._new_graph(name)
        self._source.family.other_towers[name](graph)
        return graph

    def _new_graph(self, name: str) -> WeightedGraph:
        return WeightedGraph(name, self.precision, self.dialect, self._form(name), self.read)

    def read(self, name: str, shape: Sequence[int]) -> Array:
        array = self._source.weights.tensor(name, shape)
        self._count(array.size)
        return array

    def _count(self, weights: int) -> None:
        self._read += weights
        # Some are read before their number is known.
        if self.expected:
            self._progress("exporting", self._read / 1e6, self.expected / 1e6, "M weights")

    def _form(self, graph: str) -> WeightForm:
        weights, requested, forms = self._source.weights, self._request.weights, self.forms
        name = forms.vision if is_tower(graph) else forms.decoder
        if self._source.quantisation is None:
            return form_of(name, forms.block_size)
        from sinkprune.export.weights.quantised_weights import QuantisedWeights, decoder_form, reporting_form

        assert isinstance(weights, QuantisedWeights)
        form = reporting_form(weights, name, forms.block_size, self._requantised)
        if is_tower(graph):
            return form
        floats = form_of(requested or self.precision.name, forms.block_size)
        return decoder_form(weights, form, floats, requested, forms.block_size, self._count)


def weight_bytes_of(family: Family, shallow: Sequence[Sequence[WeightedGraph]], precision: Precision) -> int:
    """Return the bytes of the weights of a bundle of `family`, with its embedding table in `precision`.

    `shallow` are the weight graphs of the decoder's last layer, and of its last two. All layers before the last have
    equal sizes, and a configuration may have more layers than any disk can hold.
    """
    return _whole(family, shallow, lambda graph: graph.bytes) + _table_size(family) * precision.numpy.itemsize


def _whole(family: Family, shallow: Sequence[Sequence[WeightedGraph]], size: Callable[[WeightedGraph], int]) -> int:
    """Return the sum of `size` over the graphs of the whole model; `shallow` as in `weight_bytes_of`."""
    one, two = (sum(map(size, graphs)) for graphs in shallow)
    return one + (family.language_model.num_layers - 1) * (two - one)


def _table_size(family: Family) -> int:
    lm = family.language_model
    return (lm.vocab_size + len(family.extra_rows)) * lm.hidden_size


def _check_memory(family: Family, shallow: Iterable[WeightedGraph], precision: Precision) -> int:
    """Return about how many bytes of memory the export takes; raises `CheckpointError` if fewer are free."""
    lm = family.language_model
    largest = max(lm.vocab_size * lm.hidden_size, *(graph.largest for graph in shallow))
    # Once as read, once as written.
    needed, free = 2 * largest * precision.numpy.itemsize, available_bytes()
    if 0 < free < needed:
        wanted, left = compared_sizes(needed, free)
        raise CheckpointError(
            f"no memory for the largest tensor: it has {largest} values, for which {wanted} are needed; "
            f"{left} are free. Free memory, or export on a larger machine"
            f"{' or with --precision fp16' if precision.name == 'fp32' else ''}."
        )
    return needed + _LIBRARIES_BYTES


def _save_embedding(path: Path, family: Family, precision: Precision, read: ReadTensor) -> None:
    lm = family.language_model
    shapes = {"weight": (family.embedding, [lm.vocab_size, lm.hidden_size])}
    shapes |= {name: (stored, [lm.hidden_size]) for name, stored in family.extra_rows.items()}
    scales = {"weight": np.float32(family.embedding_scale)}

    def values(name: str, stored: str, shape: Sequence[int]) -> Array:
        scale, array = scales.get(name, 1.0), read(stored, shape)
        return array if scale == 1.0 else array.astype(np.float32) * scale

    arrays = {
        name: np.ascontiguousarray(precision.converted(stored, values(name, stored, shape)))
        for name, (stored, shape) in shapes.items()
    }
    path.parent.mkdir()
    path.touch()
    mode = path.stat().st_mode
    save_file(arrays, path)
    # safetensors replaces the file by a private one. `touch` made it as the umask allows.
    path.chmod(mode)
