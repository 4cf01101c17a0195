"""What kind of conversation a request belongs to."""

import pytest

from treadle_gateway.capture.session import Capture
from treadle_gateway.conversation import Tool

TOOLS = (Tool("look", "", {}),)
OTHERS = (Tool("run", "", {}),)


def test_what_goes_on_from_a_turn_belongs_to_its_path(talk):
    told = [talk.system("You act."), talk.user("hi")]
    talk.say(told, talk.assistant("hello"))
    told += [talk.assistant("hello"), talk.user("more")]
    assert talk.locate(*told).label == "main"
    assert talk.locate(*told, tools=TOOLS).label == "main"


def test_a_client_names_its_own_kinds(talk):
    told = [talk.system("You act."), talk.user("hi")]
    talk.say(told, talk.assistant("hello"), identity={"kind": "turn", "thread": "1"})
    asked = [*told, talk.assistant("hello"), talk.user("Summarise.")]
    place = talk.locate(*asked, identity={"kind": "compaction"})
    assert (place.label, place.tokens > 0) == ("compaction", True)
    talk.begin(place)
    assert talk.locate(*told, talk.assistant("hello"), talk.user("more")).label == "main"
    assert talk.locate(*told, identity={"agent": "7"}).label == "subagent"
    assert talk.locate(*told, identity={"parent": "7"}).label == "subagent"
    assert talk.locate(*told, identity={"agent": "7", "kind": "title"}).label == "title"
    assert talk.capture.counts["turns.main"] == 1


def test_a_sub_agent_may_come_first(talk):
    talk.say([talk.user("go")], talk.assistant("done"), identity={"agent": "7"})
    turn = talk.say([talk.system("You act."), talk.user("hi")], talk.assistant("hello"))
    assert turn.label == "main"
    more = [talk.user("go"), talk.assistant("done"), talk.user("more")]
    assert talk.locate(*more).label == "subagent"


def test_another_system_prompt_is_a_side_request_or_with_tools_a_sub_agent(talk):
    told = [talk.system("You act."), talk.user("hi")]
    talk.say(told, talk.assistant("hello"), tools=TOOLS)
    assert talk.locate(talk.system("Title?"), talk.user("hi")).label == "side"
    remember = [talk.system("Remember."), *told[1:], talk.assistant("hello"), talk.user("Now.")]
    assert talk.locate(*remember, tools=OTHERS).label == "subagent"


def test_a_title_may_be_asked_for_first(talk):
    title = talk.say([talk.system("Title?"), talk.user("hi")], talk.assistant("Greeting"))
    assert title.label == "main"
    main = talk.say(
        [talk.system("You act."), talk.user("hi")], talk.assistant("hello"), tools=TOOLS
    )
    assert (title.label, main.label) == ("side", "main")
    counts = talk.capture.counts
    assert (counts["turns.side"], counts["turns.main"]) == (1, 1)


def test_a_conversation_that_went_on_was_no_title(talk):
    told = [talk.system("Chat."), talk.user("hi")]
    talk.say(told, talk.assistant("hello"))
    main = talk.say([*told, talk.assistant("hello"), talk.user("more")], talk.assistant("on"))
    place = talk.locate(talk.system("You act."), talk.user("go"), tools=TOOLS)
    assert (place.label, main.label) == ("subagent", "main")


def test_a_history_rewritten_under_the_same_beginning_is_a_compaction(talk):
    told = [talk.system("id 3f2: You act."), talk.user("hi")]
    talk.say(told, talk.assistant("hello"), tools=TOOLS)
    assert talk.locate(told[0], talk.user("else"), tools=TOOLS).label == "branch"
    told += [talk.assistant("hello"), talk.user("more")]
    talk.say(told, talk.assistant("fine"), tools=TOOLS)
    summary = talk.user("So far: a greeting.")
    # The few letters near the start of the system prompt follow from the first user message.
    turn = talk.say([talk.system("id 9a1: You act."), summary], talk.assistant("on"), tools=TOOLS)
    assert (turn.label, turn.base) == ("compaction", None)
    other = [talk.system("You act, and quickly."), talk.user("hi"), summary]
    assert talk.locate(*other, tools=TOOLS).label == "compaction"
    assert talk.capture.counts["paths.compaction"] == 1
    assert len(talk.capture.segments(trainable=True)) == 2


def test_a_second_way_on_from_a_reply_is_a_branch_if_the_first_is_alive(talk):
    told = [talk.user("hi")]
    talk.say(told, talk.assistant("hello"))
    told.append(talk.assistant("hello"))
    lost = talk.start(*told, talk.user("one"))
    assert talk.locate(*told, talk.user("two")).label == "branch"
    lost.cut("cancelled")
    resumed = talk.say([*told, talk.user("two")], talk.assistant("fine"))
    assert resumed.label == "main"
    again = talk.say([*told, talk.user("two")], talk.assistant("fine"))
    assert again.label == "main"
    other = talk.say([*told, talk.user("three")], talk.assistant("fine"))
    assert other.label == "branch"
    assert talk.capture.counts["branches"] == 3


def trained(talk, *labels: str) -> list[int]:
    """Trained tokens of each segment: a title, a main turn with its compaction, and a memory."""
    talk.capture = Capture(max_requests=9, trained=labels)
    talk.say([talk.system("Title?"), talk.user("hi")], talk.assistant("Greeting"))
    told = [talk.system("You act."), talk.user("hi")]
    talk.say(told, talk.assistant("hello"), tools=TOOLS)
    told += [talk.assistant("hello"), talk.user("Summarise.")]
    talk.say(told, talk.assistant("short"), tools=TOOLS, identity={"kind": "compaction"})
    talk.say([talk.user("Notes?")], talk.assistant("none"), identity={"kind": "memory"})
    return [each.num_trained for each in talk.capture.segments(trainable=True)]


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        # The compaction goes on from the main turn, so that both are one segment.
        pytest.param(("main",), [0, 3, 0], id="main"),
        pytest.param(("main", "compaction"), [0, 6, 0], id="compaction"),
        pytest.param(("side",), [3, 0, 3], id="side, and what only its client knows"),
        pytest.param((), [0, 0, 0], id="none"),
    ],
)
def test_the_labels_that_are_chosen_are_trained(talk, labels, expected) -> None:
    assert trained(talk, *labels) == expected


def test_what_another_label_keeps_from_training_is_counted(talk) -> None:
    trained(talk, "compaction")
    assert talk.capture.counts["untrained.other_label"] == 3
