"""Write the CRD and the reference from the types: `python -m rljob_api.generate [--check] [--root FOLDER]`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml

from rljob_api.crd import custom_resource_definition
from rljob_api.reference import reference

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


def main(argv: list[str] | None = None) -> int:
    """Write the files, or with `--check` tell which differ; the exit status is 1 when one does."""
    parser = argparse.ArgumentParser(prog="python -m rljob_api.generate", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a file differs")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[2], help="the repository")
    options = parser.parse_args(argv)
    stale = []
    for name, content in generated_files().items():
        path = options.root / name
        if path.exists() and path.read_text(encoding="utf-8") == content:
            continue
        stale.append(name)
        if not options.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8")
    for name in stale:
        print(f"{name}: {'differs from the types; run python -m rljob_api.generate' if options.check else 'written'}")
    return 1 if stale and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
