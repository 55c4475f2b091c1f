"""The page at `/` in headless Chromium, from a dropped picture to the comparison with the unpruned model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tests.serving.test_server import served

from sinkprune import Pipeline, demo
from sinkprune.demo.write_scenes import write_scenes
from sinkprune.export.command import main as export
from sinkprune.runtime.overlay import token_map
from sinkprune.serving.responses import Completion
from support.programs.browser import Browser, opened_browser

MARKUP = '<img src=x onerror="document.body.id=1"><script>document.body.id=2</script>'
pytestmark = pytest.mark.slow


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with opened_browser(tmp_path / "user-data") as browser:
        yield browser


def count(browser: Browser, selector: str) -> int:
    return int(browser.run("return document.querySelectorAll(arguments[0]).length", selector))


def choose(browser: Browser, *files: Path) -> None:
    browser.type("#files", "\n".join(map(str, files)))
    names = [file.name for file in files]
    script = "return [...document.querySelectorAll('figcaption')].map((each) => each.textContent)"
    browser.wait(lambda: browser.run(script) == names)


def chosen_budget(browser: Browser, pipe: Pipeline) -> str:
    """Return the budget that the page chose, once it has all of them."""
    budgets = ["the server's own", "none", *pipe.bundle.manifest.plans["sinkpruner"]]
    options = "return [...document.querySelectorAll('option')].map((each) => each.text)"
    browser.wait(lambda: browser.run(options) == budgets)
    chosen = str(browser.run("return document.querySelector('#budget').selectedOptions[0].text"))
    assert chosen in budgets[2:]
    return chosen


def ask(browser: Browser, question: str) -> None:
    """Ask a question, and wait for its answer and its last step."""
    before = count(browser, "#questions tr")
    browser.type("#question", question, instead=True)
    browser.click("#ask")
    browser.wait(lambda: browser.text("#ask") == "Ask" and count(browser, "#questions tr") > before)
    browser.wait(
        lambda: browser.run("return document.querySelector('#steps label:last-child input')?.checked ?? true")
    )


def test_a_question_its_tokens_times_and_a_second_question(
    browser: Browser, pipe: Pipeline, photo: Image.Image, photo_file: Path
) -> None:
    with served(pipe) as address, Image.open(photo_file) as opened:
        browser.open(f"{address}/")
        budget = chosen_budget(browser, pipe)
        browser.click("#ask")
        browser.wait(lambda: browser.text("#problem").startswith("no picture was given."))
        assert browser.text("#answer") == browser.text("#summary") == ""
        choose(browser, photo_file)
        ask(browser, "What is on the table?")
        assert browser.text("#problem") == ""
        expected = pipe.generate(opened.convert("RGB"), "What is on the table?", budget=budget)
        assert browser.text("#answer") == expected.text
        classes = token_map("sinkpruner", expected.kept).classes
        legend = browser.run("return [...document.querySelectorAll('li')].map((each) => each.textContent)")
        assert legend == [each.text for each in classes]
        left = browser.run("return [...document.querySelectorAll('#steps b')].map((each) => +each.textContent)")
        layers = expected.tokens_per_layer
        assert left == [
            expected.visual_tokens,
            layers[0],
            *(layers[layer + 1] for layer in expected.kept.after_stage),
        ]
        check_colours(browser, expected.kept.layout.boxes, classes)

        ask(browser, "Is there a cup?")
        assert "1 of 1 pictures and" in browser.text("#summary")
        browser.click("#compare")
        browser.wait(lambda: "Unpruned, the first token takes" in browser.text("#compared"))
        assert browser.text("#keys") == f"{budget}none" and count(browser, "#bars .bar") == 16
        # The whole unpruned request was timed: its tower ran.
        assert browser.text("#bars tr:nth-child(2)").count("from the session") == 1
        # An earlier answer is shown with its own question.
        browser.click("#questions button")
        assert browser.run("return document.querySelector('#question').value") == "What is on the table?"
        assert browser.errors() == []


def check_colours(browser: Browser, boxes: Any, classes: Any) -> None:
    """Compare the middle of each token on the canvas before and after pruning with its class's colour."""
    script = """
        const [width, boxes] = arguments, canvas = document.querySelector("canvas"), scale = canvas.width / width;
        const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        return boxes.map(([left, top, right, bottom]) => {
            const [x, y] = [Math.floor((left + right) / 2 * scale), Math.floor((top + bottom) / 2 * scale)];
            return [...data.subarray(4 * (y * canvas.width + x)).subarray(0, 3)];
        });"""
    after = browser.run(script, 600, boxes.tolist())
    browser.run("document.querySelector('#steps input').click()")
    before = browser.run(script, 600, boxes.tolist())
    for each in classes:
        for token in each.tokens.tolist() if each.fill is not None else ():
            below, shown = before[token], after[token]
            if not each.fill:
                assert shown == pytest.approx(below, abs=2), each.name
            else:
                grey = [s - c * each.fill for s, c in zip(shown, each.colour, strict=True)]
                assert max(grey) - min(grey) <= 6


def test_the_screenshot_of_the_docs(browser: Browser, tmp_path: Path) -> None:
    """`make screenshot` copies it to docs/server-page.png."""
    assert export([str(Path(demo.__file__).parent / "pocket"), "-o", str(tmp_path / "pocket")]) == 0
    write_scenes(tmp_path, 3)
    with served(Pipeline.load(tmp_path / "pocket"), name="pocket") as address:
        browser.open(f"{address}/")
        browser.wait(lambda: count(browser, "option") > 2)
        browser.run("document.querySelector('#budget').value = arguments[0]", "pocket:retain-64")
        choose(browser, tmp_path / "scene-2.png")
        ask(browser, "What colour is the star?")
        ask(browser, "What is written on the purple plate?")
        assert browser.text("#answer") == "OPEN"
        browser.click("#compare")
        browser.wait(lambda: "Unpruned, the first token takes" in browser.text("#compared"))
        browser.screenshot(tmp_path / "server-page.png", 1100)
    with Image.open(tmp_path / "server-page.png") as drawn:
        assert drawn.width == 1100


def test_with_a_key_markup_in_answers_and_names_stays_text(
    browser: Browser, pipe: Pipeline, photo: Image.Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = Completion.chunks
    monkeypatch.setattr(Completion, "chunks", lambda self, text, *rest, **more: chunks(self, MARKUP, *rest, **more))
    file = tmp_path / "<img src=x onerror=document.body.id=3>.png"
    photo.save(file)
    with served(pipe, name="<img src=x onerror=document.body.id=4>", api_key="secret") as address:
        browser.open(f"{address}/")
        browser.wait(lambda: "the API key is missing or wrong" in browser.text("#problem"))
        browser.type("#key", "secret\ue004")
        chosen_budget(browser, pipe)
        choose(browser, file)
        ask(browser, MARKUP)
        browser.click("#compare")
        browser.wait(lambda: MARKUP in browser.text("#compared"))
        assert browser.text("#answer").startswith(MARKUP) and MARKUP in browser.text("#questions")
        assert browser.text("#name").startswith("<img src=x")
        assert count(browser, "img") == 0 and count(browser, "script") == 1
        assert browser.run("return document.body.id") == ""
        # The policy rejects what the page does not do: texts as HTML, and scripts that were added.
        with pytest.raises(AssertionError, match="TrustedHTML"):
            browser.run("document.body.innerHTML = '<b>'")
