"""Images in a rendered conversation: their placeholders, as many as the engine takes."""

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from treadle_agents.images.picture import Picture
from treadle_agents.images.placeholders import ImageRule, Shown
from treadle_gateway.conversation import Image, Message, Text
from treadle_gateway.errors import RefusedError
from treadle_gateway.markup.template import Markup

PAD = "<|image_pad|>"
TEMPLATE = (Path(__file__).with_name("templates") / "vision.jinja").read_text()


def picture(width: int, height: int) -> Picture:
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    check = struct.pack(">I", zlib.crc32(b"IHDR" + header))
    return Picture.of(b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + b"IHDR" + header + check)


ONE, TWO = picture(56, 56), picture(100, 56)
PICTURES = {each.medium.sha256: each for each in (ONE, TWO)}


def user(*parts: Picture | str) -> Message:
    said = (
        Text(part) if isinstance(part, str) else Image(part.medium.sha256, part.medium.media_type)
        for part in parts
    )
    return Message("user", tuple(said))


def shown(markup: Markup, *new: Message, before: tuple[Message, ...] = ()) -> Shown:
    return markup.shown(markup.render(before, new, tools=()), new, PICTURES)


def seeing(path: Path) -> Markup:
    return Markup(path, images=ImageRule())


def test_each_placeholder_stands_as_often_as_its_image_takes(folder: Any) -> None:
    markup = seeing(folder("vision"))
    before = (user("Hi"), Message("assistant", (Text("Hello."),)))
    for behind in ((), before):
        found = shown(markup, user("a", TWO, "b"), user(ONE), before=behind)
        assert [(span.sha256, span.length) for span in found.media] == [
            (TWO.medium.sha256, 8),
            (ONE.medium.sha256, 4),
        ]
        text = markup.decode(found.token_ids.tolist())
        opened, closed = "<|vision_start|>", "<|vision_end|>"
        assert f"a{opened}{PAD * 8}{closed}b<|im_end|>" in text
        assert text.count(PAD) == 12


def test_a_placeholder_that_is_no_special_token_is_no_words_either(folder: Any) -> None:
    path = folder("vision")
    told = json.loads((path / "tokenizer.json").read_text())
    for token in told["added_tokens"]:
        token["special"] = token["special"] and token["content"] != PAD
    (path / "tokenizer.json").write_text(json.dumps(told))
    markup = seeing(path)
    found = shown(markup, user(PAD, ONE, PAD))
    (span,) = found.media
    places = np.flatnonzero(found.token_ids == markup.placeholder).tolist()
    assert places == list(range(span.start, span.end))


@pytest.mark.parametrize(
    "written",
    [
        pytest.param(f"<|vision_start|>{PAD}{PAD}<|vision_end|>", id="two-placeholders"),
        pytest.param("<|vision_start|><|vision_end|>", id="none"),
    ],
)
def test_a_template_without_one_placeholder_an_image_reads_none(folder: Any, written: str) -> None:
    template = TEMPLATE.replace(f"<|vision_start|>{PAD}<|vision_end|>", written)
    markup = seeing(folder("vision", template=template))
    assert (markup.probe.image, markup.placeholder) == ("", None)
    with pytest.raises(RefusedError, match="the model reads no images"):
        markup.check_images()
    with pytest.raises(RefusedError, match="reads no images"):
        shown(markup, user(ONE))


def test_an_engine_without_images_is_told_from_a_model_without(folder: Any) -> None:
    markup = Markup(folder("vision"))
    assert markup.probe.image
    assert markup.placeholder is None
    with pytest.raises(RefusedError, match="the engine of this run reads no images") as refused:
        shown(markup, user(ONE))
    assert refused.value.code == "unsupported_image"


def test_an_image_that_a_template_drops_is_refused(folder: Any) -> None:
    template = TEMPLATE.replace("part.type == 'image'", "part.type == 'image' and loop.index < 3")
    markup = seeing(folder("vision", template=template))
    assert len(shown(markup, user("a", ONE)).media) == 1
    with pytest.raises(RefusedError, match=r"does not show them: .* 2 images, got 1"):
        shown(markup, user("a", ONE, TWO))
