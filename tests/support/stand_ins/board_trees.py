"""Stand-ins for the system files of machines.

Lines of nvpmodel, of the release and of the device tree are those of boards. No tree is a copy of a board's.
"""

from __future__ import annotations

from pathlib import Path

from sinkprune.jetson.host import Library, PythonEnvironment

LIBRARIES = {name: Library("1", None) for name in ("onnxruntime", "tensorrt", "cuda.bindings")}
PYTHON_OF_JETPACK_6 = PythonEnvironment(
    "3.10.12", "/v/bin/python", "aarch64", virtual=True, sees_system=True, libraries=LIBRARIES
)
"""A virtual environment on a board that sees JetPack's TensorRT."""

NVPMODEL_ORIN_NANO = """\
< PARAM TYPE=FILE NAME=CPU_ONLINE >
CORE_0 /sys/devices/system/cpu/cpu0/online
< POWER_MODEL ID=0 NAME=15W >
CPU_ONLINE CORE_0 1
< POWER_MODEL ID=1 NAME=25W >
< POWER_MODEL ID=2 NAME=MAXN_SUPER >
< POWER_MODEL ID=3 NAME=7W >
< PM_CONFIG DEFAULT=1 >
"""
NVPMODEL_AGX_ORIN = """\
< POWER_MODEL ID=0 NAME=MAXN >
< POWER_MODEL ID=1 NAME=MODE_15W >
< POWER_MODEL ID=2 NAME=MODE_30W >
< POWER_MODEL ID=3 NAME=MODE_50W >
< PM_CONFIG DEFAULT=2 >
"""


def orin_nano_jetpack_6_2(root: Path) -> Path:
    """An Orin Nano 8GB developer kit with JetPack 6.2, at 15 W, with zram as its only swap."""
    files = {
        "proc/device-tree/model": "NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super\0",
        "proc/device-tree/compatible": "nvidia,p3768-0000+p3767-0005-super\0nvidia,p3767-0005\0nvidia,tegra234\0",
        "etc/nv_tegra_release": (
            "# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic, EABI: aarch64, DATE: Wed Jan  8 2025\n"
            "# KERNEL_VARIANT: oot\n"
        ),
        "etc/os-release": 'PRETTY_NAME="Ubuntu 22.04.5 LTS"\nVERSION_ID="22.04"\n',
        "proc/sys/kernel/osrelease": "5.15.148-tegra\n",
        "etc/nvpmodel.conf": NVPMODEL_ORIN_NANO,
        "var/lib/nvpmodel/status": "pmode:0000 fmode:quiet",
        "proc/swaps": "Filename\t\tType\t\tSize\t\tUsed\t\tPriority\n/dev/zram0  partition\t650000\t0\t5\n",
        "usr/local/cuda/version.json": '{"cuda": {"name": "CUDA SDK", "version": "12.6.68"}}',
        "usr/lib/python3.10/dist-packages/tensorrt/__init__.py": "",
        "sys/class/devfreq/17000000.gpu/cur_freq": "306000000\n",
        "sys/class/devfreq/17000000.gpu/min_freq": "306000000\n",
        "sys/class/devfreq/17000000.gpu/max_freq": "1020000000\n",
        "sys/class/devfreq/17000000.gpu/governor": "nvhost_podgov\n",
        **_common(7620, 6400),
        **_packages({"nvidia-jetpack": "6.2+b77", "libnvinfer10": "10.3.0.30-1+cuda12.5"}),
    }
    return _written(root, files)


def agx_orin_jetpack_7_2(root: Path) -> Path:
    """An AGX Orin 64GB with JetPack 7.2 in its fastest mode, clocks held, with a swap file."""
    files = {
        "proc/device-tree/model": "NVIDIA Jetson AGX Orin Developer Kit\0",
        "proc/device-tree/compatible": "nvidia,p3737-0000+p3701-0005\0nvidia,p3701-0005\0nvidia,tegra234\0",
        "etc/nv_tegra_release": (
            "# R39 (release), REVISION: 2.0, GCID: 45755727, BOARD: generic, EABI: aarch64, DATE: 2026\n"
        ),
        "etc/os-release": 'PRETTY_NAME="Ubuntu 24.04.3 LTS"\nVERSION_ID="24.04"\n',
        "proc/sys/kernel/osrelease": "6.8.12-tegra\n",
        "etc/nvpmodel.conf": NVPMODEL_AGX_ORIN,
        "var/lib/nvpmodel/status": "pmode:0000",
        "proc/swaps": "Filename\t\tType\t\tSize\t\tUsed\t\tPriority\n/swapfile  file\t8388604\t0\t-2\n",
        "usr/local/cuda/version.json": '{"cuda": {"name": "CUDA SDK", "version": "13.2.0"}}',
        "usr/lib/python3/dist-packages/tensorrt/__init__.py": "",
        "sys/class/devfreq/17000000.gpu/cur_freq": "1300500000\n",
        "sys/class/devfreq/17000000.gpu/min_freq": "1300500000\n",
        "sys/class/devfreq/17000000.gpu/max_freq": "1300500000\n",
        **_common(62841, 60000),
        **_packages({"nvidia-jetpack": "7.2+b1", "libnvinfer10": "10.16.2.10-1+cuda13.2"}),
    }
    _written(root, files)
    (root / "usr/bin").mkdir(parents=True)
    (root / "usr/bin/python3").symlink_to("python3.12")
    return root


def workstation(root: Path) -> Path:
    """An x86 machine with 16 GB."""
    files = {
        "etc/os-release": 'PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\n',
        "proc/cpuinfo": "processor\t: 0\nmodel name\t: Some x86 at 3 GHz\nflags\t\t: fpu avx2 avx512_vnni fma\n",
        "proc/meminfo": "MemTotal:       16000000 kB\nMemAvailable:   12000000 kB\n",
        "proc/swaps": "Filename\tType\tSize\tUsed\tPriority\n",
    }
    return _written(root, files)


def changed(root: Path, files: dict[str, str | None]) -> Path:
    """Change the text of files, and remove those whose text is None. Return the tree."""
    for name, text in files.items():
        if text is None:
            (root / name).unlink()
        else:
            _written(root, {name: text})
    return root


def _common(total_mb: int, free_mb: int) -> dict[str, str]:
    return {
        "proc/cpuinfo": "processor\t: 0\nFeatures\t: fp asimd fphp asimdhp asimddp\nCPU implementer\t: 0x41\n",
        "proc/meminfo": f"MemTotal:       {total_mb * 1024} kB\nMemAvailable:   {free_mb * 1024} kB\n",
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq": "729600\n",
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_min_freq": "729600\n",
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_max_freq": "1728000\n",
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "schedutil\n",
    }


def _packages(versions: dict[str, str]) -> dict[str, str]:
    paragraphs = [
        f"Package: {name}\nStatus: install ok installed\nArchitecture: arm64\nVersion: {version}\n"
        for name, version in versions.items()
    ]
    removed = "Package: tensorrt\nStatus: deinstall ok config-files\nVersion: 8.5.2\n"
    return {"var/lib/dpkg/status": "\n".join([removed, *paragraphs])}


def _written(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root
