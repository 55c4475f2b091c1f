"""Pictures and videos in requests: data URIs, and https addresses where the server allows them."""

from __future__ import annotations

import base64
import io
import ipaddress
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException, HTTPSConnection
from tempfile import NamedTemporaryFile
from urllib.parse import unquote_to_bytes, urlsplit

from PIL import Image

from sinkprune.contract.checks.format_value import counted
from sinkprune.contract.errors import ImageError
from sinkprune.runtime.families import Family
from sinkprune.runtime.media.clip import SampledFrames
from sinkprune.runtime.media.images import read_image_bytes
from sinkprune.runtime.media.video_file import VideoFile
from sinkprune.runtime.server.api_error import wrong
from sinkprune.runtime.server.json_values import format_json

MOST_REMOTE_BYTES = 32 << 20
"""The most bytes of a picture that is fetched."""
_EXAMPLE = "data:image/jpeg;base64,..."
_STANDARD = bytes.maketrans(b"-_", b"+/")
_NO_BASE64 = re.compile(rb"[^A-Za-z0-9+/]")
_SECONDS = 10.0
_BLOCK = 1 << 16

Fetch = Callable[[str], bytes]
"""Returns the bytes at an https address; raises `ApiError`."""


@dataclass(frozen=True)
class PictureReader:
    """Reads the pictures and videos of requests for a model of one family."""

    family: Family
    fetch: Fetch | None
    """Reads https addresses; None where the server fetches nothing."""

    def image(self, url: object) -> Image.Image:
        """Return the RGB image of an `image_url`; raises `ApiError` for bytes that are no image that fits."""
        data = self._bytes("image_url", url)
        try:
            picture = read_image_bytes(data)
            # Before the request runs, because the reader of messages names the part.
            self.family.layout(picture)
            return picture
        except ImageError as error:
            raise wrong(str(error)) from error

    def video(self, url: object) -> SampledFrames:
        """Return the frames that the model sees of a `video_url`; raises `ApiError` for bytes that are no video."""
        try:
            self.family.check_video()
            with NamedTemporaryFile(prefix="sinkprune-") as file:
                file.write(self._bytes("video_url", url))
                file.flush()
                frames = self.family.sample_frames(VideoFile(file.name))
            self.family.layout(frames)
            return frames
        except ImageError as error:
            # The message names the temporary file.
            raise wrong(re.sub(r"'[^']*/sinkprune-[^']*'", "video_url", str(error))) from error

    def _bytes(self, field: str, url: object) -> bytes:
        """Return the bytes of a data URI, or of an https address; raises `ApiError` for other addresses."""
        if not isinstance(url, str):
            raise wrong(f"{field}.url is {format_json(url)}. Give a data URI: data:image/jpeg;base64,...")
        url = url.strip()
        if url[:5].lower() == "data:":
            return data_uri_bytes(url)
        if self.fetch is not None and url[:8].lower() == "https://":
            return self.fetch(url)
        remote = "" if self.fetch else ", or start the server with --allow-remote-images and give an https address"
        raise wrong(f"{field}.url is {format_json(url)}, no data URI. Give data:image/jpeg;base64,...{remote}.")


def data_uri_bytes(uri: str) -> bytes:
    """Return the bytes of a data URI (RFC 2397); raises `ApiError`.

    As in browsers, base64 may have line breaks and lack its padding. It may also have the alphabet for URLs.
    """
    head, comma, content = uri[5:].partition(",")
    if not comma:
        raise wrong("the data URI has no comma. Give data:image/jpeg;base64,...")
    raw = unquote_to_bytes(content)
    if "base64" not in [part.strip().lower() for part in head.split(";")[1:]]:
        if raw.isascii():
            # Bytes of pictures and videos never are.
            raise wrong(f"the data URI has no ;base64 before its comma: {format_json(head)}. Write {_EXAMPLE}")
        return raw
    packed = raw.translate(_STANDARD, b" \t\r\n\f\v").rstrip(b"=")
    strange = _NO_BASE64.search(packed)
    if strange is not None:
        found = format_json(packed[strange.start() :][:4].decode(errors="replace")[0])
        raise wrong(
            f"the data URI is no valid base64: character {strange.start() + 1} is {found}. Encode the file's bytes "
            "again."
        )
    if not packed or len(packed) % 4 == 1:
        raise wrong(
            f"the data URI has {counted(len(packed), 'character')} of base64, which no file has: characters are "
            "missing. Send the whole file."
        )
    return base64.b64decode(packed + b"=" * (-len(packed) % 4))


def fetch_https(url: str) -> bytes:
    """Return the bytes at an https address: of a public host, without redirects, within limits on size and time.

    Raises `ApiError`. The address is resolved once, and the connection goes to the address that was checked.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or 443
        address = _public_address(host, port)
        connection = _CheckedConnection(host, port, address)
        try:
            path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            connection.request("GET", path, headers={"User-Agent": "sinkprune", "Accept": "image/*"})
            response = connection.getresponse()
            if response.status != 200:
                raise wrong(f"the picture's server answered {response.status}, expected 200 without a redirect.")
            data = io.BytesIO()
            while block := response.read(_BLOCK):
                data.write(block)
                if data.tell() > MOST_REMOTE_BYTES:
                    raise wrong(f"the picture has more than {MOST_REMOTE_BYTES} bytes. Scale it down.")
            return data.getvalue()
        finally:
            connection.close()
    except (OSError, HTTPException, ValueError) as error:
        raise wrong(f"the picture could not be fetched: {' '.join(str(error).split())[:200]}.") from error


class _CheckedConnection(HTTPSConnection):
    """A connection to an address that was checked, with the certificate of the host's name."""

    def __init__(self, host: str, port: int, address: str) -> None:
        super().__init__(host, port, timeout=_SECONDS)
        self._address = address

    def connect(self) -> None:
        """Connect to the checked address; no other lookup takes place."""
        plain = socket.create_connection((self._address, self.port), self.timeout)
        context = self._context  # type: ignore[attr-defined]
        self.sock = context.wrap_socket(plain, server_hostname=self.host)


def _public_address(host: str, port: int) -> str:
    """Return an address of `host`; raises `ApiError` if any of its addresses is not public."""
    found = {str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    for address in found:
        numeric = ipaddress.ip_address(address.partition("%")[0])
        if numeric.is_multicast or not numeric.is_global:
            raise wrong(f"'{host}' is an address of a private network. Give a picture on a public host.")
    return min(found)
