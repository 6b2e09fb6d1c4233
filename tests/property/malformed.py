"""Damaged input for the tests of everything that decodes bytes or text from outside.

A property is a function of drawn input; `malformed` makes it a test, and registers it for `tests/fuzz_inputs.py`, which
runs the same function on other input for as long as wanted. Damage is drawn as a list of edits, not as bytes, so that
the input that a failure prints is short.
"""

from __future__ import annotations

import contextlib
import resource
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from offbeat.errors import OffbeatError

DEEP = 20_000
"""Levels of nesting that no recursive decoder survives unless it counts them."""

DIGITS = 5_000
"""Digits of an integer that Python refuses to convert to text and back."""

SECONDS_MAX = 20
"""What takes so much processor time hangs: every input here is small."""

SENTENCE_MAX = 8_000
"""Characters of an error: it may name a long path, and does not repeat a file."""

MEMORY_BYTES = 1 << 30
"""Memory that a decoder may take beyond what the process has: far more than any input here needs."""


@dataclass(frozen=True)
class Property:
    """A promise about input from outside: `check` fails for input that breaks it."""

    area: str
    check: Callable[..., None]
    inputs: tuple[st.SearchStrategy[Any], ...]

    @property
    def name(self) -> str:
        return self.check.__name__.removeprefix("test_")


PROPERTIES: list[Property] = []


def malformed(
    area: str, *inputs: st.SearchStrategy[Any], count: int, examples: Sequence[tuple[Any, ...]] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A test with `count` inputs, the same ones each time, and those that broke the promise once."""

    def decorate(check: Callable[..., None]) -> Callable[..., None]:
        PROPERTIES.append(Property(area, check, inputs))
        test = given(*inputs)(check)
        for arguments in reversed(examples):
            test = example(*arguments)(test)
        return settings(
            max_examples=count,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],  # which is the machine's business as well
        )(test)

    return decorate


@contextlib.contextmanager
def refused_in_a_sentence(*kinds: type[OffbeatError]) -> Iterator[None]:
    """The block either works or raises an error of these kinds with one sentence, in bounded time and memory.

    kinds: what the decoder documents; none: any error of this library
    """
    sentence = None
    with _limited_time(), _limited_memory():
        try:
            yield
        except OffbeatError as error:
            if not isinstance(error, kinds or OffbeatError):
                raise
            sentence = str(error)
    if sentence is not None:
        assert sentence.strip(), "the error says nothing"
        assert "\n" not in sentence, f"more than a sentence: {sentence!r}"
        assert len(sentence) < SENTENCE_MAX, f"a sentence of {len(sentence)} characters: {sentence[:200]!r}…"


def _hangs(number: int, frame: FrameType | None) -> None:
    raise AssertionError(f"not decoded after {SECONDS_MAX} seconds of processor time")


@contextlib.contextmanager
def _limited_time() -> Iterator[None]:
    before = signal.signal(signal.SIGPROF, _hangs)
    signal.setitimer(signal.ITIMER_PROF, SECONDS_MAX)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@contextlib.contextmanager
def _limited_memory() -> Iterator[None]:
    """Allocations beyond the limit raise MemoryError, which is no error of this library."""
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


# Damaged bytes

CUT, SET, REMOVE, INSERT, REPEAT, SPLICE = "cut", "set", "remove", "insert", "repeat", "splice"

Edit = tuple[str, int, int, bytes]
"""What is done, where, to how many bytes, and what is written there."""

_WRITTEN = st.binary(min_size=1, max_size=8) | st.sampled_from(
    [
        b"\0",
        b"\xff",
        b"\x7f\xff\xff\xff",
        b"\xff" * 8,
        b"\0" * 8,
        b"\x01" + b"\0" * 7,
        b"\n",
        b'"',
        b"-",
        b"9" * DIGITS,
        b"[" * DEEP,
        b'{"":' * DEEP,
        b"\x91" * DEEP,
        b"\x81\xa0" * DEEP,
        "é\u2028\U0001f600".encode(),
        b"\xed\xa0\x80",
        b"NaN",
        b"1e999",
    ]
)

EDITS: st.SearchStrategy[list[Edit]] = st.lists(
    st.tuples(
        st.sampled_from([SET, SET, INSERT, CUT, REMOVE, REPEAT, SPLICE]),
        st.integers(0, 64) | st.integers(0, 1 << 20),
        st.integers(1, 16) | st.integers(0, 1 << 16),
        _WRITTEN,
    ),
    min_size=1,
    max_size=4,
)


def edited(raw: bytes, edits: Sequence[Edit], other: bytes = b"") -> bytes:
    """The bytes with these edits, at positions counted from the start and, if beyond the end, around it.

    other: valid bytes of the same kind, of which SPLICE takes the tail
    """
    for kind, position, count, written in edits:
        at = position % (len(raw) + 1)
        if kind == CUT:
            raw = raw[:at]
        elif kind == SET:
            raw = raw[:at] + written + raw[at + len(written) :]
        elif kind == REMOVE:
            raw = raw[:at] + raw[at + count :]
        elif kind == INSERT:
            raw = raw[:at] + written + raw[at:]
        elif kind == REPEAT:
            raw = raw[: at + count] + raw[at:]
        else:
            raw = raw[:at] + other[count % (len(other) + 1) :]
    return raw


# Damaged structures

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-3, 9)
    | st.integers(-(2**63), 2**64 - 1)
    | st.sampled_from([2**31, 2**48, 2**62, 10**15])
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["", "none", "a\0b", "x" * 5000, "\n", "1e999", "../..", "fmb", "name"])
)
PLAIN = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)

Change = tuple[int, str, Any]
"""The number of the node that is changed, in the order of reading; how; and the value that is put there."""

REPLACE, DROP, DOUBLE, WRAP, ADD = "replace", "drop", "double", "wrap", "add"


def changes(values: st.SearchStrategy[Any] = PLAIN) -> st.SearchStrategy[list[Change]]:
    """One to three changes of a structure of lists and dictionaries."""
    how = st.sampled_from([REPLACE, REPLACE, REPLACE, DROP, DOUBLE, WRAP, ADD])
    return st.lists(st.tuples(st.integers(0, 200), how, values), min_size=1, max_size=3)


def changed(tree: Any, edits: Sequence[Change]) -> Any:
    """A copy of a structure with these changes."""
    for number, how, value in edits:
        nodes = list(_nodes(tree))
        tree = _changed(tree, nodes[number % len(nodes)], how, value)
    return tree


Path = tuple[Any, ...]


def _nodes(tree: Any, path: Path = ()) -> Iterator[Path]:
    yield path
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list | tuple) else ()
    for key, inner in items:
        yield from _nodes(inner, (*path, key))


def _changed(tree: Any, path: Path, how: str, value: Any) -> Any:
    if path:
        key, *rest = path
        copy = dict(tree) if isinstance(tree, dict) else list(tree)
        if rest or how in (REPLACE, WRAP, ADD) or (how == DOUBLE and isinstance(tree, dict)):
            copy[key] = _changed(tree[key], tuple(rest), how, value)
        elif how == DROP:
            del copy[key]
        else:
            copy.insert(key, tree[key])
        return copy
    if how == WRAP:
        return [tree]
    if how == ADD and isinstance(tree, dict):
        return {**tree, "added": value}
    if how == ADD and isinstance(tree, list | tuple):
        return [*tree, value]
    return value
