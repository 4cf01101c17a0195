"""Images on their way from an agent to the engine."""

import struct
import zlib
from typing import Any

import numpy as np
import pytest

from treadle_agents.failures import EpisodeError
from treadle_agents.images.picture import Picture
from treadle_agents.images.placeholders import Shown
from treadle_core.errors import InvalidFieldError
from treadle_core.media import MediumSpan
from treadle_core.tickets import Sampling
from treadle_rollout import conformance
from treadle_rollout.adapters.script import Asked
from treadle_rollout.adapters.scripted import ScriptedEngine
from treadle_rollout.conformance import images
from treadle_rollout.conformance.tables import Tables
from treadle_rollout.core.errors import UnsupportedImageError
from treadle_rollout.core.requests import check_request
from treadle_rollout.frames import shown_of, shown_to_list
from treadle_rollout.ports import Engine, GenerationRequest


def png(width: int, height: int) -> Picture:
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    check = struct.pack(">I", zlib.crc32(b"IHDR" + header))
    return Picture.of(b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + b"IHDR" + header + check)


PICTURE = png(60, 20)
NAME = PICTURE.medium.sha256
IDS = np.array([2, 9, 9, 9, 3], np.int32)


def asked(*media: MediumSpan, pictures: tuple[Picture, ...] = (PICTURE,)) -> GenerationRequest:
    by_name = {each.medium.sha256: each for each in pictures}
    return GenerationRequest("s", IDS, Sampling(max_tokens=4), "e", media, by_name)


class Seeing(Tables):
    """Tables that read images."""

    def engine(self, **told: Any) -> Engine:
        return ScriptedEngine(vocabulary=self.vocabulary, image_patch=20, **told)


@pytest.mark.parametrize("check", images.CHECKS, ids=lambda check: check.__name__)
async def test_an_engine_that_reads_images_conforms(check: conformance.Check) -> None:
    await conformance.run(check, Seeing())


async def test_a_script_sees_the_bytes_and_where_they_are() -> None:
    seen: list[Asked] = []

    def looks(question: Asked) -> list[int]:
        seen.append(question)
        return [5, 1]

    engine = ScriptedEngine(script=looks, image_patch=20)
    await engine.install(1)
    span = MediumSpan(NAME, 1, 3)
    made = await engine.generate(asked(span))
    assert made.token_ids.tolist() == [5, 1]
    assert seen[0].images == ((span, PICTURE),)
    assert np.array_equal(seen[0].token_ids, IDS)
    await engine.close()


def test_an_engine_without_images_refuses_them_by_name() -> None:
    with pytest.raises(UnsupportedImageError, match="reads no images, got 1") as refused:
        check_request(asked(MediumSpan(NAME, 1, 3)), vocabulary=16, max_context=64)
    assert (refused.value.reason, refused.value.field) == ("UNSUPPORTED_IMAGE", "media")


@pytest.mark.parametrize(
    "told", [{"image_tokens": -1}, {"image_patch": -1}], ids=["tokens", "patch"]
)
def test_an_engine_by_which_no_image_could_be_shown_is_not_made(told: dict[str, int]) -> None:
    with pytest.raises(InvalidFieldError, match="images"):
        ScriptedEngine(**told)


def test_what_an_environment_shows_goes_to_the_replica_whole() -> None:
    shown = Shown(IDS, (MediumSpan(NAME, 1, 3),), {NAME: PICTURE})
    found = shown_of(shown_to_list(shown))
    assert np.array_equal(found.token_ids, IDS)
    assert found.media == shown.media
    assert [each.data for each in found.pictures.values()] == [PICTURE.data]


RAW, DATA = IDS.tobytes(), PICTURE.data


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param([RAW], id="too-few"),
        pytest.param([RAW[:-1], [], []], id="half-a-token"),
        pytest.param([RAW, [[NAME, 1, 3]], []], id="no-bytes"),
        pytest.param([RAW, [], [DATA]], id="no-place"),
        pytest.param([RAW, [[NAME, 1, 5]], [DATA]], id="outside"),
        pytest.param([RAW, [[NAME, -1, 2]], [DATA]], id="before"),
        pytest.param([RAW, [[NAME, 1, 0]], [DATA]], id="empty"),
        pytest.param([RAW, [[NAME, 1, 2], [NAME, 2, 1]], [DATA]], id="overlapping"),
        pytest.param([RAW, [["x", 1, 3]], [DATA]], id="no-name"),
        pytest.param([RAW, [[NAME, 1.5, 1]], [DATA]], id="no-number"),
        pytest.param([RAW, [[NAME, 1]], [DATA]], id="no-span"),
        pytest.param([RAW, [[NAME, 1, 3]], [b"GIF8"]], id="no-image"),
        pytest.param([RAW, [[NAME, 1, 3]], ["text"]], id="no-data"),
        pytest.param([RAW, [[NAME, 1, 3]], [DATA, DATA]], id="twice"),
    ],
)
def test_what_a_worker_shows_is_checked(fields: list[Any]) -> None:
    with pytest.raises(EpisodeError, match="the agent worker: expected"):
        shown_of(fields)
