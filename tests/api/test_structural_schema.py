"""The CRD follows the rules for structural schemas (kubernetes.io, CustomResourceDefinition, v1)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft4Validator
from manifests import manifest
from schema_evaluator import admit, broken_rules, compile_rule, root_schema

from rljob_api.crd import custom_resource_definition
from rljob_api.phases import PHASES
from rljob_api.schema import subschema
from rljob_api.validation import ManifestError, load_manifest

Node = dict[str, Any]

CRD = custom_resource_definition()
VERSION = CRD["spec"]["versions"][0]
TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int, "number": (int, float)}
ALLOWED_KEYS = {
    "type", "format", "description", "default", "nullable", "enum", "required", "properties", "items",
    "additionalProperties", "pattern", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength",
    "maxLength", "minItems", "maxItems", "maxProperties", "x-kubernetes-validations",
    "x-kubernetes-preserve-unknown-fields", "x-kubernetes-int-or-string", "x-kubernetes-list-type",
    "x-kubernetes-list-map-keys",
}  # fmt: skip


def nodes(node: Node, path: str = "") -> Iterator[tuple[str, Node]]:
    yield path, node
    for name, child in node.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    if "items" in node:
        yield from nodes(node["items"], f"{path}[]")
    if isinstance(node.get("additionalProperties"), dict):
        yield from nodes(node["additionalProperties"], f"{path}{{}}")


ALL = list(nodes(root_schema()))


def test_only_structural_keywords() -> None:
    assert {key for _, node in ALL for key in node} <= ALLOWED_KEYS


def test_every_node_has_a_type() -> None:
    for path, node in ALL:
        assert node.get("type") in TYPES or node.get("x-kubernetes-int-or-string") is True, path


def test_objects_are_closed_maps_or_marked_free() -> None:
    for path, node in ALL:
        if node.get("type") != "object" or path in ("", ".metadata"):
            continue
        ways = ("properties" in node, "additionalProperties" in node, "x-kubernetes-preserve-unknown-fields" in node)
        assert ways in ((True, False, False), (False, True, False), (False, False, True), (True, False, True)), path


def test_required_fields_exist() -> None:
    for path, node in ALL:
        assert set(node.get("required", [])) <= set(node.get("properties", {})), path


def test_arrays_have_one_item_schema_and_a_bound() -> None:
    for path, node in ALL:
        if node.get("type") == "array":
            assert isinstance(node["items"], dict), path
            assert "maxItems" in node or path.startswith(".spec.resources.overrides"), path


def test_exclusive_bounds_are_flags_beside_a_bound() -> None:
    for path, node in ALL:
        for flag, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
            if flag in node:
                assert node[flag] is True, path
                assert bound in node, path


def test_no_bound_has_a_fraction() -> None:
    """The API server cuts it off where the value is a whole number: 0 is not below a minimum of 0.01 there."""
    for path, node in ALL:
        assert all(float(node.get(bound, 0)).is_integer() for bound in ("minimum", "maximum")), path


def test_enums_patterns_and_numbers_fit_their_types() -> None:
    for path, node in ALL:
        if "enum" in node:
            assert all(type(value) is str for value in node["enum"]), path
            assert node["type"] == "string", path
        if "pattern" in node:
            assert node["type"] == "string", path
            assert "(?" not in node["pattern"], f"{path}: RE2 has no look-around"
            re.compile(node["pattern"])


def test_defaults_are_valid_and_pruned() -> None:
    for path, node in ALL:
        if "default" in node:
            assert node["default"] is not None, path
            assert list(Draft4Validator(node).iter_errors(node["default"])) == [], path
            assert unknown(node, node["default"]) == [], path


def test_rules_hold_for_defaults_before_the_childrens_defaults_are_filled_in() -> None:
    for path, node in ALL:
        for entry in node.get("x-kubernetes-validations", []):
            if "default" in node and "oldSelf" not in entry["rule"]:
                result = compile_rule(entry["rule"]).eval(data={"self": node["default"]})
                assert result.value() is True, f"{path}: {entry['rule']}: {result.value()}"


def test_rules_have_short_messages_and_point_at_fields_that_exist() -> None:
    seen = 0
    for path, node in ALL:
        for entry in node.get("x-kubernetes-validations", []):
            seen += 1
            compile_rule(entry["rule"])
            assert 0 < len(entry["message"]) <= 2048, path
            assert "\n" not in entry["message"], path
            if "fieldPath" in entry:
                assert subschema(node, tuple(entry["fieldPath"].strip(".").split("."))) is not None, entry
    assert seen > 60


def test_collections_that_rules_walk_are_bounded() -> None:
    for path, node in ALL:
        for entry in node.get("x-kubernetes-validations", []):
            for field in re.findall(r"self\.([\w.]+)\.(?:all|exists|exists_one)\(", entry["rule"]):
                walked = subschema(node, tuple(field.split("."))) or {}
                assert "maxItems" in walked or "maxProperties" in walked, f"{path}.{field}"


def test_list_map_keys_are_required_scalars() -> None:
    seen = 0
    for path, node in ALL:
        if node.get("x-kubernetes-list-type") == "map":
            for key in node["x-kubernetes-list-map-keys"]:
                seen += 1
                assert key in node["items"]["required"], path
                assert node["items"]["properties"][key]["type"] in ("string", "integer"), path
    assert seen > 0


def test_every_field_is_described() -> None:
    silent = [
        path
        for path, node in ALL
        if path.startswith((".spec", ".status"))
        and not path.endswith(("[]", "{}"))
        and ".engineArgs." not in path
        and not node.get("description")
    ]
    assert silent == []


def test_fields_of_lists_and_evaluations_refer_to_a_text_of_their_own_name() -> None:
    texts = {path: node.get("description", "") for path, node in ALL}
    referring = {path: text for path, text in texts.items() if text.startswith("See spec.")}
    assert len(referring) > 100
    for path, text in referring.items():
        described = f".{text.removeprefix('See ').removesuffix('.')}.{path.rpartition('.')[2]}"
        assert not texts[described].startswith("See "), path
        assert len(texts[described]) > len(text), path


def test_status_is_a_subresource_and_spec_is_required() -> None:
    assert VERSION["subresources"] == {
        "status": {},
        "scale": {
            "specReplicasPath": ".spec.resources.rollout.nodes",
            "statusReplicasPath": ".status.cluster.engineNodes",
        },
    }
    assert root_schema()["required"] == ["spec"]
    assert root_schema()["properties"]["metadata"] == {"type": "object"}
    assert CRD["metadata"]["name"] == f"{CRD['spec']['names']['plural']}.{CRD['spec']['group']}"


def test_printer_columns_read_fields_that_exist() -> None:
    for column in VERSION["additionalPrinterColumns"]:
        path = tuple(column["jsonPath"].strip(".").split("."))
        if path[0] == "metadata":
            continue
        node = subschema(root_schema(), path)
        assert node is not None, column
        assert node["type"] == column["type"], column
        if "phaseSeconds" in path:
            assert path[-1] in PHASES
    names = [column["name"] for column in VERSION["additionalPrinterColumns"] if column["priority"] == 0]
    assert names == ["Phase", "Step", "Steps", "ETA", "Reward", "Step-Seconds", "Restarts", "Age"]


def unknown(node: Node, value: Any) -> list[str]:
    """Fields that the API server would prune."""
    if isinstance(value, list):
        return [name for item in value for name in unknown(node.get("items", {}), item)]
    if not isinstance(value, dict) or node.get("x-kubernetes-preserve-unknown-fields"):
        return []
    fields, extra = node.get("properties", {}), node.get("additionalProperties")
    found = [name for name in value if name not in fields and extra is None]
    return found + [n for name, item in value.items() for n in unknown(fields.get(name, extra or {}), item)]


LEAVES = [
    ("spec.steps", "0"), ("spec.steps", "3000000000"), ("spec.steps", "1.5"), ("spec.steps", "'5'"),
    ("spec.seed", "-1"), ("spec.mode", "Both"), ("spec.suspend", "'true'"), ("spec.image", "''"),
    ("spec.rollout.topP", "0"), ("spec.rollout.topP", "1.5"), ("spec.rollout.memoryFraction", "1"),
    ("spec.rollout.temperature", "0"), ("spec.rollout.stop", "a"), ("spec.rollout.stop", "['']"),
    ("spec.rollout.engineArgs", "[1]"), ("spec.algorithm.dualClip", "1"), ("spec.algorithm.kl.estimator", "k9"),
    ("spec.algorithm", "grpo"), ("spec.training.optimizer.beta2", "1"), ("spec.training.recompute", "full"),
    ("spec.reward.python", "function"), ("spec.memorySaver.trainMemoryMargin", "2GB"),
    ("spec.memorySaver.trainMemoryMargin", "2"), ("spec.records.httpPort", "70000"),
    ("spec.timeouts.phases", "{rollout: 0}"), ("spec.environment.variables", "{A: 1}"),
    ("spec.resources.overrides.resourceName", "npu"), ("spec.hccl.interface", "'eth 0'"),
    ("spec.failurePolicy.rules", "[{action: Stop}]"), ("spec.failurePolicy.rules", "[{}]"),
    ("spec.storage.volumes", "[{name: A_b, mountPath: a, claim: x}]"),
    ("spec.model.random.config", "null"), ("apiVersion", "rljob.dev/v1"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value"), LEAVES)
def test_schema_and_types_refuse_the_same_values(path: str, value: str) -> None:
    setting = f"{path.removeprefix('spec.')}={value}"
    if path == "apiVersion":
        document = {**manifest(), "apiVersion": value}
    else:
        document = manifest(setting)
        admitted = admit(document)
        faults = list(Draft4Validator(root_schema()).iter_errors(admitted))
        quoted_number = value == "2"  # the API server refuses a number for a string, as the types do
        assert faults or quoted_number
    with pytest.raises(ManifestError) as error:
        load_manifest(document)
    assert any(problem.path.startswith(path) for problem in error.value.problems)


def test_the_example_is_valid_and_nothing_of_it_is_pruned() -> None:
    assert list(Draft4Validator(root_schema()).iter_errors(admit(manifest()))) == []
    assert unknown(root_schema()["properties"]["spec"], manifest()["spec"]) == []


def test_no_default_makes_another_list_of_what_was_applied() -> None:
    """`kubectl apply` compares lists whole: it would find a change each time, and other managers a conflict."""
    spec = CRD["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    inside = [(path, node) for path, node in nodes(spec) if "[]" in path]
    assert len(inside) > 50
    assert [path for path, node in inside if "default" in node or "nullable" in node] == []


def test_lists_of_blocks_that_have_a_name_are_keyed_by_it() -> None:
    spec = CRD["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    lists = [(path, node) for path, node in nodes(spec) if "items" in node]
    assert {".storage.volumes", ".evaluation.sets", ".records.trackers"} < {path for path, _ in lists}
    for path, node in lists:
        named = "name" in node["items"].get("required", ())
        keyed = node.get("x-kubernetes-list-map-keys") == ["name"] and node.get("x-kubernetes-list-type") == "map"
        assert keyed == named, path


def test_what_is_applied_again_is_what_is_stored() -> None:
    document = manifest(
        "storage.volumes=[{name: a, mountPath: /a, claim: a}]",
        "records.trackers=[{name: wandb}]",
        "scheduling.tolerations=[{key: a}]",
        "evaluation={sets: [{name: a, path: /a}]}",
    )
    stored = admit(document)["spec"]
    assert not broken_rules(admit(document))
    for block, name in (("storage", "volumes"), ("records", "trackers"), ("scheduling", "tolerations")):
        assert stored[block][name] == document["spec"][block][name]
    assert stored["evaluation"]["sets"] == document["spec"]["evaluation"]["sets"]
