"""litellm, Chat Completions."""

import json

import litellm
from tool import DESCRIPTION, PARAMETERS, TASK, run_command

function = {"name": "run_command", "description": DESCRIPTION, "parameters": PARAMETERS}
messages = [{"role": "user", "content": TASK}]
while True:
    response = litellm.completion(
        model="openai/policy",
        messages=messages,
        tools=[{"type": "function", "function": function}],
    )
    said = response.choices[0].message
    messages.append(said)
    for call in said.tool_calls or []:
        output = run_command(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": output})
    if not said.tool_calls:
        break
print(said.content)
