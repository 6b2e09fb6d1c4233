"""Names and prose stay those of the field: words that were given up do not come back."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src/offbeat"

RETIRED_NAMES = frozenset(
    re.findall(
        r"\w+",
        """
        Agreement Assembly AskCopy Centre Centred Copied Desk Disturbance Door Draws Enough Follower Happening Induced
        Learner Lend Lent Manner Merger NoAnswer NoStraggle Participant Pulse Roster Seat Setup Stewards Straggle
        Stretch Switch Takeover Tally Terms Together Troubles TurnedAway Whereabouts accompany agreement ask_terms
        assembly be_rank beta1 beta2 conveyed desk door doors epsilon essential heed_end keeps_replicas looks_back
        manner may_grow open_door parted_by prove pulse seat stewards suited taking_part told troubles unbroken
        whereabouts
        """,
    )
)
"""Identifiers that were replaced; the glossary has the words in use."""

PERSONS = re.compile(r"\b(?:somebody|nobody|whoever|whom|everybody|anybody)\b", re.IGNORECASE)
"""Processes are not persons: "late gradients are dropped", not "whoever comes late is dropped"."""

GLOSSARY_TERMS_MAX = 40


def python_files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def tokens(path: Path) -> Iterator[tokenize.TokenInfo]:
    return tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)


def offences(path: Path) -> list[str]:
    """Retired identifiers, and persons in comments and strings, with their lines."""
    lines = []
    for token in tokens(path):
        if token.type == tokenize.NAME and token.string in RETIRED_NAMES:
            lines.append(f"{path.relative_to(ROOT)}:{token.start[0]} {token.string}")
        elif token.type in (tokenize.STRING, tokenize.COMMENT):
            for word in PERSONS.findall(token.string):
                lines.append(f"{path.relative_to(ROOT)}:{token.start[0]} {word}")
    return lines


def test_no_retired_word_is_in_the_package() -> None:
    assert [line for path in python_files() for line in offences(path)] == []


def test_a_retired_word_would_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    path = tmp_path / "old.py"
    path.write_text('class Desk:\n    """Whoever comes is told where to sit."""\n')
    assert offences(path) == ["old.py:1 Desk", "old.py:2 Whoever"]


@pytest.mark.parametrize("folder", ["bench", "docs", "examples", "."])
def test_processes_are_not_persons_in_documents_and_scripts(folder: str) -> None:
    lines = []
    for path in sorted([*(ROOT / folder).glob("*.md"), *(ROOT / folder).glob("*.py")]):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            lines += [f"{path.relative_to(ROOT)}:{number} {word}" for word in PERSONS.findall(line)]
    assert lines == []


def test_no_two_classes_have_one_name() -> None:
    homes: dict[str, list[str]] = {}
    for path in python_files():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(str(path.relative_to(SOURCE)))
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}


def test_no_two_modules_have_one_name() -> None:
    """The public namespaces in `api` bear the names of what they collect."""
    homes: dict[str, list[str]] = {}
    for path in python_files():
        if path.stem not in ("__init__", "__main__") and path.parent.name != "api":
            homes.setdefault(path.stem, []).append(str(path.relative_to(SOURCE)))
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}


def test_no_module_has_a_retired_name() -> None:
    names = {part for path in python_files() for part in path.relative_to(SOURCE).with_suffix("").parts}
    assert names & {*RETIRED_NAMES, "centre", "engines", "follower", "learner", "mail", "probing", "public"} == set()


@pytest.mark.parametrize("document", sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]), ids=lambda path: path.name)
def test_no_document_names_what_was_renamed(document: Path) -> None:
    quoted = re.findall(r"`([A-Za-z_]\w*)(?:\(\))?`", document.read_text(encoding="utf-8"))
    assert set(quoted) & RETIRED_NAMES == set()


def test_the_glossary_is_short_and_sorted() -> None:
    rows = re.findall(
        r"^\| ([^|]+) \| [^|]+ \|$", (ROOT / "docs/glossary.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    terms = [row for row in rows if row != "term"]
    assert 20 < len(terms) <= GLOSSARY_TERMS_MAX
    assert terms == sorted(set(terms))
