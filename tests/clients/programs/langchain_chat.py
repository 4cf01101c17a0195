"""langchain-openai, Chat Completions, streaming."""

from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from tool import TASK, run_command

model = ChatOpenAI(model="policy").bind_tools([tool(run_command)])
messages = [SystemMessage("Be brief."), HumanMessage(TASK)]
while True:
    said = None
    for chunk in model.stream(messages):
        said = chunk if said is None else said + chunk
    messages.append(said)
    messages += [
        ToolMessage(run_command(**call["args"]), tool_call_id=call["id"])
        for call in said.tool_calls
    ]
    if not said.tool_calls:
        break
print(said.text)
