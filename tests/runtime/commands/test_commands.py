"""`sinkprune-run` and `sinkprune-profile`: what they print and write, and how they refuse."""

from __future__ import annotations

import io
import json
import math
import os
import signal
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from sinkprune import Answer, Pipeline, Stream
from sinkprune.runtime.commands import run as command
from sinkprune.runtime.steps.answer import PARTS
from sinkprune.runtime.system import usable_cores
from support.programs.commands import Terminal, assert_refused, run, succeed

Bundles = Callable[..., Path]
ASK = ("--prompt", "What is in the picture?")


def test_run_prints_the_answer_and_writes_it_as_json(bundle: Bundles, photo_file: Path, tmp_path: Path) -> None:
    arguments = (bundle("mha-336"), "--image", photo_file, *ASK, "--budget", "retain-64", "--max-new-tokens", 5)
    plain = run("sinkprune-run", *arguments, "--json", tmp_path / "answer.json")
    assert plain.code == 0 and plain.stderr.startswith(f"{photo_file}: the model sees 67 % of the picture ")
    *_, timings, cold = plain.stdout.splitlines()
    assert cold.startswith("cold: the first request of a process")
    assert timings.endswith("visual tokens 576 -> 129 -> 68; cut off after 5 tokens (--max-new-tokens)")
    answer = json.loads(run("sinkprune-run", *arguments, "--json").stdout)
    assert plain.stdout.startswith(answer["text"] + "\n[retain-64] TTFT ")
    assert json.loads((tmp_path / "answer.json").read_text())["text"] == answer["text"]
    assert (answer["visual_tokens"], answer["kept_after_sanitizer"], answer["cold"]) == (576, 129, True)
    assert answer["tokens_per_layer"] == [129, 68, 68, 68, 68, 68]
    assert set(answer["ms"]) == set(PARTS)
    assert answer["kv_bytes"] == 2 * 64 * 4 * sum(n + answer["prompt_tokens"] for n in answer["tokens_per_layer"])
    # Python logs the same.
    own = Pipeline.load(bundle("mha-336")).generate(photo_file, ASK[1], budget="retain-64", max_new_tokens=5)
    logged = json.loads(json.dumps(own.as_json()))
    assert {**answer, "ms": None} == {**answer, **logged, "ms": None}
    assert answer.keys() - logged.keys() == {"backend", "captured", "precision", "load_ms", "memory", "notes", "cold"}


def test_profile_report_has_every_field_and_adds_up(bundle: Bundles, photo_file: Path, tmp_path: Path) -> None:
    report_file, plot = tmp_path / "profile.json", tmp_path / "profile.png"
    outcome = succeed(
        "sinkprune-profile",
        *(bundle("mha-336"), "--image", photo_file, *ASK, "--budgets", "retain-128,retain-64"),
        *("--new-tokens", 3, "--repeat", 3, "--json", report_file, "--plot", plot),
    )
    assert "retain-64" in outcome.stdout
    with Image.open(plot) as drawn:
        assert drawn.width > 800
    report = json.loads(report_file.read_text())
    assert {"backend", "precision", "prompt_tokens", "threads", "versions", "machine"} <= set(report)
    assert list(report["budgets"]) == ["none", "retain-128", "retain-64"]
    base = report["budgets"]["none"]
    for budget in report["budgets"].values():
        assert set(budget["ms"]) == set(PARTS)
        ms = {part: spread["median"] for part, spread in budget["ms"].items()}
        assert all(spread["p95"] >= spread["median"] >= 0 for spread in budget["ms"].values())
        assert ms["select"] < ms["prefill"] < ms["ttft"] < ms["latency"]
        assert math.isclose(budget["speedup"]["ttft"], base["ms"]["ttft"]["median"] / ms["ttft"])
        assert math.isclose(budget["flops_speedup"]["prefill"], base["flops"]["prefill"] / budget["flops"]["prefill"])
        assert math.isclose(
            budget["efficiency"]["prefill"], budget["speedup"]["prefill"] / budget["flops_speedup"]["prefill"]
        )
        assert budget["flops"]["ttft"] > budget["flops"]["prefill"]
        assert budget["peak_rss_bytes"] > 50e6
        assert math.isclose(budget["decode_tokens_per_s"], 1e3 / ms["per_token"])
    assert base["tokens_per_layer"] == [576] * 6
    assert base["kept_after_sanitizer"] == base["visual_tokens"] == 576
    assert report["budgets"]["retain-64"]["tokens_per_layer"] == [129, 68, 68, 68, 68, 68]
    assert report["budgets"]["retain-64"]["kept_after_sanitizer"] == 129
    arguments = (bundle("gqa-112"), "--image", photo_file, *ASK, "--budgets", "none", "--repeat", 1)
    report = json.loads(run("sinkprune-profile", *arguments, "--new-tokens", 1, "--json").stdout)
    only = report["budgets"]["none"]
    assert only["ms"]["per_token"] is only["decode_gb_per_s"] is None


@pytest.mark.parametrize("command", ["sinkprune-run", "sinkprune-profile"])
def test_bad_questions_are_refused_before_anything_is_loaded(
    command: str, bundle: Bundles, photo_file: Path, tmp_path: Path
) -> None:
    good, url = bundle("gqa-112"), "https://example.com/a.jpg"
    budget = "--budget" if command == "sinkprune-run" else "--budgets"
    image = ("--image", photo_file)
    # Also on a terminal, names move no cursor.
    text = tmp_path / "\x1b]0;owned\x07\nphoto.jpg"
    text.write_text("no image at all")
    cases: list[tuple[tuple[object, ...], str]] = [
        ((good, "--image", text, *ASK), r"\x1b]0;owned\x07\nphoto.jpg': the image has no known format"),
        ((good, "--image", tmp_path / "no.jpg", *ASK), "no.jpg': found no such file"),
        ((good, "--image", url, *ASK), f"'{url}' is a URL; download it first"),
        ((url, *image, *ASK), "is a URL, expected a bundle"),
        ((tmp_path, *image, *ASK), "not a bundle"),
        ((good, *image, "--prompt", "{image} or {image}?"), "2 places for images, and there is"),
        ((good, *image * 2, "--prompt", "What?"), "2 images, expected at most 1"),
        ((good, *image, "--prompt", "  "), "prompt is empty"),
        ((good, *image, "--prompt", "W\udcff?"), "not valid UTF-8"),
        ((good, *image, "--prompt", "why " * 900), "too long"),
        ((good, *image, *ASK, "--threads", 5000), "threads is 5000"),
        ((good, *image, *ASK, budget, "retain-65"), "retain-65"),
        ((good, *image, *ASK, "--method", "magic"), "magic"),
        ((good, *image, *ASK, "--backend", "ort-cuda"), "CUDAExecutionProvider"),
    ]
    for words, said in cases:
        assert_refused(run(command, *words), said)


def test_output_files_are_checked_before_anything_is_loaded(
    bundle: Bundles, photo_file: Path, tmp_path: Path
) -> None:
    arguments = (bundle("gqa-112"), "--image", photo_file, *ASK)
    overlay = ("--budget", "retain-64", "--overlay")
    for name, words, said in (
        ("run", (*overlay, tmp_path / "x.txt"), ".txt"),
        ("run", (*overlay, tmp_path / "no" / "x.png"), "there is no folder"),
        ("run", ("--overlay", tmp_path / "x.png"), "--budget"),
        ("run", (*overlay, photo_file), "would be overwritten, and it is read"),
        ("run", (*overlay, bundle("gqa-112") / "x.png"), "lies in"),
        ("profile", ("--plot", tmp_path / "x.bmp"), ".bmp"),
    ):
        assert_refused(run(f"sinkprune-{name}", *arguments, *words), said)
    assert list(tmp_path.iterdir()) == []


def test_run_notes_the_options_that_changed_nothing(bundle: Bundles, photo_file: Path) -> None:
    ask = ("sinkprune-run", bundle("mha-336"), "--image", photo_file, *ASK, "--max-new-tokens", 2, "--threads")
    assert "note:" not in run(*ask, 1, "--seed", 1, "--temperature", 0.5).stderr
    cores = usable_cores()
    noted = succeed(*ask, cores + 1, "--seed", 1, "--top-p", 0.9)
    *_, options, threads = noted.stderr.splitlines()
    assert options.startswith("note: --seed and --top-p changed nothing") and f"Give --threads {cores}." in threads


def test_the_answer_so_far_is_reported(
    bundle: Callable[..., Path], photo_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After Ctrl-C at the fifth token."""
    chose = command._TokenCount.chose

    def pressing(observer: Any, token: int, logits: Any) -> None:
        chose(observer, token, logits)
        if observer._count == 5:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(command._TokenCount, "chose", pressing)
    report = tmp_path / "x.json"
    words = ("--prompt", "What?", "--max-new-tokens", 40, "--budget", "retain-64", "--json", report)
    ask = ("sinkprune-run", bundle("gqa-112"), "--image", photo_file, *words)
    outcome = run(*ask)
    assert outcome.code == 130 and "[retain-64] TTFT" in outcome.stdout
    found = json.loads(report.read_text())
    count = len(found["token_ids"])
    assert found["finish"] == "cancelled" and count in (5, 6) and found["ms"]["ttft"] > 0
    assert outcome.stderr.endswith(f"interrupted; the answer has {count} tokens so far.\n")
    report.write_text("precious")
    assert f"Earlier files stay; these results are in '{tmp_path}/x.interrupted.json'." in run(*ask).stderr
    assert report.read_text() == "precious" and (tmp_path / "x.interrupted.json").exists()


def test_images_stand_where_the_prompt_has_places(
    bundle: Bundles, pipeline: Callable[..., Pipeline], photo: Image.Image, tmp_path: Path
) -> None:
    files = [tmp_path / "before.png", tmp_path / "after.png"]
    photo.save(files[0])
    photo.rotate(180).resize((200, 300)).save(files[1])
    root = bundle("gqa-112", "fp32", ("retain-64",), max_images=3)
    pieces = ["Before: ", " and after: ", ". What has changed?"]

    def asked(prompt: str) -> Any:
        words = ("--image", files[0], "--image", files[1], "--prompt", prompt, "--budget", "retain-64")
        return json.loads(run("sinkprune-run", root, *words, "--json", "--max-new-tokens", 8).stdout)

    within, in_front = asked("{image}".join(pieces)), asked(pieces[2])
    pipe = pipeline("gqa-112", "fp32", ("retain-64",), max_images=3)
    expected = pipe.generate([*files], pieces, budget="retain-64", max_new_tokens=8)
    assert (within["token_ids"], within["visual_tokens"]) == (expected.token_ids, 128)
    assert within["tokens_per_layer"] == expected.tokens_per_layer
    assert in_front["prompt_tokens"] < within["prompt_tokens"]
    # LLaVA's template has one place for images.
    assert "moved no image" in str(within["notes"]) and "moved no image" not in str(in_front["notes"])


OUTPUT = "a\x1b[2Jb\n\tc\r\x9b1m"


@pytest.mark.parametrize(("stream", "shown"), [(io.StringIO, OUTPUT), (Terminal, "a\\x1b[2Jb\n\tc\\r\\x9b1m")])
def test_an_answer_moves_no_cursor(
    stream: type[io.StringIO], shown: str, bundle: Bundles, photo_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rest = Stream.rest

    def answer_after_said(answering: Stream, on_text: Callable[[str], None]) -> Answer:
        on_text(OUTPUT)
        return rest(answering, on_text)

    monkeypatch.setattr(Stream, "rest", answer_after_said)
    arguments = (bundle("gqa-112"), "--image", photo_file, "--prompt", "What is this?", "--max-new-tokens", 2)
    with redirect_stdout(stream()) as stdout:
        assert command.main([*map(str, arguments)]) == 0
    assert stdout.getvalue().startswith(shown)
