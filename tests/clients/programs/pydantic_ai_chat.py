"""pydantic-ai, Chat Completions."""

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from tool import TASK, run_command

agent = Agent(OpenAIChatModel("policy"), instructions="Be brief.", tools=[run_command])
print(agent.run_sync(TASK).output)
