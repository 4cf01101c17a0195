"""The chat markup of a Hugging Face folder: what an Env needs to speak to any policy.

Needs Jinja2 (`pip install "treadle-agents[chat]"`), and neither torch nor transformers.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, cast

from jinja2 import Template, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from treadle_core.errors import InvalidFieldError

Message = Mapping[str, Any]
"""`role` and `content`, and whatever else the template of the policy reads."""

_ANSWER = "TREADLE-ANSWER"
"""Stands for what the policy said, so that what the template writes behind it is found."""


class Chat:
    """Renders messages as the policy was trained to read them."""

    def __init__(self, model: Path) -> None:
        """Reads the chat template of a Hugging Face folder.

        Raises InvalidFieldError when there is none, or none that can be parsed.
        """
        self._names, self._ends, self._template = _read(model)

    def prompt(self, messages: Sequence[Message]) -> str:
        """The text of a conversation, up to where the policy speaks."""
        return self._render(messages)

    def reply(self, message: Message) -> str:
        """What follows a turn of the policy: `message`, up to where the policy speaks again.

        What the template writes behind a turn, but for the stop token, which was sampled, comes
        first: so prompt, turn and reply are together what the template makes of the conversation.
        """
        before = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
        behind = self._render([*before, message]).rpartition(_ANSWER)[2]
        for end in self._ends:
            if behind.startswith(end):
                return behind.removeprefix(end)
        return behind

    def content(self, action: str) -> str:
        """What the policy said in a turn, without the stop token and the space around it."""
        text = action.strip()
        for end in self._ends:
            text = text.removesuffix(end).strip()
        return text

    def _render(self, messages: Sequence[Message]) -> str:
        return self._template.render(
            messages=[dict(message) for message in messages],
            add_generation_prompt=True,
            **self._names,
        )


@cache  # every episode may ask, and a tokenizer is megabytes
def _read(model: Path) -> tuple[dict[str, str], list[str], Template]:
    """Special tokens by name, those that end a turn, and the template."""
    config = _json(model / "tokenizer_config.json")
    names = {
        name: _text(config[name])
        for name in ("bos_token", "eos_token", "pad_token", "unk_token")
        if config.get(name) is not None
    }
    try:
        template = _environment().from_string(
            _source(model, config), {"raise_exception": _refuse, "strftime_now": _now}
        )
    except TemplateError as error:
        raise InvalidFieldError(
            "run.model", limit="a chat template in Jinja", value=f"{error} in {model}"
        ) from error
    return names, _ends(model, names), template


def _source(model: Path, config: Mapping[str, Any]) -> str:
    """The template's text: of its own file, or of the tokenizer's configuration."""
    if (file := model / "chat_template.jinja").is_file():
        return file.read_text(encoding="utf-8")
    found: Any = config.get("chat_template")
    if isinstance(found, list):  # several, by name
        named = {each["name"]: each["template"] for each in cast("list[Any]", found)}
        found = named.get("default")
    if not isinstance(found, str):
        raise InvalidFieldError(
            "run.model",
            limit="a chat template, as chat_template.jinja or in tokenizer_config.json",
            value=f"none in {model}; a policy without one needs prompts with markup of your own",
        )
    return found


def _environment() -> ImmutableSandboxedEnvironment:
    """As Hugging Face renders: blocks leave no white space, and a template cannot reach out."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    return environment


def _tojson(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _now(form: str) -> str:
    return datetime.now(UTC).strftime(form)


def _refuse(message: str) -> str:
    raise TemplateError(message)


def _ends(model: Path, names: Mapping[str, str]) -> list[str]:
    """The tokens that end a turn: the tokenizer's and the generation config's."""
    declared: Any = _json(model / "generation_config.json").get("eos_token_id")
    ids = cast("list[Any]", declared if isinstance(declared, list) else [declared])
    added: list[Any] = _json(model / "tokenizer.json").get("added_tokens", [])
    ends = [token["content"] for token in added if token["id"] in ids]
    return list(dict.fromkeys([*([names["eos_token"]] if "eos_token" in names else []), *ends]))


def _text(token: Any) -> str:
    """A token is written as text, or as an object with its `content`."""
    return token if isinstance(token, str) else token["content"]


def _json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
