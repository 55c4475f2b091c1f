"""Every wrong export ends with one message, and leaves nothing half-written; nor does one that is killed."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.errors import BundleError
from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.checkpoint.presets import PRESETS
from sinkprune.export.source import ExportRequest
from support.models.published_configs import with_value
from support.programs.commands import assert_refused, kill_when, left, own_process, run, succeed

Checkpoints = Callable[[str], Path]


def export(source: object, output: Path, *options: object) -> Any:
    existed = output.exists()
    outcome = run("sinkprune-export", source, "-o", output, *options)
    left = sorted(path.name for path in output.parent.iterdir() if output.name in path.name)
    expected = [output.name] if existed or outcome.code == 0 else []
    assert left == expected, "the export left something half-written"
    return outcome


def truncated_shard(folder: Path) -> None:
    shard = folder / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1000])


def missing_shard(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def wrong_decoder(name: str, value: int) -> Callable[[Path], None]:
    """Return what changes a field of the decoder's configuration."""

    def apply(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(with_value(config, ("text_config", name), value)))

    return apply


DAMAGES: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "truncated shard": (truncated_shard, ["model.safetensors", "damaged", "download it again"]),
    "missing shard": (missing_shard, ["model-00002-of-00002.safetensors", "missing"]),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), ["tokenizer"]),
    "weights of another configuration": (wrong_decoder("intermediate_size", 96), ["gate_proj", "[160, 64]", "[96, "]),
    "hidden size that transformers rejects": (wrong_decoder("hidden_size", 66), ["config.json is not valid", "66"]),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint(damage: str, copied: Callable[..., Path], tmp_path: Path) -> None:
    apply, message = DAMAGES[damage]
    folder = copied("gqa-112")
    apply(folder)
    assert_refused(export(folder, tmp_path / "out"), *message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config": {"image_token_index": 270}}, ["no added token 270", "image token"]),
        ({"preprocessor_config": {"crop_size": {"height": 224, "width": 224}}}, ["224", "112x112"]),
    ],
)
def test_files_that_do_not_belong_together(
    changes: dict[str, Any], message: list[str], copied: Callable[..., Path], tmp_path: Path
) -> None:
    assert_refused(export(copied("gqa-112", **changes), tmp_path / "out"), *message)


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("nowhere/at-all/there", [], ["nowhere", "no such folder"]),
        ("llava-1.1b", [], ["--random-weights"]),
        ("llava-9b", ["--random-weights"], ["llava-9b", *PRESETS]),
        ("qwen2.5-vl-3b", ["--random-weights", "--max-images", 0], ["--max-images is 0", "from 1 to 10000"]),
        ("llava-1.1b", ["--random-weights", "--budgets", "retain-65"], ["retain-65", "retain-192", "retain-32"]),
        ("llava-1.1b", ["--random-weights", "--budgets", "retain-64+fast"], ["fast", "compact", "visual-keys"]),
        ("llava-1.1b", ["--random-weights", "--methods", "magic"], ["magic", "sinkpruner"]),
    ],
)
def test_a_wrong_request(source: str, options: list[Any], message: list[str], tmp_path: Path) -> None:
    assert_refused(export(source, tmp_path / "out", *options), *message)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"num_hidden_layers": 3}, ["3 layers", "at least 4"]),
        ({"num_hidden_layers": 1024, "hidden_size": 8192}, ["no room", "GB free"]),
        (
            {"hidden_size": 1 << 17, "intermediate_size": 1 << 20, "num_attention_heads": 1024}
            | {"num_key_value_heads": 1024, "vocab_size": 32001},
            ["no memory", "137438953472 values", "1099.5 GB are needed", "GB are free", "fp16"],
        ),
    ],
)
def test_a_shape_that_is_rejected_before_anything_is_written(
    shape: dict[str, int], message: list[str], tmp_path: Path
) -> None:
    config = PRESETS["llava-1.1b"]
    (tmp_path / "config.json").write_text(json.dumps({**config, "text_config": {**config["text_config"], **shape}}))
    assert_refused(export(tmp_path, tmp_path / "out", "--random-weights"), *message)


def test_existing_bundle_needs_force(checkpoint: Checkpoints, tmp_path: Path) -> None:
    output = tmp_path / "out"
    assert export(checkpoint("gqa-112"), output, "--budgets", "retain-64").code == 0
    before = (output / "bundle.json").read_bytes()
    assert_refused(export(checkpoint("gqa-112"), output), "--force")
    assert (output / "bundle.json").read_bytes() == before
    forced = export(checkpoint("gqa-112"), output, "--force", "--json")
    assert json.loads(forced.stdout)["budgets"] == ["retain-192", "retain-128", "retain-64", "retain-32"]


def test_what_appears_during_an_export_is_not_replaced(checkpoint: Checkpoints, tmp_path: Path) -> None:
    request, output = ExportRequest(str(checkpoint("gqa-112")), budgets=("retain-64",)), tmp_path / "out"

    def appear(*_: object) -> None:
        output.mkdir(exist_ok=True)
        (output / "bundle.json").write_text("{}")

    with pytest.raises(BundleError, match="not a bundle"):
        export_bundle(request, output, force=True, progress=appear)
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "bundle.json"]


def test_disk_full_while_writing(checkpoint: Checkpoints, tmp_path: Path) -> None:
    # A file-size limit makes the system refuse a write in the middle of a file, as a full disk does.
    command = own_process("sinkprune-export", checkpoint("gqa-112"), "-o", tmp_path / "out")
    limited = f"ulimit -f 20; exec {shlex.join(command)}"
    done = subprocess.run(["bash", "-c", limited], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    # On a busy machine lines of progress may stand before it.
    assert done.stderr.splitlines()[-1].startswith(f"error: the system refused '{tmp_path / 'out'}': File")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("..", "'..' names no new folder"),
        ("file", "'file' exists and is not"),
        ("folder", "'folder' exists and is not"),
        ("link", "'link' is a link to 'folder'"),
        ("dangling", "'dangling' is a link to 'nowhere'"),
        ("file/out", "file' is no folder"),
        (os.fsdecode(b"out\xff"), "the name 'out\\udcff' is not UTF-8"),
        ("a\0b", "the name 'a\\x00b' holds a NUL"),
        ("a/" * 3000 + "out", "cannot be written: File name too long"),
    ],
)
def test_a_place_that_cannot_be(
    output: str, message: str, checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("file", "folder/notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    for name, target in (("link", "folder"), ("dangling", "nowhere")):
        (tmp_path / name).symlink_to(target)
    before = sorted(tmp_path.rglob("*"))
    assert_refused(run("sinkprune-export", checkpoint("gqa-112"), "-o", output, "--force"), message)
    assert sorted(tmp_path.rglob("*")) == before


def test_what_is_read_is_not_written_into(checkpoint: Checkpoints, bundle: Callable[..., Path]) -> None:
    source, read = checkpoint("gqa-112"), bundle("gqa-112")
    assert_refused(run("sinkprune-export", source, "-o", source, "--force"), f"'{source}' exists and is not a")
    # A file that its manifest does not list would make it no bundle.
    output = read / "deeper" / "out"
    assert_refused(run("sinkprune-export", source, "-o", output), "whose bundle.json lists all its files")
    built = run("sinkprune-build", read, "-o", output, "--target", "onnxruntime")
    assert_refused(built, f"'{output}' lies within '{read}'")
    assert not (source / "bundle.json").exists() and not output.parent.exists()


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param(".out.partial/new/graphs/weights/*.bin", marks=pytest.mark.slow),
        ".out.partial/new/bundle.json",
        pytest.param(".out.partial/old", marks=pytest.mark.slow),
    ],
)
def test_a_kill_leaves_a_whole_bundle(moment: str, checkpoint: Checkpoints, tmp_path: Path) -> None:
    output, source = tmp_path / "out", checkpoint("gqa-112")
    succeed("sinkprune-export", source, "-o", output, "--budgets", "retain-64")
    again = (source, "-o", output, "--budgets", "retain-32", "--force")
    kill_when(moment, tmp_path, "sinkprune-export", *again)
    found = read_bundle(output)
    found.verify()
    assert list(found.manifest.budgets) in (["retain-64"], ["retain-32"])
    succeed("sinkprune-export", *again)
    read_bundle(output).verify()
    assert left(output) == []
