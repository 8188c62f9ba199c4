"""What is generated and what becomes of it: streams of tokens, groups of episodes, the ledger of prompts. Pure."""

from rljob_worker.flow.frontier import Fate, Frontier
from rljob_worker.flow.group import Decision, Episode, Finish, Group
from rljob_worker.flow.streams import Span, SpanKind, TokenStream

__all__ = ["Decision", "Episode", "Fate", "Finish", "Frontier", "Group", "Span", "SpanKind", "TokenStream"]
