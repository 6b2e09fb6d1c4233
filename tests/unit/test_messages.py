"""Messages are registered under module and name: equal names in different modules are different messages."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import offbeat as ob
from offbeat.core.messages import Message
from offbeat.records.traffic import TrafficCounter
from offbeat.transports import wire

HEADER = "from dataclasses import dataclass\nfrom offbeat.core.messages import Message\n\n"
NOTE = "@dataclass(frozen=True)\nclass Note(Message):\n    number: int = 0\n\n"


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory to import modules from; what they register is removed."""
    monkeypatch.syspath_prepend(tmp_path)
    known = set(Message.kinds)
    yield tmp_path
    for key in set(Message.kinds) - known:
        del Message.kinds[key]
        sys.modules.pop(key.rpartition(".")[0], None)


def test_equal_names_in_two_modules_are_two_messages(modules: Path) -> None:
    for name in ("first_notes", "second_notes"):
        (modules / f"{name}.py").write_text(HEADER + NOTE)
    first, second = (importlib.import_module(name).Note for name in ("first_notes", "second_notes"))
    assert Message.kinds["first_notes.Note"] is first
    assert Message.kinds["second_notes.Note"] is second
    for kind in (first, second):
        encoded = wire.encode(kind(7))
        head = wire.read_head(encoded.head, 1 << 20)
        assert head.meta is not None
        decoded = wire.decode(wire.read_meta(head, head.meta), encoded.head[:0])
        assert type(decoded) is kind
        assert encoded.size.kind is kind
        count = TrafficCounter()
        count.sent(encoded.size)
        record = count.record(1.0)
        assert record is not None
        assert list(record.sent) == ["Note"], "records have the bare name"


def test_two_messages_of_one_name_in_a_module_are_refused(modules: Path) -> None:
    (modules / "twice.py").write_text(HEADER + NOTE + NOTE)
    with pytest.raises(ob.ContractViolation, match=r"the module twice defines the message Note twice; .* another name"):
        importlib.import_module("twice")


def test_a_module_that_is_loaded_anew_replaces_its_messages(modules: Path) -> None:
    (modules / "edited.py").write_text(HEADER + NOTE)
    first = importlib.import_module("edited").Note
    del sys.modules["edited"]
    second = importlib.import_module("edited").Note
    assert first is not second
    assert Message.kinds["edited.Note"] is second


def test_a_message_may_have_slots(modules: Path) -> None:
    """`dataclass(slots=True)` makes the class a second time."""
    (modules / "slotted.py").write_text(HEADER + NOTE.replace("frozen=True", "frozen=True, slots=True"))
    kind = importlib.import_module("slotted").Note
    assert Message.kinds["slotted.Note"] is kind
