"""Ray's tasks and actors as they are used: its own types know neither options nor the methods of an actor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypedDict, TypeVar

import ray
from ray.actor import ActorHandle

T = TypeVar("T")
S_co = TypeVar("S_co", covariant=True)


class Remote(Protocol[S_co]):
    """A task, an actor's class, or a method of an actor; S is what starting it gives."""

    def options(self, **options: object) -> Remote[S_co]:
        """The same with other options."""
        ...

    def remote(self, *args: object, **kwargs: object) -> S_co:
        """Start it."""
        ...


class NodeTable(TypedDict):
    """A node as `ray.nodes()` lists it."""

    NodeID: str
    NodeManagerHostname: str
    NodeManagerAddress: str
    Resources: dict[str, float]
    Labels: dict[str, str]
    Alive: bool


def remote_task(function: Callable[..., T], **options: object) -> Remote[ray.ObjectRef[T]]:
    """A function as a task with options."""
    decorate: Callable[..., Callable[..., Remote[ray.ObjectRef[T]]]] = ray.remote
    return decorate(**options)(function)


def remote_actor(kind: type, **options: object) -> Remote[ActorHandle[object]]:
    """A class as one of actors with options."""
    decorate: Callable[..., Callable[..., Remote[ActorHandle[object]]]] = ray.remote
    return decorate(**options)(kind)


def method_of(actor: ActorHandle[object], method: Callable[..., T]) -> Remote[ray.ObjectRef[T]]:
    """An actor's method, to be started; the only one that is found by its name."""
    found: Remote[ray.ObjectRef[T]] = getattr(actor, method.__name__)
    return found
