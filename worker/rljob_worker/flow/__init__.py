"""What is generated and what becomes of it: streams of tokens, groups of episodes, the ledger of prompts. Pure."""

from rljob_worker.flow.frontier import Fate, Frontier
from rljob_worker.flow.groups import Episode, Finish, Group
from rljob_worker.flow.streams import Span, SpanKind, TokenStream

__all__ = ["Episode", "Fate", "Finish", "Frontier", "Group", "Span", "SpanKind", "TokenStream"]
