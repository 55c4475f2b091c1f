"""pi0.5: pi0 with an action expert whose norms depend on the time, and the state as text of the prompt.

transformers has no class for it. Checkpoints are LeRobot's, or have pi0's configuration with the `model_type` "pi05".
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from sinkprune.export.families.pi0 import Pi0, WriteExpert
from sinkprune.export.models.adaptive_expert import build_adaptive_expert, build_modulation


class Pi05(Pi0):
    """A configuration of pi0.5."""

    name = "pi0.5"
    configured_as = "pi0"
    state_in_prompt = True
    expert_graphs: Mapping[str, WriteExpert] = MappingProxyType(
        {"modulation": build_modulation, "expert": build_adaptive_expert}
    )
    # openpi's PaligemmaTokenizer. The runtime writes the text around the instruction, because it has the state.
    chat_template = (
        "{% for message in messages %}"
        "{% for content in message['content'] if content['type'] == 'image' %}{{ '<image>' }}{% endfor %}"
        "{{ bos_token }}"
        "{% for content in message['content'] if content['type'] == 'text' %}{{ content['text'] }}{% endfor %}"
        "{% endfor %}"
    )
