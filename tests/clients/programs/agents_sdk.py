"""The openai-agents framework, over Responses or over Chat Completions."""

import asyncio
import sys

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
from tool import TASK, run_command

set_tracing_disabled(True)
chat = sys.argv[1] == "chat"
model = OpenAIChatCompletionsModel("policy", AsyncOpenAI()) if chat else "policy"
agent = Agent(name="A", instructions="Be brief.", tools=[function_tool(run_command)], model=model)
print(asyncio.run(Runner.run(agent, TASK)).final_output)
