"""The sanitizer of SinkPruner in torch: which visual tokens of each group go into the LLM.

A group is a picture, or a tile of one. G groups of N tokens are selected at once. Every score is fp32, and ties go to
the lower index. No step waits for the device, and no count depends on a picture.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

QUERIES = 1024
"""How many rows of a head's attention are in memory at once."""


class Counts(NamedTuple):
    """How many tokens of a group of N tokens do what."""

    outliers: int
    """Tokens of largest norm. Their mean is the sink, which is kept in their place."""
    reserve: int
    """Kept tokens of largest salience."""
    diverse: int
    """Kept tokens that resemble the other kept ones least."""

    @property
    def kept(self) -> int:
        return 1 + self.reserve + self.diverse

    @property
    def diversity_group(self) -> int:
        """How many diverse tokens are chosen at once, without comparing them with each other: at least 8 rounds."""
        return max(1, min(16, self.diverse // 8))


def cls_salience(query: Tensor, key: Tensor) -> Tensor:
    """Return [G,N]: the CLS token's softmax attention to each patch, summed over the heads.

    `query` [G,H,h] is the CLS token's, `key` [G,1+N,H,h] that of all tokens.
    """
    scores = torch.einsum("ghd,gnhd->ghn", query.float() * query.shape[-1] ** -0.5, key.float())
    return scores.softmax(-1).sum(1)[:, 1:]


def received_attention(query: Tensor, key: Tensor, lengths: list[int]) -> Tensor:
    """Return [P]: the softmax attention that each patch receives within its sequence, summed over heads and queries.

    `query` and `key` [P,H,h] are those of sequences of `lengths` patches, one behind the other.
    """
    # Sequences are filled up with slots that are no keys, and whose queries do not count.
    held = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    patch = held.flatten().cumsum(0).sub(1).view_as(held).to(query.device)
    query, key = (each[patch].transpose(1, 2).float() for each in (query.float() * query.shape[-1] ** -0.5, key))
    counted = held[:, None].to(query)
    hidden = (1 - counted) * torch.finfo(torch.float32).min
    total = torch.zeros_like(counted)
    for head in range(query.shape[1]):
        for rows, own in zip(query[:, head].split(QUERIES, 1), counted.split(QUERIES, 2), strict=True):
            total += own @ (rows @ key[:, head].mT + hidden).softmax(-1)
    return total.flatten()[held.flatten().nonzero()[:, 0].to(total.device)]


def select(
    rows: Tensor, salience: Tensor, counts: Counts, norms: Tensor | None = None, width: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return the kept ones of `rows` [G,N,D], [G,n0,D], and the token of each, [G,n0].

    The first is the sink, whose token is the one of largest norm. Salient tokens follow, then diverse ones, both in
    ascending order. Only the first `width` columns are compared. Without `norms` [G,N], theirs choose the outliers.
    """
    tokens = rows[..., :width].float()
    lengths = tokens.norm(dim=-1)
    outliers = _largest(lengths if norms is None else norms, counts.outliers)
    sink = _gather(rows, outliers).float().mean(1, keepdim=True)
    reserved = _largest(salience.float().scatter(1, outliers, -torch.inf), counts.reserve)
    unit = tokens / lengths.where(lengths > 0, 1)[..., None]
    diverse = _least_alike(unit, torch.cat([outliers, reserved], 1), counts)
    index = torch.cat([reserved.sort(-1).values, diverse.sort(-1).values], 1)
    return torch.cat([sink.to(rows.dtype), _gather(rows, index)], 1), torch.cat([outliers[:, :1], index], 1)


def _least_alike(unit: Tensor, taken: Tensor, counts: Counts) -> Tensor:
    """Return the diverse tokens [G,k_div] by the cosines of the rows `unit` [G,N,D].

    `taken` are the outliers, which count for no resemblance, and the reserved tokens.
    """
    chosen, left, new = [taken[:, :0]], counts.diverse, taken[:, counts.outliers :]
    closeness = torch.full_like(unit[..., 0], -torch.inf).scatter(1, taken, torch.inf)
    while left:
        nearest = (unit @ _gather(unit, new).mT).amax(-1)
        closeness = closeness.maximum(nearest).scatter(1, new, torch.inf)
        new = _largest(-closeness, min(counts.diversity_group, left))
        chosen.append(new)
        left -= new.shape[1]
    return torch.cat(chosen, 1)


def _largest(values: Tensor, count: int) -> Tensor:
    """Return the index [G,count] of the largest of each row; topk would not order ties."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def _gather(rows: Tensor, index: Tensor) -> Tensor:
    return rows.take_along_dim(index[..., None], 1)
