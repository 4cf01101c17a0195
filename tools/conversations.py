"""Random conversations, played on capture and on the model at once: a seed is one session."""

import json
from dataclasses import replace
from random import Random

import conversation_model
from conversation_clients import Client
from conversation_speech import Letters, Speech
from conversation_wires import WireClient, object_of

from treadle_core.tickets import Sampling
from treadle_gateway.capture.session import Capture, Place
from treadle_gateway.capture.turns import Turn
from treadle_gateway.conversation import Ask, Message, Text, ToolCall
from treadle_gateway.errors import RefusedError
from treadle_gateway.wires.body import parsed

_CAUSES = ("cancelled", "failed", "failed: for a reason")


class DifferenceError(Exception):
    """Capture and model disagree."""


class Play:
    """One session."""

    def __init__(
        self, seed: int, speech: Speech | None = None, wire: WireClient | None = None
    ) -> None:
        """The same seed plays the same session, but for the ids of calls.

        Without `speech` the policy speaks in letters; without `wire` requests need none.
        """
        self._random = Random(seed)  # noqa: S311
        self._speech = speech or Letters(self._random)
        self._client = Client(self._random, pictures=self._speech.sees)
        self._wire = wire
        self.capture = Capture(max_requests=1000)
        self._model = conversation_model.Model()
        self._running: list[tuple[Turn, conversation_model.Turn]] = []

    def play(self) -> None:
        """Plays all of it. Raises DifferenceError."""
        for _ in range(self._random.randint(2, 16)):
            self._request(self._over_wire(self._client.ask()))
            while self._running and self._random.random() < 0.85:
                self._end(*self._running.pop(self._random.randrange(len(self._running))))
        self._compare_segments()

    def _over_wire(self, ask: Ask) -> Ask:
        """The request as the gateway reads it."""
        if self._wire is None:
            return ask
        if not self._wire.states_errors:
            ask = replace(ask, messages=tuple(replace(m, is_error=False) for m in ask.messages))
        if not self._wire.stop:
            ask = replace(ask, wanted=replace(ask.wanted, stop=()))
        read = self._wire.wire.ask(parsed(self._wire.request(ask)), {})
        for name in ("tools", "choice", "wanted", "reasoning", "stream"):
            self._same(name, getattr(read, name), getattr(ask, name))
        meant = ask.messages
        if self._wire.reads_arguments:
            meant = tuple(replace(m, calls=tuple(map(_as_object, m.calls))) for m in meant)
        if not (self._wire.joins and any(m.role == "assistant" for m in meant)):
            same = self._model.same_meaning(read.messages, meant)
            self._same("read", read.messages, read.messages if same else meant)
        return read

    def _request(self, ask: Ask) -> None:
        found = self._model.locate(ask)
        try:
            place = self.capture.locate(ask)
        except RefusedError as error:
            self._same("refusal", error.message, error.message if found is None else "none")
            return
        if found is None:
            raise DifferenceError(f"{ask}: not refused")
        self._same("kind", place.kind, found.kind)
        self._same("turn", _number(place.turn), _number(found.turn))
        self._same("base", _number(place.base), _number(found.base))
        if place.turn is None:
            self._begin(ask, place, found)
        elif place.kind == "replay" and found.turn and self._random.random() < 0.5:
            place.turn.delivered()
            found.turn.state = "delivered"

    def _begin(self, ask: Ask, place: Place, found: conversation_model.Found) -> None:
        place, new_ids = self._speech.render(place, ask)
        found.keep(len(place.before))
        self._same("kept", _number(place.base), _number(found.base))
        depth = len(found.base.messages) + 1 if found.base else 0
        self._same("new", list(place.new), found.shown[depth:])
        self._same("closed", place.closed, found.base is not None and found.base.closed)
        temperature = self._random.choice((1.0,) * 10 + (0.0, 0.5))
        trained = self._random.random() < 0.95
        sampling = Sampling(temperature=temperature)
        turn = self.capture.begin(place, new_ids, sampling=sampling, trained=trained, now=0.0)
        cause = "" if trained else "other_sampling"
        twin = self._model.begin(ask, found, new_ids.tolist(), temperature=temperature, cause=cause)
        self._same("prompt", turn.prompt_ids.tolist(), [row[0] for row in twin.prompt])
        self._running.append((turn, twin))

    def _end(self, turn: Turn, twin: conversation_model.Turn) -> None:
        """Something is sampled, and perhaps arrives."""
        whole = self._random.random() < 0.85
        said = self._speech.say(self._random, twin.ask, whole=whole)
        for piece in said.pieces:
            turn.heard(piece)
            columns = (piece.token_ids, piece.logprobs, piece.policy_version)
            rows = zip(*(column.tolist() for column in columns), strict=True)
            twin.sampled += [(token, True, False, logprob, v) for token, logprob, v in rows]
        message = said.message
        if not whole:
            self._cut(turn, twin, message)
            return
        reply = turn.finish(
            message, said.finish, id=f"{turn.number:032x}", created=0, stop=said.stop
        )
        twin.state = "finished"
        twin.closed = said.finish != "length" and not said.stop
        twin.open = said.finish == "length" and not (said.stop or message.calls)
        twin.open = twin.open and bool(message.text.strip())
        self._model.say(twin, message)
        if self._wire is not None:
            told = self._wire.read(self._wire.wire.reply(twin.ask, reply))
            same = self._model.same_meaning([told], [message])
            self._same("told", told, told if same else message)
            message = told
        if self._random.random() < 0.85:
            turn.delivered()
            twin.state = "delivered"
        self._client.hear([*twin.messages, message])

    def _cut(self, turn: Turn, twin: conversation_model.Turn, message: Message) -> None:
        """The turn fails; its client may keep what it heard, or a part of that."""
        known = self._random.random() < 0.5
        turn.cut(self._random.choice(_CAUSES), message if known else None)
        twin.state, twin.cause = "cut", "cut"
        if known:
            self._model.say(twin, message)
        if self._random.random() < 0.3:
            kept = (Text(message.text[:3]),) if message.text else ()
            message = replace(message, parts=kept, calls=message.calls[:1])
        self._client.hear([*twin.messages, message])

    def _compare_segments(self) -> None:
        segments = self.capture.segments(trainable=True)
        lines = self._model.segments()
        self._same("segments", len(segments), len(lines))
        for segment, (temperature, rows) in zip(segments, lines, strict=True):
            self._same("temperature", segment.temperature, temperature)
            columns = (
                *(segment.token_ids, segment.sampled, segment.trained),
                *(segment.logprobs, segment.policy_version),
            )
            captured = list(zip(*(column.tolist() for column in columns), strict=True))
            self._same("rows", captured, rows)
        actions = [turn for turn in self._model.turns if turn.trained]
        if len({turn.temperature for turn in self._model.turns}) == 1:
            trained = sum(segment.num_trained for segment in segments)
            self._same("trained", trained, sum(len(turn.sampled) for turn in actions))

    def _same(self, what: str, captured: object, expected: object) -> None:
        if captured != expected:
            raise DifferenceError(f"{what}:\n  captured {captured!r}\n  expected {expected!r}")


def _number(turn: Turn | conversation_model.Turn | None) -> int | None:
    return turn.number if turn else None


def _as_object(call: ToolCall) -> ToolCall:
    return replace(call, arguments=json.dumps(object_of(call.arguments)))
