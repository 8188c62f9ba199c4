"""The environments of a source, and what becomes of an episode by their answers."""

from __future__ import annotations

from dataclasses import dataclass

from rljob_worker.environments.base import AgentCall, Began, EnvironmentFailure, FailureKind, Stepped
from rljob_worker.environments.hosts import EnvironmentHosts
from rljob_worker.errors import JobError
from rljob_worker.flow import Episode, Finish, TokenStream
from rljob_worker.flow.turns import Budget, Opening, Turn
from rljob_worker.rollouts.observations import NO_TOKENS, Observations
from rljob_worker.types import Prompt


@dataclass(frozen=True, slots=True)
class World:
    """The environments of a source, and how their turns become tokens.

    Attributes:
        hosts: hold them.
        observations: their texts as tokens.
        budget: how long an episode may be.
        error_reward: of an episode whose environment gave what is no answer; None: that fails the job.
        max_error_share: of a step's or an evaluation's episodes that may end so.
    """

    hosts: EnvironmentHosts
    observations: Observations
    budget: Budget
    error_reward: float | None = 0.0
    max_error_share: float = 0.2

    def takes(self, failure: EnvironmentFailure) -> bool:
        """Whether an episode may end by it, and the job goes on."""
        return failure.kind is FailureKind.DATA and self.error_reward is not None

    def first(self, prompt: Prompt, began: Began) -> tuple[int, ...]:
        """A stream's prompt; JobError where there are no tokens for it, or no room for an answer."""
        if began.call is not None:
            try:
                ids = self.observations.conversation(began.call.messages)
            except ValueError as error:
                raise JobError(f"{prompt.environment}.environment.agent: row {prompt.uid}: {error}") from None
        else:
            ids = prompt.token_ids or self.observations.first(began.observation)
        if not ids:
            raise JobError(
                f"{prompt.environment}.environment: the reset with seed {prompt.seed} returned {began.observation!r}, "
                f"{NO_TOKENS}"
            )
        if isinstance(self.budget.next(len(ids), 0), Finish):
            raise JobError(
                f"{prompt.environment}.environment: the first observation with seed {prompt.seed} has {len(ids)} "
                f"tokens, which leaves no room for an answer: spec.episodes.maxTokens is {self.budget.max_tokens}"
            )
        return ids

    def begun_anew(self, prompt: Prompt, episode: Episode, began: Began) -> Episode:
        """An episode after its environment was reset once more; JobError as of `first`."""
        stream, restarts = TokenStream.of_prompt(self.first(prompt, began)), episode.restarts + 1
        return Episode(episode.ordinal, episode.sample, stream, opening=opening_of(prompt, began), restarts=restarts)

    def failed(self, failure: EnvironmentFailure, action: str = "", stream: int = 0) -> Turn:
        """The turn by which an episode ends whose failure it `takes`."""
        assert self.error_reward is not None
        return Turn(action, "", self.error_reward, True, {}, failure.text, stream)

    def answered(self, prompt: Prompt, episode: Episode, action: str, answer: Stepped) -> Episode | EnvironmentFailure:
        """An episode with what its environment says to an action; a failure where that goes on with nothing."""
        turn = Turn(action, answer.observation, answer.reward, answer.done, answer.values, stream=episode.number)
        if answer.call is not None:
            return self._called(prompt, episode, turn, answer.call)
        turns, tokens = len(episode.turns) + 1, len(episode.stream)
        end = Finish.ENVIRONMENT if answer.done else self.budget.next(tokens, turns)
        if isinstance(end, Finish):
            return episode.ended(turn, end)
        ids = self.observations.after(episode.ended_by, answer.observation, answer.parts)
        if not ids:
            return EnvironmentFailure(
                FailureKind.DATA,
                f"environment of {prompt.environment}, seed {prompt.seed}, step {turns}: its observation is empty, and "
                "spec.episodes.before and .after are no tokens: a turn has to append something",
            )
        end = self.budget.next(tokens + len(ids), turns)
        return episode.ended(turn, end) if isinstance(end, Finish) else episode.observed(turn, ids)

    def _called(self, prompt: Prompt, episode: Episode, turn: Turn, call: AgentCall) -> Episode | EnvironmentFailure:
        """An episode with what its agent asks next, or its end, where that has no room for an answer."""
        streams = episode.streams
        try:
            if not 0 <= call.stream <= len(streams):
                raise ValueError(f"a call in stream {call.stream} of {len(streams)}")
            if call.stream < len(streams):
                goes_on = streams[call.stream]
                # An answer of another stream than the newest one ended by its last token where that ends answers.
                ended_by = episode.ended_by if call.stream == episode.number else int(goes_on.ids[-1])
                before, ids = len(goes_on), self.observations.asked(ended_by, call.messages)
            else:
                before, ids = 0, self.observations.conversation(call.messages)
        except ValueError as error:
            wrong = f"agent of {prompt.environment}, row {prompt.uid}: {error}"
            return EnvironmentFailure(FailureKind.DATA, wrong)
        end = self.budget.next(before + len(ids), len(episode.turns) + 1)
        return episode.ended(turn, end) if isinstance(end, Finish) else episode.called(turn, ids, call.stream)


def opening_of(prompt: Prompt, began: Began) -> Opening:
    """The reset of an environment as its episode keeps it."""
    return Opening(prompt.seed, began.observation, began.values)
