"""An MCP server for tests: `python tool_server.py` speaks by standard input and output."""

from mcp.server import MCPServer

server = MCPServer("sums")


@server.tool()
def add(left: int, right: int) -> int:
    """Adds two whole numbers."""
    return left + right


@server.tool()
def divide(left: int, right: int) -> int:
    """Divides one whole number by another."""
    return left // right


if __name__ == "__main__":
    server.run()
