"""Owner references: the object that controls another one."""

from __future__ import annotations

from rljob_api.job import KIND
from rljob_operator.kubernetes_objects import KubeObject, OwnerReference


def controller_of(item: KubeObject) -> OwnerReference | None:
    """Owner reference of the object's controller."""
    owners = item["metadata"].get("ownerReferences") or ()
    return next((owner for owner in owners if owner.get("controller")), None)


def controller_uid(item: KubeObject) -> str:
    """UID of the object's controller if that is an RLJob, else nothing."""
    owner = controller_of(item)
    return str(owner["uid"]) if owner is not None and owner["kind"] == KIND else ""


def is_controlled_by(item: KubeObject, uid: str) -> bool:
    """Whether the object's controller, of whatever kind, has this UID."""
    owner = controller_of(item)
    return owner is not None and owner["uid"] == uid
