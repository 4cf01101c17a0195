"""The chat markup of a Hugging Face folder: what an Env needs to speak to any policy.

Needs Jinja2 (`pip install "treadle-agents[chat]"`), and neither torch nor transformers.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, cast

from jinja2 import Template as Compiled
from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from treadle_core.errors import InvalidFieldError

Message = Mapping[str, Any]
"""`role` and `content`, and whatever else the template of the policy reads."""

_ANSWER = "TREADLE-ANSWER"
"""Stands for what the policy said, so that what the template writes behind it is found."""


class Template:
    """The chat template of a Hugging Face folder, compiled once."""

    names: Mapping[str, str]
    """Special tokens by what the template calls them, `eos_token` for one."""
    ends: Sequence[str]
    """Texts of the tokens that end a turn: the tokenizer's first, then the generation config's."""

    def __init__(self, model: Path) -> None:
        """Raises InvalidFieldError when there is no template, or none that can be parsed."""
        config = _json(model / "tokenizer_config.json")
        self.names = {
            name: _text(config[name])
            for name in ("bos_token", "eos_token", "pad_token", "unk_token")
            if config.get(name) is not None
        }
        self.ends = _ends(model, self.names)
        self._compiled = {
            name: _compiled(source, model) for name, source in _sources(model, config).items()
        }

    def render(
        self,
        messages: Sequence[Message],
        *,
        opens: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
        **variables: Any,
    ) -> str:
        """The text of a conversation; `opens`: up to where the policy speaks.

        With `tools` the template named `tool_use` is taken where there is one. Raises what the
        template raises: it may refuse messages, or trip over them.
        """
        template = self._compiled["default"]
        if tools:
            template = self._compiled.get("tool_use", template)
        return template.render(
            messages=[dict(message) for message in messages],
            add_generation_prompt=opens,
            tools=list(tools) or None,  # templates ask whether these are none
            documents=None,
            **self.names,
            **variables,
        )


class Chat:
    """Renders messages as the policy was trained to read them."""

    def __init__(self, model: Path) -> None:
        """Reads the chat template of a Hugging Face folder.

        Raises InvalidFieldError when there is none, or none that can be parsed.
        """
        self._template = _read(model)

    def prompt(self, messages: Sequence[Message]) -> str:
        """The text of a conversation, up to where the policy speaks."""
        return self._template.render(messages)

    def reply(self, message: Message) -> str:
        """What follows a turn of the policy: `message`, up to where the policy speaks again.

        What the template writes behind a turn, but for the stop token, which was sampled, comes
        first: so prompt, turn and reply are together what the template makes of the conversation.
        """
        before = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
        behind = self._template.render([*before, message]).rpartition(_ANSWER)[2]
        for end in self._template.ends:
            if behind.startswith(end):
                return behind.removeprefix(end)
        return behind

    def content(self, action: str) -> str:
        """What the policy said in a turn, without the stop token and the space around it."""
        text = action.strip()
        for end in self._template.ends:
            text = text.removesuffix(end).strip()
        return text


@cache  # every episode may ask, and a tokenizer is megabytes
def _read(model: Path) -> Template:
    return Template(model)


def _compiled(source: str, model: Path) -> Compiled:
    try:
        return _environment().from_string(
            source, {"raise_exception": _refuse, "strftime_now": _now}
        )
    except TemplateError as error:
        raise InvalidFieldError(
            "run.model", limit="a chat template in Jinja", value=f"{error} in {model}"
        ) from error


def _sources(model: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The templates' texts by name, `default` among them.

    They lie in files of their own, or in the tokenizer's configuration.
    """
    found: Any = config.get("chat_template")
    named: dict[str, Any] = (
        {each["name"]: each["template"] for each in cast("list[Any]", found)}
        if isinstance(found, list)
        else {"default": found}
    )
    for file in sorted((model / "additional_chat_templates").glob("*.jinja")):
        named[file.stem] = file.read_text(encoding="utf-8")
    if (file := model / "chat_template.jinja").is_file():
        named["default"] = file.read_text(encoding="utf-8")
    if not isinstance(named.get("default"), str):
        raise InvalidFieldError(
            "run.model",
            limit="a chat template, as chat_template.jinja or in tokenizer_config.json",
            value=f"none in {model}; a policy without one needs prompts with markup of your own",
        )
    return named


class _Marked(Extension):
    """`{% generation %}`: marks in a template what a policy says; it is rendered as it stands."""

    tags = {"generation"}  # noqa: RUF012 - as its base declares it

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """As Hugging Face renders: blocks leave no white space, and a template cannot reach out."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Marked]
    )
    environment.filters["tojson"] = _tojson
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - a template may pass it by place
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


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
