"""Power sensors. A new sensor is a module here and its row in `_SENSORS`."""

from __future__ import annotations

from pathlib import Path

from sinkprune.contract.errors import NoSensorError
from sinkprune.runtime.power.sensors import ROOT, Sensor, open_nvml, open_rapl, open_tegrastats

AUTO = "auto"
"""Chooses the first readable sensor that covers the device in use."""
_SENSORS = {"tegrastats": open_tegrastats, "rapl": open_rapl, "nvml": open_nvml}
_COVER_NO_GPU = {"rapl"}
SENSORS = (AUTO, *_SENSORS)
"""The values of `--power`, in the order in which `AUTO` tries them."""


def open_sensor(name: str, *, on_gpu: bool, root: Path = ROOT) -> Sensor:
    """Return the sensor `name` after a first reading, or with `AUTO` the first sensor that this machine has.

    With `on_gpu`, engines compute on a separate GPU, and `AUTO` skips sensors that do not cover it. `root` is the
    root of the system's files. Raises `NoSensorError` if there is no sensor. Raises `PowerError` for a sensor that
    cannot be read: `AUTO` takes no other in its place.
    """
    if name != AUTO:
        return _SENSORS[name](root)
    reasons = []
    for kind, open_kind in _SENSORS.items():
        if on_gpu and kind in _COVER_NO_GPU:
            reasons.append(f"{kind}: does not cover the GPU")
            continue
        try:
            return open_kind(root)
        except NoSensorError as error:
            reasons.append(f"{kind}: {str(error).rstrip('.')}")
    raise NoSensorError(
        f"no power sensor was found. Tried {'; '.join(reasons)}. Leave --power out, or measure on a machine that has "
        "one."
    )
