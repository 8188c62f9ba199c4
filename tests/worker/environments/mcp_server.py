"""A server of the `mcp` package: `python mcp_server.py [FOLDER]`; leaves its pid in the folder."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Literal

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("boxes")


@server.tool()
def open_box(box: Literal["a", "b"]) -> str:
    """Open a box."""
    return {"a": "3", "b": "7"}[box]


@server.tool()
def fails(why: str) -> str:
    """Fail."""
    raise ToolError(f"because of {why}")


@server.tool()
def variables() -> str:
    """Say the names of the variables that are seen."""
    return " ".join(sorted(os.environ))


@server.tool()
def reads(path: str) -> str:
    """Read a file."""
    try:
        return Path(path).read_text()
    except OSError as error:
        return f"refused: {error.strerror}"


@server.tool()
def ends() -> str:
    """End the server."""
    os._exit(3)


@server.tool()
def hangs() -> str:
    """Never come back."""
    time.sleep(600)
    return ""


if __name__ == "__main__":
    if len(sys.argv) > 1:
        (Path(sys.argv[1]) / f"pid-{os.getpid()}").touch()
    server.run()
