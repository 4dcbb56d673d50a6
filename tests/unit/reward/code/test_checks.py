"""Answers of every form against tests of every form, in real processes."""

from __future__ import annotations

import pytest

from tests.helpers.code_answers import checked, passes, settings_with

ADD = "def add(a, b):\n    return a + b\n"
STACK = """
class Empty(ValueError):
    pass

class Stack:
    def __init__(self):
        self.items = []
    def push(self, item):
        self.items.append(item)
        return self
    def pop(self):
        if not self.items:
            raise Empty("nothing there")
        return self.items.pop()
    def __len__(self):
        return len(self.items)
    def __eq__(self, other):
        return self.items == other.items
    def __repr__(self):
        return f"Stack({self.items})"
"""
LIBRARY = """
import math
from collections import Counter, namedtuple, deque
from decimal import Decimal
from fractions import Fraction
from enum import Enum
Point = namedtuple("Point", "x y")
class Colour(Enum):
    RED = 1
LIMIT = 10
def give(kind):
    return {"counter": Counter("aab"), "point": Point(1, 2), "set": {1, 2}, "tuple": (1, [2]), "bytes": b"a\\xff", "big": 1 << 4000,
            "complex": 1 + 2j, "decimal": Decimal("1.10"), "fraction": Fraction(1, 3), "deque": deque([1]), "none": None,
            "nested": {(1, 2): [{3: frozenset([4])}]}, "text": "\\ud800\\0", "inf": float("inf"), "colour": Colour.RED}[kind]
def numbers(n):
    yield from range(n)
def double_all(items):
    for index, item in enumerate(items):
        items[index] = 2 * item
def apply(function, value):
    return function(value)
def fail(kind):
    raise kind("told")
def bad():
    return [][0]
"""


@pytest.mark.parametrize(
    "test",
    [
        "assert add(1, 2) == 3",
        "assert add('a', b='b') == 'ab'",
        "for a in range(3):\n    assert add(a, a) == 2 * a",
        "def test(function):\n    assert function([1], [2]) == [1, 2]\ntest(add)",
        "import unittest\nclass T(unittest.TestCase):\n    def test_add(self):\n        self.assertEqual(add(1, 1), 2)\nunittest.main()",
        "assert list(map(add, [1, 2], [3, 4])) == [4, 6]",
        "try:\n    add(1, 'a')\nexcept TypeError:\n    pass\nelse:\n    raise AssertionError",
    ],
)
def test_scripts_pass_with_a_right_answer(test: str) -> None:
    assert passes(ADD, test)


@pytest.mark.parametrize(
    "test",
    [
        "assert add(1, 2) == 4",
        "assert subtract(1, 2) == -1",
        "import unittest\nclass T(unittest.TestCase):\n    def test_add(self):\n        self.assertEqual(add(1, 1), 3)\nunittest.main()",
        "import sys\nsys.exit(1)",
        "raise KeyboardInterrupt",
        "assert add(add, 1)",
    ],
)
def test_scripts_fail_with_a_wrong_answer(test: str) -> None:
    assert checked(ADD, test).passed == (False,)


def test_plain_values_keep_their_types_on_the_way() -> None:
    tests = [
        "assert give('counter') == {'a': 2, 'b': 1}",
        "assert give('point') == (1, 2)",
        "assert give('set') == {1, 2}",
        "assert give('tuple') == (1, [2]) and type(give('tuple')) is tuple",
        "assert give('bytes') == b'a\\xff'",
        "assert give('big') == 1 << 4000",
        "assert give('complex') == 1 + 2j",
        "from decimal import Decimal\nassert give('decimal') == Decimal('1.1') and str(give('decimal')) == '1.10'",
        "from fractions import Fraction\nassert give('fraction') == Fraction(1, 3)",
        "from collections import deque\nassert give('deque') == deque([1])",
        "assert give('none') is None",
        "assert give('nested') == {(1, 2): [{3: frozenset({4})}]}",
        "assert give('text') == '\\ud800\\0'",
        "assert give('inf') == float('inf')",
        "assert give('colour') == Colour.RED and give('colour').value == 1",
        "assert LIMIT == 10",
    ]
    assert checked(LIBRARY, tests).passed == (True,) * len(tests)


def test_tests_use_objects_generators_and_changed_arguments_of_the_answer() -> None:
    tests = [
        "assert list(numbers(3)) == [0, 1, 2]",
        "generator = numbers(2)\nassert next(generator) == 0\nassert [*generator] == [1]",
        "items = [1, [2]]\ndouble_all(items)\nassert items == [2, [2, 2]]",
        "assert apply(lambda x: x + 1, 4) == 5",
        "assert apply(lambda f: f(4), len) == 0",
        "try:\n    fail(KeyError)\nexcept KeyError as error:\n    assert 'told' in str(error)\nelse:\n    raise AssertionError",
        "try:\n    bad()\nexcept IndexError:\n    pass\nelse:\n    raise AssertionError",
        "assert math.isclose(give('complex').real, 1)",
    ]
    assert checked(LIBRARY, tests).passed == (True, True, True, True, False, False, True, True)


def test_tests_use_classes_of_the_answer() -> None:
    tests = [
        "s = Stack()\ns.push(1).push([2])\nassert len(s) == 2 and s.pop() == [2] and s.pop() == 1",
        "s = Stack()\ntry:\n    s.pop()\nexcept ValueError as error:\n    assert str(error) == 'nothing there'\n"
        "else:\n    raise AssertionError",
        "assert Stack().push(1) == Stack().push(1) and Stack().push(1) != Stack()",
        "assert isinstance(Stack(), Stack) and not isinstance(1, Stack)",
        "s = Stack()\ns.items = [1]\nassert s.items == [1] and repr(s) == 'Stack([1])' and not hasattr(s, 'peek')",
        "assert len(Stack()) == 1",
    ]
    assert checked(STACK, tests).passed == (True, True, True, True, True, False)


def test_each_script_has_names_of_its_own() -> None:
    assert checked(ADD, ["x = add(1, 1)\nassert x == 2", "assert x == 2"]).passed == (True, False)


def test_setup_and_check_of_the_row_are_used() -> None:
    test = "def check(candidate):\n    assert candidate(ONE, 2) == 3\n"
    assert passes(ADD, test, entry_point="add", test_setup="ONE = 1")
    assert not passes(ADD, test, entry_point="multiply", test_setup="ONE = 1")


def test_a_function_may_have_the_name_of_a_builtin_or_a_module_if_the_row_says_so() -> None:
    assert passes("def sum(a):\n    return 7\n", "assert sum([1]) == 7", entry_point="sum")
    assert not passes("def sum(a):\n    return 7\n", "assert sum([1]) == 7")
    assert passes("def bisect(a):\n    return 7\n", "assert bisect([1]) == 7")


def test_calls_compare_plain_values() -> None:
    answer = "class Solution:\n    def two_sum(self, numbers, target=0):\n        return (0, len(numbers))\n" + ADD
    tests = [
        {"function": "add", "args": [1, 2], "output": 3},
        {"function": "Solution.two_sum", "args": [[1, 2]], "kwargs": {"target": 3}, "output": [0, 2]},
        {"function": "add", "args": [0.1, 0.2], "output": 0.3},
        {"function": "add", "args": [1, 2], "output": 4},
        {"function": "add", "args": [1], "output": 3},
        {"function": "missing", "args": [], "output": None},
        {"function": "add", "args": [[1], [2]], "output": [1, 2]},
    ]
    assert checked(answer, tests).passed == (True, True, True, False, False, False, True)


def test_programs_read_and_print() -> None:
    program = "import sys\nfor line in sys.stdin:\n    print(2 * int(line))\n"
    tests = [
        {"input": "1\n2\n", "output": "2\n4"},
        {"input": "", "output": ""},
        {"input": "3", "output": "7"},
        {"input": "x", "output": ""},
    ]
    assert checked(program, tests).passed == (True, True, False, False)


def test_programs_may_leave_their_input_unread_and_interleave() -> None:
    assert passes("print(1)", [{"input": "x" * 1_000_000, "output": "1"}])
    echo = "import sys\nfor line in sys.stdin:\n    sys.stdout.write(line)\n"
    text = "".join(f"{n:099}\n" for n in range(5000))
    assert passes(echo, [{"input": text, "output": text}])


def test_programs_open_their_standard_streams_again() -> None:
    assert passes("print(open('/dev/stdin').read(), file=open('/dev/stdout', 'w'))", [{"input": "3", "output": "3"}])


def test_a_program_that_ends_badly_fails_whatever_it_printed() -> None:
    assert not passes("print(1)\nraise SystemExit(2)", [{"input": "", "output": "1"}])
    assert not passes("print(1, flush=True)\nimport os\nos.abort()", [{"input": "", "output": "1"}])
    assert passes("print(1)\nraise SystemExit(0)", [{"input": "", "output": "1"}])


def test_threads_asyncio_and_large_modules_work() -> None:
    program = """
import asyncio, concurrent.futures, ctypes, decimal, email.message, encodings.idna, sqlite3, ssl, tempfile, xml.dom.minidom, zoneinfo
async def main():
    return await asyncio.gather(asyncio.to_thread(sum, [1, 2]), asyncio.sleep(0.001, 4))
print(asyncio.run(main()))
with concurrent.futures.ThreadPoolExecutor(4) as pool:
    print(list(pool.map(abs, [-1, -2])))
with tempfile.NamedTemporaryFile("w+") as file:
    file.write("5")
    file.seek(0)
    print(file.read())
print(zoneinfo.ZoneInfo is not None, "ä".encode("idna"), sqlite3.connect(":memory:").execute("select 6").fetchone())
"""
    assert passes(program, [{"input": "", "output": "[3, 4]\n[1, 2]\n5\nTrue b'xn--4ca' (6,)"}])


def test_after_a_test_that_breaks_the_answer_the_next_has_fresh_processes() -> None:
    answer = "import os\nstate = []\ndef f(x):\n    state.append(x)\n    if x == 2:\n        os._exit(0)\n    return len(state)\n"
    assert checked(answer, [f"assert f({x}) >= 1" for x in (1, 2, 3)]).passed == (True, False, True)
    calls = [{"function": "f", "args": [x], "output": output} for x, output in ((1, 1), (1, 2), (2, 3), (1, 1))]
    assert checked(answer, calls).passed == (True, True, False, True)


def test_a_test_that_takes_too_long_fails_alone() -> None:
    answer = "def f(x):\n    while x == 2:\n        pass\n    return x\n"
    limits = settings_with(test_s=1.0)
    assert checked(answer, [f"assert f({x}) == {x}" for x in (1, 2, 3)], limits).passed == (True, False, True)


def test_the_time_of_the_answer_ends_all_of_its_tests() -> None:
    limits = settings_with(test_s=0.5, answer_s=0.9)
    found = checked("def f():\n    while True:\n        pass\n", [{"function": "f", "output": 1}] * 50, limits)
    assert found.passed == (False,) * 50


@pytest.mark.parametrize("answer", ["def f(:\n", "1 / 0", "import os\nos._exit(0)", "while True:\n    pass", "raise SystemExit(0)", "\0"])
def test_an_answer_that_does_not_load_fails_every_test_at_once(answer: str) -> None:
    found = checked(answer, ["assert True or f()"] * 20, settings_with(test_s=1.0))
    assert found.passed == (False,) * 20
    assert "loaded" in found.problem
