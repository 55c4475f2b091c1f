"""The scripts for LeRobot in an environment without it."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest


@pytest.mark.parametrize("script", ["write_policy", "policy_server"])
def test_without_lerobot_the_scripts_print_how_to_install_it(script: str) -> None:
    command = (sys.executable, "-m", f"sinkprune.policies.lerobot.{script}")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(
        r"error: .* needs the package '(draccus|lerobot)', which is not installed\. Install it with: pip install "
        r"--editable '\.\[cpu,lerobot\]' \(in the clone\); see docs/lerobot\.md\n",
        done.stderr,
    )
