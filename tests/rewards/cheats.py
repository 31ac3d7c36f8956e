"""Programs that try to pass tests without being right, grouped by the trick they use.

Every one defines `add(a, b)` (or prevents the tests from running) and never adds. They are strings,
because they run only in the box.
"""

# ruff: noqa: E501 (programs as text)

from __future__ import annotations


def _returns(body: str, base: str = "", value: str = "Any()") -> str:
    return f"class Any{base}:\n    {body}\ndef add(*_): return {value}"


EQUAL = "__eq__ = lambda self, other: True\n    __hash__ = lambda self: 0"

EQUALITY = {
    "an object equal to everything": _returns(EQUAL),
    "unequal to nothing": _returns(EQUAL + "\n    __ne__ = lambda self, other: False"),
    "unittest.mock.ANY": "from unittest.mock import ANY\ndef add(*_): return ANY",
    "MagicMock": "from unittest.mock import MagicMock\nadd = MagicMock(return_value=MagicMock())",
    "MagicMock with operators": (
        "from unittest.mock import MagicMock\nm = MagicMock()\nm.__eq__.return_value = True\n"
        "m.__sub__.return_value = 0\nm.__abs__.return_value = 0\nm.__lt__.return_value = True\n"
        "def add(*_): return m"
    ),
    "an int subclass": _returns(EQUAL, "(int)"),
    "a float subclass": _returns(EQUAL, "(float)", "Any('nan')"),
    "a list subclass": _returns(EQUAL, "(list)"),
    "a str subclass": _returns(EQUAL, "(str)"),
    "a tuple subclass": _returns(EQUAL, "(tuple)"),
    "a dict subclass": _returns(EQUAL, "(dict)"),
    "a comparable to everything": _returns(
        EQUAL + "\n    __lt__ = __le__ = __gt__ = __ge__ = __eq__"
    ),
    "arithmetic that ends at zero": _returns(
        EQUAL + "\n    __sub__ = __rsub__ = __abs__ = lambda *_: 0\n    __lt__ = __eq__"
    ),
    "reflected arithmetic": _returns(
        "__radd__ = __rsub__ = __sub__ = __add__ = lambda self, other: other"
    ),
    "nan": "def add(*_): return float('nan')",
    "infinity": "def add(*_): return float('inf')",
    "NotImplemented": "def add(*_): return NotImplemented",
    "equality that copies the expected value": _returns(
        "def __eq__(self, other):\n        self.v = other\n        return self.v == other"
    ),
    "an object that is always true": _returns(
        "__bool__ = lambda self: True\n    __len__ = lambda self: 1"
    ),
    "contained in everything": _returns(
        EQUAL + "\n    __contains__ = lambda *_: True\n    __iter__ = lambda self: iter([self])"
    ),
}

_O = "[sys.executable, '-O', 'main.py']"
FLAGS = {
    "exec with -O": f"import os, sys\nif __debug__: os.execv(sys.executable, {_O})",
    "exec with -OO": f"import os, sys\nif __debug__: os.execv(sys.executable, {_O.replace('-O', '-OO')})",
    "exec by PYTHONOPTIMIZE": (
        "import os, sys\nos.environ['PYTHONOPTIMIZE'] = '2'\n"
        "if __debug__: os.execv(sys.executable, [sys.executable, 'main.py'])"
    ),
    "a subprocess with -O": f"import subprocess, sys\nif __debug__: subprocess.run({_O}); sys.exit(0)",
    "compile without asserts": (
        "import os\nsource = open('/box/main.py').read()\n"
        "exec(compile(source, 'main.py', 'exec', optimize=2))\nos._exit(0)"
    ),
    "an AST without asserts": (
        "import ast, os\ntree = ast.parse(open('/box/main.py').read())\n"
        "class Drop(ast.NodeTransformer):\n    visit_Assert = lambda self, node: ast.Pass()\n"
        "exec(compile(Drop().visit(tree), 'main.py', 'exec'))\nos._exit(0)"
    ),
    "builtins.__debug__": "import builtins\nbuiltins.__dict__['__debug__'] = False\ndef add(*_): return 0",
    "sys.flags": (
        "import sys\nclass Flags:\n    optimize = 2\nsys.flags = Flags()\ndef add(*_): return 0"
    ),
    "posix_spawn with -O": (
        "import os, sys\nif __debug__:\n"
        f"    os.waitpid(os.posix_spawn(sys.executable, {_O}, {{}}), 0)\n    os._exit(0)"
    ),
    "runpy": "import runpy, sys\nif not hasattr(sys, 'again'):\n    sys.again = 1\n    runpy.run_path('/box/main.py')",
    "a fork that runs -O": f"import os, sys\nif os.fork() == 0: os.execv(sys.executable, {_O})\nos.wait()\ndef add(*_): return 0",
    "sitecustomize": (
        "import os, sys\nopen('/box/sitecustomize.py', 'w').write('import os; os._exit(0)')\n"
        "os.environ['PYTHONPATH'] = '/box'\nos.execve(sys.executable, [sys.executable, '/box/main.py'], os.environ)"
    ),
}

EXEC_AND_FORK = {
    "exec of true": "import os\nos.execv('/bin/true', ['true'])",
    "exec of echo": "import os\nos.execv('/bin/echo', ['echo', 'passed'])",
    "exec inside the call": "import os\ndef add(*_): os.execv('/bin/true', ['true'])",
    "fork and let the parent go": "import os\nif os.fork(): os._exit(0)\ndef add(*_): return 0",
    "fork inside the call": "import os\ndef add(*_):\n    if os.fork(): os._exit(0)\n    return 0",
    "fork and both answer": "import os\ndef add(*_):\n    os.fork()\n    return 0",
    "a child that kills its parent": (
        "import os, signal\nif os.fork() == 0:\n    os.kill(os.getppid(), signal.SIGKILL)\n    os._exit(0)\n"
        "def add(*_): return 0"
    ),
    "a daemon that outlives": "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(60)\ndef add(*_): return 0",
    "exec with the channel kept": (
        "import os\nfor fd in range(3, 64):\n    try: os.set_inheritable(fd, True)\n    except OSError: pass\n"
        "os.execv('/bin/cat', ['cat'])"
    ),
    "a shell that writes to all": (
        "import os\nfor fd in range(3, 64):\n    try: os.set_inheritable(fd, True)\n    except OSError: pass\n"
        "os.system('for i in 1 2 3 4 5 6 7 8 9; do echo passed >&$i; done')\ndef add(*_): return 0"
    ),
    "kill everyone": "import os, signal\ndef add(*_):\n    os.kill(-1, signal.SIGKILL)",
    "kill the first process": "import os, signal\nos.kill(1, signal.SIGKILL)\ndef add(*_): return 0",
    "vfork storm": "import os\nfor _ in range(20):\n    if os.fork() == 0: os._exit(0)\ndef add(*_): return 0",
}

_LOOK = "import re\nnumbers = re.findall(r'== *(-?[0-9.]+)', text)\n"
_THEN = "def add(*_):\n    return float(numbers.pop(0)) if numbers else 0"
INTROSPECTION = {
    "open(__file__)": "text = open(__file__ if '__file__' in dir() else '/box/main.py').read()\n"
    + _LOOK
    + _THEN,
    "all of /box": (
        "import glob\ntext = ''.join(open(p).read() for p in glob.glob('/box/**', recursive=True) if p[-3:] == '.py')\n"
        + _LOOK
        + _THEN
    ),
    "/proc/self/cmdline": "text = open('/proc/self/cmdline').read()\n" + _LOOK + _THEN,
    "/proc/self/mem by maps": (
        "text = ''\nfor line in open('/proc/self/maps'):\n"
        "    if 'heap' in line:\n        a, b = (int(x, 16) for x in line.split()[0].split('-'))\n"
        "        f = open('/proc/self/mem', 'rb'); f.seek(a); text = f.read(b - a).decode('latin-1')\n"
        + _LOOK
        + _THEN
    ),
    "frames": (
        "import sys\ndef add(*_):\n    frame = sys._getframe()\n    while frame:\n"
        "        for c in frame.f_code.co_consts:\n            if isinstance(c, int) and c > 2: return c\n"
        "        frame = frame.f_back\n    return 0"
    ),
    "frames' locals": (
        "import sys\ndef add(*_):\n    frame = sys._getframe().f_back\n    while frame:\n"
        "        if 'expected' in frame.f_locals: return frame.f_locals['expected']\n"
        "        frame = frame.f_back\n    return 0"
    ),
    "gc": (
        "import gc\ndef add(*_):\n"
        "    for o in gc.get_objects():\n        if isinstance(o, str) and 'assert add' in o: return 3\n    return 0"
    ),
    "linecache": "import linecache\ndef add(*_):\n    text = ''.join(linecache.getlines('tests.py'))\n    return 3 if text else 0",
    "inspect": (
        "import inspect\ndef add(*_):\n    return 3 if 'assert' in ''.join(f.code_context[0] if f.code_context else ''"
        " for f in inspect.stack()) else 0"
    ),
    "excepthook": "import sys, os\nsys.excepthook = lambda *_: os._exit(0)\ndef add(*_): return 0",
    "settrace": (
        "import sys\ndef trace(frame, event, arg):\n    frame.f_trace_opcodes = True\n    return trace\n"
        "sys.settrace(trace)\ndef add(*_): return 0"
    ),
    "other processes in /proc": (
        "import glob\ntext = ''\nfor p in glob.glob('/proc/[0-9]*/cmdline') + glob.glob('/proc/[0-9]*/environ'):\n"
        "    try: text += open(p).read()\n    except OSError: pass\n" + _LOOK + _THEN
    ),
    "descriptors of others": (
        "import glob, os\ntext = ''\nfor p in glob.glob('/proc/[0-9]*/fd/*'):\n"
        "    try:\n        fd = os.open(p, os.O_RDONLY | os.O_NONBLOCK); text += os.read(fd, 9999).decode('latin-1')\n"
        "    except OSError: pass\n" + _LOOK + _THEN
    ),
    "the judge's modules": "import sys\ndef add(*_): return 3 if 'hone.sandbox.judging.judge_server' in sys.modules else 0",
}

LEAVING = {
    "sys.exit at load": "import sys\nsys.exit(0)",
    "os._exit at load": "import os\nos._exit(0)",
    "SystemExit in the call": "def add(*_): raise SystemExit(0)",
    "os._exit in the call": "import os\ndef add(*_): os._exit(0)",
    "KeyboardInterrupt": "def add(*_): raise KeyboardInterrupt",
    "GeneratorExit": "def add(*_): raise GeneratorExit",
    "StopIteration": "def add(*_): raise StopIteration",
    "atexit": "import atexit, os\natexit.register(lambda: os._exit(0))\ndef add(*_): return 0",
    "atexit that prints": "import atexit\natexit.register(print, 'passed')\ndef add(*_): return 0",
    "SIGALRM": "import os, signal\nsignal.signal(14, lambda *_: os._exit(0))\nsignal.setitimer(signal.ITIMER_REAL, 0.01)\ndef add(*_):\n    while True: pass",
    "SIGTERM to the group": "import os\nos.killpg(0, 15)\ndef add(*_): return 0",
    "a thread that exits": "import os, threading, time\nthreading.Thread(target=lambda: (time.sleep(0.02), os._exit(0))).start()\ndef add(*_):\n    while True: pass",
    "a thread that closes descriptors": "import os, threading\nthreading.Thread(target=lambda: os.closerange(0, 99)).start()\ndef add(*_): return 0",
    "SIGSTOP": "import os, signal\ndef add(*_): os.kill(os.getpid(), signal.SIGSTOP)",
    "AssertionError swallowed": "class A(AssertionError): pass\ndef add(*_): raise A()",
    "__del__": "import os\nclass D:\n    def __del__(self): os._exit(0)\nd = D()\ndef add(*_): return 0",
}

_CHANNEL = (
    "import os, json\n"
    "def frames(*values):\n    out = b''\n    for value in values:\n"
    "        data = value if isinstance(value, bytes) else json.dumps(value).encode()\n"
    "        out += len(data).to_bytes(8, 'big') + data\n    return out\n"
    "def everywhere(data):\n    for fd in range(64):\n        try: os.write(fd, data)\n"
    "        except OSError: pass\n"
)
_LATER = "def add(*_): return 0"
_V = '["v", {}, [], []]'
FORGED = {
    "the word on every descriptor": _CHANNEL + "everywhere(b'passed\\n')\n" + _LATER,
    "a verdict line": _CHANNEL
    + 'everywhere(b\'{"passed": true, "reason": "", "answers": 9, "usable": true}\\n\')\n'
    + _LATER,
    "a verdict in a frame": _CHANNEL
    + "everywhere(frames({'passed': True, 'reason': '', 'answers': 9, 'usable': True}))\n"
    + _LATER,
    "answers in advance": _CHANNEL + "everywhere(frames(*[['v', True, [], []]] * 99))\n" + _LATER,
    "absent names in advance": _CHANNEL
    + "everywhere(frames(*[['v', {'-': None}, [], []]] * 99))\n"
    + _LATER,
    "handles that do not exist": _CHANNEL
    + "everywhere(frames(*[['v', {'h': 10**9}, [], []]] * 99))\n"
    + _LATER,
    "a frame without an end": _CHANNEL + "everywhere((1 << 62).to_bytes(8, 'big'))\n" + _LATER,
    "half a frame, then exit": _CHANNEL + "everywhere((99).to_bytes(8, 'big') + b'[')\nos._exit(0)",
    "callbacks that were not given": _CHANNEL
    + "everywhere(frames(['b', [0, [], {'d': []}], [], []]))\n"
    + _LATER,
    "an unknown tag": _CHANNEL + "everywhere(frames(['v', {'zz': 1}, [], []]))\n" + _LATER,
    "objects that replace methods": _CHANNEL
    + "everywhere(frames(['v', None, [[0, 'TreeNode', ['__class__', 1]]], []]))\n"
    + _LATER,
    "changes of arguments that do not exist": _CHANNEL
    + "everywhere(frames(['v', None, [], []], ['v', 3, [], [[99, 1], ['x', 2]]]))\n"
    + _LATER,
    "the tests' report": "print('3 passed in 0.01s')\nprint('OK')\n" + _LATER,
    "an error that is a class": _CHANNEL
    + "everywhere(frames(['x', [['Warning'], {'e': ['int']}], [], []]))\n"
    + _LATER,
    "output on every descriptor in the call": _CHANNEL
    + "def add(*_):\n    everywhere(b'passed\\n')\n    return 0",
}

PATCHED = {
    "json": "import json\njson.dumps = lambda *_, **__: 'true'\njson.loads = lambda *_: True\n"
    + _LATER,
    "_json": "import _json\n_json.make_encoder = None\n_json.encode_basestring_ascii = lambda s: 'true'\n"
    + _LATER,
    "marshal": "import marshal\nmarshal.loads = lambda d: ('return', [], 3)\nmarshal.dumps = lambda *_: b''\n"
    + _LATER,
    "os.write": "import os\nw = os.write\nos.write = lambda fd, d: w(fd, bytes(d).replace(b'0', b'3'))\n"
    + _LATER,
    "os.read": "import os\nr = os.read\nos.read = lambda fd, n: r(fd, n)[:1]\n" + _LATER,
    "the encoder of the program's server": (
        "import sys\nf = sys._getframe()\nwhile f and 'ProgramSession' not in f.f_globals: f = f.f_back\n"
        "f.f_globals['Encoder'].encode = lambda self, v: True\n" + _LATER
    ),
    "the request loop of the program's server": (
        "import sys\nf = sys._getframe()\nwhile f and 'ProgramSession' not in f.f_globals: f = f.f_back\n"
        "f.f_globals['ProgramSession']._execute = lambda self, *_: (True, None)\n" + _LATER
    ),
    "builtins.print and len": "import builtins\nbuiltins.len = lambda *_: 3\nbuiltins.print = lambda *_: None\n"
    + _LATER,
    "builtins.AssertionError": "import builtins\nbuiltins.AssertionError = type('A', (Exception,), {})\n"
    + _LATER,
    "own sorted, set and abs": "def sorted(*_): return [2, 4]\ndef set(*_): return {2}\ndef abs(*_): return 0\n"
    + _LATER,
    "own math": "class math:\n    isclose = staticmethod(lambda *_, **__: True)\n" + _LATER,
    "sys.modules": "import sys, types\nfor n in list(sys.modules): sys.modules[n] = types.ModuleType(n)\n"
    + _LATER,
    "an import hook": (
        "import sys\nclass Hook:\n    def find_spec(self, *_): return None\nsys.meta_path.insert(0, Hook())\n"
        + _LATER
    ),
    "own check": "def check(*_): return True\n" + _LATER,
    "__builtins__": "__builtins__.__dict__.update(isinstance=lambda *_: True)\n" + _LATER,
    "pickle and struct": "import pickle, struct\npickle.loads = struct.unpack = lambda *_: 3\n"
    + _LATER,
}

RESOURCES = {
    "a huge answer": "def add(*_): return 'x' * (1 << 27)",
    "open files without end": "x = []\nwhile True: x.append(open('/dev/null'))",
    "an endless load": "while True: pass",
    "an endless call": "def add(*_):\n    while True: pass",
    "a sleep": "import time\ndef add(*_): time.sleep(999)",
    "a sleep at load": "import time\ntime.sleep(999)",
    "all memory": "x = []\nwhile True: x.append(bytearray(1 << 24))",
    "all memory in the call": "def add(*_): return bytearray(1 << 40)",
    "a fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "threads without end": "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(99,)).start()",
    "a list of a million lists": "def add(*_): return [[] for _ in range(3_000_000)]",
    "endless messages": _CHANNEL
    + "while True: everywhere(frames(['b', [0, [], {'d': []}], [], []]))",
    "endless output": "while True: print('x' * 9999)",
    "an endless generator": "def add(*_):\n    while True: yield 1",
    "a full disk": "f = open('/box/x', 'wb')\nwhile True: f.write(bytes(1 << 20))",
    "a huge range": "def add(*_): return range(1 << 62)",
}

SERIALISATION = {
    "deep nesting": "x = []\nfor _ in range(100_000): x = [x]\ndef add(*_): return x",
    "deep nesting by hand": _CHANNEL + "everywhere(frames(b'[' * 500_000))\n" + _LATER,
    "a cyclic list": "x = []\nx.append(x)\ndef add(*_): return x",
    "a cyclic dict": "x = {}\nx[1] = x\ndef add(*_): return x",
    "a huge integer": "def add(*_): return 1 << (1 << 24)",
    "a long decimal by hand": _CHANNEL
    + "everywhere(frames(b'[\"v\", ' + b'9' * 100_000 + b', [], []]'))\n"
    + _LATER,
    "lone surrogates": "def add(*_): return '\\ud800\\udfff'",
    "NUL": "def add(*_): return '\\0' * 9",
    "__reduce__": "import os\nclass R:\n    def __reduce__(self): return os.system, ('true',)\ndef add(*_): return R()",
    "a hostile key": "class K:\n    __hash__ = lambda s: 0\n    __eq__ = lambda s, o: True\ndef add(*_): return {K(): 1}",
    "unhashable members by hand": _CHANNEL
    + "everywhere(frames(*[['v', {'s': [[1]]}, [], []]] * 9))\n"
    + _LATER,
    "two tags by hand": _CHANNEL
    + "everywhere(frames(*[['v', {'t': [], 's': []}, [], []]] * 9))\n"
    + _LATER,
    "no UTF-8 by hand": _CHANNEL + "everywhere(frames(b'\\xff\\xfe\\x00'))\n" + _LATER,
    "infinite decimals": "from decimal import Decimal\ndef add(*_): return Decimal('sNaN')",
    "a fraction over zero by hand": _CHANNEL
    + "everywhere(frames(*[['v', {'F': [1, 0]}, [], []]] * 9))\n"
    + _LATER,
    "shared laughs": "x = (0,)\nfor _ in range(60): x = (x, x)\ndef add(*_): return x",
    "a hostile encode": "class S(str):\n    encode = lambda *_: b'3'\ndef add(*_): return S('0')",
}

TYPES = {
    "__class__ that lies": _returns("__class__ = property(lambda self: int)"),
    "a metaclass equal to all": (
        "class M(type):\n    __eq__ = lambda s, o: True\n    __hash__ = type.__hash__\n"
        "class A(metaclass=M): pass\ndef add(*_): return A"
    ),
    "a class named int": "class int: pass\ndef add(*_): return int()",
    "a type named like a shared one": "class TreeNode:\n    __eq__ = lambda *_: True\ndef add(*_): return TreeNode()",
    "True": "def add(*_): return True",
    "a string of the number": "def add(*_): return '3'",
    "a bool subclass by __new__": _returns(EQUAL + "\n    __index__ = __int__ = lambda self: 3"),
    "__float__ and __index__": _returns("__float__ = lambda s: 0.75\n    __index__ = lambda s: 3"),
    "an IntEnum": "import enum\nclass E(enum.IntEnum):\n    A = 7\n    __eq__ = lambda *_: True\n    __hash__ = int.__hash__\ndef add(*_): return E.A",
    "a function": "def add(*_): return lambda *_: 3",
    "add that is a class": "class add:\n    def __init__(*_): pass\n    __eq__ = lambda *_: True",
    "add that is a number": "class N(int):\n    __call__ = lambda *_: 0\nadd = N(3)",
    "a coroutine": "async def add(*_): return 3",
    "a Counter equal to much": "from collections import Counter\nclass C(Counter): __eq__ = lambda *_: True\ndef add(*_): return C()",
    "a namedtuple": "from collections import namedtuple\nN = namedtuple('N', 'a')\nN.__eq__ = lambda *_: True\ndef add(*_): return N(0)",
    "a numeric ABC": (
        "import numbers\nclass N: __eq__ = lambda *_: True\nnumbers.Number.register(N)\ndef add(*_): return N()"
    ),
}

SOURCE = {
    "quotes that never close": _LATER + '\n"""',
    "a condition that swallows": _LATER + "\nif 0:",
    "a line that goes on": _LATER + "\nx = 1, \\",
    "a bracket that never closes": _LATER + "\nx = (",
    "an encoding of its own": "# coding: rot13\nqrs nqq(*_): erghea 3",
    "an end of file": _LATER + "\n\x1a",
    "a NUL": _LATER + "\n\0",
    "a class around it": "class A:\n    def add(*_): return 0\nadd = A",
    "a module that answers all names": "def __getattr__(name): return lambda *_: 3\ndef __missing__(name): return 3",
    "names of the judge's": "TestsFailed = Session = TestNamespace = RemoteObject = object\n"
    + _LATER,
    "a future that does not exist": "from __future__ import equality\n" + _LATER,
    "a decorator": "import functools\n@functools.partial\ndef add(*_): return 0",
    "nothing at all": "",
    "an assert in the program": "assert True\n" + _LATER,
}

CHEATS: dict[str, dict[str, str]] = {
    "equality": EQUALITY,
    "interpreter flags": FLAGS,
    "exec and fork": EXEC_AND_FORK,
    "introspection": INTROSPECTION,
    "exit, atexit, signals, threads": LEAVING,
    "forged output": FORGED,
    "patched builtins and imports": PATCHED,
    "timing and resources": RESOURCES,
    "serialisation": SERIALISATION,
    "type tricks": TYPES,
    "source text": SOURCE,
}
