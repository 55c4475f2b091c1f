"""Names of the hub: a failed download is reported in one message; no code is downloaded, or run if it is there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from support.programs.commands import assert_refused, own_process, run
from support.programs.repository import ROOT

_PROGRAM = """
import json, sys
sys.modules["torch"] = None
from support.programs.commands import run
out, *names = sys.argv[1:]
outcomes = [run("sinkprune-export", name, "-o", out) for name in names]
print(json.dumps([[outcome.code, outcome.stderr] for outcome in outcomes]))
"""
REVISION = "0123456789abcdef0123456789abcdef01234567"
FILES = ["README.md", "config.json", "evil.py", "model.bin", "sub/evil.py"]
ASKED: list[str] = []


class Hub(BaseHTTPRequestHandler):
    """Answers by the name of the model's owner."""

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        owner = path.removeprefix("/api/models/").split("/")[0]
        if path.startswith("/api/models/odd/"):
            listed = [{"type": "file", "path": name, "size": 2, "oid": "0"} for name in FILES]
            model = {"id": "odd/model", "sha": REVISION, "siblings": [{"rfilename": name} for name in FILES]}
            self.answer(200, json.dumps(listed if "/tree/" in path else model))
        elif owner == "gated":
            self.answer(403, "{}", {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted."})
        elif owner == "none":
            self.answer(404, "{}", {"X-Error-Code": "RepoNotFound"})
        elif owner == "garbage":
            self.answer(200, "<html>")
        else:
            ASKED.append(path)
            self.answer(404, "{}", {"X-Error-Code": "EntryNotFound"})

    do_HEAD = do_GET

    def answer(self, status: int, body: str, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body.encode())

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@contextmanager
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def exported(tmp_path: Path, names: list[str], **environment: str) -> list[tuple[int, str]]:
    """Exit code and message of an export of each name, with the hub client's settings of `environment`."""
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"), "")
    search = os.pathsep.join(filter(None, [str(ROOT / "tests"), os.environ.get("PYTHONPATH")]))
    variables = {**os.environ, **proxies, "PYTHONPATH": search, "HF_HOME": str(tmp_path / "hf"), **environment}
    variables["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    command = [sys.executable, "-c", _PROGRAM, str(tmp_path / "out"), *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=variables)
    assert done.returncode == 0, done.stderr
    return [(code, message) for code, message in json.loads(done.stdout)]


def test_what_the_hub_rejects_is_reported_in_one_message(tmp_path: Path) -> None:
    expected = {
        "none/model": "Check the name; for a private model log in",
        "gated/model": "Ask for access on the model's page",
        "garbage/model": "Check the name and the network",
        "odd/model": "could not be downloaded",
        "a..b/model": "Check the name",
    }
    with hub() as address:
        outcomes = exported(tmp_path, [*expected], HF_ENDPOINT=address)
    for (name, part), (code, message) in zip(expected.items(), outcomes, strict=True):
        assert code == 2
        assert message.startswith(f"error: checkpoint '{name}' is no local folder and could not be downloaded: ")
        assert part in message
        assert message.count("\n") == 1
    assert not [path for path in ASKED if path.endswith((".py", ".bin", ".md"))], ASKED
    assert [path for path in ASKED if path.endswith("config.json")]


def test_without_a_network(tmp_path: Path) -> None:
    for environment in ({"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}):
        [(code, message)] = exported(tmp_path, ["someone/model"], **environment)
        assert code == 2
        assert "could not be downloaded" in message
        assert "the network, or give a local folder" in message
        assert message.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "said"),
    [
        *((name, ["found no such folder", "demo/pocket", "--random-weights"]) for name in ("../a", "a/b?c")),
        ("https://huggingface.co/some-one/mo.del/tree/main", ["is a URL", "Give its hub name: some-one/mo.del\n"]),
        ("s3://bucket/model", ["'s3://bucket/model' is a URL", "Download it first"]),
        *((name, ["is not UTF-8", "Rename it"]) for name in ("caf\udce9", "a\0b")),
    ],
)
def test_what_is_no_name_is_never_requested(
    name: str, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where no folder of such a name stands.
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert_refused(run("sinkprune-export", name, "-o", tmp_path / "out"), *said)


@pytest.mark.parametrize("outer", ["llava", "evil"])
def test_code_in_a_checkpoint_does_not_run(outer: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """The export asks no question either."""
    folder = Path(shutil.copytree(checkpoint("gqa-112"), tmp_path / "checkpoint"))
    ran = tmp_path / "ran"
    evil = {
        "auto_map": dict.fromkeys(("AutoConfig", "AutoModel", "AutoProcessor", "AutoImageProcessor"), "evil.Evil"),
        "configuration_files": ["config.other.json"],
        "tokenizer_class": "EvilTokenizer",
    }
    evil["auto_map"]["AutoTokenizer"] = ["evil.Evil", "evil.Evil"]  # type: ignore[call-overload]
    (folder / "evil.py").write_text(f"import pathlib\npathlib.Path({str(ran)!r}).touch()\nclass Evil: pass\n")
    for name in ("config.json", "tokenizer_config.json", "preprocessor_config.json"):
        content = json.loads((folder / name).read_text(encoding="utf-8")) | evil
        if name == "config.json":
            (folder / "config.other.json").write_text(json.dumps({**content, "model_type": "evil"}))
            content["model_type"] = outer
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    command = own_process("sinkprune-export", folder, "-o", tmp_path / "bundle", "--budgets", "retain-64")
    result = subprocess.run(command, input="y\n" * 99, capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == (0 if outer == "llava" else 2), result.stderr
    assert (tmp_path / "bundle" / "bundle.json").exists() == (outer == "llava")
    assert "[y/N]" not in result.stdout + result.stderr
    assert not ran.exists()
