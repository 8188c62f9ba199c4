"""Changes of upstream's modules: `python changes.py KIND...`, in a fresh process.

Prints, as JSON, the full names of attributes of modules, classes and objects that were replaced, added or removed: for
`import`, by importing every module of the worker; for `patches`, by each patch in a fork of its own. Then the answers
of `patched_processes`, each from a fork in which all patches of such a process are installed.
"""

from __future__ import annotations

import ast
import copyreg
import importlib
import importlib.util
import json
import os
import pkgutil
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import patched_processes

PACKAGES = ("torch", "vllm", "megatron", "ray")
_PLAIN = (int, float, str, bytes, bool, type(None))
_TRACKERS = "rljob_worker.records.trackers."
_LAZY = ("__getattr__", "__path__", "__warningregistry__")


def modules_of_the_worker() -> list[str]:
    """All but those that import a tracker's package: each has a process of its own, in an environment that has it."""
    import rljob_worker
    from rljob_api.rules.trackers import TRACKER_KEYS

    names = [module.name for module in pkgutil.walk_packages(rljob_worker.__path__, "rljob_worker.")]
    return [name for name in names if name.removeprefix(_TRACKERS) not in TRACKER_KEYS]


def upstream_modules() -> dict[str, types.ModuleType]:
    return {
        name: module
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in PACKAGES and isinstance(module, types.ModuleType)
    }


def attributes(modules: dict[str, types.ModuleType]) -> dict[str, Any]:
    """Full name -> value, or a shallow copy of a container."""
    found: dict[str, Any] = {f"env:{name}": value for name, value in os.environ.items()}
    found["warnings.filters"] = _copy(warnings.filters)
    found["sys.argv"] = _copy(sys.argv)
    for module_name, module in modules.items():
        for name, value in list(vars(module).items()):
            if name in _LAZY or isinstance(value, types.ModuleType):
                continue
            if value is copyreg.dispatch_table:
                # The standard library's, under a name of upstream's: packages like regex enter themselves there.
                continue
            found[f"{module_name}.{name}"] = _copy(value)
            for inner, content in _inside(value, module_name):
                found[f"{module_name}.{name}.{inner}"] = _copy(content)
    return found


def _inside(value: Any, module_name: str) -> Iterator[tuple[str, Any]]:
    """Attributes of a class of this module, and of an object of one of upstream's classes."""
    if isinstance(value, type):
        if value.__module__ == module_name:
            yield from list(vars(value).items())
    elif type(value).__module__.partition(".")[0] in PACKAGES and type(getattr(value, "__dict__", None)) is dict:
        yield from list(vars(value).items())


def _copy(value: Any) -> Any:
    if type(value) is dict:
        return ("dict", [(key, value[key]) for key in list(value)])
    return ("list", list(value)) if type(value) in (list, set) else value


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is tuple and type(other) is tuple and len(one) == len(other):
        return all(_same(a, b) for a, b in zip(one, other, strict=True))
    if type(one) is list and type(other) is list and len(one) == len(other):
        return all(_same(a, b) for a, b in zip(one, other, strict=True))
    return type(one) is type(other) and isinstance(one, _PLAIN) and one == other


def changed_by(action: Callable[[], object], modules: dict[str, types.ModuleType], before: dict[str, Any]) -> list[str]:
    action()
    after = attributes(modules)
    missing = object()
    changed = {n for n in before.keys() | after.keys() if not _same(before.get(n, missing), after.get(n, missing))}
    return sorted(name for name in changed if name.rpartition(".")[0] not in changed)


def by_import() -> list[str]:
    """Changes of upstream's modules by an import of every module of the worker."""
    # Most of them, so that the fork that says which they are has little left to import.
    for name in third_party_imports():
        with suppress(ModuleNotFoundError):
            importlib.import_module(name)
    for name in _forked(_brought_along):
        importlib.import_module(name)
    modules = upstream_modules()
    before = attributes(modules)
    return changed_by(_import_the_worker, modules, before)


def _import_the_worker() -> None:
    for name in modules_of_the_worker():
        importlib.import_module(name)


def _brought_along() -> list[str]:
    _import_the_worker()
    return list(upstream_modules())


def third_party_imports() -> list[str]:
    """Modules outside of RLJob that statements at the top of the worker's files import."""
    names = set()
    for spec in map(importlib.util.find_spec, modules_of_the_worker()):
        assert spec is not None
        assert spec.origin is not None
        for node in ast.parse(Path(spec.origin).read_text()).body:
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module)
    return sorted(name for name in names if not name.startswith("rljob_"))


def by_patches() -> dict[str, list[str]]:
    """For each patch of a whole process that can be applied here: what it changes."""
    from rljob_worker.upstream.install import PATCHES

    chosen = [patch for patch in PATCHES if not patch.scoped and patch.devices != ("npu",)]
    for target in (target for patch in chosen for target in patch.targets):
        if target.partition(".")[0] in PACKAGES:
            _import_prefix(target)
    modules = upstream_modules()
    before = attributes(modules)

    def changed(action: Callable[[], object]) -> list[str]:
        return _forked(lambda: changed_by(action, modules, before))

    def all_of_them() -> None:
        for patch in chosen:
            patch.apply()

    # A look at all modules takes seconds: it is made once, for all patches together. Each by itself is then looked for
    # in the modules that they change; what one changes and another puts back is not seen.
    names = changed(all_of_them)
    modules = {name: it for name, it in modules.items() if any(one.startswith(f"{name}.") for one in names)}
    before = attributes(modules)
    # Locks are made anew in a fork.
    by_the_fork = set(changed(lambda: None))
    return {patch.name: [name for name in changed(patch.apply) if name not in by_the_fork] for patch in chosen}


def _forked(action: Callable[[], Any]) -> Any:
    """Result of an action in a fork of this process, through JSON."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        with open(writing, "w") as answer:
            json.dump(action(), answer)
        os._exit(0)
    os.close(writing)
    with open(reading) as answer:
        returned = json.load(answer)
    os.wait()
    return returned


def _import_prefix(target: str) -> None:
    parts = target.split(".")
    for count in range(1, len(parts)):
        try:
            importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            return


def main() -> None:
    kinds: dict[str, Callable[[], Any]] = {"import": by_import, "patches": by_patches}
    found = {name: kinds[name]() for name in sys.argv[1:]}
    found |= {role.__name__: _forked(role) for role in (patched_processes.trainer, patched_processes.engine_worker)}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
