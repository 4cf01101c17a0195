"""The openai library, Chat Completions, streaming."""

import json

from openai import OpenAI
from tool import DESCRIPTION, PARAMETERS, TASK, run_command

function = {"name": "run_command", "description": DESCRIPTION, "parameters": PARAMETERS}
messages = [{"role": "user", "content": TASK}]
while True:
    with OpenAI().chat.completions.stream(
        model="policy", messages=messages, tools=[{"type": "function", "function": function}]
    ) as stream:
        said = stream.get_final_completion().choices[0].message
    messages.append(said.model_dump(exclude_none=True, exclude={"parsed"}))
    for call in said.tool_calls or []:
        output = run_command(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": output})
    if not said.tool_calls:
        break
print(said.content)
