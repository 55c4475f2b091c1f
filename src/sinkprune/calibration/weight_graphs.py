"""The weight graphs of a bundle, run for all prompts, a subgraph of linear layers at a time.

So the weights of one subgraph are in memory at a time, and each subgraph runs once. Tensors that later subgraphs need
are kept for every prompt. Rows of pruned prompts are a subset of these rows, so one rounding serves every budget.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnx_ir as ir

from sinkprune.calibration.rounding import InputProducts
from sinkprune.calibration.tasks import Item
from sinkprune.contract.bundle import Bundle
from sinkprune.contract.errors import BackendError
from sinkprune.contract.manifest import EMBEDDING, Manifest
from sinkprune.contract.precision import DTYPES, Array, WeightForms, WeightsName
from sinkprune.contract.schedule import VisualLayout
from sinkprune.export.dialects import Dialect, load_dialect
from sinkprune.export.graph import Weight, WeightedGraph
from sinkprune.export.weights import PRECISIONS, Matrix, Precision, WeightForm, form_of
from sinkprune.export.weights.rounding import RoundingMethod
from sinkprune.runtime.backends import Backend, load_backend
from sinkprune.runtime.backends.models import Model
from sinkprune.runtime.backends.onnxruntime.library import import_onnxruntime, session_options, words
from sinkprune.runtime.families import Fit, Rotary, load_family
from sinkprune.runtime.steps.chain import EncodedPicture, TowerOutput
from sinkprune.runtime.steps.prompt_rows import Embedding, lay_out
from sinkprune.runtime.text.prompt import PromptEncoder

Tensors = Mapping[str, Array]
"""Inputs or outputs of a graph by name."""


class GraphSession:
    """A graph, or a part of one, with its weights in `folder`.

    Activations stay floats before quantised weights: rounding them too is an engine's choice.
    """

    def __init__(self, graph: ir.Graph, version: int, folder: Path, threads: int) -> None:
        """Load the graph; `version` is ONNX's IR version. Raises `BackendError`."""
        ort = import_onnxruntime("sinkprune-calibrate quantize")
        self.name = str(graph.name)
        options = session_options(ort)
        options.intra_op_num_threads = threads
        options.enable_mem_pattern = False
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
        data = ir.to_proto(ir.Model(graph, ir_version=version)).SerializeToString()
        try:
            self._session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"], enable_fallback=0)
        except Exception as error:
            # onnxruntime has no common base class for its errors.
            raise BackendError(f"onnxruntime cannot load graph '{self.name}': {words(error)}") from error
        self._inputs = {value.name for value in self._session.get_inputs()}
        self._outputs = [value.name for value in self._session.get_outputs()]

    def __call__(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return all outputs by name, from inputs by name; raises `BackendError`."""
        feeds: dict[str, Any] = {name: array for name, array in inputs.items() if name in self._inputs}
        try:
            outputs = self._session.run(self._outputs, feeds)
        except Exception as error:
            raise BackendError(
                f"graph '{self.name}' failed in onnxruntime: {words(error)}. If memory ran out, end other programs; "
                "if not, export the bundle again."
            ) from error
        return dict(zip(self._outputs, outputs, strict=True))


OpenSession = Callable[[ir.Graph], GraphSession]
"""Returns a session of a subgraph."""


class Subgraph(NamedTuple):
    """Consecutive linear layers of a graph and the operators around them, by names of values.

    Layers may share an input. The outputs are those of the graph, and values that a later subgraph needs.
    """

    layer_inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class GraphRun:
    def __init__(self, graph: ir.Graph, open_session: OpenSession, feeds: Iterable[Tensors]) -> None:
        """Start before the first subgraph. `feeds` are each prompt's inputs; `graph` has only needed outputs."""
        self._graph, self._open, self._feeds = graph, open_session, list(feeds)
        self._kept: list[Tensors] = [{} for _ in self._feeds]
        self.remaining = split_graph(graph)

    def step(self, use: Callable[[str, Array], None] | None = None) -> None:
        """Run the next subgraph, and call `use` with the name and the value of each layer's input for each prompt.

        Raises `BackendError`, and `IndexError` after the last subgraph.
        """
        subgraph = self.remaining.pop(0)
        used = subgraph.layer_inputs if use else ()
        # No session computes the values that are known already.
        known_names = {*self._feeds[0], *self._kept[0]}
        wanted = [name for name in dict.fromkeys((*subgraph.outputs, *used)) if name not in known_names]
        session = self._open(_extract(self._graph, self._kept[0], wanted))
        for number, feed in enumerate(self._feeds):
            known = {**feed, **self._kept[number]}
            known |= session(known)
            self._kept[number] = {name: known[name] for name in subgraph.outputs}
            if use:
                for name in used:
                    use(name, known[name])

    def outputs(self) -> list[Tensors]:
        """Run the remaining subgraphs, and return the graph's outputs for each prompt; raises `BackendError`."""
        while self.remaining:
            self.step()
        return self._kept


def split_graph(graph: ir.Graph) -> list[Subgraph]:
    """Return all subgraphs of `graph`, cut at the places between layers where the fewest values must be kept.

    In a transformer these are after the residual sums that end attention and MLP. Values that depend on no matrix,
    such as masks from positions, are not kept but computed again.
    """
    layers, live_ranges = _layers(graph), _live_ranges(graph)

    def live(place: int) -> list[str]:
        """Return the values that are computed before the node at that place, and needed from there on."""
        return [name for name, (first, last) in live_ranges.items() if first < place <= last]

    boundaries = [
        min((live(place) for place in range(last + 1, first + 1)), key=len)
        for (_, _, last), (_, first, _) in pairwise(layers)
    ]
    found, inputs = list[Subgraph](), list[str]()
    for number, (layer_input, _, _) in enumerate(layers):
        inputs.append(layer_input)
        # A cut is a boundary that keeps no more values than the boundaries next to it.
        neighbours = boundaries[max(number - 1, 0) : number + 2]
        if number < len(boundaries) and len(boundaries[number]) == min(map(len, neighbours)):
            found.append(Subgraph(tuple(inputs), tuple(boundaries[number])))
            inputs = []
    return [*found, Subgraph(tuple(inputs), tuple(str(value.name) for value in graph.outputs))]


def _layers(graph: ir.Graph) -> list[tuple[str, int, int]]:
    """Return the input of each product with a matrix, and the places of the first and the last node that share it."""
    found: list[tuple[str, int, int]] = []
    for place, node, varying in _varying_nodes(graph):
        if _is_layer(node, varying):
            together = found and found[-1][0] == varying[0]
            first = found.pop()[1] if together else place
            found.append((varying[0], first, place))
    return found


def _live_ranges(graph: ir.Graph) -> dict[str, tuple[int, int]]:
    """Return where values that depend on matrices are computed, and where they are needed last."""
    ranges: dict[str, tuple[int, int]] = {}
    for place, node, varying in _varying_nodes(graph):
        needed = [name for name in varying if name in ranges]
        ranges |= {name: (ranges[name][0], place) for name in needed}
        if needed or _is_layer(node, varying):
            ranges |= {str(value.name): (place, place) for value in node.outputs}
    outputs = [str(value.name) for value in graph.outputs]
    return ranges | {name: (ranges[name][0], len(graph)) for name in outputs if name in ranges}


def _varying_nodes(graph: ir.Graph) -> Iterator[tuple[int, ir.Node, list[str]]]:
    """Yield each node that depends on the graph's inputs, with its place and the names of its inputs that do."""
    constant = set(graph.initializers)
    for place, node in enumerate(graph):
        varying = [str(value.name) for value in node.inputs if value is not None and value.name not in constant]
        if varying:
            yield place, node, varying
        else:
            constant.update(str(value.name) for value in node.outputs)


def _is_layer(node: ir.Node, varying: Sequence[str]) -> bool:
    value = node.inputs[0] if node.op_type == "MatMul" else None
    return value is not None and varying == [value.name]


def _extract(graph: ir.Graph, known: Tensors, wanted: Sequence[str]) -> ir.Graph:
    """Return the part of `graph` that computes the `wanted` values from its inputs and the `known` values."""
    inputs = [str(value.name) for value in graph.inputs]
    part = ir.convenience.extract(graph, [*inputs, *known], wanted)
    for value in part.inputs:
        if (array := known.get(str(value.name))) is not None:
            value.type, value.shape = ir.TensorType(ir.DataType.from_numpy(array.dtype)), None
    return part


_WEIGHT = ".weight"


class Layer(NamedTuple):
    value: str
    """The name of its input; layers may share it."""
    inputs: int
    outputs: int


class Products:
    """X^T X of each matrix of a graph on the same prompts, computed on demand, a subgraph of layers at a time.

    Calls in the order of the layers compute each product once.
    """

    def __init__(self, graph: ir.Graph, start: Callable[[], GraphRun]) -> None:
        """`start` returns a run of all prompts through `graph`."""
        self._layers, self._joined = linear_layers(graph), joined_layers(graph)
        self._start, self._run = start, start()
        self._held: dict[str, InputProducts] = {}

    def __call__(self, matrix: str) -> InputProducts:
        """Return the products of the inputs of the layer with the matrix of that name; raises `BackendError`."""
        value = self._layers[matrix].value
        ahead = any(value in subgraph.layer_inputs for subgraph in self._run.remaining)
        if value not in self._held and not ahead:
            self._run = self._start()
        while value not in self._held:
            # Free the old products before the next ones are computed.
            self._held = {}
            sums: dict[str, Array] = {}
            self._run.step(partial(_add, sums))
            self._held = {name: InputProducts(products) for name, products in sums.items()}
        return self._held[value]

    def parts(self, matrix: str) -> Mapping[str, int]:
        """Return the layers that share the matrix of that name: their own matrices' names, and their outputs."""
        return self._joined.get(matrix, {matrix: self._layers[matrix].outputs})

    def outputs(self) -> list[Tensors]:
        """Return the graph's outputs for each prompt; raises `BackendError`."""
        self._held = {}
        return self._run.outputs()


def linear_layers(graph: ir.Graph) -> dict[str, Layer]:
    """Return all linear layers of `graph`, by the names of their matrices of floats."""
    found = {}
    for matrix, node in multiplications(graph).items():
        tensor = graph.initializers[matrix].const_value
        if node.inputs[0] is None or node.inputs[0].name is None or tensor is None:
            raise ValueError(f"the matrix '{matrix}' is multiplied with nothing")
        found[matrix] = Layer(node.inputs[0].name, *shape_of(tensor))
    return found


def joined_layers(graph: ir.Graph) -> dict[str, dict[str, int]]:
    """Return the layers that share a matrix, by its name: the names of their own matrices, and their outputs."""
    found = {}
    for matrix, node in multiplications(graph).items():
        own = matrix.removesuffix(_WEIGHT).rpartition(".")[0]
        uses = [use for use, _ in node.outputs[0].uses()]
        if len(uses) == 1 and uses[0].op_type == "Add":
            uses = [use for use, _ in uses[0].outputs[0].uses()]
        for split in (use for use in uses if use.op_type == "Split" and len(use.inputs) > 1):
            names = [str(value.name) for value in split.outputs]
            # If the checkpoint itself stores one matrix, as in Qwen's towers, the parts have no layers' names.
            if all(name.rpartition(".")[0] == own for name in names):
                sizes = split.inputs[1].const_value if split.inputs[1] is not None else None
                if sizes is None:
                    raise ValueError("a matrix is split at places that are computed")
                widths = sizes.numpy().tolist()
                found[matrix] = {f"{name}{_WEIGHT}": width for name, width in zip(names, widths, strict=True)}
    return found


def _add(sums: dict[str, Array], value: str, rows: Array) -> None:
    width = rows.shape[-1]
    rows = rows.reshape(-1, width).astype(np.float32, copy=False)
    if value not in sums:
        sums[value] = np.zeros((width, width), np.float32)
    sums[value] += rows.T @ rows


_PIXELS = "pixel_values"
"""A product with pixels embeds them and is no linear layer: exports store its matrix as floats."""


class RewrittenGraph(WeightedGraph):
    """The graph of an ONNX file, whose matrices of floats are stored in another form; all else stays."""

    def __init__(
        self,
        name: str,
        precision: Precision,
        dialect: Dialect,
        form: WeightForm,
        graph: ir.Graph,
        read_weight: Callable[[str], Array],
    ) -> None:
        """Rewrite `graph` in place. `save` calls `read_weight` for the weights that lie outside the ONNX file."""
        super().__init__(name, precision, dialect, form, self._read_matrix, graph)
        self._read_weight = read_weight
        multiplied, casts = multiplications(graph), set[ir.Node]()
        for weight, value in list(graph.initializers.items()):
            tensor = value.const_value
            if not isinstance(tensor, ir.ExternalTensor):
                continue
            if weight in multiplied:
                inputs, outputs = shape_of(tensor)
                casts |= {node for node, _ in value.uses() if node.op_type == "Cast"}
                del graph.initializers[weight]
                multiplied[weight].replace_input_with(1, form.matrix(self, Matrix(weight, {weight: outputs}, inputs)))
            else:
                read, shape = partial(self._read_tensor, weight), ir.Shape(tensor.shape.numpy())
                self._weights[value] = Weight(read, tensor.dtype, shape, name=tensor.name)
        graph.remove(casts, safe=True)
        graph.sort()

    def _read_tensor(self, name: str) -> Any:
        return ir.Tensor(self._read_weight(name))

    def _read_matrix(self, name: str, shape: Sequence[int]) -> Array:
        # It is stored transposed.
        array = self._read_weight(name).T
        return array if array.dtype in (np.float16, np.float32) else array.astype(np.float32)


def read_graph(data: bytes) -> ir.Graph:
    """Return the graph of an ONNX file that an export wrote, from its bytes `data`."""
    return ir.from_proto(onnx.ModelProto.FromString(data)).graph


def multiplications(graph: ir.Graph) -> dict[str, ir.Node]:
    """Return the MatMul of each linear layer by the name of its matrix of floats, in the order of the nodes."""
    found = {}
    for node in graph:
        if node.op_type != "MatMul" or node.inputs[0] is None or node.inputs[0].name == _PIXELS:
            continue
        value = node.inputs[1]
        source = value.producer() if value is not None else None
        if source is not None and source.op_type == "Cast":
            value = source.inputs[0]
        if value is not None and value.is_initializer() and value.name is not None:
            found[value.name] = node
    return found


def shape_of(matrix: ir.TensorProtocol) -> tuple[int, int]:
    """Return the numbers of inputs and outputs of a linear layer's matrix."""
    inputs, outputs = matrix.shape.numpy()
    return inputs, outputs


_WANTED = ("tokens", "norms", "salience", "deepstack", "embeddings", "hidden_out", "logits")
"""Outputs of weight graphs that the next graph or the answer needs."""


class WeightGraphs:
    """The weight graphs of `bundle`, of which matrices will be stored in `forms`."""

    def __init__(self, bundle: Bundle, forms: WeightForms, threads: int) -> None:
        self._bundle, self._forms, self._threads = bundle, forms, threads
        self._dialect = load_dialect(bundle.manifest.dialect)

    def changes(self, graph: str) -> bool:
        return _form(graph, self._forms) != _form(graph, self._bundle.manifest.weights)

    def read(self, graph: str) -> ir.Graph:
        """Return the graph with its needed outputs only; raises what `Model.onnx` raises."""
        return _wanted(read_graph(Model.of_bundle(self._bundle, graph).onnx))

    def layers(self, graph: str) -> list[list[Layer]]:
        read = self.read(graph)
        layers = linear_layers(read).values()
        return [[layer for layer in layers if layer.value in subgraph.layer_inputs] for subgraph in split_graph(read)]

    def rewritten(self, graph: str, rounding: RoundingMethod) -> RewrittenGraph:
        """Return the graph with its matrices rounded by a rule; raises `UsageError` if one does not fit its form."""
        form = form_of(_form(graph, self._forms), self._forms.block_size, rounding=rounding)
        precision, model = PRECISIONS[self._bundle.manifest.precision], Model.of_bundle(self._bundle, graph)
        weights = {weight.name: weight for weight in model.weights}

        def read(name: str) -> Array:
            return model.weight(weights[name])

        return RewrittenGraph(graph, precision, self._dialect, form, read_graph(model.onnx), read)

    def file(self, graph: str) -> str:
        return self._bundle.manifest.graphs[graph].file

    def run(self, graph: str, feeds: Iterable[Tensors]) -> GraphRun:
        """Return a run of prompts through the graph of floats; raises what `Model.onnx` raises."""
        return self._run(self.read(graph), Model.of_bundle(self._bundle, graph).file.path.parent, feeds)

    def run_written(self, graph: str, root: Path, feeds: Iterable[Tensors]) -> GraphRun:
        path = root / self.file(graph)
        return self._run(_wanted(read_graph(path.read_bytes())), path.parent, feeds)

    def _run(self, graph: ir.Graph, folder: Path, feeds: Iterable[Tensors]) -> GraphRun:
        return GraphRun(
            graph, lambda part: GraphSession(part, self._dialect.IR_VERSION, folder, self._threads), feeds
        )


def _form(graph: str, forms: WeightForms) -> WeightsName:
    return forms.vision if graph == "vision" else forms.decoder


def _wanted(graph: ir.Graph) -> ir.Graph:
    graph.outputs[:] = [value for value in graph.outputs if value.name in _WANTED]
    return graph


class EncodedPrompt(NamedTuple):
    """A prompt about one picture, as the model takes it."""

    inputs: dict[str, Array]
    """The inputs of the graph `vision`."""
    layout: VisualLayout
    texts: list[list[int]]
    """Token ids before the picture and after it."""


def encode_prompts(bundle: Bundle, items: Iterable[Item], fit: Fit | None = None) -> list[EncodedPrompt]:
    """Encode pictures and questions for the model of `bundle`; raises `ImageError`, `PromptError`, `UsageError`.

    `fit` is how a picture becomes a square; None is the checkpoint's own way.
    """
    family, encoder = load_family(bundle.manifest, fit), PromptEncoder.of_bundle(bundle)
    prompts = []
    for item in items:
        picture = item.load_image()
        layout = family.layout(picture)
        texts = encoder.encode(["", item.question.prompt], [layout.texts]).texts
        prompts.append(EncodedPrompt(family.inputs(picture), layout, texts))
    return prompts


def weight_graphs(manifest: Manifest) -> list[str]:
    """Return the graphs that hold weights, in the order in which an unpruned request runs them."""
    decoders = [f"decoder_{segment}" for segment in range(len(manifest.segments))]
    return ["vision", *filter(None, [manifest.projector]), *decoders, "head"]


class ChainRun:
    """All prompts, each before the same graph."""

    def __init__(self, bundle: Bundle, prompts: Sequence[EncodedPrompt]) -> None:
        backend, embedding = load_backend("ort-cpu"), Embedding(bundle.files[EMBEDDING], bundle.manifest)
        between = load_family(bundle.manifest).between_rows
        self._prompts = [_steps(bundle.manifest, backend, embedding, between, prompt) for prompt in prompts]
        self.feeds: list[Tensors] = [next(prompt) for prompt in self._prompts]
        """The graph's inputs for each prompt; those of the head are the rows of the text after the picture."""
        self.logits: list[Array] = []
        """[vocab] for each prompt, after the head."""

    def advance(self, outputs: Iterable[Tensors]) -> None:
        """Go on to the next graph, with the outputs of this one for each prompt."""
        for number, (prompt, own) in enumerate(zip(self._prompts, outputs, strict=True)):
            try:
                self.feeds[number] = prompt.send(own)
            except StopIteration as done:
                self.logits.append(done.value)


def _steps(
    manifest: Manifest, backend: Backend, embedding: Embedding, between_rows: str | None, prompt: EncodedPrompt
) -> Generator[Tensors, Tensors, Array]:
    """Run an unpruned request: yield each graph's inputs, receive its outputs, and return the logits [vocab]."""
    tower = yield prompt.inputs
    tokens = tower["tokens"]
    if manifest.projector:
        tokens = (yield {"tokens": tokens})["embeddings"]
    features = TowerOutput.of(backend, {name: backend.tensor(array) for name, array in tower.items()})
    every = np.broadcast_to(np.arange(features.shape[1]), features.shape)
    encoded = EncodedPicture(backend.tensor(tokens), every, features.scores, features.deepstack)
    rows = lay_out(backend, embedding, between_rows, prompt.texts, [prompt.layout], [encoded], pruned=False)
    hidden, added = backend.numpy(rows.hidden), {name: backend.numpy(x) for name, x in rows.deepstack_inputs.items()}
    lm = manifest.language_model
    rotary = Rotary(lm.rope_theta, lm.head_dim, DTYPES[manifest.precision], lm.rope_sections, lm.rope_factor)
    cos, sin = rotary.tables(rows.on_host.positions.rows)
    for segment in range(len(manifest.segments)):
        past = _no_past(manifest, segment, rows.length)
        own = added if segment == 0 else {}
        hidden = (yield {"hidden": hidden, "cos": cos, "sin": sin, **own, **past})["hidden_out"]
    # A request runs the head on the last row only. The other rows are possible inputs too.
    return (yield {"hidden": hidden[:, rows.text]})["logits"][0]


def _no_past(manifest: Manifest, segment: int, rows: int) -> Tensors:
    """Return empty caches, with room for the new `rows` if the graph writes them in place."""
    room = rows if manifest.cache == "in-place" else 0
    past = [spec for spec in manifest.graphs[f"decoder_{segment}"].inputs if spec.name.startswith("past_")]
    shapes = [[size if isinstance(size, int) else room for size in spec.shape] for spec in past]
    return {spec.name: np.zeros(shape, spec.dtype) for spec, shape in zip(past, shapes, strict=True)}
