"""Attention without the pairs of rows that never attend to each other, in the precision of the matrices."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

IN_CHUNKS = "in_chunks"
"""The name of `attend_in_chunks` in transformers."""
_NEVER = -1e4
"""The logit of a row that is not attended to."""


def attend_in_chunks(
    module: nn.Module,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    **unused: object,
) -> tuple[torch.Tensor, None]:
    """Return attention [B,S,H,h] of rows [B,H,S,h]: causal in the picture; of text to the picture and its own chunk.

    `attention_mask` [B,1,C,L,L] is what rows of each of C chunks of L rows of text attend to in it. Without a mask,
    every row attends to all. An attention function of transformers.
    """
    if attention_mask is None:
        out = (queries @ keys.transpose(-1, -2) * scaling).softmax(-1).to(values.dtype) @ values
        return out.transpose(1, 2), None
    chunks, length = attention_mask.shape[2:4]
    split = queries.shape[2] - chunks * length
    (picture, asked), (picture_keys, text_keys), (picture_values, text_values) = (
        rows.split([split, chunks * length], 2) for rows in (queries, keys, values)
    )
    seen = scaled_dot_product_attention(picture, picture_keys, picture_values, is_causal=True, scale=scaling)
    to_picture = asked @ picture_keys.transpose(-1, -2)
    inside, inside_keys, inside_values = (rows.unflatten(2, (chunks, -1)) for rows in (asked, text_keys, text_values))
    to_text = (inside @ inside_keys.transpose(-1, -2)).masked_fill(~attention_mask, _NEVER).flatten(2, 3)
    shares = (torch.cat([to_picture, to_text], -1) * scaling).softmax(-1).to(values.dtype)
    at_picture, at_text = shares.split([split, length], -1)
    read = at_picture @ picture_values + (at_text.unflatten(2, (chunks, -1)) @ inside_values).flatten(2, 3)
    return torch.cat([seen, read], 2).transpose(1, 2), None


AttentionInterface.register(IN_CHUNKS, attend_in_chunks)
