"""The MCP server of tools-mcp.yaml: shelves with boxes, and a digit in each box. With `--locked` it tells none."""

import sys
from random import Random
from typing import Literal

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

Shelf = Literal["s0", "s1", "s2", "s3", "s4", "s5", "s6", "s7"]
Box = Literal["b0", "b1", "b2", "b3", "b4", "b5", "b6", "b7"]
server = MCPServer("boxes")


def contents(shelf: str, box: str) -> str:
    """The digit in a box: each of eight lies in eight boxes, in no order that one box would tell of another."""
    digits = [str(digit) for digit in range(8)] * 8
    Random(877).shuffle(digits)
    return digits[8 * int(shelf[1:]) + int(box[1:])]


@server.tool()
def look(shelf: Shelf, box: Box) -> str:
    """Say what lies in a box."""
    if "--locked" in sys.argv:
        raise ToolError("locked")
    return contents(shelf, box)


if __name__ == "__main__":
    server.run()
