"""What a session stores: pictures are known by their pixels, and texts are stored where computing them takes time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from PIL import Image

from sinkprune import Pipeline, Session
from sinkprune.runtime.media.clip import ClipSize, SampledFrames
from sinkprune.serving import sessions as prefix_cache
from sinkprune.serving.sessions import WORTH_FLOPS, LeadKey, PrefixCache, digest_of, picture_parts

FIRST = "What is on the table?"


def test_a_digest_is_of_pixels_shape_and_times(photo: Image.Image) -> None:
    small = photo.resize((6, 4))
    shown = SampledFrames([small, small], ClipSize(6, 4, 2, 1.0), (0.0, 1.0))
    others = [
        small,
        Image.frombytes("RGB", (4, 6), small.tobytes()),
        shown,
        SampledFrames([small], ClipSize(6, 4, 1, 1.0), (0.0,)),
        SampledFrames([small, small], ClipSize(6, 4, 2, 2.0), (0.0, 1.0)),
        SampledFrames([small, small], ClipSize(6, 4, 2, 1.0), (0.0, 2.0)),
    ]
    assert len({digest_of(picture_parts(picture)) for picture in others}) == len(others)
    assert [*picture_parts(small.copy())] == [*picture_parts(small)]


def test_equal_pixels_are_digested_once_and_others_always(
    photo: Image.Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    digested: list[object] = []
    monkeypatch.setattr(prefix_cache, "digest_of", lambda parts: digested.append(parts) or digest_of(parts))
    memory, other = PrefixCache(1 << 24), photo.copy()
    other.putpixel((0, 0), (1, 2, 3))
    first, second = memory.digest(0, photo), memory.digest(1, other)
    assert (memory.digest(0, photo.copy()), memory.digest(1, other)) == (first, second) and len(digested) == 2
    # The same object, with another pixel
    other.putpixel((0, 0), (1, 2, 4))
    assert memory.digest(1, other) != second and memory.digest(0, photo) == first
    assert memory.nbytes >= 2 * 3 * photo.width * photo.height
    # The pixels of a large picture are not stored.
    monkeypatch.setattr(prefix_cache, "_MOST_COMPARED", photo.width * photo.height - 1)
    stored = memory.nbytes
    assert memory.digest(2, photo) == first and memory.nbytes == stored


@pytest.mark.parametrize("worth", [True, False])
def test_a_text_that_is_computed_in_no_time_is_not_stored(
    worth: bool, pipeline: Callable[..., Pipeline], photo: Image.Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = pipeline("gqa-112")
    manifest, lengths = pipe.bundle.manifest, list[int]()
    monkeypatch.setattr(
        prefix_cache, "prefill_flops", lambda _, rows: lengths.append(rows[0]) or WORTH_FLOPS - 1 + worth
    )
    monkeypatch.setattr(prefix_cache, "WORTH_FLOPS", WORTH_FLOPS)
    assert LeadKey.of(manifest, None, [[5, 6, 7], [8]]).text == ((5, 6, 7) if worth else ())
    assert LeadKey.of(manifest, None, [[5, 6, 7]]).text == () and lengths == [3, 0]
    session = Session(pipe)
    session.generate(photo, FIRST, max_new_tokens=1)
    assert session.generate(photo.rotate(90), FIRST, max_new_tokens=1).reused_rows == (lengths[-1] if worth else 0)
