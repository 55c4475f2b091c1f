"""Robot policies in LeRobot: a policy class, and its asynchronous inference server (docs/lerobot.md).

Modules of this folder need LeRobot, and nothing else of this package imports them. LeRobot finds the policy class by
`--discover_packages_path=sinkprune.policies.lerobot`, which imports them all.
"""

from sinkprune.contract.checks import install_command

INSTALL = f"{install_command('cpu,lerobot')}; see docs/lerobot.md"
"""How to install what the modules need."""
