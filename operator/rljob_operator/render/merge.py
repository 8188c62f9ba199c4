"""Strategic merge of a user's pod template over the operator's, with Kubernetes' merge keys.

Maps are merged key by key and null deletes a key. Lists with a merge key are merged item by item; an item with
`$patch: delete` goes, one with `$patch: replace` takes the other's place. All other lists are replaced. Items that hold
one of several alternatives (a variable's value or its source, a volume's source) are replaced whole, since both would
be refused.
"""

from __future__ import annotations

import re

from rljob_api.json_types import Json
from rljob_operator.kubernetes_objects import Manifest, blocks_of
from rljob_operator.render.errors import RenderError
from rljob_operator.render.settings import short

MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "imagePullSecrets": "name",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
    "resourceClaims": "name",
    "schedulingGates": "name",
}
"""Field -> patchMergeKey of k8s.io/api/core/v1 (types.go, 0.34)."""
_REPLACED_WHOLE = ("env", "volumes")
_DIRECTIVE = "$patch"
_PLAIN_KEY = re.compile(r"[A-Za-z0-9_./$-]{1,63}")


def merge(base: Manifest, patch: Manifest, path: str) -> dict[str, Json]:
    """Return `patch` merged over `base`; neither is changed, but what nobody changes is shared. `path` is the patch's
    place in the manifest.

    Raises:
        RenderError: where the patch has another shape than a pod.
    """
    if patch.get(_DIRECTIVE) == "replace":
        return _plain(patch)
    merged = dict(base)
    for key, value in patch.items():
        at = f"{path}.{key if _PLAIN_KEY.fullmatch(key) else short(key, 40)}"
        if key == _DIRECTIVE:
            raise RenderError(at, f"{short(str(value))} is neither delete nor replace")
        if value is None:
            merged.pop(key, None)
        elif key in MERGE_KEYS and (isinstance(value, list) or isinstance(merged.get(key), list)):
            merged[key] = _merge_lists(blocks_of(merged, key), value, key, at)
        elif key in merged:
            merged[key] = _merge_values(merged[key], value, at)
        else:
            merged[key] = merge({}, value, at) if isinstance(value, dict) else _without_nulls(value)
    return merged


def _merge_values(base: Json, patch: Json, path: str) -> Json:
    if isinstance(base, dict):
        if not isinstance(patch, dict):
            raise RenderError(path, f"{short(str(patch))} is no mapping, as it is in a pod")
        return merge(base, patch, path)
    if isinstance(base, list) and not isinstance(patch, list):
        raise RenderError(path, f"{short(str(patch))} is no list, as it is in a pod")
    return _without_nulls(patch)


def _merge_lists(base: list[Manifest], patch: Json, field: str, path: str) -> list[Manifest]:
    if not isinstance(patch, list):
        raise RenderError(path, f"{short(str(patch))} is no list, as it is in a pod")
    by = MERGE_KEYS[field]
    merged = {item[by]: item for item in base}
    for i, item in enumerate(patch):
        at = f"{path}[{i}]"
        if not isinstance(item, dict) or not isinstance(item.get(by), int if by == "containerPort" else str):
            raise RenderError(at, f"has no {by}, which tells which item is meant")
        name, directive = item[by], item.get(_DIRECTIVE)
        if directive == "delete":
            merged.pop(name, None)
        elif name in merged and field not in _REPLACED_WHOLE:
            merged[name] = merge(merged[name], item, at)
        else:
            merged[name] = _plain(item)
    return list(merged.values())


def _plain(patch: Manifest) -> dict[str, Json]:
    return {key: _without_nulls(value) for key, value in patch.items() if key != _DIRECTIVE and value is not None}


def _without_nulls(value: Json) -> Json:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
