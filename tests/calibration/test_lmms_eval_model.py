"""The model class for `lmms-eval`.

The harness brings some fifty packages along and is no part of the development environment. `make test-harness`
installs what it needs and runs the test that runs it for real, with a small local task. The other tests stand on a
stand-in for the harness's base class where it is not installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from PIL import Image
from skimage import data

from sinkprune import Pipeline, VideoFile
from sinkprune.contract.errors import ImageError, PromptError, PruningError, UsageError
from support.models.video_files import write_video

HAS_HARNESS = importlib.util.find_spec("lmms_eval") is not None
MODULE = "sinkprune.calibration.evaluation.lmms_eval_model"
QUESTION = "What is this?"

TASK = """\
task: sinkprune_local
dataset_path: json
dataset_kwargs:
  data_files:
    test: {questions}
test_split: test
output_type: generate_until
doc_to_visual: !function functions.doc_to_visual
doc_to_text: "question"
doc_to_target: "answer"
process_results: !function functions.process_results
generation_kwargs:
  max_new_tokens: 6
metric_list:
  - metric: right
    aggregation: mean
    higher_is_better: true
"""
FUNCTIONS = """\
from PIL import Image

def doc_to_visual(doc):
    return [Image.open(doc["image"]).convert("RGB")]

def process_results(doc, results):
    return {"right": float(results[0] == doc["answer"].strip())}
"""


class FakeLmms:
    """Stands in for `lmms_eval.api.model.lmms`."""

    def __init__(self) -> None:
        self.task_dict: dict[str, Any] = {}


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The adapter, on the harness's base class or, where there is none, on the stand-in."""
    if not HAS_HARNESS:
        for name in ("lmms_eval", "lmms_eval.api", "lmms_eval.api.model"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setattr(sys.modules["lmms_eval.api.model"], "lmms", FakeLmms, raising=False)
    yield importlib.import_module(MODULE)
    sys.modules.pop(MODULE)


@pytest.fixture
def model(module: ModuleType, bundle: Callable[..., Path], photo: Image.Image) -> Any:
    """A small bundle at a budget, with a task whose first document has one image, the second two, the third none."""
    model = module.SinkpruneModel(str(bundle("gqa-112")), budget="retain-32", batch_size="1", device="cpu")
    model.task_dict["own"] = {"test": [[photo], [photo, photo], []]}
    return model


def request(document: int = 0, **settings: Any) -> SimpleNamespace:
    """A request as the harness makes it for a task of simple models."""
    return SimpleNamespace(args=(QUESTION, settings, lambda images: images, document, "own", "test"))


def test_replies_are_those_of_the_bundle_at_the_budget(
    model: Any, pipeline: Callable[..., Pipeline], photo: Image.Image
) -> None:
    said = [
        pipeline("gqa-112").generate(photo, QUESTION, budget=budget, max_new_tokens=6).text
        for budget in ("retain-32", "none")
    ]
    assert said[0] != said[1]
    greedy = {"max_new_tokens": 6, "do_sample": False, "temperature": 0.7, "top_p": None, "num_beams": 1}
    assert model.generate_until([request(**greedy), request(max_new_tokens=6)]) == [said[0]] * 2
    middle = said[0][2:4]
    cut = said[0].split(middle)[0]
    assert model.generate_until([request(max_new_tokens=6, until=["", middle, "never said"])]) == [cut]
    assert model.generate_until([request(max_new_tokens=6, until=middle)]) == [cut]


def test_several_images_stand_where_the_task_puts_them(
    module: ModuleType, bundle: Callable[..., Path], photo: Image.Image
) -> None:
    path, pictures = bundle("gqa-112", max_images=2), [photo, photo.rotate(180)]
    model, own = module.SinkpruneModel(str(path), budget="retain-64"), Pipeline.load(path)
    model.task_dict["own"] = {"test": [pictures]}
    texts = {"What differs?": ("", "", "What differs?"), "A <image> b <image> c?": ("A ", " b ", " c?")}
    for context, around in texts.items():
        asked = request(max_new_tokens=6)
        asked.args = (context, *asked.args[1:])
        said = own.generate(pictures, around, budget="retain-64", max_new_tokens=6).text
        assert model.generate_until([asked]) == [said]


def test_videos_are_files(module: ModuleType, bundle: Callable[..., Path], tmp_path: Path) -> None:
    path = bundle("qwen-tied", max_frames=4)
    file = write_video(tmp_path / "clip.mp4", [Image.new("RGB", (64, 64), (60 * turn, 9, 9)) for turn in range(4)])
    model = module.SinkpruneModel(str(path), budget="prune-66.7")
    model.task_dict["own"] = {"test": [[str(file)]]}
    said = Pipeline.load(path).generate(VideoFile(file), QUESTION, budget="prune-66.7", max_new_tokens=6)
    assert model.generate_until([request(max_new_tokens=6)]) == [said.text]


def test_what_a_bundle_cannot_do_is_refused(model: Any) -> None:
    model.task_dict["own"]["test"].append([b"a frame"])
    for asked, error, said in (
        (request(1), PromptError, "2 images"),
        (request(2), PruningError, "no picture"),
        (request(3), ImageError, r"question 3 of task 'own'.*type bytes, expected images"),
        (request(num_beams=5), UsageError, "5 beams"),
    ):
        with pytest.raises(error, match=said):
            model.generate_until([asked])
    for other, said in ((model.loglikelihood, "generate_until"), (model.generate_until_multi_round, "single round")):
        with pytest.raises(UsageError, match=said):
            other([])


@pytest.mark.harness
def test_a_local_task_in_the_harness(
    bundle: Callable[..., Path], pipeline: Callable[..., Pipeline], tmp_path: Path
) -> None:
    """Four photos; for two of them the right answer is the bundle's own at that budget."""
    lines = []
    for number, name in enumerate(("coffee", "astronaut", "chelsea", "rocket")):
        photo = Image.fromarray(getattr(data, name)()).resize((200, 150))
        photo.save(tmp_path / f"{name}.png")
        said = pipeline("gqa-112").generate(photo, QUESTION, budget="retain-64", max_new_tokens=6).text
        answer = said if number % 2 else "not what it says"
        lines.append({"image": str(tmp_path / f"{name}.png"), "question": QUESTION, "answer": answer})
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    task = tmp_path / "task"
    task.mkdir()
    (task / "local.yaml").write_text(TASK.format(questions=tmp_path / "questions.jsonl"))
    (task / "functions.py").write_text(FUNCTIONS)
    command = [
        *(sys.executable, "-m", "lmms_eval", "--model", "sinkprune"),
        *("--model_args", f"bundle={bundle('gqa-112')},budget=retain-64"),
        *("--tasks", "sinkprune_local", "--include_path", task, "--output_path", tmp_path / "out"),
    ]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run(
        [*map(str, command)], cwd=tmp_path, env=offline, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    (results,) = (tmp_path / "out").rglob("*results.json")
    assert json.loads(results.read_text())["results"]["sinkprune_local"]["right,none"] == 0.5
