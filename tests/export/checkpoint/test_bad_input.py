"""What is wrong with an export is told in one message, and nothing half-written stays behind."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sinkprune.contract.budgets import OPTIONS
from sinkprune.contract.errors import BundleError
from sinkprune.contract.families import FAMILIES
from sinkprune.export.bundle_writer import export_bundle
from sinkprune.export.command import main
from sinkprune.export.presets import PRESETS
from sinkprune.export.source import ExportRequest
from support.programs.commands import assert_refused, own_process, run

Checkpoints = Callable[[str], Path]


@pytest.fixture
def broken(checkpoint: Checkpoints, tmp_path: Path) -> Path:
    """A checkpoint to damage."""
    return Path(shutil.copytree(checkpoint("gqa-112"), tmp_path / "checkpoint"))


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def export(source: object, output: Path, *options: str) -> Any:
    outcome = run("sinkprune-export", source, "-o", output, *options)
    left = sorted(path.name for path in output.parent.iterdir() if output.name in path.name)
    assert left == ([output.name] if outcome.code == 0 else []), "something half-written was left"
    return outcome


def test_truncated_shard(broken: Path, tmp_path: Path) -> None:
    shard = broken / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1000])
    assert_refused(export(broken, tmp_path / "out"), "model.safetensors", "damaged", "download it again")


def test_missing_shard(broken: Path, tmp_path: Path) -> None:
    (broken / "model.safetensors").unlink()
    index = {"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}
    (broken / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_refused(export(broken, tmp_path / "out"), "model-00002-of-00002.safetensors", "missing")


def test_no_weights_at_all(broken: Path, tmp_path: Path) -> None:
    (broken / "model.safetensors").unlink()
    assert_refused(export(broken, tmp_path / "out"), "model.safetensors.index.json")


def test_weights_of_another_configuration(broken: Path, tmp_path: Path) -> None:
    config = json.loads((broken / "config.json").read_text())
    config["text_config"]["intermediate_size"] = 96
    (broken / "config.json").write_text(json.dumps(config))
    assert_refused(export(broken, tmp_path / "out"), "gate_proj", "[160, 64]", "[96, 64]")


def test_fewer_layers_than_configured(broken: Path, tmp_path: Path) -> None:
    config = json.loads((broken / "config.json").read_text())
    config["text_config"]["num_hidden_layers"] = 9
    (broken / "config.json").write_text(json.dumps(config))
    assert_refused(export(broken, tmp_path / "out"), "layers.8", "holds no tensor")


def test_unsupported_architecture_lists_the_supported(broken: Path, tmp_path: Path) -> None:
    edit_json(broken / "config.json", architectures=["BertModel"], model_type="bert")
    assert_refused(export(broken, tmp_path / "out"), "BertModel", "LlavaForConditionalGeneration")


@pytest.mark.parametrize(
    ("part", "changes", "said"),
    [
        ("text_config", {"model_type": "qwen2"}, "qwen2"),
        (
            "text_config",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            "linear",
        ),
        ("vision_config", {"model_type": "siglip_vision_model"}, "siglip_vision_model"),
        (None, {"vision_feature_select_strategy": "full"}, "full"),
        (None, {"vision_feature_layer": [-2, -1]}, "[-2, -1]"),
        ("text_config", {"num_key_value_heads": 3}, "4 heads, 3 key-value heads"),
        (None, {"image_token_index": 384}, "image token 384"),
    ],
)
def test_unsupported_variant_is_named(
    part: str | None, changes: dict[str, Any], said: str, broken: Path, tmp_path: Path
) -> None:
    config = json.loads((broken / "config.json").read_text())
    (config[part] if part else config).update(changes)
    (broken / "config.json").write_text(json.dumps(config))
    assert_refused(export(broken, tmp_path / "out"), said, "expected")


@pytest.mark.parametrize("layer", [0, 5, -5, -9])
def test_feature_layer_must_be_a_block_of_the_tower(layer: int, broken: Path, tmp_path: Path) -> None:
    edit_json(broken / "config.json", vision_feature_layer=layer)
    assert_refused(export(broken, tmp_path / "out"), f"vision_feature_layer {layer} ", "4 blocks")


@pytest.mark.parametrize(("part", "value"), [("hidden_size", 66), ("head_dim", 15)])
def test_config_that_transformers_refuses(part: str, value: Any, broken: Path, tmp_path: Path) -> None:
    config = json.loads((broken / "config.json").read_text())
    config["text_config"][part] = value
    (broken / "config.json").write_text(json.dumps(config))
    outcome = export(broken, tmp_path / "out")
    assert_refused(outcome, "config.json is not valid", str(value))
    assert not outcome.stderr.endswith("..\n")


def test_config_that_is_not_json(broken: Path, tmp_path: Path) -> None:
    (broken / "config.json").write_text("{")
    assert_refused(export(broken, tmp_path / "out"), "config.json", "JSON")


def test_processor_of_another_size(broken: Path, tmp_path: Path) -> None:
    path = next(path for path in broken.glob("*processor_config.json"))
    edit_json(path, crop_size={"height": 224, "width": 224})
    assert_refused(export(broken, tmp_path / "out"), "224", "112x112")


def test_missing_tokenizer(broken: Path, tmp_path: Path) -> None:
    (broken / "tokenizer.json").unlink()
    assert_refused(export(broken, tmp_path / "out"), "tokenizer")


def test_tokenizer_without_the_image_token(broken: Path, tmp_path: Path) -> None:
    edit_json(broken / "config.json", image_token_index=270)
    assert_refused(export(broken, tmp_path / "out"), "no added token 270", "image token")


def test_no_such_folder(tmp_path: Path) -> None:
    assert_refused(export(tmp_path / "nowhere", tmp_path / "out"), "nowhere", "no such folder")


def test_preset_without_random_weights(tmp_path: Path) -> None:
    assert_refused(export("llava-1.1b", tmp_path / "out"), "--random-weights")


def test_unknown_preset_lists_them(tmp_path: Path) -> None:
    assert_refused(export("llava-9b", tmp_path / "out", "--random-weights"), "llava-9b", *PRESETS)


def test_unknown_budget_and_option_list_the_known(broken: Path, tmp_path: Path) -> None:
    assert_refused(export(broken, tmp_path / "out", "--budgets", "retain-65"), "retain-65", "retain-192", "retain-32")
    assert_refused(export(broken, tmp_path / "out", "--budgets", "retain-64+fast"), "fast", "compact", "visual-keys")
    assert_refused(export(broken, tmp_path / "out", "--methods", "magic"), "magic", "sinkpruner")


@pytest.mark.parametrize("option", ["--budgets", "--methods"])
@pytest.mark.parametrize("names", [",", " , ", ""], ids=repr)
def test_a_list_that_names_nothing(
    option: str, names: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["llava-1.1b", "-o", str(tmp_path / "out"), option, names])
    assert f"{option}: '{names}' names nothing" in capsys.readouterr().err


def test_help_lists_every_budget_option_and_preset(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    words = capsys.readouterr().out.replace(",", " ").split()
    assert {*FAMILIES["llava"].budgets, *OPTIONS, *PRESETS} <= set(words)


def test_the_size_of_a_small_bundle_is_told_in_megabytes(checkpoint: Checkpoints, tmp_path: Path) -> None:
    told = export(checkpoint("gqa-112"), tmp_path / "out", "--budgets", "retain-64").stdout
    size = sum(path.stat().st_size for path in (tmp_path / "out").rglob("*.*") if path.name != "bundle.json")
    assert told.startswith(f"{tmp_path / 'out'}: {size / 1e6:.2f} MB, fp32, budgets none, retain-64")


def test_an_interrupt_while_packages_are_imported(tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("raise KeyboardInterrupt")
    command = own_process("sinkprune-export", "llava-1.1b", "--random-weights", "-o", tmp_path / "out")
    search = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=search, check=False)
    assert done.returncode == 130
    assert "Traceback" not in done.stderr


def test_decoder_too_shallow_for_three_stages(tmp_path: Path) -> None:
    config = json.loads(json.dumps(PRESETS["llava-1.1b"]))
    config["text_config"]["num_hidden_layers"] = 3
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_refused(export(tmp_path, tmp_path / "out", "--random-weights"), "3 layers", "at least 4")


def test_values_beyond_fp16(broken: Path, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    tensors = load_file(broken / "model.safetensors")
    name = next(name for name in tensors if name.endswith("down_proj.weight"))
    tensors[name][0, 0] = 1e6
    save_file(tensors, broken / "model.safetensors")
    outcome = export(broken, tmp_path / "out", "--precision", "fp16")
    assert_refused(outcome, "down_proj", "1e+06", "--precision fp32")


def test_existing_bundle_needs_force_and_a_foreign_folder_is_never_replaced(
    checkpoint: Checkpoints, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    assert export(checkpoint("gqa-112"), output, "--budgets", "retain-64").code == 0
    before = (output / "bundle.json").read_bytes()
    again = run("sinkprune-export", checkpoint("gqa-112"), "-o", output)
    assert_refused(again, "--force")
    assert (output / "bundle.json").read_bytes() == before
    forced = run("sinkprune-export", checkpoint("gqa-112"), "-o", output, "--force", "--json")
    assert forced.code == 0
    assert json.loads(forced.stdout)["budgets"] == ["retain-192", "retain-128", "retain-64", "retain-32"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    (output / "bundle.json").unlink()
    foreign = run("sinkprune-export", checkpoint("gqa-112"), "-o", output, "--force")
    assert_refused(foreign, "not a bundle")


@pytest.mark.parametrize(
    ("name", "content", "force", "said"),
    [
        ("bundle.json", '{"format_version": 3, "sinkprune_version": "0", "files": {}}', False, "--force"),
        ("bundle.json", "{}", True, "not a bundle"),
        ("thesis.tex", "{}", True, "not a bundle"),
    ],
)
def test_what_appears_during_an_export_is_not_replaced(
    name: str, content: str, force: bool, said: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    request, output = ExportRequest(str(checkpoint("gqa-112")), budgets=("retain-64",)), tmp_path / "out"

    def appear(what: str, weights: int) -> None:
        output.mkdir(exist_ok=True)
        (output / name).write_text(content)

    with pytest.raises(BundleError, match=said):
        export_bundle(request, output, force=force, progress=appear)
    assert sorted(path.name for path in tmp_path.rglob("*")) == sorted(["out", name])


@pytest.mark.parametrize(
    ("option", "count", "said"),
    [
        ("--max-images", 0, "from 1 to 10000"),
        ("--max-images", 10**30, "from 1 to 10000"),
        ("--max-frames", -1, "from 0 to 100000"),
        ("--max-frames", 10**30, "from 0 to 100000"),
    ],
)
def test_counts_beyond_all_reason(option: str, count: int, said: str, tmp_path: Path) -> None:
    asked = ("--random-weights", option, count)
    assert_refused(export("qwen2.5-vl-3b", tmp_path / "out", *asked), f"{option} is {count}", said)


def test_no_permission(checkpoint: Checkpoints) -> None:
    # Not even root may make a folder in sysfs.
    assert_refused(run("sinkprune-export", checkpoint("gqa-112"), "-o", "/sys/out"), "/sys", "cannot be written")


def test_no_room_is_told_before_anything_is_written(tmp_path: Path) -> None:
    config = json.loads(json.dumps(PRESETS["llava-1.1b"]))
    config["text_config"] |= {"num_hidden_layers": 1024, "hidden_size": 8192}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_refused(export(tmp_path, tmp_path / "out", "--random-weights"), "no room", "GB free")


def test_disk_full_while_writing(checkpoint: Checkpoints, tmp_path: Path) -> None:
    # A file-size limit makes the system refuse a write in the middle of a file, as a full disk does.
    command = own_process("sinkprune-export", checkpoint("gqa-112"), "-o", tmp_path / "out")
    limited = f"ulimit -f 20; exec {shlex.join(command)}"
    done = subprocess.run(["bash", "-c", limited], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    # On a busy machine lines of progress may stand before it.
    assert done.stderr.splitlines()[-1].startswith("error: the system refused")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_interrupted_export_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    command = own_process("sinkprune-export", "llava-1.1b", "--random-weights", "-o", tmp_path / "out")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".out.*.partial/new/graphs/weights/*")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, number)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in stderr
    assert list(tmp_path.iterdir()) == []
