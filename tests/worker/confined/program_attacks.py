"""Attacks of a policy's program on what runs it, as a program of the sandbox: `attacks(victim, folder)` tries them."""

import ctypes
import fcntl
import os
import resource
import signal
import socket
import sys
import tempfile
import threading

libc = ctypes.CDLL(None, use_errno=True)


def call(name, *arguments):
    if getattr(libc, name)(*arguments) == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def read(path):
    with open(path, "rb") as file:
        return file.read(10)


def write(path):
    with open(path, "w") as file:
        file.write("x")


def child():
    if os.fork() == 0:
        os._exit(0)


def thread():
    one = threading.Thread(target=lambda: None)
    one.start()
    one.join()


def own_files():
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"x" * 1000)
        os.listdir(".")


def many_files():
    opened = []
    try:
        for _ in range(100):
            opened.append(os.open("/dev/null", os.O_RDONLY))
    finally:
        for one in opened:
            os.close(one)


def raised_limit():
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (hard + 1, hard + 1))


def attacks(victim, folder):
    parent = os.getppid()
    refused = {
        "fork": child,
        "another program": lambda: os.execv("/bin/true", ["true"]),
        "spawn": lambda: os.posix_spawn("/bin/true", ["true"], {}),
        "TCP": lambda: socket.socket(),
        "UDP": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
        "Unix socket": lambda: socket.socket(socket.AF_UNIX),
        "netlink": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW),
        "signal": lambda: os.kill(victim, 0),
        "signal to its parent": lambda: os.kill(parent, signal.SIGCONT),
        "signal to a group": lambda: os.killpg(os.getpgid(parent), signal.SIGCONT),
        "signal to all": lambda: os.kill(-1, 0),
        "handle of a process": lambda: os.pidfd_open(parent),
        "owner of a descriptor": lambda: fcntl.fcntl(1, 8, parent),
        "ptrace": lambda: call("ptrace", 0x4206, parent, 0, 0),
        "another's memory": lambda: read(f"/proc/{parent}/mem"),
        "another's variables": lambda: read(f"/proc/{victim}/environ"),
        "/proc": lambda: os.listdir("/proc"),
        "its own /proc": lambda: read("/proc/self/maps"),
        "file": lambda: read(f"{folder}/secret"),
        "file of the working directory": lambda: read(f"{folder}/code/data"),
        "what a reward may read": lambda: read(f"{folder}/read/data"),
        "what a reward may write": lambda: write(f"{folder}/write/made"),
        "folders of others": lambda: os.listdir(".."),
        "write beside": lambda: write("../made"),
        "/tmp": lambda: write(f"/tmp/attack-{os.getpid()}"),
        "/dev/shm": lambda: write(f"/dev/shm/attack-{os.getpid()}"),
        "/etc/passwd": lambda: read("/etc/passwd"),
        "write into Python": lambda: write(f"{os.path.dirname(os.__file__)}/made.py"),
        "nameless memory": lambda: os.memfd_create("x"),
        "namespace": lambda: call("unshare", 0x10000000),
        "another's limits": lambda: resource.prlimit(parent, resource.RLIMIT_CORE),
        "another's cores": lambda: os.sched_setaffinity(parent, {0}),
        "System V memory": lambda: call("shmget", 0, 4096, 0o1600),
        "its own limit": raised_limit,
        "much memory": lambda: bytearray(2**30),
        "much shared memory": lambda: __import__("mmap").mmap(-1, 2**30),
        "many files": many_files,
        "device": lambda: os.mknod("device", 0o20600, os.makedev(1, 1)),
    }
    allowed = {
        "thread": thread,
        "own files": own_files,
        "socket pair": socket.socketpair,
        "random": lambda: os.urandom(8),
        "module": lambda: __import__("sqlite3"),
        "own signal": lambda: os.kill(os.getpid(), 0),
        "abort's signal": lambda: signal.raise_signal(signal.SIGCONT),
        "recursion": lambda: sys.setrecursionlimit(10**5),
    }
    return [{name: outcome(do) for name, do in group.items()} for group in (refused, allowed)]


def outcome(do):
    try:
        do()
    except (OSError, MemoryError, ValueError, OverflowError) as error:
        return f"{type(error).__name__}: {error}"
    return ""
