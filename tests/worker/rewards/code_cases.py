# ruff: noqa: E501
"""Programs for the tests of the reward `code`: cheats, which know no answer, and right ones."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

SECRET = 1234
ANSWER = SECRET * SECRET
"""Output that programs are to give for `SECRET`; it stands nowhere but in the tests."""
TESTS: dict[str, Any] = {
    "Stdin": [{"input": f"{SECRET}\n", "output": f"{ANSWER}\n"}],
    "Calls": {"fn_name": "square", "inputs": [[SECRET]], "outputs": [ANSWER]},
    "Pytest": f"from solution import square\n\ndef test_square():\n    assert square({SECRET}) == {ANSWER}\n",
}
RIGHT = "def square(n):\n    return n * n\n"
MAIN = "if __name__ == '__main__':\n    print(square(int(input())))\n"
_WRONG = "def square(n):\n    return 'passed'\n"
_FOUND = "def square(n):\n    return found(n)\n"

CHEATS: dict[str, str] = {
    "sys.exit": "import sys\nsys.exit(0)\n",
    "os._exit": "import os\nos._exit(0)\n",
    "exit in a call": "import os\ndef square(n):\n    os._exit(0)\n",
    "prints the verdict": _WRONG + "print('1 passed')\nprint('{\"tests\": [1, 1, 0], \"raised\": null}')\n",
    "equal to all": """
class Always:
    __hash__ = None
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __str__(self): return 'passed'
def square(n): return Always()
""",
    "number equal to all": """
class Always(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
    def __index__(self): return 7
def square(n): return Always(7)
""",
    "patched builtins": _WRONG
    + """
import builtins, functools, json, operator
for module in (builtins, operator, json, functools):
    for name in ('all', 'any', 'isinstance', 'eq', 'dumps', 'loads', 'len', 'sum', 'reduce'):
        if hasattr(module, name): setattr(module, name, lambda *a, **k: True)
json.JSONEncoder.encode = lambda *a: '{"value": true}'
""",
    "patched pytest": _WRONG
    + """
import sys
for name, module in list(sys.modules.items()):
    if 'pytest' in name or name in ('unittest', 'unittest.case'):
        for own in list(vars(module)):
            if not own.startswith('__'): setattr(module, own, lambda *a, **k: True)
""",
    "edits what runs it": _WRONG
    + """
import os, sys
for name, module in list(sys.modules.items()):
    if name.startswith('rljob_worker'):
        for own in list(vars(module)):
            if callable(vars(module)[own]): setattr(module, own, lambda *a, **k: {'value': True})
        try:
            with open(module.__file__, 'a') as file: file.write('raise SystemExit\\n')
        except OSError: pass
""",
    "reads the tests": f"""
import os
def found(n):
    for folder in ('.', '..', '/tmp', '/dev/shm', '/work', '/shared', '/root', os.path.dirname(os.getcwd())):
        for at, _, names in os.walk(folder):
            for name in names[:200]:
                try: text = open(os.path.join(at, name), errors='replace').read(100000)
                except OSError: continue
                if 'assert square' in text: return int(text.rpartition('== ')[2].split()[0])
    return 0
{_FOUND}""",
    "reads other processes": f"""
import os, re
def found(n):
    for pid in list(map(str, range(1, 200))) + [str(os.getppid()), 'self']:
        for name in ('mem', 'environ', 'maps', 'fd/0'):
            try: text = open('/proc/%s/%s' % (pid, name), 'rb').read(1 << 20)
            except OSError: continue
            for number in re.findall(rb'[0-9]{{7}}', text):
                if int(number) == n * n: return int(number)
    return 0
{_FOUND}""",
    "looks into its own memory": f"""
import gc, sys
def held(value, depth=0):
    if isinstance(value, bool): return None
    if isinstance(value, int): return value if value > 1000000 and value % 1000 == {ANSWER % 1000} else None
    if isinstance(value, str): return next((int(w) for w in value.split() if w.isdigit() and len(w) == 7), None)
    if depth < 3 and isinstance(value, (list, tuple, set)):
        return next(filter(None, (held(v, depth + 1) for v in value)), None)
    if depth < 3 and isinstance(value, dict): return held(list(value.values()), depth)
def found(n):
    frame = sys._getframe()
    while frame:
        if answer := held(dict(frame.f_locals)): return answer
        frame = frame.f_back
    return next(filter(None, map(held, gc.get_objects())), 0)
{_FOUND}""",
    "forges its channel": _WRONG
    + """
import os
for descriptor in range(3, 64):
    for text in ('{"tests": [1, 1, 0], "raised": null}', '{"value": true}', '{"number": 1, "status": 0}'):
        try: os.write(descriptor, text.encode() + b'\\n')
        except OSError: pass
""",
    "kills its parents": _WRONG
    + """
import os, signal
for pid in (os.getppid(), -os.getppid(), 0):
    for call in (os.kill, os.killpg, lambda p, s: signal.pidfd_send_signal(os.pidfd_open(p), s)):
        try: call(pid, signal.SIGKILL)
        except OSError: pass
""",
    "owner of a descriptor": _WRONG
    + """
import fcntl, os, signal
for command, value in ((8, os.getppid()), (10, signal.SIGKILL)):
    try: fcntl.fcntl(1, command, value)
    except OSError: pass
""",
    "fork bomb": _WRONG + "import os\nwhile True:\n    os.fork()\n",
    "thread bomb": _WRONG
    + "import threading, time\nwhile True:\n    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n",
    "endless output": _WRONG + "while True:\n    print('passed' * 1000)\n",
    "endless answer": "def square(n):\n    return 'x' * 10 ** 8\n",
    "thread that outlives": "import threading, time\nprint('passed')\n"
    "threading.Thread(target=lambda: (time.sleep(3600), print('passed'))).start()\n" + _WRONG,
    "atexit": _WRONG + "import atexit, os\natexit.register(lambda: (print('passed'), os._exit(0)))\n",
    "its own print": _WRONG
    + "import builtins\nbuiltins.print = lambda *a, **k: __import__('os').write(1, b'passed')\n",
    "past the deadline": "import time\ndef square(n):\n    time.sleep(30)\n    return n * n\n",
    "endless loop": "while True:\n    pass\n",
    "too much memory": "def square(n):\n    held = bytearray(3 << 30)\n    return n * n\n",
    "memory by pieces": "def square(n):\n    held = [bytes(1 << 20) for _ in range(3000)]\n    return n * n\n",
    "shared memory": "import mmap\ndef square(n):\n    m = mmap.mmap(-1, 3 << 30)\n    return n * n\n",
    "large file": "def square(n):\n    with open('x', 'wb') as f:\n        f.write(b'x' * (100 << 20))\n    return n * n\n",
    "many files": "import time\ndef square(n):\n    for i in range(20000): open(f'{i}', 'w').close()\n"
    "    time.sleep(1)\n    return n * n\n",
    "another program": "import subprocess\ndef square(n):\n    return int(subprocess.check_output(['expr', str(n), '*', str(n)]))\n",
    "network": "import socket\ndef square(n):\n    socket.socket().bind(('127.0.0.1', 0))\n    return n * n\n",
    "pickle bomb": "import os\nclass Bomb:\n    def __reduce__(self): return os.system, ('true',)\ndef square(n): return Bomb()\n",
    "nested answer": "def square(n):\n    nested = []\n    for _ in range(10 ** 5): nested = [nested]\n    return nested\n",
    "exception that lies": """
class Lie(Exception):
    def __str__(self): return '{"value": true}'
def square(n): raise Lie()
""",
    "no number": "def square(n):\n    return float('nan')\n",
    "almost": "def square(n):\n    return str(n * n)\n",
}
PRINTS_RIGHT = {"almost"}
"""Cheats that cannot be detected in a program which prints: a text and a number are printed alike."""
STDIN_ALONE: dict[str, str] = {
    "right, and fails": RIGHT + MAIN + "raise SystemExit(3)\n",
    "right, and hangs": RIGHT + MAIN + "import time\ntime.sleep(60)\n",
    "right, and more": RIGHT + MAIN + "print('passed')\n",
}


def fenced(program: str) -> str:
    """A response with a program in it."""
    return f"<think>\n```python\nraise SystemExit\n```\n</think>\nThis solves it:\n\n```python\n{program}\n```\nDone.\n"


def right_calls(number: int, random_: random.Random) -> tuple[str, Any]:
    """A program and the tests of one of its functions."""
    kinds: list[tuple[str, Callable[..., Any], Callable[[], list[Any]]]] = [
        ("def f(a, b):\n    return a * b + {k}", lambda a, b, k: a * b + k, lambda: [random_.randint(-99, 99) for _ in "ab"]),
        ("def f(s):\n    return s[::-1] * {k}", lambda s, k: s[::-1] * k, lambda: ["".join(random_.choices("añ b\n", k=9))]),
        ("def f(v):\n    return sorted(v)[:{k}]", lambda v, k: sorted(v)[:k], lambda: [random_.sample(range(99), 9)]),
        ("def f(v):\n    return {{x: v.count(x) + {k} for x in v}}", lambda v, k: {x: v.count(x) + k for x in v},
         lambda: [random_.choices("abc", k=9)]),
        ("import math\ndef f(x):\n    return math.sqrt(x) / {k}", lambda x, k: math.sqrt(x) / k, lambda: [random_.random()]),
        ("from functools import lru_cache\n@lru_cache(None)\ndef g(n):\n    return n if n < 2 else g(n - 1) + g(n - 2)\n"
         "def f(n):\n    return g(n) ** {k}", lambda n, k: _fibonacci(n) ** k, lambda: [random_.randint(200, 300)]),
        ("class Solution:\n    def f(self, v):\n        return [x for x in v if x % ({k} + 1)] or None",
         lambda v, k: [x for x in v if x % (k + 1)] or None, lambda: [random_.sample(range(99), 5)]),
        ("def f(a, b):\n    return a > b + {k}, (a, b)", lambda a, b, k: [a > b + k, [a, b]],
         lambda: [random_.randint(0, 9), random_.randint(0, 9)]),
        ("import numpy as np\ndef f(v):\n    return int(np.array(v).sum()) + {k}", lambda v, k: sum(v) + k,
         lambda: [random_.choices(range(9), k=9)]),
        ("def f(n):\n    print('noise')\n    return 10 ** (5000 + {k}) + n", lambda n, k: 10 ** (5000 + k) + n, lambda: [3]),
    ]  # fmt: skip
    text, right, draw = kinds[number % len(kinds)]
    k = random_.randint(1, 9)
    inputs = [draw() for _ in range(3)]
    return text.format(k=k), {"fn_name": "f", "inputs": inputs, "outputs": [right(*args, k) for args in inputs]}


def right_stdin(number: int, random_: random.Random) -> tuple[str, Any]:
    """A program that reads and prints, and its tests."""
    k = random_.randint(1, 9)
    lines = [[random_.randint(-99, 99) for _ in range(4)] for _ in range(2)]
    programs: list[tuple[str, Callable[[list[int]], str]]] = [
        (f"print(sum(map(int, input().split())) * {k})", lambda v: f"{sum(v) * k}\n"),
        (f"import sys\nfor x in sys.stdin.read().split():\n    print(int(x) + {k}, end=' ')\nprint()",
         lambda v: " ".join(str(x + k) for x in v)),
        (f"import sys\nsys.setrecursionlimit(10 ** 6)\ndef g(n):\n    return {k} if n == 0 else g(n - 1)\n"
         "input()\nprint(g(5000))", lambda v: str(k)),
        (f"import atexit, io, sys\nout = io.StringIO()\natexit.register(lambda: sys.__stdout__ and print(out.getvalue()))\n"
         f"out.write(input()[::-1] + '{k}')", lambda v: " ".join(map(str, v))[::-1] + str(k)),
        (f"import sys, threading\nthreading.stack_size(2 ** 26)\ndef main():\n    print(max(map(int, input().split())) + {k})\n"
         "threading.Thread(target=main).start()", lambda v: str(max(v) + k)),
        (f"def main():\n    open('own', 'w').write(input())\n    print(len(open('own').read()) + {k})\n"
         "if __name__ == '__main__':\n    main()\n    raise SystemExit", lambda v: str(len(" ".join(map(str, v))) + k)),
    ]  # fmt: skip
    text, right = programs[number % len(programs)]
    return text, [{"input": " ".join(map(str, line)), "output": right(line)} for line in lines]


def right_pytest(number: int, random_: random.Random) -> tuple[str, Any]:
    """A program and tests for pytest."""
    k = random_.randint(1, 9)
    program = f"""
LIMIT = {k}
class TooLarge(ValueError): pass
class Stack:
    def __init__(self): self.items = []
    def push(self, x):
        if len(self.items) == LIMIT: raise TooLarge('full')
        self.items.append(x)
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
def pairs(n): return {{(i, i * LIMIT) for i in range(n)}}
def ratio(a, b): return a / b
def numbers(n):
    for i in range(n): yield i
"""
    tests = f"""
import pytest
import solution
from solution import LIMIT, Stack, TooLarge, pairs, ratio
def test_values():
    assert LIMIT == {k}
    assert pairs(2) == {{(0, 0), (1, {k})}}
    assert ratio(1, 3) == pytest.approx(1 / 3)
    assert solution.numbers(3) == [0, 1, 2]
@pytest.mark.parametrize('a', [1, 2, {number}])
def test_errors(a):
    with pytest.raises(ZeroDivisionError):
        ratio(a, 0)
class TestStack:
    @pytest.fixture
    def stack(self): return Stack()
    def test_stack(self, stack):
        assert not stack
        for i in range({k}): stack.push(i)
        assert stack and len(stack) == {k} and stack.items[-1] == {k} - 1
        with pytest.raises(TooLarge, match='full'): stack.push(0)
        assert stack.pop() == {k} - 1
"""
    return program, tests


def _fibonacci(n: int) -> int:
    one, other = 0, 1
    for _ in range(n):
        one, other = other, one + other
    return one
