"""Tokens that stand for images: how many there are for each, and where.

A chat template writes one placeholder token an image. The engine's processor looks for as many as
the image has features, so that the one is written so often, once, before the policy is asked.

Shapes: T = tokens that are shown.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from treadle_agents.images.picture import Picture
from treadle_core.errors import InvalidFieldError
from treadle_core.media import MediumSpan

_KNOWN = ("<|image_pad|>", "<image>", "[IMG]", "<|image|>", "<image_soft_token>")
"""Placeholders of models whose folders do not name theirs."""


@dataclass(frozen=True, slots=True)
class ImageRule:
    """How many tokens the engine makes of an image: so many, or one a square of its pixels.

    The second is what processors do that cut an image as it is: `ceil(width / patch) *
    ceil(height / patch)`, at least `least` and at most `most`.
    """

    tokens: int = 0
    """Of every image; 0: by its size."""
    patch: int = 28
    """Pixels along a side of the square that becomes one token."""
    least: int = 4
    most: int = 16384

    def __post_init__(self) -> None:
        """Raises InvalidFieldError where no image could be shown."""
        if self.tokens < 0:
            raise InvalidFieldError("images.tokens", limit=">= 0", value=self.tokens)
        for name, least in (("patch", 1), ("least", 1), ("most", self.least)):
            if (value := getattr(self, name)) < least:
                raise InvalidFieldError(f"images.{name}", limit=f">= {least}", value=value)

    def tokens_of(self, width: int, height: int) -> int:
        """Tokens of an image of so many pixels."""
        if self.tokens:
            return self.tokens
        squares = -(-width // self.patch) * -(-height // self.patch)
        return min(max(squares, self.least), self.most)


@dataclass(frozen=True, slots=True, eq=False)
class Shown:
    """Tokens that the policy is shown, and the images among them."""

    token_ids: NDArray[np.int32]
    """[T]."""
    media: tuple[MediumSpan, ...] = ()
    """Where images are, ascending."""
    pictures: Mapping[str, Picture] = field(default_factory=dict[str, Picture])
    """These images, by sha256; in a conversation perhaps more."""


@dataclass(frozen=True, slots=True)
class Placeholder:
    """The token of a model that stands for an image."""

    text: str
    id: int
    rule: ImageRule

    def shown(self, ids: NDArray[np.int32], pictures: Sequence[Picture]) -> Shown:
        """The ids with the placeholder of each picture, in order, as often as the rule says.

        Raises InvalidFieldError where there are not as many placeholders as pictures.
        """
        places = np.flatnonzero(ids == self.id)
        if places.size != len(pictures):
            limit = f"{self.text} once for each of {len(pictures)} images"
            raise InvalidFieldError("placeholders", limit=limit, value=places.size)
        if not pictures:
            return Shown(ids)
        repeats = np.ones(ids.size, np.int64)
        repeats[places] = [self.rule.tokens_of(each.width, each.height) for each in pictures]
        starts = (np.cumsum(repeats) - repeats)[places]
        media = tuple(
            MediumSpan(each.medium.sha256, int(start), int(length))
            for each, start, length in zip(pictures, starts, repeats[places], strict=True)
        )
        by_content = {each.medium.sha256: each for each in pictures}
        return Shown(np.repeat(ids, repeats), media, by_content)


def placeholder_of(folder: Path, rule: ImageRule) -> Placeholder | None:
    """The placeholder of a Hugging Face folder, by its own word or by name; None for none."""
    added: dict[str, int] = {
        token["content"]: token["id"]
        for token in _json(folder / "tokenizer.json").get("added_tokens", [])
    }
    named = next((name for name in (*_named(folder, added), *_KNOWN) if name in added), None)
    return None if named is None else Placeholder(named, added[named], rule)


def _named(folder: Path, added: Mapping[str, int]) -> list[str]:
    """What the configurations call the image token."""
    named: list[str] = []
    for file in ("processor_config.json", "tokenizer_config.json"):
        stated: Any = _json(folder / file).get("image_token")
        if isinstance(stated, dict):
            stated = cast("dict[str, Any]", stated).get("content")
        named += [stated] if isinstance(stated, str) else []
    config = _json(folder / "config.json")
    numbers = {config.get("image_token_id"), config.get("image_token_index")} - {None}
    return named + [text for text, number in added.items() if number in numbers]


def _json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
