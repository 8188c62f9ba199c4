"""A server that speaks the protocol by hand: `python odd_mcp_server.py CASE`."""

from __future__ import annotations

import json
import sys
from typing import Any

TEXT = {"type": "string"}
POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}


def tool(name: str, **schema: Any) -> dict[str, Any]:
    return {"name": name, "description": "Do.", "inputSchema": {"type": "object", **schema}}


TOOLS: dict[str, list[dict[str, Any]]] = {
    "right": [
        tool("anything"),
        tool("nothing", properties={}),
        tool("true", properties={"a": True}, required=["a"]),
        tool("unlisted", properties={}, required=["b"]),
        tool(
            "typed",
            properties={
                "at": {"$ref": "#/$defs/point"},
                "many": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                "five": {"type": "integer", "minimum": 5},
                "day": {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}$"},
                "pair": {"type": "array", "items": [{"type": "integer"}, {"type": "string"}]},
            },
            required=["at", "many", "five", "day"],
            **{"$defs": {"point": POINT}, "$schema": "http://json-schema.org/draft-07/schema#"},
        ),
        tool(
            "either",
            oneOf=[{"properties": {"a": TEXT}, "required": ["a"]}, {"properties": {"b": TEXT}, "required": ["b"]}],
        ),
        tool("letters", properties={"a": {"type": "string", "pattern": r"^\p{L}+$"}}),
        tool("nested", properties={"node": {"$ref": "#/$defs/node"}}, **{"$defs": {"node": NODE}}),
        tool("raises", properties={"a": TEXT}),
        tool("structured", properties={}),
    ],
    "twice": [tool("same"), tool("same")],
    "mistyped": [tool("wrong", properties={"a": {"type": "str"}})],
    "unmapped": [tool("wrong", properties={"a": {"enum": "abc"}})],
    "unmatched": [tool("wrong", properties={"a": {"type": "string", "pattern": 7}})],
    "dangling": [tool("wrong", properties={"a": {"$ref": "#/$defs/none"}})],
    "remote": [tool("wrong", properties={"a": {"$ref": "http://127.0.0.1:9/schema.json"}})],
    "circular": [tool("wrong", properties={"a": {"$ref": "#/properties/a"}})],
    "endless": [tool("one")],
    "version": [tool("one")],
    "later": [tool("one")],
}


def result(case: str, asked: dict[str, Any]) -> dict[str, Any]:
    method, given = asked["method"], asked.get("params") or {}
    if method == "initialize":
        version = "1812-06-24" if case == "version" else given["protocolVersion"]
        about = {"name": "odd", "version": "1"}
        return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": about}
    if method == "tools/list":
        if case == "endless":
            return {"tools": TOOLS[case], "nextCursor": "again"}
        # A tool on each page.
        page = int(given.get("cursor", 0))
        more = {"nextCursor": str(page + 1)} if page + 1 < len(TOOLS[case]) else {}
        return {"tools": TOOLS[case][page : page + 1], **more}
    if given["name"] == "structured":
        return {"content": [], "structuredContent": {"a": 1}}
    return {"content": [{"type": "text", "text": "done"}]}


def say(message: dict[str, Any]) -> None:
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)


def main(case: str) -> None:
    for line in sys.stdin:
        asked = json.loads(line)
        if "id" not in asked:
            continue
        if case == "later":
            # What a server must not do, and what it may.
            print("Listening on standard input ...\n{\n\n[]", flush=True)
            say({"id": 4711, "result": {}})
            say({"method": "notifications/message", "params": {"level": "info", "data": "x" * 100_000}})
        if asked["method"] == "server/discover":
            say({"id": asked["id"], "error": {"code": -32601, "message": "Method not found"}})
        elif asked["method"] == "tools/call" and asked["params"]["name"] == "raises":
            say({"id": asked["id"], "error": {"code": -32602, "message": "a is no colour"}})
        else:
            say({"id": asked["id"], "result": result(case, asked)})


if __name__ == "__main__":
    main(sys.argv[1])
