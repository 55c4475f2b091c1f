"""Pictures and videos in requests: data URIs, and https addresses where the server allows them."""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import re
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from urllib.parse import unquote_to_bytes, urlsplit

import h11
from anyio import fail_after, to_thread

from sinkprune.contract.checks import counted
from sinkprune.contract.errors import ImageError
from sinkprune.runtime.families import Family
from sinkprune.runtime.media.image_bytes import ImageBytes
from sinkprune.runtime.media.video_file import VideoBytes
from sinkprune.serving.body_fields import format_json, wrong
from sinkprune.serving.connections import Parser

MOST_REMOTE_BYTES = 32 << 20
"""The most bytes of a picture that is fetched."""
_EXAMPLE = "data:image/jpeg;base64,..."
_STANDARD = bytes.maketrans(b"-_", b"+/")
_NO_BASE64 = re.compile(rb"[^A-Za-z0-9+/]")
_SECONDS = 10.0
"""How long a picture may take: the lookup of its host, the connection, and all bytes."""
_BLOCK = 1 << 14
_MOST_INTERIM = 8
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
"""Addresses that a gateway translates to the IPv4 address at their end (RFC 6052)."""
_OBSOLETE = [
    ipaddress.ip_network(network)
    # Local NAT64, 6to4, Teredo, IPv4-compatible and IPv4-translated addresses, and site-local ones.
    for network in ("64:ff9b:1::/48", "2002::/16", "2001::/32", "::/96", "::ffff:0:0:0/96", "fec0::/10")
]
"""Networks that no public host needs, and that may lead to private addresses."""


@dataclass(frozen=True)
class PictureReader:
    """Reads the pictures and videos of requests for a model of one family."""

    family: Family
    fetch: Callable[[str], bytes] | None
    """Returns the bytes at an https address, or raises `ApiError`; None where the server fetches nothing."""

    def image(self, url: object, place: str) -> ImageBytes:
        """Return the image of an `image_url` at a `place` of the request, whose header was read.

        Raises `ApiError` for bytes that are no image of a known format and size.
        """
        data = self._bytes("image_url", url)
        try:
            return ImageBytes(data, place)
        except ImageError as error:
            raise wrong(str(error)) from error

    def video(self, url: object, place: str) -> VideoBytes:
        """Return the bytes of a `video_url` at a `place` of the request; raises `ApiError` where videos are none."""
        try:
            self.family.check_video()
        except ImageError as error:
            raise wrong(str(error)) from error
        return VideoBytes(self._bytes("video_url", url), place)

    def _bytes(self, field: str, url: object) -> bytes:
        """Return the bytes of a data URI, or of an https address; raises `ApiError` for other addresses."""
        if not isinstance(url, str):
            raise wrong(f"{field}.url is {format_json(url)}. Give a data URI: {_EXAMPLE}")
        url = url.strip()
        if url[:5].lower() == "data:":
            return data_uri_bytes(url)
        if self.fetch is not None and url[:8].lower() == "https://":
            return self.fetch(url)
        remote = "" if self.fetch else ", or start the server with --allow-remote-images and give an https address"
        raise wrong(f"{field}.url is {format_json(url)}, no data URI. Give {_EXAMPLE}{remote}.")


def data_uri_bytes(uri: str) -> bytes:
    """Return the bytes of a data URI (RFC 2397); raises `ApiError`.

    As in browsers, base64 may have line breaks and lack its padding. It may also have the alphabet for URLs.
    """
    head, comma, content = uri[5:].partition(",")
    if not comma:
        raise wrong(f"the data URI has no comma. Give {_EXAMPLE}")
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
        place = f"character {strange.start() + 1} is {found}"
        raise wrong(f"the data URI is no valid base64: {place}. Encode the file's bytes again.")
    if not packed or len(packed) % 4 == 1:
        count = f"{counted(len(packed), 'character')} of base64"
        raise wrong(f"the data URI has {count}, which no file has: characters are missing. Send the whole file.")
    return base64.b64decode(packed + b"=" * (-len(packed) % 4))


async def fetch_https(url: str) -> bytes:
    """Return the bytes at an https address: of a public host, without redirects, within limits on size and time.

    Raises `ApiError`. The address is resolved once, and the connection goes to the address that was checked.
    """
    try:
        with fail_after(_SECONDS):
            return await _fetched(url)
    except TimeoutError as error:
        raise wrong(f"the picture was not fetched within {_SECONDS:g} seconds. Give it as a data URI.") from error
    except (OSError, h11.ProtocolError, ValueError) as error:
        raise wrong(f"the picture could not be fetched: {' '.join(str(error).split())[:200]}.") from error


async def _fetched(url: str) -> bytes:
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or 443
    address = await _public_address(host, port)
    reader, writer = await asyncio.open_connection(address, port, ssl=_tls(), server_hostname=host)
    try:
        name = f"[{host}]" if ":" in host else host.encode("idna").decode()
        name += f":{port}" * (port != 443)
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        headers = {"Host": name, "User-Agent": "sinkprune", "Accept": "image/*", "Connection": "close"}
        connection, request = Parser(h11.CLIENT), h11.Request(method="GET", target=path, headers=[*headers.items()])
        writer.write((connection.send(request) or b"") + (connection.send(h11.EndOfMessage()) or b""))
        data, interim = bytearray(), 0
        while not isinstance(event := connection.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA:
                connection.receive_data(await reader.read(_BLOCK))
                # A fast server leaves no pause, in which others are answered.
                await asyncio.sleep(0)
            elif isinstance(event, h11.Response) and event.status_code != 200:
                raise wrong(f"the picture's server answered {event.status_code}, expected 200 without a redirect.")
            elif isinstance(event, h11.InformationalResponse):
                interim += 1
                if interim > _MOST_INTERIM:
                    raise wrong("the picture's server sends interim responses without end.")
            elif isinstance(event, h11.Data):
                data += event.data
                if len(data) > MOST_REMOTE_BYTES:
                    raise wrong(f"the picture has more than {MOST_REMOTE_BYTES} bytes. Scale it down.")
        return bytes(data)
    finally:
        # Without the end of TLS, for which a server may let us wait.
        writer.transport.abort()


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


async def _public_address(host: str, port: int) -> str:
    """Return an address of `host`; raises `ApiError` if any of its addresses is not public."""
    # In a thread that nobody waits for: a lookup cannot be ended.
    lookup = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    found = {str(info[4][0]) for info in await to_thread.run_sync(lookup, abandon_on_cancel=True)}
    for address in found:
        if not _is_public(ipaddress.ip_address(address.partition("%")[0])):
            raise wrong(f"'{host}' is an address of a private network. Give a picture on a public host.")
    return min(found)


def _is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Return whether an address is public. One that leads to an IPv4 address is as public as that."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped or address in _NAT64:
            return _is_public(ipaddress.IPv4Address(address.packed[-4:]))
        if any(address in network for network in _OBSOLETE):
            return False
    return address.is_global and not address.is_multicast
