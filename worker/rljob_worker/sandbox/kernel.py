"""Parts of a sandbox that this kernel can give."""

from __future__ import annotations

import os

from rljob_api.spec import SandboxSpec
from rljob_api.spec.sandbox import Isolation
from rljob_worker.confined import landlock
from rljob_worker.confined.kernel import Kernel
from rljob_worker.errors import UserError
from rljob_worker.sandbox import namespaces


def lacks(kernel: Kernel) -> list[str]:
    """Abilities that a program has although the sandbox is to prevent them, one sentence each."""
    found = []
    if kernel.landlock < landlock.FILES_SINCE:
        found.append(
            f"Linux {os.uname().release} has no Landlock (Linux 5.13, switched on): a program could read and write "
            "files of the same user, the tests in other processes' memory among them"
        )
    if not kernel.filters:
        found.append("there are no seccomp filters: a program could start others, open sockets and signal processes")
    return found


def refuse(kernel: Kernel, sandbox: SandboxSpec) -> None:
    """Refuse a sandbox that this kernel cannot give.

    Raises:
        UserError: it lacks filters of system calls, namespaces that `isolation` asks for, or Landlock where
            `requireFiles` does.
    """
    if not kernel.filters:
        raise UserError(f"reward.name: code: {lacks(kernel)[-1]}; run the job where the kernel has them")
    if sandbox.isolation == Isolation.NAMESPACE:
        if problem := namespaces.problem():
            raise UserError(f"reward.name: code: {no_namespaces(problem)}")
        return
    if sandbox.require_files and (found := lacks(kernel)):
        raise UserError(
            f"reward.name: code: {found[0]}; run the job on a newer kernel, or set spec.sandbox.requireFiles: false "
            "where nothing of the driver's user is secret"
        )


def no_namespaces(problem: str) -> str:
    """Message for a machine that does not give namespaces, with the ways out."""
    return (
        f"spec.sandbox.isolation: Namespace: this machine gives no namespaces ({problem}): it takes the package "
        "bubblewrap, and user namespaces, which the runtime's default filter of system calls keeps from pods, and "
        "user.max_user_namespaces: 0 or AppArmor from users; isolation: Process needs neither"
    )
