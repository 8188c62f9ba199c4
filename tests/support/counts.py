"""Counts what a redesign was to bring down, and keeps it down: `python tests/support/counts.py`, run by `make lint`.

Each count has a goal and a limit. A limit is the number that was there when it was last brought down: above it the
exit code is 1, and a change that brings the number further down lowers the limit with it.
"""

from __future__ import annotations

import ast
import itertools
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import prose

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"rljob_api": ROOT / "crds", "rljob_operator": ROOT / "operator", "rljob_worker": ROOT / "worker"}
UPSTREAM = ("torch", "vllm", "vllm_ascend", "megatron", "ray", "mindspeed")
OF_KUBERNETES = ("operator/rljob_operator/shell/", "operator/rljob_operator/plugin/doctor.py")
"""Read objects of Kubernetes and KubeRay, whose fields have no types here."""
CALLS_BY_NAME = {
    *("call", "_call", "control", "submit", "methodcaller", "collective_rpc", "_rpc", "_land", "remote"),
    *("trainers", "engines", "on_trainers", "on_engines", "_to_processes"),
}
OF_WORKERS = re.compile(r"rljob_[a-z_]+")
"""Methods that are mixed into vLLM's workers."""
RECORDS = re.compile(r"(record|status|summary|page|step|run|previous|written)s?")
PLURAL = re.compile(
    " (checkpoints|steps|rows|prompts|devices|nodes|engines|trainers|values|warnings|errors|restarts|processes|pods|"
    "responses|workers|findings|files|items|requests|scores|settings|events|updates|pictures|problems|episodes)\\b"
)
UNREAD = [["flow"], ["upstream"], ["weightsync"], ["memory"], ["algorithms"], ["trainer"], ["devices"]]
"""Rooms whose messages are of programs to programs."""
ROOMS = [["driver"], ["rollouts"], ["flow"], ["cluster"], ["checkpoints"]]
SHOWN = 12


@dataclass(frozen=True)
class File:
    path: Path
    module: str
    text: str
    tree: ast.Module

    def at(self, node: ast.AST, what: str = "") -> str:
        return f"{self.path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}{': ' if what else ''}{what}"


@dataclass(frozen=True)
class Count:
    what: str
    value: float
    limit: float
    goal: float
    where: list[str]


def files_of(package: str) -> list[File]:
    found = []
    for path in sorted((PACKAGES[package] / package).rglob("*.py")):
        parts = path.relative_to(PACKAGES[package]).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text()
        found.append(File(path, module, text, ast.parse(text)))
    return found


def imported(file: File) -> Iterator[tuple[ast.stmt, str]]:
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node, f"{node.module}.{alias.name}") for alias in node.names)


def mutual_imports(files: list[File]) -> list[str]:
    """Pairs of folders of one package that import each other."""
    folders = {file.path.parent for file in files}
    edges: dict[tuple[str, str], str] = defaultdict(str)
    for file in files:
        package, _, rest = file.module.partition(".")
        own = rest.partition(".")[0]
        for node, name in imported(file):
            parts = name.split(".")
            if parts[0] == package and len(parts) > 1 and PACKAGES[package] / package / parts[1] in folders:
                edges[f"{package}.{own}", f"{package}.{parts[1]}"] = file.at(node)
    return [f"{a} <-> {b}: {edges[a, b]}, {edges[b, a]}" for a, b in sorted(edges) if a < b and (b, a) in edges]


def names_as_strings(files: list[File]) -> list[str]:
    """Methods that are called by a name in a string.

    What the functions get that are known to call one, and wherever a method that vLLM's workers get is named.
    """
    found = []
    for file in files:
        for node in ast.walk(file.tree):
            if not isinstance(node, ast.Call):
                continue
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            names = [a.value for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            by_name = called in CALLS_BY_NAME and names and names[0].isidentifier()
            if by_name or any(OF_WORKERS.fullmatch(name) for name in names):
                found.append(file.at(node, f'{called}("{names[0]}")'))
    return found


def fields_by_key(files: list[File]) -> list[str]:
    """Fields of records and documents that are looked up by a string key."""
    found = []
    for file in files:
        if str(file.path.relative_to(ROOT)).startswith(OF_KUBERNETES):
            continue
        for node in ast.walk(file.tree):
            key: ast.expr | None = None
            if isinstance(node, ast.Subscript):
                holder, key = node.value, node.slice
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
                holder, key = node.func.value, node.args[0] if node.args else None
            if not isinstance(key, ast.Constant) or not isinstance(key.value, str):
                continue
            name = holder.attr if isinstance(holder, ast.Attribute) else getattr(holder, "id", "")
            if RECORDS.fullmatch(name.lstrip("_")):
                found.append(file.at(node, ast.unparse(node)))
    return found


def patches_elsewhere(files: list[File]) -> list[str]:
    """Attributes of upstream's modules and classes that are set outside of `upstream/`, and registrations there."""
    found = []
    for file in files:
        if file.module.startswith("rljob_worker.upstream"):
            continue
        theirs = _names_of_upstream(file)
        for node in ast.walk(file.tree):
            targets = node.targets if isinstance(node, ast.Assign) else []
            for target in targets:
                if isinstance(target, ast.Attribute) and _root(target.value) in theirs:
                    found.append(file.at(node, ast.unparse(target)))
                elif isinstance(target, ast.Attribute) and ast.unparse(target) == "sys.argv":
                    found.append(file.at(node, "sys.argv"))
                elif isinstance(target, ast.Subscript) and re.match(
                    r"os\.environ\['RAY_(?!USAGE)", ast.unparse(target)
                ):
                    found.append(file.at(node, ast.unparse(target)))
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                set_there = called == "setattr" and node.args and _root(node.args[0]) in theirs
                if set_there or called.endswith((".register_impl", ".register_backend")):
                    found.append(file.at(node, called))
    return found


def _names_of_upstream(file: File) -> set[str]:
    """Names that stand for upstream's modules and what was imported from them, and their plain aliases."""
    names: set[str] = set()
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Import):
            names |= {a.asname or a.name.partition(".")[0] for a in node.names if a.name.partition(".")[0] in UPSTREAM}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in UPSTREAM:
            names |= {alias.asname or alias.name for alias in node.names}
    for node in ast.walk(file.tree):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Name | ast.Attribute):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name) and _root(node.value) in names:
                names.add(target.id)
    return names


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def anys(files: list[File]) -> tuple[float, list[str]]:
    """`Any` for 1,000 lines, imports of it included; the files that have most."""
    counts = {file: len(re.findall(r"\bAny\b", file.text)) for file in files}
    lines = sum(file.text.count("\n") for file in files)
    most = sorted(counts, key=lambda file: -counts[file])[:SHOWN]
    return 1000 * sum(counts.values()) / lines, [f"{file.path.relative_to(ROOT)}: {counts[file]}" for file in most]


def weight_path(files: list[File]) -> list[str]:
    """Files between a trainer's parameter and an engine's that handle tensors: `weightsync/`, and its users.

    A weight passes one kind of slots, those of the host or those of a device, and one carrier, or neither, and lands as
    it is or in an adapter: they count once. A file that passes the route on handles no tensor.
    """
    on_path = []
    for file in files:
        folder = file.module.split(".")[1] if "." in file.module else ""
        uses = any(
            name.startswith("rljob_worker.weightsync.") and name != "rljob_worker.weightsync.route.Route"
            for _, name in imported(file)
        )
        others = ("device_ipc", "shared_disk", "in_place", "vllm_adapters")
        if file.module in [f"rljob_worker.weightsync.{name}" for name in others]:
            continue
        if "Tensor" in file.text and (folder == "weightsync" or (folder in ("trainer", "engine") and uses)):
            on_path.append(str(file.path.relative_to(ROOT)))
    return on_path


def forwarders(files: list[File]) -> list[str]:
    """Methods that only pass their own arguments on to a method of their own name, of another object.

    One that adds an argument, calls several objects or makes something of the result does not only forward.
    """
    found = []
    for file in files:
        for holder in (node for node in ast.walk(file.tree) if isinstance(node, ast.ClassDef)):
            for method in (node for node in holder.body if isinstance(node, ast.FunctionDef)):
                body = [node for node in method.body if not _is_docstring(node)]
                if len(body) == 1 and isinstance(body[0], ast.Return | ast.Expr) and _forwards(body[0].value, method):
                    found.append(file.at(method, f"{holder.name}.{method.name}"))
    return found


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _forwards(value: ast.expr | None, method: ast.FunctionDef) -> bool:
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
        return False
    own = {argument.arg for argument in ast.walk(method.args) if isinstance(argument, ast.arg)}
    given = [one.value if isinstance(one, ast.Starred) else one for one in value.args]
    given += [keyword.value for keyword in value.keywords]
    passed = all(isinstance(one, ast.Name) and one.id in own for one in given)
    return passed and value.func.attr == method.name and ast.unparse(value.func.value) != "super()"


def files_in_driver(files: list[File]) -> list[str]:
    """Modules of the worker's `driver/`, without those of its loops."""
    return [file.at(file.tree) for file in files if file.path.parent.name == "driver"]


def classes_that_generate(files: list[File]) -> list[str]:
    """Classes that ask engines to generate: calls of `generate` or `submit` of a group of engines."""
    found = []
    for file in files:
        for holder in (node for node in ast.walk(file.tree) if isinstance(node, ast.ClassDef)):
            calls = [node.func for node in ast.walk(holder) if isinstance(node, ast.Call)]
            asked = [one for one in calls if isinstance(one, ast.Attribute) and one.attr in ("generate", "submit")]
            if any(ast.unparse(one.value).endswith("engines") for one in asked):
                found.append(file.at(holder, holder.name))
    return found


def fixed_plurals(files: list[File]) -> list[str]:
    """Numbers with a plural after them in messages, `{n} steps`, which says `1 steps`: `how_many` has both forms.

    The second number of `3 of 8 rows` is left out, and what has as many in every case (a constant, bytes, tokens).
    """
    found = []
    for file in files:
        if file.module.split(".")[1:2] in UNREAD:
            continue
        for node in (node for node in ast.walk(file.tree) if isinstance(node, ast.JoinedStr)):
            parts = [part.value if isinstance(part, ast.Constant) else part for part in node.values]
            for i, (part, after) in enumerate(itertools.pairwise(parts)):
                plural = PLURAL.match(after) if isinstance(after, str) else None
                if plural is None or not isinstance(part, ast.FormattedValue) or part.format_spec is not None:
                    continue
                constant = isinstance(part.value, ast.Name) and part.value.id.isupper()
                of_several = i > 1 and parts[i - 1] in (" of ", " of the ", " of at most ")
                if not constant and not of_several:
                    found.append(file.at(part, ast.unparse(part.value) + plural[0]))
    return found


def lines_of_rooms(files: list[File]) -> list[str]:
    """Lines of the rooms through which a step goes: the driver's loops, rollouts, placement and checkpoints."""
    return [line for file in files if file.module.split(".")[1:2] in ROOMS for line in file.text.splitlines()]


def count_all() -> list[Count]:
    api, operator, worker = (files_of(package) for package in PACKAGES)
    everything = [*api, *operator, *worker]
    begins, people = prose.findings()
    listed: list[tuple[str, Callable[[], list[str]], float, float]] = [
        ("folder pairs that import each other", lambda: mutual_imports(everything), *LIMITS["pairs"]),
        ("method names as strings", lambda: names_as_strings([*operator, *worker]), *LIMITS["names"]),
        ("record fields by string key", lambda: fields_by_key([*operator, *worker]), *LIMITS["fields"]),
        ("patches outside upstream/", lambda: patches_elsewhere(worker), *LIMITS["patches"]),
        ("files of a weight's way to an engine", lambda: weight_path(worker), *LIMITS["path"]),
        ("files in driver/", lambda: files_in_driver(worker), *LIMITS["driver"]),
        ("classes that ask engines to generate", lambda: classes_that_generate(worker), *LIMITS["generate"]),
        ("methods of the worker that only forward", lambda: forwarders(worker), *LIMITS["forward"]),
        ("numbers with a fixed plural in messages", lambda: fixed_plurals(everything), *LIMITS["plurals"]),
        ("docstrings that begin with What, Of, As, Those, Which, How, Where", lambda: begins, *LIMITS["begins"]),
        ("docstrings with who, whoever, told, knows", lambda: people, *LIMITS["people"]),
    ]
    counts = []
    for what, find, limit, goal in listed:
        where = find()
        counts.append(Count(what, len(where), limit, goal, where))
    lines = len(lines_of_rooms(worker))
    counts.append(Count("lines of driver, rollouts, flow, cluster, checkpoints", lines, *LIMITS["lines"], []))
    for name, files in (("worker", worker), ("operator", operator)):
        value, where = anys(files)
        counts.append(Count(f"Any for 1,000 lines of the {name}", round(value, 1), *LIMITS[name], where))
    return counts


LIMITS: dict[str, tuple[float, float]] = {
    "pairs": (0, 0),
    "names": (0, 0),
    "fields": (0, 0),
    "patches": (0, 0),
    "path": (10, 10),
    "driver": (14, 22),
    "generate": (1, 1),
    "forward": (15, 15),
    "plurals": (18, 18),
    "lines": (float("inf"), 8128),
    "begins": (0, 0),
    "people": (0, 0),
    "worker": (6, 8),
    "operator": (2, 8),
}
"""(limit, goal) of each. Three more are counted while a step runs: `tests/worker/driver/test_step_census.py`."""


def main() -> int:
    counts = count_all()
    for count in counts:
        bad, open_ = count.value > count.limit, count.value > count.goal
        verdict = "too many" if bad else f"goal {count.goal:g}" if open_ else "ok"
        print(f"{count.value:6g}  at most {count.limit:<5g} {verdict:<9} {count.what}")
        if bad or (open_ and "-v" in sys.argv):
            print(
                "".join(f"           {line}\n" for line in count.where[: None if "-v" in sys.argv else SHOWN]), end=""
            )
    return int(any(count.value > count.limit for count in counts))


if __name__ == "__main__":
    sys.exit(main())
