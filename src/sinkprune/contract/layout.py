"""What a picture is to a model: how many visual tokens it has, in which order, and where they stand."""

from __future__ import annotations

from dataclasses import dataclass

from sinkprune.contract.precision import Array


@dataclass(frozen=True, eq=False)
class VisualLayout:
    """An image or a clip as `groups` groups of `tokens` visual tokens; made once by its family, when it is seen.

    Tokens are counted through all groups: G*N of them.
    """

    size: tuple[int, int]
    """Width and height of the picture, in pixels."""
    groups: int
    """G: what is sanitised apart, or seen at once. An image, its tiles, the temporal patches of a clip."""
    tokens: int
    """N: how many visual tokens each group has."""
    unpruned_rows: Array
    """[V] int64: the token that each row of the model's own prompt stands for, unpruned; -1 at the end of a line."""
    boxes: Array
    """[G*N,4] float: left, top, right, bottom of each token, in pixels of the picture."""
    views: tuple[range, ...]
    """The tokens that can be drawn on one frame or image, because they show each part of it once."""
    places: Array | None
    """[A,G*N] int64: each token's position ids along A axes, counted from the picture's first row; None where a row's
    position is its number in the prompt."""
    extent: int
    """How far behind the picture's first row the text behind it stands; without meaning where `places` is None."""
    tower_flops: int
    """Matmul FLOPs of the vision tower on all groups."""
    projector_flops: int
    """Matmul FLOPs of the projector for one token; 0 where there is none."""
    seen_share: float = 1.0
    """The share of the picture's area that the model is given; 1 for the whole picture."""
    texts: tuple[str, ...] = ()
    """What stands around the groups in the model's own prompt, in the words of its template: one text before each
    and one behind the last. Empty where they follow each other. Where there are any, `places` and `extent` are those
    of a token in its own group, whose first row they are counted from."""

    @property
    def parts(self) -> int:
        """At how many places of a prompt the picture stands: the texts of a prompt have as many gaps for it."""
        return max(1, len(self.texts) - 1)

    @property
    def all_tokens(self) -> int:
        """G*N: how many visual tokens the picture has before anything is dropped."""
        return self.groups * self.tokens
