"""Chinese texts of the reference: `python -m rljob_api.reference_zh [--update KEY ...]`.

`reference_zh.yaml` has, for each key of `reference.described`, the digest of the English text and the Chinese text. A
text whose English has changed since is not shown: the reference has the English one there. Fields with the same English
text share one entry. The keys that have no text, or one of another English text, are listed; `--update` writes the
digest of today's English text, once the Chinese one was compared with it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from rljob_api.job import GROUP, KIND, VERSION
from rljob_api.reference import Texts, described

CATALOGUE = Path(__file__).with_name("reference_zh.yaml")
_HEADER = (
    "# Chinese texts of docs/zh/reference.md. of: digest of the English text (`python -m rljob_api.reference_zh`).\n"
)
_BOUNDS = {
    "whole number": "整数",
    "number": "数",
    "true or false": "true 或 false",
    "string": "字符串",
    "any value": "任意值",
    "free-form mapping": "自由格式的映射",
    "block": "块",
    "not empty": "非空",
}
_EFFECTS = {"none": "无", "some samples": "部分样本", "rounding": "舍入"}
_INTRODUCTION = f"""# RLJob 字段参考

<!-- Generated from crds/rljob_api by `python -m rljob_api.generate`. Do not edit. -->

[English](../reference.md)

`apiVersion: {GROUP}/{VERSION}`，`kind: {KIND}`。除非字段另有说明，时长以秒为单位，大小以字节为单位。
没有默认值的字段是可选的，标有**必填**的除外。未知字段会被拒绝。
省略一个块，等于其所有字段都取默认值；API server 不保存它。
规则保留英文原文，与 API server 和 `rljob validate` 的输出一致；尚未翻译的说明显示为英文。

`spec` 的部分字段可以在创建之后修改：[可修改的字段](#可修改的字段)。
"""
_MAY_CHANGE = """## 可修改的字段

任务在第一次尝试之后可以修改的 `spec` 字段，包括其下的全部内容；其他字段既不能用 `kubectl apply` 修改，
也不能用 `rljob run --resume` 修改，只有后者还允许[另一种并行布局](../running.md#resuming-in-another-layout)。
第一次尝试之前可以修改任何字段。
*挂起时*指任务不占用设备的时候（`suspend: true`），以及恢复时。按对计算结果的影响分为：

- 无：样本和权重逐位一致；
- 部分样本：奖励失败的样本或被排除的行会有所不同；
- 舍入：相同的求和以另一种顺序进行。有此类修改的第一步会在记录中注明（`changed`），`rljob audit` 和 `rljob replay`
  会指出它：从该步起，结果可能与未修改的运行不再逐位一致。

| 字段 | 时机 | 影响 | 原因 |
|---|---|---|---|
"""


def digest(english: str) -> str:
    """Return the first 8 hexadecimal digits of a text's SHA-256."""
    return hashlib.sha256(english.encode()).hexdigest()[:8]


class Chinese(Texts):
    """Texts of the catalogue.

    Args:
        catalogue: key -> `of` (digest of the English text) and `zh`.
    """

    introduction = _INTRODUCTION
    columns = "| 字段 | 类型 | 默认值 | 含义 |"
    required = "**必填**"
    rules = "规则："
    may_change = _MAY_CHANGE
    at_any_time, while_suspended = "任何时候", "挂起时"

    def __init__(self, catalogue: Mapping[str, Mapping[str, str]]) -> None:
        self.catalogue = catalogue
        self._by_digest = {entry["of"]: entry["zh"] for entry in catalogue.values()}

    @classmethod
    def load(cls, path: Path = CATALOGUE) -> Chinese:
        """Return the texts of a file."""
        return cls(yaml.safe_load(path.read_text(encoding="utf-8")))

    def text(self, english: str) -> str:
        """Return the Chinese text, or the English one where there is none of exactly this one."""
        return self._by_digest.get(digest(english), english)

    def kind(self, english: str) -> str:
        """Return the type of a field."""
        if found := re.fullmatch(r"list of (.*?)(?: \(at most (\d+)\))?", english):
            limit = f"（至多 {found[2]} 项）" if found[2] else ""
            return f"列表：{self.kind(found[1])}{limit}"
        if english.startswith("mapping of names to "):
            return f"映射：名称到{self.kind(english.removeprefix('mapping of names to '))}"
        if english.startswith("one of "):
            return f"取值 {english.removeprefix('one of ')}"
        kind, _, bounds = english.partition(", ")
        return "，".join(_BOUNDS.get(part, part) for part in (kind, _bounds(bounds)) if part)

    def list_of(self, link: str) -> str:
        """Return the type of a field that has several blocks."""
        return f"列表：{link}"

    def effect(self, english: str) -> str:
        """Return the effect of a change."""
        return _EFFECTS[english]

    def missing(self) -> list[str]:
        """Return the keys that have no text, or one of another English text."""
        return [key for key, english in described().items() if digest(english) not in self._by_digest]

    def unknown(self) -> list[str]:
        """Return the keys of the catalogue that nothing has."""
        return sorted(self.catalogue.keys() - described().keys())


def _bounds(english: str) -> str:
    if english.startswith("like "):
        return f"匹配 {english.removeprefix('like ')}"
    if english.startswith("a time like "):
        return f"时间，如 {english.removeprefix('a time like ')}"
    for word, sign in (("at least", "≥"), ("at most", "≤"), ("above", ">"), ("below", "<"), (" and ", " 且 ")):
        english = english.replace(word, sign)
    return english


def write(catalogue: Mapping[str, Mapping[str, str]], path: Path = CATALOGUE) -> None:
    """Write the catalogue in the order of the reference, a line for each entry."""
    order = {key: i for i, key in enumerate(described())}
    lines = (
        f"{key}: {{of: '{entry['of']}', zh: {json.dumps(entry['zh'], ensure_ascii=False)}}}\n"
        for key, entry in sorted(catalogue.items(), key=lambda item: order.get(item[0], len(order)))
    )
    path.write_text(_HEADER + "".join(lines), encoding="utf-8")


def main(arguments: Sequence[str] | None = None, path: Path = CATALOGUE) -> int:
    """Write digests, list what is missing; return 1 when the catalogue has a key that nothing has."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--update", nargs="+", default=[], metavar="KEY", help="keys of the catalogue, such as spec.steps"
    )
    keys = parser.parse_args(arguments).update
    chinese = Chinese.load(path)
    if other := set(keys) - chinese.catalogue.keys() | (set(keys) & set(chinese.unknown())):
        parser.error(f"not in {path.name}, or not in the reference: {', '.join(sorted(other))}")
    english = described()
    if keys:
        of = {key: {"of": digest(english[key])} for key in keys}
        write({key: {**entry, **of.get(key, {})} for key, entry in chinese.catalogue.items()}, path)
        chinese = Chinese.load(path)
    for key in chinese.missing():
        print(f"{key}: {'older than the English text' if key in chinese.catalogue else 'no text'}: {english[key]}")
    for key in chinese.unknown():
        print(f"{key}: nothing in the reference has this key")
    print(f"Chinese reference: {len(english) - len(chinese.missing())} of {len(english)} texts")
    return int(bool(chinese.unknown()))


if __name__ == "__main__":
    sys.exit(main())
