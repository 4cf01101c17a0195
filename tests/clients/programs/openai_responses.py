"""The openai library, Responses."""

import json

from openai import OpenAI
from tool import DESCRIPTION, PARAMETERS, TASK, run_command

tool = {
    "type": "function",
    "name": "run_command",
    "description": DESCRIPTION,
    "parameters": PARAMETERS,
    "strict": False,
}
said = [{"role": "user", "content": TASK}]
while True:
    response = OpenAI().responses.create(model="policy", input=said, tools=[tool], store=False)
    said += response.output
    calls = [item for item in response.output if item.type == "function_call"]
    for call in calls:
        output = run_command(**json.loads(call.arguments))
        said.append({"type": "function_call_output", "call_id": call.call_id, "output": output})
    if not calls:
        break
print(response.output_text)
