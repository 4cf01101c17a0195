"""Tools where the template has no place for them: told in a system message, as Hermes is."""

import json
from collections.abc import Sequence

from treadle_gateway.conversation import Message, Text, Tool
from treadle_gateway.markup.form import definition

_WORDS = """# Tools

You may call one or more functions. Their definitions are within <tools></tools> tags:
<tools>
{definitions}
</tools>

To call one, write its name and arguments as a JSON object within <tool_call></tool_call> tags:
<tool_call>
{{"name": <name of the function>, "arguments": <object of arguments>}}
</tool_call>"""


def told(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """The messages, led by a system message that tells of the tools."""
    definitions = "\n".join(json.dumps(definition(tool), ensure_ascii=False) for tool in tools)
    words = Text(_WORDS.format(definitions=definitions))
    if messages and messages[0].role == "system":
        lead = Message("system", (*messages[0].parts, Text("\n\n"), words))
        return [lead, *messages[1:]]
    return [Message("system", (words,)), *messages]
