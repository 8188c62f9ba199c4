"""Bearer tokens from the jobs' Secrets: read once each, by name; the operator neither lists nor watches Secrets."""

from __future__ import annotations

import base64
import binascii
from typing import NamedTuple

from rljob_operator.kubernetes_objects import SecretObject
from rljob_operator.shell.api.client import ApiClient, ApiError
from rljob_operator.shell.api.owners import is_controlled_by
from rljob_operator.shell.api.resources import SECRETS, JobKey


class _Slot(NamedTuple):
    owner_uid: str
    secret: str
    key: str


class Tokens:
    """Tokens that were read or made, by job.

    Args:
        client: the API server.
    """

    def __init__(self, client: ApiClient) -> None:
        self._client = client
        self._known: dict[JobKey, dict[_Slot, str]] = {}

    def known(self, job: JobKey, owner_uid: str, secret: str, key: str) -> str | None:
        """A token that was read before."""
        return self._known.get(job, {}).get(_Slot(owner_uid, secret, key))

    async def read(self, job: JobKey, owner_uid: str, secret: str, key: str) -> str | None:
        """A token; None when the Secret is not there, is no Secret of this owner's, or lacks the key.

        Args:
            job: whose token it is.
            owner_uid: UID of the RLJob for the driver's token, of the RayCluster for Ray's: one that was made anew has
                another token.
            secret: name of the Secret.
            key: in its data.

        Raises:
            ApiError: the API server did not say.
        """
        found = self.known(job, owner_uid, secret, key)
        if found is not None:
            return found
        try:
            item = await self._client.get(SECRETS, job.namespace, secret)
        except ApiError as error:
            if error.code == 404:
                return None
            raise
        # KubeRay makes its cluster the controller of Ray's Secret, as the operator does with the driver's.
        if not is_controlled_by(item, owner_uid):
            return None
        token = _decoded(item, key)
        if token is not None:
            self.learn(job, owner_uid, secret, key, token)
        return token

    def learn(self, job: JobKey, owner_uid: str, secret: str, key: str, token: str) -> None:
        """A token that was just made or read."""
        self._known.setdefault(job, {})[_Slot(owner_uid, secret, key)] = token

    def forget(self, job: JobKey) -> None:
        """Read the job's tokens again next time: one was refused, a pod misses its Secret, or the job is gone."""
        self._known.pop(job, None)


def _decoded(item: SecretObject, key: str) -> str | None:
    text = (item.get("data") or {}).get(key)
    try:
        return None if text is None else base64.b64decode(text, validate=True).decode("ascii").strip() or None
    except (binascii.Error, UnicodeDecodeError):
        return None
