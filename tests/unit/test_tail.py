"""Following a live run while it is written."""

from __future__ import annotations

from pathlib import Path

from offbeat.records.files import RankWriter, Tail, rank_file
from offbeat.records.schema import Notice


def note(at: float, rank: int = 0) -> Notice:
    return Notice(at=at, rank=rank, text="")


def test_each_record_is_returned_once_whenever_its_file_appears(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "run")
    assert tail.poll() == [], "there is no directory yet"
    with RankWriter(tmp_path / "run", 1) as one:
        assert tail.poll() == []
        one.write(note(1.0, 1))
        one.write(note(3.0, 1))
        assert tail.poll() == [note(1.0, 1), note(3.0, 1)]
        assert tail.poll() == []
        with RankWriter(tmp_path / "run", 0) as hub:
            one.write(note(5.0, 1))
            hub.write(note(4.0))
            hub.write(note(5.0))
            assert tail.poll() == [note(4.0), note(5.0), note(5.0, 1)]
    assert tail.poll() == []


def test_a_line_is_returned_when_it_is_complete(tmp_path: Path) -> None:
    with RankWriter(tmp_path, 0) as writer:
        writer.write(note(1.0))
    path = rank_file(tmp_path, 0)
    line = path.read_bytes()
    path.write_bytes(b"")
    tail = Tail(tmp_path)
    for sign in line[:-1]:
        with path.open("ab") as file:
            file.write(bytes([sign]))
        assert tail.poll() == []
    with path.open("ab") as file:
        file.write(line[-1:] + line[:7])
    assert tail.poll() == [note(1.0)]
    with RankWriter(tmp_path, 0) as writer:  # takes over, and removes the piece
        writer.write(note(2.0))
    assert tail.poll() == [note(2.0)]


def test_records_after_a_truncation_are_new(tmp_path: Path) -> None:
    tail = Tail(tmp_path)
    with RankWriter(tmp_path, 0) as writer:
        writer.write(note(1.0))
        position = writer.position()
        writer.write(note(2.0))
        assert len(tail.poll()) == 2
        writer.truncate(position)
        assert tail.poll() == []
        writer.write(note(1.5))
        assert tail.poll() == [note(1.5)]


def test_lines_that_cannot_be_decoded_and_other_files_are_ignored(tmp_path: Path) -> None:
    tail = Tail(tmp_path)
    (tmp_path / "records-x.jsonl").write_text("nonsense\n")
    (tmp_path / "records-4.jsonl").mkdir()
    rank_file(tmp_path, 0).write_text('nonsense\n{"record":"notice","at":1,"rank":0,"text":""}\n{"record":"other"}\n')
    assert tail.poll() == [note(1.0)]
    assert tail.poll() == []
