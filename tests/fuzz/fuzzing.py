"""Random input for everything that reads what a user gives, by `hypothesis`.

`fuzz` runs a check on drawn examples: few and always the same ones in `make test`, many and new ones, with the seed
that repeats them, in `make test-all`. It counts what it ran, and no example may take longer than `HANG_S`.
"""

import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

T = TypeVar("T")
HANG_S = 30.0
QUICK = 60  # examples
# At least 20,000 together. tests/fuzz/test_inputs.py runs them.
MANY = {"configs": 8000, "conversations": 5000, "checkpoints": 3000, "drafts": 5000}

# Directions, joiners, half surrogates, line separators, special tokens, templates, paths.
ODD = [
    "", "\0", "\ud800", "\udfff\ud800", "\u202eabc", "\U0001f469\u200d\U0001f467", "\xe9", "e\u0301", "\u2028", "\x85",
    "\ufeff", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "{{ 7*7 }}", "{% generation %}", "%s%n", "../../x",
    "a" * 3000,
]  # fmt: skip
HUGE = [10**30, -(10**30), 2**31, 2**63, 2**64, -1, 0, 1e308, -1e308, 5e-324]
texts = st.one_of(st.text(max_size=12), st.sampled_from(ODD))
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 300), st.sampled_from(HUGE), st.floats(allow_nan=True), texts
)
junk = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=6,
) | st.integers(1, 400).map(lambda depth: _nested(depth))


# What is put in the place of every value in turn.
TOUGH = [None, True, False, 0, -1, 1, 3, "x", "", "1", "\ud800", [], [1], ["x"], [None], {}, {"a": 1}, 1.5,
         float("nan"), float("inf"), *HUGE]  # fmt: skip


def _nested(depth: int) -> Any:
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


def fuzz(what: str, strategy: st.SearchStrategy[T], check: Callable[[T], None], *, many: bool) -> int:
    """Runs `check` on examples; an exception of it is reported with the smallest example that raises it.

    Returns:
        How many examples were checked: at least `QUICK`, or `MANY[what]`.
    """
    ran = 0

    def body(example: T) -> None:
        nonlocal ran
        with _in_time():
            check(example)
        ran += 1

    phases = [Phase.generate, Phase.shrink]
    wanted = MANY[what] if many else QUICK
    run = settings(
        max_examples=wanted,
        deadline=None,
        database=None,
        derandomize=not many,
        phases=phases,
        suppress_health_check=list(HealthCheck),
    )(given(strategy)(body))
    if many:
        chosen = random.SystemRandom().randrange(2**32)
        print(f"fuzzing {what}: seed {chosen}")
        run = seed(chosen)(run)
    run()
    print(f"fuzzing {what}: {ran} examples")
    assert ran >= wanted
    return ran


@contextmanager
def _in_time() -> Iterator[None]:
    """An example that hangs is a fault like any other."""

    def late(number: int, frame: Any) -> None:
        raise TimeoutError(f"an example took longer than {HANG_S:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, HANG_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@st.composite
def changed(draw: st.DrawFn, value: Any, most: int = 3) -> Any:
    """JSON-like data with a few places changed: replaced by junk, deleted, renamed, repeated."""
    for _ in range(draw(st.integers(0, most))):
        if draw(st.booleans()):
            value = _replaced(value, draw(st.sampled_from(list(_paths(value)))), draw(st.sampled_from(TOUGH)))
        else:
            value = _changed_once(draw, value)
    return value


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of everything inside, and of the whole."""
    yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from _paths(inner, (*path, key))


def _replaced(value: Any, path: tuple[Any, ...], other: Any) -> Any:
    if not path:
        return other
    inside = dict(value) if isinstance(value, dict) else list(value)
    inside[path[0]] = _replaced(inside[path[0]], path[1:], other)
    return inside


def _changed_once(draw: st.DrawFn, value: Any) -> Any:
    inside = (
        list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    )
    if not inside or draw(st.integers(0, 11)) == 7:
        return draw(junk)
    key, inner = draw(st.sampled_from(inside))
    kind = draw(st.sampled_from(["deeper", "deeper", "deeper", "deeper", "replace", "delete", "rename", "repeat"]))
    changed_inner = _changed_once(draw, inner) if kind == "deeper" else draw(junk) if kind == "replace" else inner
    if isinstance(value, list):
        rest = [*value]
        rest[key : key + 1] = {"delete": [], "repeat": [inner] * 3}.get(kind, [changed_inner])
        return rest
    rest = {k: v for k, v in value.items() if k != key}
    return rest if kind == "delete" else rest | {draw(texts) if kind == "rename" else key: changed_inner}


@st.composite
def damaged(draw: st.DrawFn, data: bytes, most: int = 3) -> bytes:
    """Bytes with a few damages: cut, flipped, overwritten, repeated, lengthened; perhaps none."""
    for _ in range(draw(st.integers(0, most))):
        at = draw(st.integers(0, max(0, len(data))))
        kind = draw(st.sampled_from(["cut", "flip", "write", "repeat", "insert", "zero"]))
        if kind == "cut":
            data = data[:at]
        elif kind == "flip" and at < len(data):
            data = data[:at] + bytes([data[at] ^ (1 << draw(st.integers(0, 7)))]) + data[at + 1 :]
        elif kind == "write":
            patch = draw(st.binary(min_size=1, max_size=9))
            data = data[:at] + patch + data[at + len(patch) :]
        elif kind == "repeat":
            data = data[:at] + data[max(0, at - 20) : at] * 2 + data[at:]
        elif kind == "insert":
            data = data[:at] + draw(st.binary(max_size=9)) + data[at:]
        elif kind == "zero":
            data = data[:at] + bytes(min(64, len(data) - at)) + data[at + 64 :]
    return data


def one_line(error: BaseException) -> None:
    """What a user is told: something, that can be printed, on a line or few."""
    text = str(error)
    assert text.strip()
    assert len(text) < 5000
    text.encode("utf-8", "backslashreplace")
