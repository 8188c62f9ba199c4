"""Errors that end a command, in words for the person who typed it."""

from __future__ import annotations

import re

from rljob_operator.shell.api.client import ApiError

# kubernetes staging/src/k8s.io/apiserver/pkg/endpoints/handlers/responsewriters/errors.go
_FORBIDDEN = re.compile(
    r'User "(?P<user>[^"]*)" cannot (?P<verb>\S+) resource "(?P<resource>[^"]*)" in API group "(?P<group>[^"]*)"'
    r'(?: in the namespace "(?P<namespace>[^"]*)")?'
)


class CommandError(Exception):
    """The command cannot do what was asked; the message says why and what would help."""


def from_api(error: ApiError, doing: str) -> CommandError:
    """Explain a refusal of the API server to the user.

    Args:
        error: the refusal.
        doing: what was tried, like `read RLJob rl/a`.
    """
    message = str(error)
    if error.code == 403 and (found := _FORBIDDEN.search(message)):
        resource = f"{found['resource']}.{found['group']}" if found["group"] else found["resource"]
        where = f"in namespace {found['namespace']}" if found["namespace"] else "in the whole cluster"
        return CommandError(
            f"cannot {doing}: {found['user']} lacks the right to {found['verb']} {resource} {where}; "
            f"ask for a Role with verb {found['verb']} on {resource}"
        )
    if error.code == 401:
        return CommandError(f"cannot {doing}: the API server does not accept your credentials; log in again")
    if error.code == 0:
        return CommandError(f"cannot {doing}: the API server does not answer ({message})")
    return CommandError(f"cannot {doing}: {message}")
