"""A bundle is accepted by its sum or its signature, and holds no file that its manifest does not list."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from sinkprune import Pipeline
from sinkprune.contract.bundle import read_bundle
from sinkprune.contract.errors import BundleError, EnginesError, UsageError
from sinkprune.contract.files.signature import read_private_key
from sinkprune.contract.files.trust import Trust
from sinkprune.contract.manifest import MANIFEST
from support.models.manifests import manifest_data, write_data
from support.programs.commands import assert_refused, run, succeed

ASK = ("--prompt", "What is this?", "--max-new-tokens", "2")
PEM, PKCS8, PLAIN = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()


def write_keys(folder: Path, name: str, password: bytes | None = None) -> Path:
    """A private key `name` and its public key `name.pub`, as openssl writes them."""
    key = Ed25519PrivateKey.generate()
    locked = serialization.BestAvailableEncryption(password) if password else PLAIN
    public = key.public_key().public_bytes(PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    (folder / name).write_bytes(key.private_bytes(PEM, PKCS8, locked))
    (folder / f"{name}.pub").write_bytes(public)
    return folder / name


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    write_keys(folder, "ours")
    write_keys(folder, "theirs")
    write_keys(folder, "locked", b"secret")
    return folder


@pytest.fixture(scope="module")
def signed(checkpoint: Callable[[str], Path], keys: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle signed by the command; tests leave it alone."""
    output = tmp_path_factory.mktemp("signed") / "bundle"
    options = ("-o", output, "--budgets", "retain-64", "--sign", keys / "ours")
    outcome = succeed("sinkprune-export", checkpoint("gqa-112"), *options)
    assert f"sha256 {hashlib.sha256((output / MANIFEST).read_bytes()).hexdigest()}\n" in outcome.stdout
    return output


@pytest.fixture
def copied(signed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(signed, tmp_path / "bundle"))


def rewritten(root: Path) -> Path:
    """A bundle whose manifest says the same in other words."""
    write_data(root, manifest_data(root))
    return root


def test_the_printed_sum_is_accepted_and_no_other(signed: Path, copied: Path, photo_file: Path) -> None:
    digest = read_bundle(signed).sha256
    succeed("sinkprune-run", signed, "--sha256", digest, "--image", photo_file, *ASK)
    outcome = run("sinkprune-run", rewritten(copied), "--sha256", digest, "--image", photo_file, *ASK)
    assert_refused(outcome, f"expected {digest}")
    with pytest.raises(BundleError, match=f"expected {digest}"):
        Pipeline.load(copied, sha256=digest)


def test_a_signature_is_checked_against_the_key(signed: Path, copied: Path, keys: Path, photo_file: Path) -> None:
    command = ("sinkprune-run", signed, "--image", photo_file, *ASK, "--signed-by")
    succeed(*command, keys / "ours.pub")
    assert_refused(run(*command, keys / "theirs.pub"), "was not signed with the key that belongs to", "theirs.pub")
    with pytest.raises(BundleError, match="was not signed"):
        Pipeline.load(rewritten(copied), signed_by=keys / "ours.pub")
    (copied / f"{MANIFEST}.sig").unlink()
    with pytest.raises(BundleError, match="found no signature of the bundle to compare with"):
        Pipeline.load(copied, signed_by=keys / "ours.pub")


def test_what_is_no_key_is_refused(signed: Path, keys: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    curve = generate_private_key(SECP256R1())
    (tmp_path / "curve").write_bytes(curve.private_bytes(PEM, PKCS8, PLAIN))
    os.mkfifo(tmp_path / "fifo")
    for name, reason in (
        ("text", "expected the private key"),
        ("curve", "is not Ed25519"),
        ("fifo", "is a FIFO"),
        ("none", "is missing"),
        (keys / "ours.pub", "expected the private key"),
        (keys / "locked", "has a passphrase"),
    ):
        with pytest.raises(UsageError, match=reason):
            read_private_key(tmp_path / name)
    with pytest.raises(UsageError, match="expected the public key"):
        read_bundle(signed, Trust(signed_by=keys / "ours"))


def test_a_pinned_bundle_wants_pinned_engines(copied: Path, keys: Path, photo_file: Path, tmp_path: Path) -> None:
    engines = tmp_path / "engines"
    options = ("-o", engines, "--target", "onnxruntime", "--signed-by", keys / "ours.pub", "--sign", keys / "ours")
    outcome = succeed("sinkprune-build", copied, *options)
    assert f"\nsigned with '{keys / 'ours'}'\nsha256 " in outcome.stdout
    built = outcome.stdout.split()[-1]
    digest = read_bundle(copied).sha256
    command = ("sinkprune-run", copied, "--engines", engines, "--image", photo_file, *ASK)
    succeed(*command, "--sha256", digest, "--engines-sha256", built)
    succeed(*command, "--signed-by", keys / "ours.pub")
    assert_refused(run(*command, "--sha256", digest), "is pinned", "--engines-sha256")
    assert_refused(run(*command, "--engines-sha256", "0" * 64), "engines.json", f"expected {'0' * 64}")
    (engines / "engines.json.sig").unlink()
    with pytest.raises(EnginesError, match="found no signature of the engines to compare with"):
        Pipeline.load(copied, engines=engines, signed_by=keys / "ours.pub")


def test_no_pin_is_dropped_in_silence(signed: Path, keys: Path) -> None:
    opened, digest = read_bundle(signed), read_bundle(signed).sha256
    for source, options, said in (
        (signed, {"sha256": digest, "check_sums": False}, "Leave out --skip-sums"),
        (signed, {"engines": signed, "engines_sha256": "0" * 64, "check_sums": False}, "Leave out --skip-sums"),
        (opened, {"sha256": digest}, "was read already"),
        (opened, {"signed_by": keys / "ours.pub"}, "was read already"),
        (signed, {"engines_sha256": "0" * 64}, "and no engines"),
        (signed, {"engines_sha256": "none"}, "64 hexadecimal digits"),
    ):
        with pytest.raises(UsageError, match=said):
            Pipeline.load(source, **options)  # type: ignore[arg-type]
    assert Pipeline.load(read_bundle(signed, Trust(digest)), sha256=digest).bundle.trust == Trust(digest)


@pytest.mark.parametrize("name", [".hidden", "weights/a/b/c"])
def test_an_unlisted_file_is_rejected(name: str, copied: Path) -> None:
    (copied / name).parent.mkdir(parents=True, exist_ok=True)
    (copied / name).touch()
    with pytest.raises(BundleError, match=f"found the file '{name}', which bundle.json does not list"):
        read_bundle(copied)


def test_links_in_a_bundle_are_refused_and_a_link_to_one_is_not(copied: Path, signed: Path, tmp_path: Path) -> None:
    (tmp_path / "current").symlink_to(copied)
    assert read_bundle(tmp_path / "current").manifest == read_bundle(copied).manifest
    for name in ("graphs/head.onnx", "graphs/weights/head.bin", MANIFEST, "weights/tokenizer.json"):
        (copied / name).unlink()
        (copied / name).symlink_to(signed / name)
        with pytest.raises(BundleError, match="is a link"):
            read_bundle(copied)
        (copied / name).unlink()
        shutil.copy(signed / name, copied / name)
    shutil.move(copied / "graphs", tmp_path / "graphs")
    (copied / "graphs").symlink_to(tmp_path / "graphs")
    with pytest.raises(BundleError, match="found the file 'graphs'"):
        read_bundle(copied)


def test_openssl_checks_the_signature_too(signed: Path, keys: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    command = ["openssl", "pkeyutl", "-verify", "-rawin", "-pubin", "-inkey", keys / "ours.pub"]
    files = ["-in", signed / MANIFEST, "-sigfile", signed / f"{MANIFEST}.sig"]
    assert subprocess.run([*command, *files], capture_output=True, check=False).returncode == 0
