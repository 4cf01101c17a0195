"""A sandbox by the name that a recipe gives it."""

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any, cast

from treadle_agents.sandbox.ports import Sandbox
from treadle_core.errors import InvalidFieldError

GROUP = "treadle.sandboxes"


def sandbox_of(chosen: str | Mapping[str, Any] | Sandbox) -> Sandbox:
    """The sandbox called `chosen`, built from its parameters; one that is made is taken as it is.

    Raises InvalidFieldError where there is none of that name, or it does not take these parameters.
    """
    if not isinstance(chosen, (str, Mapping)):
        return chosen
    settings = {"name": chosen} if isinstance(chosen, str) else dict(chosen)
    name = str(settings.pop("name", ""))
    found = entry_points(group=GROUP)
    if name not in found.names:
        limit = f"one of {', '.join(sorted(found.names))}"
        raise InvalidFieldError("sandbox", limit=limit, value=name)
    try:
        return cast("Sandbox", found[name].load()(**settings))
    except TypeError as error:
        raise InvalidFieldError(f"sandbox {name}", limit="its parameters", value=error) from error
