"""Write the CRD and the reference from the types: `python -m rljob_api.generate [--check]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rljob_api.crd import custom_resource_definition
from rljob_api.reference import reference
from rljob_api.reference_zh import Chinese

_REPOSITORY = Path(__file__).parents[2]
_HEADER = "# Generated from crds/rljob_api by `python -m rljob_api.generate`. Do not edit.\n"
_CHART_TEMPLATE = """{{{{- if .Values.crd.install }}}}
{header}{kind}metadata:
  name: {name}
  labels: {{{{- include "rljob.labels" . | nindent 4 }}}}
  annotations:
    helm.sh/resource-policy: keep
    {{{{- with .Values.crd.annotations }}}}
    {{{{- toYaml . | nindent 4 }}}}
    {{{{- end }}}}
{spec}{{{{- end }}}}
"""


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def generated_files() -> dict[str, str]:
    """Return path below the repository -> content of every generated file."""
    crd = custom_resource_definition()
    return {
        "crds/rljob.dev_rljobs.yaml": _HEADER + _yaml(crd),
        "helm/rljob/templates/crd.yaml": _chart_template(crd),
        "docs/reference.md": reference(),
        "docs/zh/reference.md": reference(Chinese.load()),
    }


def _yaml(document: dict[str, Any]) -> str:
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)


def _chart_template(crd: dict[str, Any]) -> str:
    """Return the CRD as a template of the chart: upgraded with it, kept when it is uninstalled."""
    return _CHART_TEMPLATE.format(
        header=_HEADER,
        kind=_yaml({key: crd[key] for key in ("apiVersion", "kind")}),
        name=crd["metadata"]["name"],
        # Helm would take two braces in a description for the begin of an action.
        spec=_yaml({"spec": crd["spec"]}).replace("{{", '{{ "{{" }}'),
    )


def write_or_check(
    files: Callable[[], Mapping[str, str]],
    description: str | None,
    arguments: Sequence[str] | None = None,
    root: Path = _REPOSITORY,
) -> int:
    """The command line of whatever writes files of the repository from a source: write those that differ, name them.

    With `--check` nothing is written; the exit status is 1 when a file differs.

    Args:
        files: returns path below the repository -> content.
        description: what `--help` says.
        arguments: command line; default: this process's.
        root: the repository.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 when a file is out of date")
    check = parser.parse_args(arguments).check
    stale = False
    for name, content in files().items():
        path = root / name
        if path.exists() and path.read_text(encoding="utf-8") == content:
            continue
        stale = True
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8")
        print(f"{name}: {'out of date; `make generate` writes it anew' if check else 'written'}")
    return int(check and stale)


if __name__ == "__main__":
    sys.exit(write_or_check(generated_files, __doc__))
