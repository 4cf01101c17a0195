"""Images that a policy is shown: their tokens, and where agents put them."""

import base64
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from treadle_agents import ChatContext, Env, Observation, Result, Turn
from treadle_agents.failures import EpisodeError
from treadle_agents.images.headers import NotAnImageError
from treadle_agents.images.picture import Picture
from treadle_agents.images.placeholders import ImageRule, Placeholder, Shown, placeholder_of
from treadle_agents.loop import Limits, Words, run_episode
from treadle_agents.record import Generated
from treadle_core.errors import InvalidFieldError
from treadle_core.tickets import Sampling

END, PAD = 1, 9
PLACEHOLDER = Placeholder("#", PAD, ImageRule(patch=10, least=1))


def png(width: int, height: int) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    check = struct.pack(">I", zlib.crc32(b"IHDR" + header))
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + b"IHDR" + header + check


def uri(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


@pytest.mark.parametrize(
    ("rule", "size", "tokens"),
    [
        pytest.param(ImageRule(), (56, 29), 4, id="squares"),
        pytest.param(ImageRule(), (1, 1), 4, id="at-least"),
        pytest.param(ImageRule(most=9), (1000, 1000), 9, id="at-most"),
        pytest.param(ImageRule(tokens=256), (1000, 3), 256, id="fixed"),
    ],
)
def test_a_rule_says_how_many_tokens_an_image_takes(
    rule: ImageRule, size: tuple[int, int], tokens: int
) -> None:
    assert rule.tokens_of(*size) == tokens


@pytest.mark.parametrize("wrong", [{"tokens": -1}, {"patch": 0}, {"least": 0}, {"most": 3}])
def test_a_rule_by_which_no_image_could_be_shown_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidFieldError, match=f"images.{next(iter(wrong))}"):
        ImageRule(**wrong)


def test_a_placeholder_becomes_as_many_as_its_image_takes() -> None:
    small, large = Picture.of(png(10, 10)), Picture.of(png(25, 10))
    shown = PLACEHOLDER.shown(np.array([2, PAD, 3, PAD, PAD], np.int32), [small, large, small])
    assert shown.token_ids.tolist() == [2, PAD, 3, PAD, PAD, PAD, PAD]
    assert [(span.start, span.length) for span in shown.media] == [(1, 1), (3, 3), (6, 1)]
    assert [each.data for each in shown.pictures.values()] == [small.data, large.data]


@pytest.mark.parametrize("ids", [[2], [PAD, PAD]])
def test_there_are_as_many_placeholders_as_images(ids: list[int]) -> None:
    with pytest.raises(InvalidFieldError, match="once for each of 1 images"):
        PLACEHOLDER.shown(np.array(ids, np.int32), [Picture.of(png(1, 1))])


@pytest.mark.parametrize(
    ("files", "found"),
    [
        pytest.param({}, "<image>", id="known"),
        pytest.param({"config.json": {"image_token_id": 5}}, "[PIC]", id="by-number"),
        pytest.param({"tokenizer_config.json": {"image_token": "[PIC]"}}, "[PIC]", id="by-word"),
        pytest.param(
            {"processor_config.json": {"image_token": {"content": "[PIC]"}}}, "[PIC]", id="object"
        ),
        pytest.param({"tokenizer_config.json": {"image_token": "[X]"}}, "<image>", id="no-token"),
        pytest.param({"tokenizer.json": {"added_tokens": []}}, None, id="none"),
    ],
)
def test_the_placeholder_of_a_folder_is_found(
    tmp_path: Path, files: dict[str, Any], found: str | None
) -> None:
    added = [{"id": 4, "content": "<image>"}, {"id": 5, "content": "[PIC]"}]
    for name, content in ({"tokenizer.json": {"added_tokens": added}} | files).items():
        (tmp_path / name).write_text(json.dumps(content))
    placeholder = placeholder_of(tmp_path, ImageRule())
    assert (placeholder and placeholder.text) == found


@pytest.mark.parametrize("data", [b"", b"GIF8", png(100_000, 100_000)])
def test_what_is_no_fit_image_is_no_picture(data: bytes) -> None:
    with pytest.raises(NotAnImageError):
        Picture.of(data)


def context(**task: Any) -> ChatContext:
    return ChatContext(task, "b/v1", "b", "key", "policy", Sampling(), 99, 1.5)


def test_images_stand_at_the_markers_of_what_users_say() -> None:
    one, two = uri(png(1, 1)), uri(png(2, 2))
    messages = [
        {"role": "system", "content": "<image>"},
        {"role": "user", "content": "See <image> and"},
        {"role": "user", "content": [{"type": "text", "text": "<image>?"}, {"type": "other"}]},
        {"role": "user", "content": "<image>"},
    ]
    said = [each["content"] for each in context(messages=messages, images=[one, two]).messages]
    assert said == [
        "<image>",
        [
            {"type": "text", "text": "See "},
            {"type": "image_url", "image_url": {"url": one}},
            {"type": "text", "text": " and"},
        ],
        [
            {"type": "image_url", "image_url": {"url": two}},
            {"type": "text", "text": "?"},
            {"type": "other"},
        ],
        [{"type": "text", "text": "<image>"}],
    ]


def test_images_are_given_in_any_of_four_ways(tmp_path: Path) -> None:
    content = png(3, 3)
    file, known = tmp_path / "picture", f"treadle:sha256:{'a' * 64}"
    file.write_bytes(content)
    images = [uri(content), known, base64.b64encode(content).decode(), str(file)]
    (message,) = context(prompt="<image>" * 4, images=images).messages
    urls = [part["image_url"]["url"] for part in message["content"]]
    assert urls == [uri(content), known, uri(content), uri(content)]


@pytest.mark.parametrize("image", [7, "no such file", "QUJD", "a\0b"])
def test_an_image_that_is_none_is_named(image: Any) -> None:
    with pytest.raises(ValueError, match=r"task\.images\[0\]: expected a data URI"):
        context(prompt="<image>", images=[image]).messages  # noqa: B018


class Shows(Env):
    """Shows an image, then what it was made with."""

    def __init__(self, then: Any) -> None:
        self.then = then

    def reset(self, task: Any) -> str:
        return Observation("a#b", [png(20, 10)])

    def step(self, turn: Turn) -> Result:
        assert turn.observation == "a#b" or turn.number == 2
        return Result(observation=self.then, reward=1.0, terminated=turn.number == 2)


async def run(env: Env, words: Words, prompts: list[Shown]) -> Any:
    async def generate(prompt: Shown, sampling: Sampling) -> Generated:
        prompts.append(prompt)
        ones = np.ones(1, np.int32)
        return Generated(ones * END, -ones.astype(np.float32), ones, ones, length=False)

    return await run_episode(
        env, {}, generate=generate, words=words, sampling=Sampling(), limits=Limits(64, 4)
    )


def encode(text: str) -> list[int]:
    return [PAD if letter == "#" else 2 for letter in text]


SEEING = Words(encode, str, PLACEHOLDER)


async def test_what_an_environment_shows_is_recorded_with_its_images() -> None:
    prompts: list[Shown] = []
    env = Shows(Observation("#c#", [png(10, 10), png(20, 10)]))
    episode = await run(env, SEEING, prompts)

    one, two = prompts
    assert one.token_ids.tolist() == [2, PAD, PAD, 2]
    assert two.token_ids.tolist() == [2, PAD, PAD, 2, END, PAD, 2, PAD, PAD]
    (segment,) = episode.segments
    assert [(span.start, span.length) for span in segment.media] == [(1, 2), (5, 1), (7, 2)]
    assert segment.media == two.media
    assert [each.sha256 for each in episode.media] == list(two.pictures)
    assert len(episode.media) == 2


@pytest.mark.parametrize(
    ("then", "words", "says"),
    [
        pytest.param(Observation("#"), SEEING, "once for each of 0 images, got 1", id="too-few"),
        pytest.param(Observation("", [b"GIF8"]), SEEING, "no known kind", id="no-image"),
        pytest.param(Observation("", ["x"]), SEEING, r"images\[0\]: expected bytes", id="no-bytes"),  # type: ignore[list-item]
        pytest.param(Observation("", [b""] * 257), SEEING, "at most 256 images", id="too-many"),
        pytest.param(
            Observation("#" * 256, [png(1 + i, 1) for i in range(256)]),
            SEEING,
            "at most 256 in an episode, got 257",
            id="too-many-in-all",
        ),
        pytest.param("", Words(encode, str), "the policy reads no images", id="blind"),
    ],
)
async def test_images_that_cannot_be_shown_are_the_environments_failure(
    then: Any, words: Words, says: str
) -> None:
    with pytest.raises(EpisodeError, match=says) as failed:
        await run(Shows(then), words, [])
    assert failed.value.failure_class == "environment"
