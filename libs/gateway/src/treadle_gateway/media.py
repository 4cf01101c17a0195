"""The images of a session: each content once, bounded, and known until the session ends; pure."""

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field

from treadle_agents.images.picture import Picture
from treadle_gateway.conversation import Ask
from treadle_gateway.errors import RefusedError


@dataclass(slots=True, eq=False)
class Media:
    """What a session was shown. Bytes that came once need not come again: a reference will do."""

    most: int
    """Images, over the whole session."""
    most_bytes: int
    """Of all of them."""
    known: MutableMapping[str, Picture]
    """Images of all sessions here, by sha256, so that no content is kept twice."""
    on_new: Callable[[Picture], None]
    """Told of every image of the session, once."""
    pictures: dict[str, Picture] = field(default_factory=dict[str, Picture], init=False)
    """By sha256."""
    _bytes: int = field(default=0, init=False)

    def admit(self, ask: Ask) -> Mapping[str, Picture]:
        """Takes the images of a request; returns all of the session.

        Raises RefusedError at a bound of the session, and where a reference is to nothing that the
        session was shown. Then none of them is taken.
        """
        if not ask.media and not ask.references:
            return self.pictures
        new = {name: each for name, each in ask.media.items() if name not in self.pictures}
        for name, where in ask.references.items():
            if name not in self.pictures and name not in new:
                message = f"{where}: this session was shown no image treadle:sha256:{name}"
                raise RefusedError("invalid", message, field=where, code="unknown_image")
        size = self._bytes + sum(len(each.data) for each in new.values())
        if len(self.pictures) + len(new) > self.most:
            raise _spent("max_images", self.most)
        if size > self.most_bytes:
            raise _spent("max_image_bytes", self.most_bytes)
        self._bytes = size
        for name, each in new.items():
            picture = self.pictures[name] = self.known.setdefault(name, each)
            self.on_new(picture)
        return self.pictures


def _spent(name: str, limit: int) -> RefusedError:
    message = f"{name}: with these images the session is over its limit of {limit}"
    return RefusedError("invalid", message, code=name, limit=limit)
