"""A kind of import contract that import-linter lacks: everything that a package may depend on, not what it may not."""

from __future__ import annotations

import sys

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output


class DependsOnAtMost(Contract):
    """`package` imports, itself and in all its modules, the standard library and the packages of `allowed` alone."""

    package = fields.StringField()
    allowed = fields.ListField(subfield=fields.StringField(), required=False, default=[])

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        package = str(self.package)
        own = {package, *graph.find_descendants(package)}
        may = own | set(self.allowed) | sys.stdlib_module_names  # type: ignore[call-overload]
        wrong = sorted(
            f"{module} imports {imported}"
            for module in own
            for imported in graph.find_modules_directly_imported_by(module)
            if imported not in may and imported.partition(".")[0] not in may
        )
        return ContractCheck(kept=not wrong, metadata={"wrong": wrong})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for line in check.metadata["wrong"]:
            output.print_error(line)
