"""Generated data and its fate: streams of tokens, groups of episodes, the pool of groups."""

from rljob_worker.flow.episode import Episode
from rljob_worker.flow.frontier import Frontier
from rljob_worker.flow.group import Decision, Group
from rljob_worker.flow.pool import GroupPool
from rljob_worker.flow.streams import Span, SpanKind, TokenStream
from rljob_worker.flow.turns import Finish

__all__ = ["Decision", "Episode", "Finish", "Frontier", "Group", "GroupPool", "Span", "SpanKind", "TokenStream"]
