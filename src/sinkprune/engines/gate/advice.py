"""What to say of an engine that is refused: where it differs, by how much, and what to try."""

from __future__ import annotations

from sinkprune.contract.engines_manifest import EnginesManifest
from sinkprune.engines.gate.report import GateReport, GraphReport, OutputReport, TextReport


def refusal(graph: str, report: GraphReport, manifest: EnginesManifest) -> str:
    """The message for the engine of `graph`, which is past its limits."""
    name = report.refused or next(iter(report.outputs))
    output = report.outputs[name]
    library = f"{manifest.target} {manifest.library_version}"
    return (
        f"the engine of graph '{graph}', by {library}, differs from the ONNX graph in output '{name}': "
        f"{output.told}. "
        f"{_what_to_try(graph, report, output, manifest)}"
    )


def text_refusal(text: TextReport, manifest: EnginesManifest) -> str:
    """The message for a chain whose answer parts from the graphs' where it should not."""
    return (
        f"all engines pass alone, and what they say together, by {manifest.target} {manifest.library_version}, parts "
        f"from the ONNX graphs at token {text.same_tokens + 1} of budget '{text.budget}' of method '{text.method}': "
        f"a token less likely by {text.gap:.2g} standard deviations of the logits, and it may be by "
        f"{text.gap_limit:g}. Try another picture; if it parts there too, build with another version of the library, "
        "or from a bundle of a finer --precision or --weights."
    )


def first_refusal(report: GateReport, manifest: EnginesManifest) -> str | None:
    """The message for what was refused first, with how many more there are; None where all passed."""
    told = [refusal(graph, own, manifest) for graph, own in report.graphs.items() if own.refused is not None]
    told += [text_refusal(text, manifest) for text in report.texts if not text.passed]
    if not told:
        return None
    more = f" {len(told) - 1} more {'was' if len(told) == 2 else 'were'} refused." if len(told) > 1 else ""
    return told[0] + more


def _what_to_try(graph: str, report: GraphReport, output: OutputReport, manifest: EnginesManifest) -> str:
    on_gpu = manifest.target.startswith("tensorrt")
    if graph == "vision" and on_gpu:
        return (
            "fp16 vision towers have lost accuracy in silence on TensorRT 10.3: build with another version of the "
            "library, or export with --precision fp32 and run it on ort-cuda, ort-cpu or openvino."
        )
    if output.kind == "indices":
        return (
            "It keeps other tokens, and selection is in fp32 everywhere: build again, or with another version of the "
            "library."
        )
    if output.worst is None:
        return (
            "If its values exceed fp16 (65504), export with --precision fp32, or with --weights bf16 for openvino "
            "(openvino-gpu: run it with --compute fp32); if not, build again."
        )
    if report.rounding == "int8":
        return (
            "Build again; if it stays so, rows rounded to int8 are too coarse for this model: export with --weights "
            "bf16 or fp16" + ("." if on_gpu else ", or run it with --compute bf16 or fp32 where the backend can.")
        )
    if report.rounding == "bf16":
        return "Build again; if it stays so, bf16 is too coarse for this model: run it with --compute fp32."
    return "Build again, or with another version of the library."
