"""The anthropic library, Messages, streaming."""

from anthropic import Anthropic
from tool import DESCRIPTION, PARAMETERS, TASK, run_command

tool = {"name": "run_command", "description": DESCRIPTION, "input_schema": PARAMETERS}
messages = [{"role": "user", "content": TASK}]
while True:
    with Anthropic().messages.stream(
        model="policy", max_tokens=4096, messages=messages, tools=[tool]
    ) as stream:
        said = stream.get_final_message()
    messages.append({"role": "assistant", "content": said.content})
    calls = [block for block in said.content if block.type == "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": run_command(**call.input)}
        for call in calls
    ]
    if not calls:
        break
    messages.append({"role": "user", "content": results})
print(said.content[-1].text)
