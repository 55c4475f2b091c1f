"""The robot's computer: boards, what this machine is and what fits it, set-up.

May import contract, runtime and engines; nobody imports it."""
