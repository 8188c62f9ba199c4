"""From what a policy wrote to one of an environment's actions. Imported by the environment hosts: keep it light."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rljob_api.environments import Form

# White space around an answer is taken off afterwards: patterns for it would look at a long run again and again.
_ANSWER = re.compile(r"<answer>([^<>]*)</answer>")
_THINK = re.compile(r"\s*<think>(?:(?!</think>).)*</think>\s*<answer>([^<>]*)</answer>\s*", re.DOTALL)


class Actions:
    """An environment's actions in a form.

    Args:
        names: of the actions, by their numbers; case makes no difference in an answer.
        form: how they are written.
    """

    def __init__(self, names: Sequence[str], form: Form) -> None:
        self.names, self.form = tuple(names), form
        self._numbers = {name.lower(): number for number, name in enumerate(names)}
        alternatives = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
        self._word = re.compile(rf"(?<!\w)(?:{alternatives})(?!\w)", re.IGNORECASE)

    def number(self, answer: str) -> int | None:
        """The action's number; None where the answer has none, or not in this form."""
        found: str | None = None
        if self.form is Form.PLAIN:
            words = self._word.findall(answer)
            found = words[-1] if words else None
        elif self.form is Form.ANSWER:
            answers = _ANSWER.findall(answer)
            found = answers[-1] if answers else None
        elif match := _THINK.fullmatch(answer):
            found = match[1]
        return None if found is None else self._numbers.get(found.strip().lower())

    def written(self, number: int) -> str:
        """An action as a policy would write it."""
        name = self.names[number]
        if self.form is Form.PLAIN:
            return name
        answer = f"<answer>{name}</answer>"
        return answer if self.form is Form.ANSWER else f"<think>{name} is next.</think> {answer}"

    def told(self) -> str:
        """Instructions for a policy on how to write it, in a sentence."""
        listed = f"{', '.join(self.names[:-1])} or {self.names[-1]}"
        example = self.names[-1]
        if self.form is Form.PLAIN:
            return f"Answer with one word: {listed}."
        if self.form is Form.ANSWER:
            return f"Your action is {listed}. Answer in this form: <answer>{example}</answer>"
        return (
            f"Your action is {listed}. Think first, then answer, in this form: "
            f"<think>your reasons</think> <answer>{example}</answer>"
        )
