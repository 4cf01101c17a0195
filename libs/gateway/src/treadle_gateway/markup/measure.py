"""Measures what a chat template takes and does, by rendering small conversations; pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from treadle_agents.chat import Template
from treadle_gateway.conversation import Image, Message, Text
from treadle_gateway.markup.bench import (
    ARGUMENTS,
    ASKS,
    ASKS_MORE,
    OTHER_ARGUMENTS,
    SAYS,
    SAYS_MORE,
    SYSTEM,
    THOUGHT,
    TOOL,
    Bench,
    calling,
    reads,
    result,
)
from treadle_gateway.markup.errors import UnsupportedTemplateError
from treadle_gateway.markup.form import Form
from treadle_gateway.markup.probe import Probe
from treadle_gateway.markup.readers import FORMATS
from treadle_gateway.markup.readers.block import CallFormat
from treadle_gateway.markup.renderer import RefusedByTemplateError
from treadle_gateway.markup.spelling import Spelling
from treadle_gateway.markup.trial import Trial
from treadle_gateway.markup.words import Guard, Words

_TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
_SWITCHES = ("enable_thinking", "thinking")


def guarded_tokens(template: Template, tokenizer: Mapping[str, Any]) -> frozenset[str]:
    """Texts of the tokens that only the template may write, and nobody is shown.

    Special tokens, those that it writes around messages, and those that end a turn; not what stands
    around reasoning, which templates look for in the words of an assistant.
    """
    tokens: list[Mapping[str, Any]] = tokenizer.get("added_tokens", [])
    bench = Bench(template, Guard(()))
    frames = [
        bench.whole(replace(Form(), content=content), [ASKS, SAYS, ASKS_MORE])
        for content in ("text", "parts")
    ]
    kept = {
        token["content"]
        for token in tokens
        if token["special"]
        or token["content"] in template.ends
        or any(frame and token["content"] in frame for frame in frames)
    }
    return frozenset(kept.difference(*_TAGS))


def measure(template: Template, guard: Guard, words: Words) -> Probe:
    """What the template takes and does. Raises UnsupportedTemplateError with the reason."""
    bench = Bench(template, guard)
    spelling = Spelling(words.markers, words.hidden)
    form = _messages(bench, _content(bench))
    form = _thoughts(bench, form, spelling)
    _check_answer(bench, form, spelling)
    form, calls = _tools(bench, form, spelling)
    form, image = _images(bench, form)
    probe = Probe(
        form,
        calls,
        thinks=_opens(bench, form, reasoning=True),
        thinks_unasked=_opens(bench, form, reasoning=False),
        rewrites=frozenset(),
        image=image,
    )
    trial = Trial(bench, spelling, probe)
    return replace(probe, rewrites=frozenset(trial.rewrites()))


def _content(bench: Bench) -> Form:
    """The form of content with which a question is read."""
    for content in ("text", "parts"):
        form = Form(content=content)
        if bench.shows(form, [ASKS], ASKS.text):
            return form
    reason = "what a user says is not in the text that it makes"
    try:
        bench.renderer(Form()).whole([ASKS])
    except RefusedByTemplateError as error:
        reason = f"it refuses a question of a user: {error}"
    raise _unsupported(reason)


def _messages(bench: Bench, form: Form) -> Form:
    """Roles, and their order."""
    talk = [ASKS, SAYS, ASKS_MORE]
    if not bench.shows(form, talk, *(each.text for each in talk)):
        raise _unsupported("it does not write a question, an answer and another question")
    rendered = bench.whole(form, talk) or ""
    between = rendered.partition(SAYS.text)[2].partition(ASKS_MORE.text)[0]
    twice = [[ASKS, ASKS_MORE], [ASKS, SAYS, SAYS_MORE, ASKS_MORE]]
    answer = replace(result("Probe-result"), call_id="")
    first = bench.shows(form, [SYSTEM, ASKS], SYSTEM.text, ASKS.text)
    later = [[ASKS, SAYS, SYSTEM, ASKS_MORE], [ASKS, SYSTEM, SAYS, ASKS_MORE]]
    return replace(
        form,
        end=_first(between, bench.template.ends),
        answers=bench.shows(form, [ASKS, SAYS, answer], SAYS.text, answer.text),
        neighbours=all(bench.shows(form, each, *(m.text for m in each)) for each in twice),
        system_first=first,
        system_later=first and all(bench.shows(form, each, SYSTEM.text) for each in later),
    )


def _first(text: str, tokens: Sequence[str]) -> str:
    """The token that comes first in `text`; empty where none does."""
    return min(((text.find(each), each) for each in tokens if each in text), default=(0, ""))[1]


def _thoughts(bench: Bench, form: Form, spelling: Spelling) -> Form:
    """How reasoning is written, and what asks for it."""
    prompt = bench.whole(form, [ASKS]) or ""
    known = [tags for tags in _TAGS if tags[0] in spelling.markers or tags[0] in prompt]
    opens, closes = (known or _TAGS)[0]
    switches = tuple(name for name in _SWITCHES if _switches(bench, form, name))
    form = replace(form, opens=opens, closes=closes, switches=switches)
    thought = replace(SAYS, reasoning=THOUGHT)
    for thoughts in ("field", "inline"):
        tried = replace(form, thoughts=thoughts)
        if bench.shows(tried, [ASKS, thought], THOUGHT, opens=False):
            return tried
    return form


def _switches(bench: Bench, form: Form, name: str) -> bool:
    form = replace(form, switches=(name,))
    return bench.whole(form, [ASKS]) != bench.whole(form, [ASKS], reasoning=False)


def _check_answer(bench: Bench, form: Form, spelling: Spelling) -> None:
    """Refuses a template that puts more than a turn's words where the policy speaks."""
    prompt = bench.whole(form, [ASKS]) or ""
    alone = bench.whole(form, [ASKS, SAYS], opens=False) or ""
    said = alone.rpartition(form.end)[0] if form.end and form.end in alone else alone
    if not reads(spelling, form, None, _behind(spelling, prompt, said), SAYS):
        raise _unsupported("what a policy says stands in markup that cannot be read")


def _unsupported(reason: str) -> UnsupportedTemplateError:
    return UnsupportedTemplateError(f"chat template: {reason}", field="chat_template", value=reason)


def _opens(bench: Bench, form: Form, *, reasoning: bool) -> bool:
    """The prompt ends within a block of reasoning."""
    prompt = bench.whole(form, [ASKS], reasoning=reasoning) or ""
    return prompt.rfind(form.opens) > prompt.rfind(form.closes)


def _tools(bench: Bench, form: Form, spelling: Spelling) -> tuple[Form, CallFormat | None]:
    """How tools are told, called, and answered."""
    untaken = replace(form, tools=False, results=False)
    if not bench.shows(form, [ASKS], TOOL.name, tools=[TOOL]):
        return untaken, FORMATS[0]
    written = False
    turn, answer = calling(ARGUMENTS), result("Probe-result")
    for tried in _call_forms(form):
        text = bench.whole(tried, [ASKS, turn, answer], tools=[TOOL]) or ""
        called, found, _ = text.partition(answer.text)
        if "Oslo" not in called or not found:
            continue
        written = True
        if tried.arguments == "text" and ARGUMENTS not in called:
            continue  # written as a string within JSON
        end = _first(called[called.find("Oslo") :], bench.template.ends)
        called = called[: called.rfind(end)] if end else called
        prompt = bench.whole(tried, [ASKS], tools=[TOOL]) or ""
        for calls in FORMATS:
            if reads(spelling, tried, calls, _behind(spelling, prompt, called), turn):
                return _calling(bench, replace(tried, call_end=end)), calls
    return (form, None) if written else (untaken, FORMATS[0])


def _behind(spelling: Spelling, prompt: str, text: str) -> list[int]:
    """Tokens of `text` behind those that it shares with `prompt`."""
    before, whole = spelling.encode(prompt), spelling.encode(text)
    pairs = enumerate(zip(before, whole, strict=False))
    return whole[next((at for at, (one, two) in pairs if one != two), len(before)) :]


def _call_forms(form: Form) -> Iterator[Form]:
    for results, blank in product((True, False), ("text", "none")):
        for short_ids, arguments in product((False, True), ("text", "mapping")):
            yield replace(
                form, results=results, blank=blank, short_ids=short_ids, arguments=arguments
            )


def _calling(bench: Bench, form: Form) -> Form:
    """What may stand beside a call."""
    words = [ASKS, replace(SAYS, calls=calling(ARGUMENTS).calls), result("Probe-result")]
    both = [
        ASKS,
        calling(ARGUMENTS, OTHER_ARGUMENTS),
        result("Probe-result"),
        result("Probe-second", n=1),
    ]
    return replace(
        form,
        beside=bench.shows(form, words, SAYS.text, "Oslo", tools=[TOOL]),
        parallel=bench.shows(
            form, both, "Oslo", "Rome", "Probe-result", "Probe-second", tools=[TOOL]
        ),
    )


def _images(bench: Bench, form: Form) -> tuple[Form, str]:
    """What stands for an image, if anything does."""
    seen = replace(form, images=True)
    shown = Message("user", (Text("Probe-left"), Image("", "image/png"), Text("Probe-right")))
    text = bench.whole(seen, [shown]) or ""
    before, left, rest = text.partition("Probe-left")
    image, right, _ = rest.partition("Probe-right")
    # A template that knows no parts writes the list that they are, in Python's words.
    if not (before and left and right and image.strip()) or "'type'" in image:
        return form, ""
    return seen, image.strip()
