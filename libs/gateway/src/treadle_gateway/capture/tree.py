"""The tree of what was said in a session: a node is a message behind those that lead to it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from treadle_gateway.capture.keys import Meaning, meaning_of
from treadle_gateway.capture.turns import Turn
from treadle_gateway.conversation import Message


@dataclass(slots=True, eq=False)
class Node:
    """One message at one place, by meaning."""

    meaning: Meaning
    parent: "Node | None"
    children: dict[bytes, list["Node"]] = field(default_factory=dict[bytes, list["Node"]])
    replies: list[Turn] = field(default_factory=list[Turn])
    """Turns that said this; none where the client wrote it."""
    asked: list[Turn] = field(default_factory=list[Turn])
    """Turns that were asked for what follows, oldest first."""

    @property
    def said(self) -> Message | None:
        """The message in the policy's own words, of a node with replies."""
        return newest(self.replies).said

    def matching(self, meaning: Meaning) -> list["Node"]:
        """The next nodes that a message may stand for; several where it leaves something out."""
        known = self.children.get(meaning.key, [])
        if len(known) == 1 and known[0].meaning == meaning:
            return known
        return [node for node in known if meaning.fits(node.meaning)]

    def next(self, meaning: Meaning) -> "Node":
        """The node of a message that is rendered behind this one, a new one where it is unknown.

        A message that leaves something out is the policy's, if it fits; else it is as it stands.
        """
        matching = self.matching(meaning)
        replies = [turn for node in matching for turn in node.replies]
        if replies:
            meant = newest(replies)
            return next(node for node in matching if meant in node.replies)
        same = [node for node in matching if node.meaning == meaning]
        return same[0] if same else self.add(meaning)

    def add(self, meaning: Meaning) -> "Node":
        """A new node behind this one."""
        node = Node(meaning, self)
        self.children.setdefault(meaning.key, []).append(node)
        return node


@dataclass(slots=True)
class Walk:
    """How far a conversation is known."""

    same: Turn | None
    """The turn with the same head whose reply it goes on from."""
    onward: Turn | None
    """Likewise, whatever its head."""
    ends: list[Node]
    """Where all of it is known: the nodes that it may end at."""

    def asked(self, head: bytes, wanted: bytes) -> list[Turn]:
        """Turns that the same was asked of, oldest first."""
        return [
            turn
            for node in self.ends
            for turn in node.asked
            if turn.head == head and turn.wanted == wanted
        ]


class Tree:
    """All conversations of a session."""

    def __init__(self) -> None:
        self.root = Node(Meaning(b""), None)
        self.issued: set[str] = set()
        """Ids of all calls of the session."""
        self._said_at: dict[Turn, Node] = {}

    def meanings(self, messages: Sequence[Message]) -> list[Meaning]:
        """What each message means."""
        return [meaning_of(message, self.issued) for message in messages]

    def walk(self, meanings: Sequence[Meaning], head: bytes) -> Walk:
        """Follows a conversation as far as it is known.

        A reply that ends it is context to continue, unless it is open: then its tokens are.
        """
        known: list[list[Node]] = []
        nodes = [self.root]
        for meaning in meanings:
            if len(nodes) == 1:
                nodes = nodes[0].matching(meaning)
            else:
                nodes = [each for node in nodes for each in node.matching(meaning)]
            if not nodes:
                break
            known.append(nodes)
        onward: Turn | None = None
        for depth in range(len(known), 0, -1):
            said = [turn for node in known[depth - 1] for turn in node.replies]
            if depth == len(meanings):
                said = [turn for turn in said if turn.open]
            if said:
                onward = onward or newest(said)
                alike = [turn for turn in said if turn.head == head]
                if alike:
                    return Walk(newest(alike), onward, nodes)
        return Walk(None, onward, nodes)

    def lead(self, meanings: Sequence[Meaning], after: Turn | None) -> list[Node]:
        """The nodes of a conversation that goes on from `after`, new ones where it is unknown."""
        node = self._said_at[after] if after else self.root
        known: list[Node] = []
        while node.parent:
            known.append(node)
            node = node.parent
        nodes = known[::-1]
        node = nodes[-1] if nodes else self.root
        for meaning in meanings[len(nodes) :]:
            node = node.next(meaning)
            nodes.append(node)
        return nodes

    def say(self, asked: Node, turn: Turn, message: Message) -> None:
        """Puts what a turn said behind what it was asked at."""
        self.issued.update(call.id for call in message.calls)
        meaning = meaning_of(message, self.issued)
        alike = asked.children.get(meaning.key, ())
        node = next((node for node in alike if node.meaning == meaning), None)
        node = node or asked.add(meaning)
        node.replies.append(turn)
        self._said_at[turn] = node

    def forget(self) -> None:
        """Takes the nodes apart: what each leads to leads back to it."""
        nodes = [self.root]
        while nodes:
            node = nodes.pop()
            for children in node.children.values():
                nodes += children
            node.children.clear()
            node.asked.clear()
        self._said_at.clear()


def newest(turns: Sequence[Turn]) -> Turn:
    """Of turns that said the same, the one that a client means: the newest delivered one."""
    if len(turns) == 1:
        return turns[0]
    return max(turns, key=lambda turn: (turn.state == "delivered", turn.number))
