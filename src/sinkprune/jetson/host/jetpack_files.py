"""The installed parts of JetPack: L4T, packages, CUDA, TensorRT and its Python modules."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from sinkprune.jetson.host.system_files import SystemFiles

_RELEASE = re.compile(r"#\s*R(\d+)\s*\(release\),\s*REVISION:\s*(\d+(?:\.\d+)*)")
_CUDA = ("usr/local/cuda/version.json", "usr/local/cuda-13/version.json", "usr/local/cuda-12/version.json")
_TENSORRT = re.compile(r"libnvinfer\d+")
_MODULES = "usr/lib/python3*/dist-packages/tensorrt/__init__.py"
_UPSTREAM = re.compile(r"\d+(?:\.\d+)*")


@dataclass(frozen=True)
class InstalledJetPack:
    """The versions of the vendor's software; None if missing."""

    l4t: str | None
    """Of Jetson Linux, as in "36.4.3"."""
    package: str | None
    """Of the package nvidia-jetpack."""
    cuda: str | None
    tensorrt: str | None
    tensorrt_python: tuple[str, ...]
    """The system's Pythons with TensorRT's module, as in "3.10"."""


def read_installed(files: SystemFiles) -> InstalledJetPack:
    """Return the installed versions."""
    packages = _packages(files)
    tensorrt = next((version for name, version in packages.items() if _TENSORRT.fullmatch(name)), None)
    modules = [re.search(r"python(3\.\d+)/", path) for path in files.matching(_MODULES)]
    # /usr/lib/python3 has the modules of Debian's own Python, of any version.
    own = _system_python(files) if any(module is None for module in modules) else None
    pythons = {*(module[1] for module in modules if module), *([own] if own else [])}
    return InstalledJetPack(
        l4t=_l4t(files),
        package=packages.get("nvidia-jetpack"),
        cuda=_cuda(files),
        tensorrt=_upstream(tensorrt or packages.get("tensorrt")),
        tensorrt_python=tuple(sorted(pythons)),
    )


def _l4t(files: SystemFiles) -> str | None:
    found = _RELEASE.search(files.text("etc/nv_tegra_release") or "")
    return f"{found[1]}.{found[2]}" if found else None


def _system_python(files: SystemFiles) -> str | None:
    """Return the version of /usr/bin/python3."""
    found = re.fullmatch(r"python(3\.\d+)", files.target("usr/bin/python3") or "")
    return found[1] if found else None


def _cuda(files: SystemFiles) -> str | None:
    """Return the toolkit's version, from its own file."""
    for path in _CUDA:
        try:
            return str(json.loads(files.text(path) or "")["cuda"]["version"])
        except (ValueError, KeyError, TypeError):
            continue
    return None


def _packages(files: SystemFiles) -> dict[str, str]:
    """Return the versions of installed packages, by name."""
    versions = {}
    for paragraph in (files.text("var/lib/dpkg/status") or "").split("\n\n"):
        fields = dict(re.findall(r"^(Package|Status|Version): (.+)$", paragraph, re.MULTILINE))
        if fields.get("Status", "").endswith(" installed") and {"Package", "Version"} <= fields.keys():
            versions[fields["Package"]] = fields["Version"]
    return versions


def _upstream(version: str | None) -> str | None:
    """Return the upstream version: "10.3.0.30" of "10.3.0.30-1+cuda12.5"."""
    found = _UPSTREAM.match(version or "")
    return found[0] if found else None
