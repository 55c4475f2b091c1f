"""The recommendation: the best row of the table that findings allow, or what to do first."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from sinkprune.jetson.fit import FormFit, ModelFit, best_form, recommend
from support.programs.doctor_runs import doctor, preset, set_python, told
from support.stand_ins.board_trees import changed, orin_nano_jetpack_6_2


def chosen(model: ModelFit) -> tuple[str, str] | None:
    """The form and the budget of the best choice."""
    best = best_form(model)
    return (best[0].decoder_form, best[1]) if best else None


def fitting(form: FormFit, fits: bool) -> FormFit:
    """The form, which fits at retain-192 or only at retain-32."""
    budgets = {name: replace(one, fits=fits or name == "retain-32") for name, one in form.budgets.items()}
    return replace(form, budgets=budgets)


def test_the_best_choice_answers_soonest_at_the_largest_budget() -> None:
    assert chosen(preset("llava-1.1b")) == ("int4", "retain-192")
    # Without a datasheet, the fewest bytes win.
    assert chosen(preset("llava-1.1b", None)) == ("int4", "retain-192")
    # Where one form alone fits at the largest budget, a quicker one at a smaller budget is no choice.
    model = preset("llava-1.1b")
    forms = tuple(fitting(form, form.decoder_form == "fp16") for form in model.forms)
    assert chosen(replace(model, forms=forms)) == ("fp16", "retain-192")
    assert chosen(preset("llava-1.5-13b", usable=7_150_000_000)) is None


def test_an_added_budget_may_be_the_largest_of_a_folder_that_runs_as_it_is() -> None:
    model = preset("llava-1.1b")
    rows = {name: rows for name, rows in model.rows.items() if name != "retain-192"} | {
        "in-60": model.rows["retain-192"]
    }
    forms = tuple(replace(one, budgets={**one.budgets, "in-60": one.budgets["retain-192"]}) for one in model.forms)
    own = tuple(replace(one, exported=one is forms[0]) for one in forms)
    folder = replace(model, kind="bundle", rows=rows, forms=own)
    found = recommend(folder, as_it_is=True)
    assert found is not None and (found.as_it_is, found.budget) == (True, "in-60")
    # An export makes no added budget.
    found = recommend(folder, as_it_is=False)
    assert found is not None and (found.as_it_is, found.budget, found.weights) == (False, "retain-128", "int4")


def test_what_cannot_be_built_is_no_choice() -> None:
    model = preset("llava-1.1b", usable=8 << 30)
    int4 = model.forms[-1]
    assert int4.build is not None and int4.build.fits
    too_large = replace(int4, build=replace(int4.build, fits=False))
    assert chosen(replace(model, forms=(*model.forms[:-1], too_large))) == ("int8", "retain-192")
    # A bundle runs on a processor as it is.
    on_processor = replace(model, forms=(too_large,), backend="ort-cpu")
    assert chosen(on_processor) == ("int4", "retain-192")


def test_the_command_that_a_stop_forbids_is_not_printed(tmp_path: Path) -> None:
    """The page has what to do first, and the recommendation for afterwards."""
    root = orin_nano_jetpack_6_2(tmp_path)
    report = told("--root", root, "llava-1.1b")
    assert report["next"] == []
    assert report["first"] == ["make the environment again: python3.10 -m venv --system-site-packages .venv"]
    assert report["recommendations"][0]["weights"] == "int4"
    page = doctor("--root", root, "llava-1.1b").stdout
    assert "First:\n  make the environment again" in page
    assert "Next:" not in page and "sinkprune-export" not in page and "sinkprune-build" not in page


def test_a_bundle_of_another_dialect_is_exported_again(
    monkeypatch: pytest.MonkeyPatch, bundle: Callable[..., Path], tmp_path: Path
) -> None:
    """The printed command fixes the finding about the bundle."""
    set_python(monkeypatch, "3.10.12")
    path = bundle("mha-336", "fp16")
    report = told("--root", orin_nano_jetpack_6_2(tmp_path), path)
    assert [finding["model"] for finding in report["findings"] if finding["stops"]] == [str(path)]
    assert report["first"] == []
    (command,) = report["next"]
    # A bundle has its checkpoint's name, not its path.
    given = r"PATH/TO/[^/\s]+"
    assert re.match(
        rf"sinkprune-export {given} -o \S+-int4 --precision fp16 --weights int4 --dialect opset20$", command
    )
    assert not report["recommendations"][0]["as_it_is"]


def test_a_bundle_that_is_too_large_is_exported_smaller(
    monkeypatch: pytest.MonkeyPatch, bundle: Callable[..., Path], tmp_path: Path
) -> None:
    set_python(monkeypatch, "3.10.12")
    path = bundle("mha-336", "fp16", dialect="opset20")
    none = told("--root", orin_nano_jetpack_6_2(tmp_path), path)["models"][0]["forms"]
    needed = [form["budgets"]["retain-32"]["memory_bytes"] for form in none]
    # Between int8 and fp16, in whole KiB.
    free = (needed[1] // 1024 + 1, f"MemTotal: 8000000 kB\nMemAvailable: {needed[1] // 1024 + 1} kB\n")
    assert needed[1] < free[0] * 1024 < needed[0]
    report = told("--root", changed(tmp_path, {"proc/meminfo": free[1]}), path)
    assert any("as it is exported" in finding["found"] for finding in report["findings"])
    assert re.match(
        r"sinkprune-export \S+ -o \S+-int4 --precision fp16 --weights int4 --dialect opset20", report["next"][0]
    )
