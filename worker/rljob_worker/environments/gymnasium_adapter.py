"""Environments that gymnasium makes, with text for their observations and, where they are numbered, their actions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rljob_api.spec import GymnasiumSpec
from rljob_worker.environments.answers import Actions
from rljob_worker.errors import UserError

_MARKED = re.compile(r"\x1b\[[0-9;]*m(.*?)\x1b\[0m", re.DOTALL)
"""Colours of a terminal, with which `ansi` renderings mark where one stands."""


class GymnasiumEnvironment:
    """`base.TextEnvironment` around one of gymnasium's.

    An observation that is no text is replaced by what `render` gives (`kwargs: {render_mode: ansi}`), in which a
    coloured cell stands in brackets.

    Raises:
        UserError: gymnasium cannot make it.
    """

    def __init__(self, settings: GymnasiumSpec) -> None:
        self._settings = settings
        self._numbers = list(settings.actions.values())
        self._actions = Actions(list(settings.actions), settings.form) if settings.actions else None
        # Its import takes as long as all else of a host.
        import gymnasium

        try:
            self._inner: Any = gymnasium.make(settings.id, **settings.made_with)
        except Exception as error:
            raise UserError(
                f"environment.gymnasium: {settings.id!r} cannot be made: {type(error).__name__}: {error}"
            ) from None
        self._seen: object = ""

    def reset(self, *, seed: int, options: Mapping[str, object]) -> tuple[object, object]:
        """Begin an episode."""
        observation, info = self._inner.reset(seed=seed, options=dict(options) or None)
        self._seen = self._text(observation)
        return self._seen, info

    def step(self, action: str) -> tuple[object, object, object, object, Mapping[str, object]]:
        """Act, where the answer is an action; `info` has `valid` where actions are numbered."""
        given: object = action
        if self._actions is not None:
            place = self._actions.number(action)
            if place is None:
                return self._seen, self._settings.format_penalty, False, False, {"valid": 0.0}
            given = self._numbers[place]
        observation, reward, terminated, truncated, info = self._inner.step(given)
        self._seen = self._text(observation)
        return self._seen, reward, terminated, truncated, info if self._actions is None else {**info, "valid": 1.0}

    def close(self) -> None:
        """Close gymnasium's, and remember no observation."""
        self._seen = ""
        self._inner.close()

    def examples(self) -> list[str]:
        """An answer for each numbered action."""
        return [] if self._actions is None else [self._actions.written(n) for n in range(len(self._numbers))]

    def _text(self, observation: object) -> object:
        shown = observation if isinstance(observation, str) else self._inner.render()
        return _MARKED.sub(r"[\1]", shown) if isinstance(shown, str) else observation
