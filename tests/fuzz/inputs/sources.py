"""The sources of cases: an endless stream of each kind from one seed, and the corpus of earlier findings."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from random import Random

from fuzz.inputs import media
from fuzz.inputs.cases import SPECIAL_FILES, Case, Change, Content, SpecialFile, case_of
from fuzz.inputs.mutations import crossed, document_of, edits_of, wrong_bytes
from fuzz.subjects import Subjects

CORPUS = Path(__file__).parents[1] / "corpus"
_TEMPLATE, _TOKENIZER = "bundle/weights/chat_template.jinja", "bundle/weights/tokenizer.json"
_OF_CORPUS = {
    "templates": (("run:llava", _TEMPLATE),),
    "tokenizers": (("run:llava", _TOKENIZER), ("export:llava", "checkpoint/tokenizer.json")),
    "pictures": (("run:llava", "photo.jpg"),),
    "videos": (("video:qwen2_5_vl", "clip.mp4"),),
}
"""By folder of the corpus: the subjects and the files that each of its files replaces."""


def corpus() -> Iterator[tuple[str, Case]]:
    """Yield every case of the corpus with its name: files of the folders, and lines of `*.jsonl`."""
    for folder, targets in _OF_CORPUS.items():
        for path in sorted((CORPUS / folder).glob("[!.]*")):
            for subject, file in targets:
                yield f"{folder}/{path.name} {subject}", Case(subject, (Content(file, path.read_bytes()),))
    for path in sorted(CORPUS.glob("*.jsonl")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            yield f"{path.name}:{number}", case_of(json.loads(line))


def manifests(subjects: Subjects, random: Random) -> Iterator[Case]:
    """Yield each wrong value of each field of `bundle.json` and `engines.json`, then two at once."""
    bundles = dict.fromkeys(("run", "build", "doctor"), "bundle/bundle.json")
    tasks = {**bundles, "engines": "engines/engines.json"}
    files = [(name, tasks[name.partition(":")[0]]) for name in _of(subjects, *tasks)]
    pinned = [(name, file) for name in _of(subjects, "pinned")[:1] for file in sorted(set(tasks.values()))]
    return _json_cases(subjects, [*files, *pinned], random)


def checkpoints(subjects: Subjects, random: Random) -> Iterator[Case]:
    """Yield each wrong value of each field of a checkpoint's JSON files, then two at once."""
    return _json_cases(subjects, _checkpoint_files(subjects, ".json"), random)


def tensors(subjects: Subjects, random: Random) -> Iterator[Case]:
    """Yield safetensors files with wrong values in their headers, or with damaged headers."""
    files = [
        *((name, "bundle/weights/embedding.safetensors") for name in _of(subjects, "run")),
        *_checkpoint_files(subjects, ".safetensors"),
    ]
    while True:
        name, file = random.choice(files)
        path = subjects.folder(name) / file
        if random.random() < 0.5:
            yield Case(name, (random.choice(edits_of(path, file)),))
        else:
            # The header comes first; after it there are only numbers.
            data, front = path.read_bytes(), 4096
            yield Case(name, (Content(file, wrong_bytes(data[:front], random) + data[front:]),))


def texts(subjects: Subjects, random: Random) -> Iterator[Case]:
    """Yield damaged chat templates."""
    names = _of(subjects, "run", "run", "run", "export")
    while True:
        name = random.choice(names)
        root = "checkpoint" if name.startswith("export") else "bundle/weights"
        data = (subjects.folder(name) / "bundle/weights/chat_template.jinja").read_bytes()
        yield Case(name, (Content(f"{root}/chat_template.jinja", wrong_bytes(data, random)),))


def pictures(subjects: Subjects, random: Random) -> Iterator[Case]:
    """Yield pictures of every format, intact and damaged."""
    yield from _damaged(_of(subjects, "run"), "photo.jpg", list(media.pictures().values()), random)


def clips(subjects: Subjects, random: Random) -> Iterator[Case]:
    """Yield clips of every format, intact and damaged."""
    yield from _damaged(_of(subjects, "video"), "clip.mp4", list(media.clips().values()), random)


def graphs(subjects: Subjects, random: Random) -> Iterator[Case]:
    """Yield damaged ONNX graphs; `test_onnx_file.py` has those with loops and false interfaces."""
    names = _of(subjects, "run", "run", "build", "engines", "pinned")
    while True:
        name = random.choice(names)
        root = "bundle" if name.startswith(("run", "build")) else "engines"
        file = random.choice(_files(subjects, name, root, ".onnx"))
        data = (subjects.folder(name) / file).read_bytes()
        yield Case(name, (Content(file, wrong_bytes(data, random)),))


def special_files(subjects: Subjects, random: Random) -> Iterator[Case]:
    """Yield subjects with a file replaced by something that is no file to read."""
    roots = {"run": "bundle", "export": "checkpoint", "engines": "engines", "build": "bundle"}
    places = [
        *((n, file) for n in _of(subjects, *roots) for file in _files(subjects, n, roots[n.partition(":")[0]], "")),
        *((n, "photo.jpg") for n in _of(subjects, "run")),
        *((n, "clip.mp4") for n in _of(subjects, "video")),
    ]
    # A checkpoint's weights are mapped as a whole, and a case has less address space than a sparse file has.
    cases = [
        Case(name, (SpecialFile(file, kind),))
        for name, file in places
        for kind in SPECIAL_FILES
        if not (kind == "sparse" and file.startswith("checkpoint/") and file.endswith(".safetensors"))
    ]
    while True:
        random.shuffle(cases)
        yield from cases


Source = Callable[[Subjects, Random], Iterator[Case]]
SOURCES: dict[str, tuple[Source, int]] = {
    "manifests": (manifests, 8),
    "checkpoints": (checkpoints, 4),
    "tensors": (tensors, 2),
    "texts": (texts, 4),
    "pictures": (pictures, 4),
    "clips": (clips, 3),
    "graphs": (graphs, 2),
    "special": (special_files, 2),
}
"""Every kind, and its number of cases in each turn."""


def endless(subjects: Subjects, seed: int, kinds: Iterable[str] = SOURCES) -> Iterator[tuple[str, Case]]:
    """Yield cases of all `kinds` in turns, each with its kind; the same for the same seed."""
    streams = {kind: SOURCES[kind][0](subjects, Random(f"{seed} {kind}")) for kind in kinds}
    while True:
        for kind, stream in streams.items():
            for _ in range(SOURCES[kind][1]):
                yield from ((kind, case) for case in [next(stream, None)] if case)


def _json_cases(subjects: Subjects, files: list[tuple[str, str]], random: Random) -> Iterator[Case]:
    documents = {place: document_of(subjects.folder(place[0]) / place[1]) for place in files}
    edits = {place: edits_of(subjects.folder(place[0]) / place[1], place[1]) for place in files}
    every = list(chain.from_iterable(((place[0], edit) for edit in edits[place]) for place in files))
    random.shuffle(every)
    for name, edit in every:
        yield Case(name, (edit,))
    while True:
        place = random.choice(files)
        more: list[Change] = [*random.choices(edits[place], k=2), crossed(place[1], documents[place], random)]
        yield Case(place[0], tuple(random.sample(more, random.choice((1, 2)))))


def _damaged(names: list[str], file: str, every: list[bytes], random: Random) -> Iterator[Case]:
    """Yield each of `every` intact and then a damaged file; then damaged files only."""
    whole = iter(every)
    while names:
        for data in [*islice(whole, 1), wrong_bytes(random.choice(every), random, random.choice(every))]:
            yield Case(random.choice(names), (Content(file, data),))


def _of(subjects: Subjects, *tasks: str) -> list[str]:
    """Return the names of the subjects of these tasks, one task after the other."""
    return [name for task in tasks for name in subjects.names if name.partition(":")[0] == task]


def _files(subjects: Subjects, name: str, root: str, suffix: str) -> list[str]:
    """Return the files of that suffix below a part of a subject."""
    folder = subjects.folder(name)
    found = (path for path in sorted((folder / root).rglob(f"*{suffix}")) if path.is_file())
    return [str(path.relative_to(folder)) for path in found]


def _checkpoint_files(subjects: Subjects, suffix: str) -> list[tuple[str, str]]:
    """Return the files of that suffix of every checkpoint, each with the name of its subject."""
    names = _of(subjects, "export")
    return [(name, file) for name in names for file in _files(subjects, name, "checkpoint", suffix)]
