"""`kubectl rljob`: look at RLJobs and steer them."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence

from rljob_api.safe_text import visible
from rljob_operator.plugin import commands
from rljob_operator.plugin.cluster import open_cluster
from rljob_operator.plugin.problems import CommandError
from rljob_operator.plugin.rendering import PARTS
from rljob_operator.shell.api.access import AccessProblem, find_access

_DESCRIPTION = """Look at RLJobs and steer them."""
_EPILOG = """examples:
  kubectl rljob list -A
  kubectl rljob status qwen3-4b-grpo
  kubectl rljob why qwen3-4b-grpo
  kubectl rljob doctor qwen3-4b-grpo
  kubectl rljob logs -f --tail 20 qwen3-4b-grpo
  kubectl rljob render job.yaml --only trainer
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit status is 0, 1 when it failed, 2 for a wrong command line, 130 after Ctrl-C."""
    options = parser().parse_args(argv)
    try:
        if options.command == "render" and commands.is_file(options.what):
            commands.render_file(options, options.namespace or "default")
        else:
            asyncio.run(_run(options))
        sys.stdout.flush()
    except CommandError as error:
        sys.stdout.flush()
        print(f"kubectl rljob: {visible(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader (head, a pager) has left; the interpreter must not meet the broken pipe again when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


async def _run(options: argparse.Namespace) -> None:
    try:
        where = await find_access(options.kubeconfig, options.context, options.namespace)
    except AccessProblem as error:
        raise CommandError(str(error)) from None
    async with open_cluster(where) as cluster:
        await commands.COMMANDS[options.command](cluster, options)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="kubectl rljob",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    subparsers = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    common = _common()

    def add(name: str, text: str, details: str = "", job: bool = True) -> argparse.ArgumentParser:
        command = subparsers.add_parser(
            name,
            help=text[0].lower() + text[1:].rstrip("."),
            description=f"{text} {details}".strip(),
            parents=[common],
        )
        if job:
            command.add_argument("job", metavar="JOB", help="name of the RLJob")
        return command

    status = add(
        "status",
        "Show progress, the phases of the last steps as bars, conditions, attempts and where the time went.",
        "The step records come from the running driver; without one, the last step that the status keeps is shown.",
    )
    status.add_argument("--steps", type=_positive, default=8, metavar="N", help="steps to draw (default: 8)")
    _output(status)
    _output(
        add(
            "why",
            "Say in one sentence why a job does not run, and what would help.",
            "Looks at the RLJob, its RayCluster, pods, Workload or PodGroup, events and nodes as they are now.",
        )
    )
    logs = add(
        "logs",
        "Show the driver's log.",
        "After the cluster is gone: the last lines that the status keeps. Lines of trainers and engines are in the run "
        "folder (logs/).",
    )
    logs.add_argument("-f", "--follow", action="store_true", help="go on until the driver ends")
    logs.add_argument("--attempt", type=_natural, metavar="N", help="attempt to show (default: the newest)")
    logs.add_argument("--tail", type=_tail, default=-1, metavar="N", help="only the last N lines (default: all)")
    examined = add(
        "doctor",
        "Show what `rljob doctor` found in the job's worker pods.",
        "Where the pods were not examined at their start (spec.pods.doctor, profile cpu), or with --now, it looks at "
        "all nodes through the job's Ray cluster. Exit status 1 when there are problems.",
    )
    examined.add_argument("--now", action="store_true", help="look again, through the running cluster")
    _output(examined)
    add("suspend", "Save the last completed step, then give the devices back.")
    add("resume", "Let a suspended job go on from its last checkpoint.")
    add("checkpoint", "Ask a running job for a checkpoint after the running step.")
    traced = add(
        "trace",
        "Write a job's trace for Perfetto: queueing, pods, image pulls, restarts, and what its driver recorded.",
        "Pods and events are those that the cluster still has; the phases come from the running driver.",
    )
    traced.add_argument("-o", "--output", metavar="FILE", help="default: JOB.trace.json.gz; packed if it ends with .gz")
    profiled = add(
        "profile",
        "Have a running job profile some steps.",
        "The files are written to the run folder (profiles/); one request at a time.",
    )
    profiled.add_argument("--steps", metavar="FIRST[-LAST]", required=True, help="steps that are still to come")
    profiled.add_argument("--ranks", metavar="N,...", default="0", help="trainers by rank; '': none (default: 0)")
    profiled.add_argument("--engines", metavar="N,...", default="0", help="engines by number; '': none (default: 0)")
    profiled.add_argument("--stacks", action="store_true", help="with the Python lines that called each operator")
    listed = add("list", "List jobs with their progress.", job=False)
    listed.add_argument("-A", "--all-namespaces", action="store_true", help="in all namespaces")
    _output(listed)
    _add_render(
        add(
            "render",
            "Print the objects that a job becomes, and the environment of its processes.",
            "The RayCluster, the head's NetworkPolicy, the Secret (without its token), the submission, the manifest "
            "that the driver gets, and the runtime_env of trainers and engines. With a file no cluster is asked.",
            job=False,
        )
    )
    return top


def _common() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    group = common.add_argument_group("cluster")
    group.add_argument("-n", "--namespace", help="namespace (default: the context's)")
    group.add_argument("--context", help="context of the kubeconfig")
    group.add_argument("--kubeconfig", metavar="FILE", help="kubeconfig (default: KUBECONFIG, ~/.kube/config)")
    return common


def _output(command: argparse.ArgumentParser) -> None:
    command.add_argument("-o", "--output", choices=("json", "yaml"), help="print a document instead")


def _add_render(command: argparse.ArgumentParser) -> None:
    command.add_argument("what", metavar="FILE|JOB", help="manifest (- for standard input) or name of an RLJob")
    command.add_argument("--only", action="append", choices=PARTS, help="only this part; may be given more than once")
    command.add_argument(
        "--attempt", type=_natural, metavar="N", help="attempt of the submission (default: the present)"
    )
    group = command.add_argument_group("the operator's settings, where they differ from the defaults")
    group.add_argument("--worker-image", default="", metavar="IMAGE", help="image for jobs that name none")
    group.add_argument(
        "--kuberay-version", type=_version, default=(1, 5, 1), metavar="X.Y.Z", help="of the cluster (default: 1.5.1)"
    )
    group.add_argument("--operator-namespace", default="", metavar="NAME", help="for the head's NetworkPolicy")
    _output(command)


def _natural(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0")
    return int(text)


def _tail(text: str) -> int:
    return -1 if text == "-1" else _positive(text, 10**9)


def _positive(text: str, most: int = 1000) -> int:
    value = _natural(text)
    if not 1 <= value <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is not between 1 and {most}")
    return value


def _version(text: str) -> tuple[int, ...]:
    parts = text.removeprefix("v").split(".")
    if not 2 <= len(parts) <= 3 or not all(part.isascii() and part.isdigit() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no version like 1.5.1")
    return tuple(int(part) for part in parts)


if __name__ == "__main__":
    sys.exit(main())
