"""Budgets added to a bundle in its place: no weight is written, and a kill leaves the old bundle or the new one."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sinkprune import Pipeline
from sinkprune.calibration.scheduling.search import METHOD, TRIAL, Trials, add_budget, plan_facts
from sinkprune.contract.budgets import Budget, Share
from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.errors import BudgetError, BundleError
from sinkprune.contract.files.signature import verify_signature
from sinkprune.contract.files.trust import Trust
from sinkprune.contract.manifest import Manifest
from sinkprune.export.methods import load_method
from support.programs.commands import left
from support.programs.repository import ROOT
from support.programs.slow_cases import slow

Bundles = Callable[..., Path]
OURS = Budget(Share(10, 64), Share(5, 64), (Share(9, 64), Share(4, 64)))


@pytest.fixture
def own(bundle: Bundles, tmp_path: Path) -> Path:
    """A bundle that may be written to."""
    return Path(shutil.copytree(bundle("gqa-112", budgets=("retain-64",)), tmp_path / "bundle"))


def cuts(manifest: Manifest) -> tuple[int, ...]:
    return manifest.cut_after[0], manifest.cut_after[2]


def add(root: Path, name: str = "ours", budget: Budget = OURS, **options: object) -> Manifest:
    found = read_bundle(root)
    return add_budget(found, name, budget, cuts(found.manifest), **options)


def inodes(root: Path) -> dict[str, int]:
    return {str(path.relative_to(root)): path.stat().st_ino for path in root.rglob("*") if path.is_file()}


def test_a_budget_is_added_and_runs(own: Path, photo: object) -> None:
    before, was = inodes(own), read_bundle(own)
    manifest = add(own)
    after, found = inodes(own), read_bundle(own)
    found.verify()
    assert found.manifest == manifest
    # All that was there is there, the very same files; what came are graphs of kilobytes.
    assert {name: after[name] for name in before if name != "bundle.json"} == {
        name: inode for name, inode in before.items() if name != "bundle.json"
    }
    new = sorted(after.keys() - before.keys())
    assert new == sorted(manifest.graphs[graph].file for graph in manifest.plans[METHOD]["ours"].graphs)
    assert sum((own / name).stat().st_size for name in new) < 60_000
    assert was.sha256 != found.sha256
    assert left(own) == []
    answer = Pipeline.load(own).generate(photo, "What?", budget="ours", max_new_tokens=2)  # type: ignore[arg-type]
    first, last = cuts(manifest)
    assert answer.tokens_per_layer == [16] * (first + 1) + [9] * (last - first) + [4] * (7 - last)
    assert [*answer.kept.after_stage] == [first, last]


def test_a_budget_is_replaced_with_force_only(own: Path) -> None:
    add(own)
    with pytest.raises(BudgetError, match="holds a budget 'ours' already"):
        add(own)
    smaller = Budget(Share(3, 64), Share(2, 64), (Share(2, 64), Share(1, 64)))
    manifest = add(own, budget=smaller, force=True)
    read_bundle(own).verify()
    assert manifest.budgets["ours"] == smaller and [*manifest.budgets] == ["retain-64", "ours"]


@pytest.mark.parametrize(
    "name", ["none", "retain-64", "retain-128", "", "a/b", "..", "A", "x+compact", "x" * 65, "é"]
)
def test_names_that_mean_something_else_are_refused(name: str, own: Path) -> None:
    before = inodes(own)
    with pytest.raises(BudgetError, match="Choose another --name"):
        add(own, name, force=True)
    assert inodes(own) == before


def test_a_signed_bundle_must_be_signed_again(own: Path, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    public = tmp_path / "key.pub"
    public.write_bytes(
        key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    add(own, "first", sign=key.sign)
    manifest = (own / "bundle.json").read_bytes()
    assert verify_signature(public, manifest, (own / "bundle.json.sig").read_bytes())
    with pytest.raises(BundleError, match=r"is signed, .*--sign KEY"):
        add(own, "second")
    assert (own / "bundle.json").read_bytes() == manifest
    add(own, "second", sign=key.sign)
    assert [*read_bundle(own, Trust(signed_by=public)).manifest.budgets] == ["retain-64", "first", "second"]


def test_what_another_process_did_meanwhile_stays(own: Path) -> None:
    found = read_bundle(own)
    add(own, "theirs")
    with pytest.raises(BundleError, match=r"not the expected manifest\. If you .*add a budget, give the sum"):
        add_budget(found, "ours", OURS, cuts(found.manifest))
    assert [*read_bundle(own).manifest.budgets] == ["retain-64", "theirs"]
    assert left(own) == []


def test_a_disk_that_fills_leaves_the_old_bundle(own: Path) -> None:
    found, before = read_bundle(own), inodes(own)

    def full(data: bytes) -> bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match="No space left"):
        add_budget(found, "ours", OURS, cuts(found.manifest), sign=full)
    assert inodes(own) == before
    read_bundle(own).verify()
    assert left(own) == []


@pytest.mark.slow
def test_killed_at_calls_of_the_system(own: Path) -> None:
    command = [sys.executable, "-m", "support.programs.kill_adding", own]
    done = subprocess.run(command, cwd=ROOT / "tests", capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) > 10
    # First always the old bundle, then always the new.
    turn = [budgets for budgets in found if "ours" not in budgets]
    assert found == [["retain-64"]] * len(turn) + [["retain-64", "ours"]] * (len(found) - len(turn))
    assert len(turn) < len(found)
    # What was killed left nothing that the next does not remove.
    add(own, "another")
    read_bundle(own).verify()
    assert left(own) == []


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gqa-112", {}),
        ("gqa-112", {"precision": "fp16", "dialect": "opset20", "max_images": 2}),
        ("next", {}),
        slow(("qwen", {})),
        slow(("qwen2-vl", {"max_frames": 4})),
        ("qwen3-vl", {"max_frames": 4}),
    ],
)
def test_the_facts_of_a_bundle_build_the_plans_it_has(
    name: str, options: dict[str, object], bundle: Bundles, tmp_path: Path
) -> None:
    found = read_bundle(bundle(name, **options))
    facts = plan_facts(found.manifest)
    for budget, shares in found.manifest.budgets.items():
        built, plan = load_method(METHOD)(facts, shares), found.manifest.plans[METHOD][budget]
        assert plan.shares == (built.kept if found.manifest.any_resolution else None)
        graphs = [*([built.sanitizer] if built.sanitizer else []), *built.select_after.values()]
        for graph, graph_name in zip(graphs, plan.graphs, strict=True):
            spec = graph.save(tmp_path, "graph.onnx")
            theirs = found.manifest.graphs[graph_name]
            assert (spec.inputs, spec.outputs) == (theirs.inputs, theirs.outputs)
            assert (tmp_path / "graph.onnx").read_bytes() == found.files[theirs.file].read(1 << 20)


def test_plans_on_trial_run_and_leave_the_bundle_alone(bundle: Bundles, tmp_path: Path, photo: object) -> None:
    found = read_bundle(bundle("gqa-112"))
    trials = Trials(found, tmp_path)
    pipeline = Pipeline.load(trials.bundle)
    trials.add("later", OURS, cuts(found.manifest))
    answer = pipeline.generate(photo, "What?", method=TRIAL, budget="later", max_new_tokens=2)  # type: ignore[arg-type]
    assert answer.tokens_per_layer[0] == 16 and answer.tokens_per_layer[-1] == 4
    same = read_bundle(bundle("gqa-112"))
    assert same.sha256 == found.sha256 and TRIAL not in same.manifest.plans
