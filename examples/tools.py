"""Tools and rewards of tools.yaml and tools-mcp.yaml: boxes with a digit in each, unseen until they are opened."""

from typing import Any, Literal


class Boxes:
    """Made for each episode; its public methods are the tools."""

    def reset(self, boxes: dict[str, str], **row: object) -> None:
        """Begin with a row of the data."""
        self.boxes = boxes

    def open(self, box: Literal["a", "b"]) -> str:
        """Open a box and say what lies in it.

        Args:
            box: Letter of the box.
        """
        return self.boxes[box]


class Locked(Boxes):
    """The same tool, which never tells: what a policy learns without it."""

    def open(self, box: Literal["a", "b"]) -> str:
        """Open a box and say what lies in it.

        Args:
            box: Letter of the box.
        """
        return "0"


def answered(response: str, label: str) -> float:
    """1 where the last answer has the digit, and no other."""
    return float([word for word in response.split() if word.isdecimal()] == [label])


def opened(turns: list[dict[str, Any]], label: str) -> float:
    """1 where the box was opened that was asked for; it leads an untrained policy to the tool."""
    return float(turns[0]["observation"] == label)


def called(turns: list[dict[str, Any]], shelf: str, box: str) -> float:
    """Share of the first answer's words that are those of the call for this box."""
    words = turns[0]["action"].split()
    wanted = f'<tool_call>{{"name":"look","arguments":{{"shelf":"{shelf}", "box":"{box}"}}}}</tool_call>'.split()
    return sum(map(str.__eq__, words, wanted)) / len(wanted)


def found(turns: list[dict[str, Any]], response: str, label: str, shelf: str, box: str) -> float:
    """1 for the digit after the call for this box: what is only remembered of a box is worth nothing."""
    return answered(response, label) if called(turns, shelf, box) == 1 else 0.0
