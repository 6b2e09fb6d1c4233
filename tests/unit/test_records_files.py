"""Run directories of live runs: a file for each rank, taken over, cut back, put together, and full disks."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import pytest
from made_records import a_round, header

import offbeat as ob
from offbeat.cli.output import prepare_directory
from offbeat.errors import ConfigurationError, RunFailed
from offbeat.records.files import (
    BLOCK_BYTES,
    HEADER,
    LIVE,
    RECORDS,
    RESULT,
    FileWriter,
    RankWriter,
    check_idle,
    find_runs,
    rank_file,
    rank_files,
    read_header,
    read_run,
    write_header,
)
from offbeat.records.schema import Ended, Notice, Record


def note(at: float, rank: int = 0, text: str = "") -> Notice:
    return Notice(at=at, rank=rank, text=text)


def write(directory: Path, rank: int, *records: Record) -> None:
    with RankWriter(directory, rank) as writer:
        for record in records:
            writer.write(record)


def live(directory: Path) -> Path:
    write_header(directory, header(engine="live"))
    return directory


def test_the_header_can_be_written_and_read_alone(tmp_path: Path) -> None:
    write_header(tmp_path / "new" / "run", header(engine="live", seed=4))
    assert read_header(tmp_path / "new" / "run") == header(engine="live", seed=4)
    with pytest.raises(ConfigurationError, match=r"nowhere is not a run directory \(run.json: No such file"):
        read_header(tmp_path / "nowhere")


def test_the_files_of_all_ranks_are_read_in_the_order_of_time_and_then_of_ranks(tmp_path: Path) -> None:
    write(live(tmp_path), 10, note(1.0, 10), note(3.0, 10))
    write(tmp_path, 2, note(1.0, 2, "first"), note(1.0, 2, "second"), note(2.0, 2))
    write(tmp_path, 0, note(1.0, 0), note(0.5, 0), Ended(at=4.0, bytes_sent=1, messages_sent=1, failure=None))
    read = read_run(tmp_path).records
    assert [(record.at, getattr(record, "rank", None), getattr(record, "text", "")) for record in read] == [
        (0.5, 0, ""),
        (1.0, 0, ""),
        (1.0, 2, "first"),
        (1.0, 2, "second"),
        (1.0, 10, ""),
        (2.0, 2, ""),
        (3.0, 10, ""),
        (4.0, 0, ""),
    ]
    assert [rank for rank, _ in rank_files(tmp_path)] == [0, 2, 10]
    assert find_runs([tmp_path]) == [tmp_path]


def test_a_live_run_without_files_of_records_has_no_records(tmp_path: Path) -> None:
    assert read_run(live(tmp_path)).records == ()


def test_a_simulated_run_without_its_records_is_not_a_run(tmp_path: Path) -> None:
    write_header(tmp_path, header())
    with pytest.raises(ConfigurationError, match=r"\(records.jsonl: No such file or directory\)"):
        read_run(tmp_path)


def test_an_incomplete_last_line_is_ignored_in_every_file(tmp_path: Path) -> None:
    for rank in (0, 1):
        write(live(tmp_path), rank, note(1.0, rank), note(2.0, rank))
        path = rank_file(tmp_path, rank)
        path.write_bytes(path.read_bytes()[:-5])
    assert read_run(tmp_path).records == (note(1.0, 0), note(1.0, 1))


def test_a_line_that_cannot_be_read_is_named_with_its_file(tmp_path: Path) -> None:
    rank_file(live(tmp_path), 3).write_bytes(b"nonsense\n{}\n")
    with pytest.raises(ConfigurationError, match=r"records-3.jsonl, line 1, cannot be read"):
        read_run(tmp_path)


@pytest.mark.parametrize("signs", [0, 1, BLOCK_BYTES, 3 * BLOCK_BYTES])
def test_a_restarted_rank_continues_after_the_last_complete_line(tmp_path: Path, signs: int) -> None:
    whole = note(1.0, 0, "x" * signs)
    write(live(tmp_path), 0, whole, note(2.0, 0, "y" * signs))
    path = rank_file(tmp_path, 0)
    path.write_bytes(path.read_bytes()[:-3])
    write(tmp_path, 0, note(3.0))
    assert read_run(tmp_path).records == (whole, note(3.0))


def test_a_file_with_only_an_incomplete_line_is_emptied(tmp_path: Path) -> None:
    rank_file(live(tmp_path), 0).write_bytes(b'{"record":"notice"' + b" " * (2 * BLOCK_BYTES))
    with RankWriter(tmp_path, 0) as writer:
        assert writer.position() == 0
        writer.write(note(1.0))
    assert read_run(tmp_path).records == (note(1.0),)


def test_a_line_is_visible_to_readers_as_soon_as_it_is_written(tmp_path: Path) -> None:
    with RankWriter(live(tmp_path), 0) as writer:
        for count in (1, 2, 3):
            writer.write(note(float(count)))
            writer.sync()
            assert len(read_run(tmp_path).records) == count
            assert writer.position() == rank_file(tmp_path, 0).stat().st_size


def test_records_after_a_checkpoint_are_removed_on_resuming(tmp_path: Path) -> None:
    with RankWriter(live(tmp_path), 0) as writer:
        writer.write(note(1.0))
        position = writer.position()
        writer.write(note(2.0))
    with RankWriter(tmp_path, 0) as writer:
        writer.truncate(position)
        assert writer.position() == position
        writer.write(note(3.0))
    assert read_run(tmp_path).records == (note(1.0), note(3.0))


@pytest.mark.parametrize("position", [-1, 5, 10_000])
def test_records_that_do_not_match_a_checkpoint_are_not_changed(tmp_path: Path, position: int) -> None:
    write(live(tmp_path), 0, note(1.0))
    with RankWriter(tmp_path, 0) as writer, pytest.raises(ConfigurationError, match="does not match the checkpoint"):
        writer.truncate(position)
    assert read_run(tmp_path).records == (note(1.0),)


def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    rank_file(live(tmp_path), 0).symlink_to("/dev/full")
    with RankWriter(tmp_path, 0) as writer, pytest.raises(RunFailed) as failure:
        writer.write(note(1.0))
    assert str(failure.value) == (
        f"no more records could be written to {tmp_path} (No space left on device); "
        "make room there, or name another place with --out"
    )


@pytest.mark.parametrize("flush_every", [1, 1000])
def test_a_full_disk_is_one_sentence_in_a_simulation_as_well(tmp_path: Path, flush_every: int) -> None:
    (tmp_path / RECORDS).symlink_to("/dev/full")
    with (
        pytest.raises(RunFailed, match="No space left on device"),
        FileWriter(tmp_path, header(), flush_every=flush_every) as writer,
    ):
        writer.write(note(1.0))


def test_a_directory_that_is_not_writable_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for begin in (lambda path: RankWriter(path, 0), lambda path: write_header(path, header())):
        with pytest.raises(ConfigurationError, match=r"cannot write records to .*file.* name another place with --out"):
            begin(tmp_path / "file")
    rank_file(tmp_path, 1).mkdir()
    with pytest.raises(ConfigurationError, match=r"cannot write records to .* \(Is a directory\)"):
        RankWriter(tmp_path, 1)


def test_the_rank_of_an_end_is_written_only_where_it_is_not_0() -> None:
    """So that simulated runs, which have one end, keep the bytes that they had."""
    ended = Ended(at=1.0, bytes_sent=2, messages_sent=3, failure=None)
    line = b'{"record":"ended","at":1.0,"bytes_sent":2,"messages_sent":3,"failure":null}'
    assert msgspec.json.encode(ended) == line
    assert msgspec.json.decode(line, type=Ended).rank == 0
    assert msgspec.json.encode(msgspec.structs.replace(ended, rank=2)).endswith(b'"failure":null,"rank":2}')


def test_overwriting_removes_the_files_of_a_live_run_and_nothing_else(tmp_path: Path) -> None:
    run = live(tmp_path / "fmb-seed0")
    for rank in (0, 1, 12):
        write(run, rank, a_round(rank, 0.0, 1.0))
    foreign = ("records-x.jsonl", "records-01.jsonl", "checkpoint-0.offbeat.mine", "checkpoint.offbeat")
    for name in ("checkpoint-0.offbeat", "checkpoint-0.offbeat.partial", LIVE, RESULT, *foreign):
        (run / name).write_bytes(b"")
    with pytest.raises(ConfigurationError, match="already holds 1 run"):
        prepare_directory(tmp_path, overwrite=False)
    assert (run / HEADER).exists()
    prepare_directory(tmp_path, overwrite=True)
    assert sorted(path.name for path in run.iterdir()) == sorted(foreign)
    for name in foreign:
        (run / name).unlink()
    live(run)
    prepare_directory(tmp_path, overwrite=True)
    assert not run.exists()


def test_a_directory_that_is_itself_a_run_can_be_overwritten(tmp_path: Path) -> None:
    run = live(tmp_path / "mine")
    write(run, 0, a_round(0, 0.0, 1.0))
    prepare_directory(run, overwrite=True)
    assert list(run.iterdir()) == []


def test_an_active_run_is_neither_written_by_a_second_process_nor_overwritten(tmp_path: Path) -> None:
    run = live(tmp_path / "fmb-seed0")
    going_on = "fmb-seed0 is still going on; wait for its end"
    with RankWriter(run, 0) as writer, RankWriter(run, 1):
        writer.write(a_round(0, 0.0, 1.0))
        for attempt in (lambda: RankWriter(run, 0), lambda: check_idle(run), lambda: prepare_directory(tmp_path, True)):
            with pytest.raises(ConfigurationError, match=going_on):
                attempt()
    check_idle(run)
    assert len(read_run(run).records) == 1
    prepare_directory(tmp_path, overwrite=True)


def test_a_simulation_writes_the_same_bytes_each_time(tmp_path: Path) -> None:
    digests = set()
    for name in ("a", "b"):
        ob.simulate(
            ob.workloads.Quadratic(), ob.FixedMinibatch(), until=ob.Samples(3000), workers=2, out=tmp_path / name
        )
        assert sorted(path.name for path in (tmp_path / name).iterdir()) == [RECORDS, RESULT, HEADER]
        written = [(tmp_path / name / file).read_bytes() for file in (RECORDS, RESULT)]
        digests.add(hashlib.sha256(b"".join(written)).digest())
    assert len(digests) == 1
