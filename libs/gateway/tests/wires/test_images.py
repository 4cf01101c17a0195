"""Images in requests: measured by their header, never fetched."""

import base64
import struct
import time
import zlib
from hashlib import sha256
from typing import Any

import pytest

from treadle_gateway.conversation import Image
from treadle_gateway.errors import RefusedError
from treadle_gateway.wires.chat import Chat
from treadle_gateway.wires.images import MAX_BYTES, Gallery
from treadle_gateway.wires.messages import Messages
from treadle_gateway.wires.responses import Responses


def chunk(kind: bytes, data: bytes) -> bytes:
    check = struct.pack(">I", zlib.crc32(kind + data))
    return struct.pack(">I", len(data)) + kind + data + check


def png(width: int, height: int, frames: int = 1) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    animated = chunk(b"acTL", struct.pack(">II", frames, 0)) if frames > 1 else b""
    return b"\x89PNG\r\n\x1a\n" + header + animated + chunk(b"IDAT", b"")


def jpeg(width: int, height: int) -> bytes:
    app = b"\xff\xe0\x00\x10JFIF\x00" + bytes(9)
    frame = b"\xff\xc0\x00\x11\x08" + struct.pack(">HH", height, width) + bytes(10)
    return b"\xff\xd8" + app + b"\xff" + frame


def gif(width: int, height: int, frames: int = 1, frame: tuple[int, int] = (1, 1)) -> bytes:
    screen = b"GIF89a" + struct.pack("<HH", width, height) + b"\x80\x00\x00" + bytes(6)
    control = b"\x21\xf9\x04\x00\x00\x00\x00\x00"
    one = control + b"\x2c" + struct.pack("<HHHH", 0, 0, *frame) + b"\x00\x02\x01\x00\x00"
    return screen + one * frames + b"\x3b"


def riff(kind: bytes, data: bytes) -> bytes:
    return (
        b"RIFF"
        + struct.pack("<I", 12 + len(data))
        + b"WEBP"
        + kind
        + struct.pack("<I", len(data))
        + data
    )


def webp_lossy(width: int, height: int) -> bytes:
    return riff(b"VP8 ", b"\x00\x00\x00\x9d\x01\x2a" + struct.pack("<HH", width, height))


def webp_lossless(width: int, height: int) -> bytes:
    return riff(b"VP8L", b"\x2f" + struct.pack("<I", (width - 1) | (height - 1) << 14))


def webp_animated(width: int, height: int, frames: int) -> bytes:
    size = struct.pack("<I", width - 1)[:3] + struct.pack("<I", height - 1)[:3]
    return (
        riff(b"VP8X", b"\x02\x00\x00\x00" + size)
        + (b"ANMF" + struct.pack("<I", 2) + b"xx") * frames
    )


def uri(media_type: str, content: bytes) -> str:
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"


def refused(url: str) -> RefusedError:
    with pytest.raises(RefusedError) as found:
        Gallery().from_url(url, "image")
    return found.value


@pytest.mark.parametrize(
    ("media_type", "content"),
    [
        pytest.param("image/png", png(3, 2), id="png"),
        pytest.param("image/png", png(3, 2, frames=8), id="moving-png"),
        pytest.param("image/jpeg", jpeg(3, 2), id="jpeg"),
        pytest.param("image/gif", gif(3, 2, frames=8), id="gif"),
        pytest.param("image/webp", webp_lossy(3, 2), id="lossy-webp"),
        pytest.param("image/webp", webp_lossless(3, 2), id="lossless-webp"),
        pytest.param("image/webp", webp_animated(3, 2, 8), id="moving-webp"),
    ],
)
def test_a_picture_is_kept_under_its_digest(media_type: str, content: bytes) -> None:
    gallery = Gallery()
    found = gallery.from_url(uri(media_type, content), "image")
    assert found == Image(sha256(content).hexdigest(), media_type)
    assert {name: each.data for name, each in gallery.media.items()} == {found.sha256: content}
    with pytest.raises(RefusedError, match=r"at most \d+ pixels|its bytes are"):
        Gallery().from_url(uri("image/png", png(100_000, 100_000)), "image")


@pytest.mark.parametrize(
    ("media_type", "content", "words"),
    [
        pytest.param("image/png", png(100_000, 100_000), "not 100000 x 100000", id="huge-png"),
        pytest.param("image/jpeg", jpeg(65_535, 65_535), "not 65535 x 65535", id="huge-jpeg"),
        pytest.param("image/gif", gif(1, 1, frame=(60_000, 60_000)), "pixels", id="huge-frame"),
        pytest.param("image/webp", webp_lossless(16_384, 16_384), "pixels", id="huge-webp"),
        pytest.param("image/gif", gif(3, 2, frames=9), "at most 8 frames", id="gif-frames"),
        pytest.param("image/gif", gif(3, 2, frames=100_000), "at most 8 frames", id="gif-bomb"),
        pytest.param("image/png", png(3, 2, frames=9), "at most 8 frames", id="png-frames"),
        pytest.param("image/webp", webp_animated(3, 2, 9), "at most 8 frames", id="webp-frames"),
        pytest.param("image/png", png(0, 2), "no pixels", id="no-pixels"),
        pytest.param("image/png", jpeg(3, 2), "its bytes are image/jpeg", id="wrong-magic"),
        pytest.param("image/png", b"GIF8", "no known kind", id="no-picture"),
        pytest.param("image/png", png(3, 2)[:20], "ends within", id="cut-off-png"),
        pytest.param("image/jpeg", jpeg(3, 2)[:24], "ends within", id="cut-off-jpeg"),
        pytest.param("image/jpeg", b"\xff\xd8\xff\xd9", "without a size", id="empty-jpeg"),
        pytest.param("image/gif", gif(3, 2)[:-3], "ends within", id="cut-off-gif"),
        pytest.param("image/svg+xml", b"<svg/>", "not image/svg+xml", id="svg"),
        pytest.param("text/html", b"<b>", "not text/html", id="html"),
    ],
)
def test_what_is_no_fit_picture_is_refused(media_type: str, content: bytes, words: str) -> None:
    started = time.process_time()
    assert words in refused(uri(media_type, content)).message
    assert time.process_time() - started < 0.5


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254/latest",
        "http://127.0.0.1/",
        "https://[::1]/x.png",
        "http://10.0.0.1/",
        "http://2130706433/",
        "http://0177.0.0.1/",
        "http://good.example\\@127.0.0.1/",
        "https://example.com/a.png",
        "file:///etc/passwd",
        "gopher://127.0.0.1/",
        "treadle:sha256:xyz",
        "treadle:sha256:" + "A" * 64,
        "//example.com/a.png",
        "",
    ],
)
def test_no_address_is_ever_fetched(url: str) -> None:
    assert "remote media is disabled" in refused(url).message


@pytest.mark.parametrize(
    "url", ["data:image/png,abc", "data:;base64,abc", "DATA:image/png;base64,"]
)
def test_a_broken_data_uri_is_refused(url: str) -> None:
    assert "data URI" in refused(url).message


def test_broken_base64_is_refused() -> None:
    assert "base64" in refused("data:image/png;base64,a*b").message


def test_a_picture_over_the_limit_is_too_large() -> None:
    error = refused("data:image/png;base64," + "A" * (MAX_BYTES // 3 * 4 + 8))
    assert error.kind == "too_large"


def test_a_content_reference_is_taken_at_its_word() -> None:
    gallery = Gallery()
    assert gallery.from_url("treadle:sha256:" + "a" * 64, "image") == Image("a" * 64, "")
    assert (gallery.media, gallery.references) == ({}, {"a" * 64: "image"})


def test_countless_images_are_refused() -> None:
    gallery = Gallery()
    for _ in range(256):
        gallery.from_url("treadle:sha256:" + "a" * 64, "image")
    with pytest.raises(RefusedError, match="at most 256 images"):
        gallery.from_url("treadle:sha256:" + "a" * 64, "image")


def test_every_wire_takes_a_picture() -> None:
    content = png(3, 2)
    url, said = uri("image/png", content), base64.b64encode(content).decode()
    source = {"type": "base64", "media_type": "image/png", "data": said}
    chat: Any = [{"type": "image_url", "image_url": {"url": url, "detail": "low"}}]
    asks = [
        Chat().ask({"model": "m", "messages": [{"role": "user", "content": chat}]}, {}),
        Responses().ask(
            {
                "model": "m",
                "input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}],
            },
            {},
        ),
        Messages().ask(
            {
                "model": "m",
                "messages": [{"role": "user", "content": [{"type": "image", "source": source}]}],
            },
            {},
        ),
    ]
    image = Image(sha256(content).hexdigest(), "image/png")
    assert all(asked.messages[0].parts == (image,) for asked in asks)
    assert all(asked.media[image.sha256].data == content for asked in asks)
