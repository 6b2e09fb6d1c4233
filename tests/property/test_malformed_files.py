"""Whatever a file holds: checkpoints, records and TOML are read, or refused in a sentence."""

from __future__ import annotations

import hashlib
import logging
import tempfile
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import tomli_w
import torch
from hypothesis import strategies as st
from made_records import a_round, a_traffic, accuracies, an_update, header
from malformed import DEEP, DIGITS, EDITS, PLAIN, Change, Edit, changed, changes, edited, malformed
from malformed import refused_in_a_sentence as refused

from offbeat.cli.plans import plan_from_file, plan_of
from offbeat.cluster.cluster import Cluster
from offbeat.cluster.presets import PRESETS, load_cluster
from offbeat.core.configuration import from_plain, read_toml, to_plain
from offbeat.core.run_identity import RunIdentity
from offbeat.core.strategy import Strategy
from offbeat.core.workload import NamedWorkload
from offbeat.errors import ConfigurationError
from offbeat.lab.experiment_plan import Plan
from offbeat.lab.reproduction import study as studies
from offbeat.lab.reproduction.published_settings import read_settings
from offbeat.live import checkpoints, state_file
from offbeat.live.checkpoints import KEPT, Checkpoint, checkpoint_path, older_path, read_checkpoint
from offbeat.records.files import HEADER, RECORDS, RankWriter, Tail, rank_file, read_header, read_run
from offbeat.records.schema import (
    AnyRecord,
    Consensus,
    Dropped,
    Ended,
    Exchange,
    LinkUse,
    Membership,
    Notice,
    Undone,
)


@contextmanager
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


# Checkpoints

NODE = {
    "parameters": torch.arange(12.0).reshape(3, 4).T,
    "buffers": (torch.zeros(2, dtype=torch.int64), torch.ones((), dtype=torch.bool), torch.empty(0)),
    "optimizer": {"step": 7, "big": 1 << 80, ("a", 1): [None, True, b"raw", "text", 2.5]},
}
CHECKPOINTS = [
    Checkpoint("model", "strategy", 12.5, 100, 0, NODE),
    Checkpoint("other", "strategy", 1.0, 0, 3, {"parameters": torch.ones(5)}),
]


def file_of(checkpoint: Checkpoint) -> bytes:
    with directory() as place:
        state_file.save(place / "checkpoint", vars(checkpoint))
        return (place / "checkpoint").read_bytes()


FILES = [file_of(checkpoint) for checkpoint in CHECKPOINTS]
DIGEST_BYTES = 32


def sealed(raw: bytes) -> bytes:
    """With a digest that fits."""
    return raw + hashlib.sha256(raw).digest()


def use(checkpoint: Checkpoint) -> None:
    """What is done with a checkpoint before the state of the node is restored."""
    assert repr(checkpoint)
    checkpoint.check_fits(RunIdentity("model", "strategy"))


LINE_BREAKS = [
    (0, [("set", FILES[0].index(key, FILES[0].index(key) + 1), 1, b"\n")], True) for key in (b"model", b"strategy")
]
"""In the value of a key, which is the same word."""


@malformed(
    "checkpoints",
    st.sampled_from([0, 1]),
    EDITS,
    st.booleans(),
    count=50,
    examples=LINE_BREAKS,
)
def test_a_damaged_checkpoint_is_refused_and_read_only_where_its_digest_fits(
    number: int, edits: list[Edit], is_sealed: bool
) -> None:
    whole = FILES[number]
    raw = sealed(edited(whole[:-DIGEST_BYTES], edits, FILES[1 - number])) if is_sealed else edited(whole, edits, whole)
    with directory() as place:
        checkpoint_path(place).write_bytes(raw)
        with refused(ConfigurationError):
            use(Checkpoint.load(checkpoint_path(place)))
            assert is_sealed or raw in FILES


TREES = [state_file._pack(vars(checkpoint), "state", []) for checkpoint in CHECKPOINTS]
DTYPES = st.sampled_from(sorted(state_file.DTYPES))
TENSORS = st.tuples(
    st.just(state_file.TENSOR),
    DTYPES,
    st.lists(st.integers(0, 3) | st.sampled_from([2**31, 2**62, 2**64 - 1]), max_size=70),
    st.permutations(range(3)),
).map(list)
TREE_VALUES = PLAIN | TENSORS | st.sampled_from([[state_file.BIG_INTEGER, "0x" + "f" * DIGITS], b"\0", [3], [2, 1]])


SEALED = [
    (0, [(0, "replace", [state_file.TENSOR, "uint8", [1] * 100_000, list(range(100_000))])], 1),
    (0, [(0, "replace", [state_file.TENSOR, "float32", [3], [0]])], 12),
    (0, [(TREES[0].index("resumes") + 2, "replace", [state_file.BIG_INTEGER, "0x" + "f" * DIGITS])], 0),
    (1, [(TREES[1].index("records_position") + 2, "replace", [state_file.BIG_INTEGER, "0x" + "f" * DIGITS])], 20),
]


@malformed("checkpoints", st.sampled_from([0, 1]), changes(TREE_VALUES), st.integers(0, 200), count=50, examples=SEALED)
def test_a_sealed_checkpoint_with_a_changed_tree_is_read_or_refused(
    number: int, edits: list[Change], tensor_bytes: int
) -> None:
    """Memory is allocated only for tensors that the file has bytes for."""
    try:
        tree = msgspec.msgpack.encode(changed(TREES[number], edits))
    except (OverflowError, UnicodeEncodeError):
        return
    head = state_file.HEAD.pack(state_file.MAGIC, state_file.VERSION, len(tree), tensor_bytes)
    with directory() as place:
        checkpoint_path(place).write_bytes(sealed(head + tree + bytes(tensor_bytes)))
        with refused(ConfigurationError):
            use(Checkpoint.load(checkpoint_path(place)))


@malformed("checkpoints", st.lists(EDITS, min_size=1, max_size=KEPT), count=15)
def test_the_newest_checkpoint_that_is_whole_is_found_among_damaged_ones(damage: list[list[Edit]]) -> None:
    with directory() as place:
        files = [edited(FILES[0], edits) for edits in damage] + [FILES[1]] * (KEPT - len(damage))
        for age, raw in enumerate(files):
            older_path(checkpoint_path(place), age).write_bytes(raw)
        logger = logging.getLogger(checkpoints.__name__)
        logger.disabled = True  # a warning names the damaged ones
        try:
            with refused(ConfigurationError):
                read_checkpoint(place)
                return
        finally:
            logger.disabled = False
        assert FILES[1] not in files


# Records

LINES: list[AnyRecord] = [
    a_round(0, 0.0, 1.0),
    a_round(1, 0.0, 2.0, idle=0.5),
    an_update(2.0, 20, (0, 0, 10, 0), (1, 0, 10, 1)),
    *accuracies([0.5, None]),
    a_traffic(2.5, Gradient=1000),
    Undone(at=3.0, rank=0, version=2, to_version=1, samples=10, samples_total=10),
    Dropped(at=3.0, rank=1, first=0, stop=10, staleness=3, reason="stale"),
    Exchange(at=3.5, rank=0, peer=1, seconds=0.5, distance=None, outcome="averaged"),
    Consensus(at=3.5, peers=2, distance=0.25),
    Membership(at=3.5, rank=0, peer=1, incarnation=0, joined=True),
    Notice(at=4.0, rank=0, text="a “text” with\nall\tkinds \\ of signs"),
    LinkUse(at=4.0, rank=0, bytes_per_second=1e6, used={"1": 5}),
    Ended(at=5.0, bytes_sent=1, messages_sent=1, failure="it failed", rank=1),
]
RECORD_LINES = [msgspec.json.encode(record) + b"\n" for record in LINES]
HEADER_BYTES = msgspec.json.format(msgspec.json.encode(header()), indent=2)
NOT_UTF8 = [("set", HEADER_BYTES.index(b"digits"), 0, b"\xff")]
NESTED = [("insert", 1, 0, b'"x":' + b"[" * DEEP)]


@malformed("records", EDITS, count=40, examples=[(NOT_UTF8,), (NESTED,)])
def test_the_damaged_header_of_a_run_is_read_or_refused(edits: list[Edit]) -> None:
    with directory() as place:
        (place / HEADER).write_bytes(edited(HEADER_BYTES, edits, HEADER_BYTES))
        with refused(ConfigurationError):
            read_header(place)


LINE_NUMBERS = st.integers(0, len(LINES) - 1)


LONG_WORD = [("set", 11, 1, b"[" * DEEP)]
"""What the type of a record is then, which an error quotes."""


@malformed(
    "records",
    LINE_NUMBERS,
    EDITS,
    st.booleans(),
    count=60,
    examples=[(0, NESTED, False), (0, NESTED, True), (0, LONG_WORD, False)],
)
def test_a_damaged_line_of_records_is_named_or_read_and_never_hides_another(
    number: int, edits: list[Edit], is_live: bool
) -> None:
    """`read_run` names the file and the line, or ignores it if it is the last; a `Tail` passes it over."""
    damaged = edited(RECORD_LINES[number], edits, RECORD_LINES[0])
    lines = [*RECORD_LINES[:number], damaged, *RECORD_LINES[number + 1 :]]
    with directory() as place:
        (place / HEADER).write_bytes(msgspec.json.encode(header(engine="live" if is_live else "simulated")))
        path = rank_file(place, 0) if is_live else place / RECORDS
        path.write_bytes(b"".join(lines))
        with refused(ConfigurationError):
            assert {*map(repr, read_run(place).records)} >= {*map(repr, [*LINES[:number], *LINES[number + 2 :]])}
        if is_live:
            with refused(ConfigurationError):
                assert {*map(repr, Tail(place).poll())} >= {*map(repr, [*LINES[:number], *LINES[number + 2 :]])}
            with RankWriter(place, 0) as writer:
                assert writer.position() == path.read_bytes().rfind(b"\n") + 1


RECORD_TREES = [msgspec.json.decode(line) for line in RECORD_LINES]


@malformed("records", LINE_NUMBERS, changes(), count=40)
def test_a_record_with_changed_fields_is_read_or_refused(number: int, edits: list[Change]) -> None:
    line = json_of(changed(RECORD_TREES[number], edits))
    with directory() as place:
        (place / HEADER).write_bytes(HEADER_BYTES)
        (place / RECORDS).write_bytes(line + b"\n" + RECORD_LINES[0])
        with refused(ConfigurationError):
            assert len(read_run(place).records) == 2


def json_of(tree: Any) -> bytes:
    try:
        return msgspec.json.encode(tree)
    except UnicodeEncodeError:
        return b"{}"


# TOML

NO_FLAGS: dict[str, dict[str, Any]] = defaultdict(dict)
EXPERIMENTS = studies.directory()
PLANS = [(EXPERIMENTS / f"{name}.toml").read_bytes() for name in ("demo", "demo_live")]
PLAN_TABLES = [tomllib.loads(raw.decode()) for raw in PLANS]
WORDS = [
    "fmb",
    "amb",
    "sgd",
    "sgd:0.1:2:3",
    "crash:1:30",
    "digits",
    "cifar10",
    "none.py:Mine",
    "a\0b.py:Mine",
    "a\0.toml",
]
TOML_VALUES = PLAIN | st.sampled_from([*WORDS, "x" * 5000 + ".py:Mine", 0x10**DIGITS, -1, 0, 1.5, [[]], {"name": [1]}])
TOML_CHANGES = changes(TOML_VALUES)


def written(tree: Any) -> bytes:
    """As TOML, which has no null; what is no table is put into one."""
    table = _without_null(tree)
    text: str = tomli_w.dumps(table if isinstance(table, dict) else {"x": table})
    return text.encode("utf-8", errors="replace")


def _without_null(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _without_null(inner) for key, inner in tree.items()}
    if isinstance(tree, list | tuple):
        return [_without_null(inner) for inner in tree]
    if isinstance(tree, int) and abs(tree) >= 1 << 64:
        return _Hexadecimal(tree)
    return "none" if tree is None else tree


class _Hexadecimal(int):
    """An integer that is too long for decimal digits."""

    def __str__(self) -> str:
        return hex(self)


def check_plan_file(raw: bytes) -> None:
    """What the command line does with an experiment file before the first run."""
    with directory() as place:
        (place / "plan.toml").write_bytes(raw)
        with refused(ConfigurationError):
            plan = plan_from_file(str(place / "plan.toml"), NO_FLAGS)
            assert Plan.from_plain(plan.to_plain(), "again") == plan
        with refused(ConfigurationError):
            Plan.from_file(place / "plan.toml")


@malformed(
    "toml",
    st.sampled_from([0, 1]),
    EDITS,
    count=30,
    examples=[
        (0, [("insert", 0, 0, b"x=" + b"[" * DEEP)]),
        (1, [("insert", PLANS[1].index(b'"fmb"') + 1, 0, b"[" * DEEP)]),
        (0, [("insert", 0, 0, b"until=" + b"9" * DIGITS)]),
        (0, [("insert", 0, 0, b"until=0x" + b"9" * DIGITS + b"\n")]),
    ],
)
def test_a_damaged_experiment_file_is_read_or_refused(number: int, edits: list[Edit]) -> None:
    check_plan_file(edited(PLANS[number], edits, PLANS[1 - number]))


NO_TABLE = {"workload": "digits", "strategy": "fmb"}


@malformed(
    "toml",
    st.sampled_from(range(len(PLAN_TABLES))),
    TOML_CHANGES,
    count=60,
    examples=[
        (0, [(0, "replace", {**NO_TABLE, "strategy": {"name": [1]}})]),
        (0, [(0, "replace", {**NO_TABLE, "strategy": 3})]),
        (0, [(0, "replace", {**NO_TABLE, "strategy": "a\0b.py:Mine"})]),
        (0, [(0, "replace", {**NO_TABLE, "strategy": "x" * 5000 + ".py:Mine"})]),
        (0, [(0, "replace", {**NO_TABLE, "strategy": {"name": "fmb", "label": 3}})]),
        (0, [(0, "replace", {**NO_TABLE, "workload": {"name": [1]}})]),
        (0, [(0, "replace", {**NO_TABLE, "seeds": 10**15})]),
        (0, [(0, "replace", {**NO_TABLE, "cluster": "a\0.toml"})]),
        (0, [(0, "replace", {**NO_TABLE, "cluster": "x" * 5000})]),
    ],
)
def test_an_experiment_with_changed_entries_is_read_or_refused(number: int, edits: list[Change]) -> None:
    check_plan_file(written(changed(PLAN_TABLES[number], edits)))


MEMBERS = [*((Strategy, name) for name in Strategy.members), *((NamedWorkload, name) for name in NamedWorkload.members)]


@malformed("toml", st.integers(0, len(MEMBERS) - 1), TOML_CHANGES, count=40)
def test_the_changed_settings_of_any_strategy_or_workload_are_read_or_refused(number: int, edits: list[Change]) -> None:
    """What is read can be written, and is the same when it is read again."""
    family, name = MEMBERS[number]
    table = to_plain(family.members[name]())
    with refused(ConfigurationError):
        read = from_plain(family, changed(table, edits), "a table")
        assert from_plain(family, to_plain(read), "again") == read


CLUSTERS = [to_plain(cluster) for cluster in PRESETS.values()] + [
    {"straggle": "lognormal:0.5", "faults": ["crash:1:30", "partition:1+2:30:10"], "factors": [4.0, 2.0]},
]


@malformed("toml", st.integers(0, len(CLUSTERS) - 1), TOML_CHANGES, count=30)
def test_the_changed_file_of_a_cluster_is_read_or_refused(number: int, edits: list[Change]) -> None:
    with directory() as place:
        (place / "cluster.toml").write_bytes(written(changed(CLUSTERS[number], edits)))
        with refused(ConfigurationError):
            cluster = load_cluster(str(place / "cluster.toml"))
            assert from_plain(Cluster, to_plain(cluster), "again") == cluster


@malformed("toml", st.lists(st.sampled_from(WORDS) | st.text(max_size=12), min_size=1, max_size=4), count=30)
def test_the_words_of_a_command_are_a_plan_or_are_refused(words: list[str]) -> None:
    with refused(ConfigurationError):
        plan_of(words, NO_FLAGS)


STUDIES = [read_toml(EXPERIMENTS / f"{name}.toml", "study") for name in studies.names()]


@malformed("toml", st.integers(0, len(STUDIES) - 1), TOML_CHANGES, st.sampled_from(studies.SCALES), count=30)
def test_a_study_with_changed_entries_is_read_or_refused(
    number: int, edits: list[Change], scale: studies.Scale
) -> None:
    with directory() as place:
        (place / "study.toml").write_bytes(written(changed(STUDIES[number], edits)))
        with refused(ConfigurationError):
            studies.load_study(str(place / "study.toml"), scale)
        with refused(ConfigurationError):
            read_settings(place / "study.toml")
