"""Process 1 of a machine of the tests: `python first_process.py ADDRESS FOLDER`, inside new namespaces.

It lays out what programs of a node expect, says "ready", and then takes in the orphans of container runtimes. What
they write to the usual places (/run, /var/log, /var/lib, /usr/local, /etc) never reaches the real ones.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

OVERLAID = {"lib": "/var/lib", "local": "/usr/local", "etc": "/etc"}
LAYOUT = """
mkdir -p /var/lib/kubelet {folder}/kubelet
mount --bind {folder}/kubelet /var/lib/kubelet
cp --remove-destination {folder}/resolv.conf /etc/resolv.conf
mount --make-rshared /
mkdir /run/lock /run/netns
ip link set lo up
ip link add node0 type bridge
ip addr add {address}/24 dev node0
ip link set node0 up
ip route replace default dev node0
"""


def steps(address: str, folder: str) -> list[str]:
    """The commands that lay out the machine."""
    first = ["mount --make-rprivate /", "mount -t proc proc /proc"]
    empty = [f"mount -t tmpfs tmpfs {path}" for path in ("/run", "/var/log")]
    written = {path: (f"{folder}/over/{name}", f"{folder}/over/{name}-work") for name, path in OVERLAID.items()}
    folders = [f"mkdir -p {upper} {work}" for upper, work in written.values()]
    overlays = [
        f"mount -t overlay overlay -o lowerdir={path},upperdir={upper},workdir={work} {path}"
        for path, (upper, work) in written.items()
    ]
    return [*first, *empty, *folders, *overlays, *LAYOUT.format(address=address, folder=folder).strip().splitlines()]


def main() -> None:
    """Lay out the machine and wait for ever."""
    address, folder = sys.argv[1:]
    Path(folder, "resolv.conf").write_text(f"nameserver {address}\n")
    for line in steps(address, folder):
        done = subprocess.run(line.split(), capture_output=True, text=True, timeout=60)
        if done.returncode:
            sys.exit(f"`{line}`: {done.stderr.strip()}")
    print("ready", flush=True)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            signal.sigwait({signal.SIGCHLD})


if __name__ == "__main__":
    main()
