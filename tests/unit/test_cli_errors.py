"""Every mistake is answered by one sentence on stderr and exit code 2, before anything is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from offbeat.cli import main

RUN = ["simulate", "digits", "fmb"]
MISTAKES = [
    (["simulate", "mnsit", "fmb"], "unknown workload 'mnsit'; did you mean 'mnist'?"),
    (["simulate", "digts", "fmb"], "unknown workload 'digts'; did you mean 'digits'?"),
    (["simulate", "digits", "fnb"], "unknown strategy 'fnb'; did you mean 'fmb'?"),
    (["simulate", "fmb", "digits"], "'fmb' is a strategy, and the workload comes first"),
    (["simulate", "digits", "toy", "fmb"], "'toy' is a workload"),
    (["simulate", "digits"], "no strategy is named; type, for example: offbeat simulate digits fmb amb"),
    (["simulate"], "neither a workload nor a strategy is named"),
    (
        ["simulate", "digits", "async-timed", "--worker-seconds", "-1"],
        "async-timed.worker_seconds must be greater than 0",
    ),
    ([*RUN, "--wrokers", "3"], "unknown option '--wrokers'; did you mean '--workers'?"),
    ([*RUN, "--wrokers=3"], "unknown option '--wrokers'; did you mean '--workers'?"),
    ([*RUN, "--zzzzzz"], "unknown option '--zzzzzz'; see 'offbeat simulate --help'"),
    ([*RUN, "--workers", "0"], "workers must be a whole number of at least 1, but is 0"),
    ([*RUN, "--workers", "three"], "--workers is a whole number, but 'three' was given"),
    ([*RUN, "--workers"], "--workers needs a value"),
    ([*RUN, "--workers", "3", "--workers", "4"], "--workers is given more than once"),
    ([*RUN, "amb.batch=3"], "'amb.batch=3' is for 'amb', but this run has only fmb"),
    ([*RUN, "fnb.batch=3"], "did you mean fmb.batch=3?"),
    ([*RUN, "batch=3"], "write fmb.batch=3 for one, or --batch 3 for all"),
    ([*RUN, "fmb.btach=3"], "unknown field of fmb 'btach'; did you mean 'batch'?"),
    ([*RUN, "fmb.batch=many"], "fmb.batch is a whole number, but 'many' was given"),
    ([*RUN, "fmb.optimizer.momentun=1"], "unknown field of fmb.optimizer 'momentun'"),
    ([*RUN, "--hub-seconds", "2"], "--hub-seconds is not a field of fmb; async-timed has it"),
    ([*RUN, "--noise", "2"], "--noise is not a field of digits; quadratic, linear, toy, toy-fc and toy-conv have it"),
    ([*RUN, "--optimizer.momentum", "0.9"], "not a field of adam; sgd and rmsprop have it; add --optimizer sgd"),
    ([*RUN, "--optimizer", "sdg"], "unknown optimizer 'sdg'; did you mean 'sgd'?"),
    ([*RUN, "--lr", "-1"], "fmb.optimizer.lr must be 0 or more"),
    ([*RUN, "--until", "soon"], "'soon' is neither a number of samples"),
    ([*RUN, "--until", "0"], "--until must be greater than 0, but is 0"),
    ([*RUN, "--straggle", "niagra"], "unknown straggler model 'niagra'; did you mean 'niagara'?"),
    ([*RUN, "--target", "1.5"], "an accuracy to reach is above 0 and at most 1, but is 1.5"),
    ([*RUN, "--target", "speed:1"], "unknown value for target.metric 'speed'"),
    ([*RUN, "--evaluate", "sometimes"], "unknown cadence 'sometimes'"),
    ([*RUN, "--cluster", "nope"], "unknown cluster 'nope'"),
    ([*RUN, "--cluster", "nope.toml"], "the cluster file nope.toml cannot be read: no such file"),
    ([*RUN, "--factors", "1,x"], "--factors[1] is a number, but 'x' was given"),
    ([*RUN, "--faults", "crash:99:30"], "the fault 'crash' names rank 99"),
    ([*RUN, "--link.latency-seconds", "-1"], "--link.latency-seconds must be 0 or more"),
    ([*RUN, "--seeds", "0"], "--seeds is how many seeds to run, at least 1, but 0 was given"),
    ([*RUN, "--seed", "-1"], "a seed is 0 or more, but -1 was given"),
    ([*RUN, "--seeds", "2,2"], "seed 2 is named more than once"),
    ([*RUN, "--seed", "1", "--seeds", "2"], "--seed and --seeds exclude each other"),
    ([*RUN, "--baseline", "apam"], "unknown baseline 'apam'"),
    (["simulate", "none.py:Mine", "fmb"], "there is no Python file 'none.py'"),
    (["simualte"], "unknown command 'simualte'; did you mean 'simulate'?"),
    (["compare"], "offbeat compare needs EXPERIMENT"),
    (["compare", "none.toml"], "the experiment file none.toml cannot be read: no such file or directory"),
    (["report"], "no run is named"),
    (["report", "/nowhere"], "there is no run at /nowhere"),
    (["replay", "/nowhere"], "/nowhere is not a run directory"),
    (["replay", "amb"], "type: offbeat replay amb --seed 0"),
    (["replay", "amb", "--seed", "x"], "--seed is a whole number, but 'x' was given"),
    (["replay", "abm", "--seed", "1"], "unknown strategy 'abm'; did you mean 'amb'?"),
    (["strategies", "abm"], "unknown strategy 'abm'; did you mean 'amb'?"),
    (["strategies", "amb", "fmb"], "'fmb' is one word too many"),
    (["clusters", "niagra"], "unknown cluster 'niagra'; did you mean 'niagara'?"),
]
FILES = [
    ('workload = "digits"\nworkers = [', "is not TOML"),
    ('workload = "digits"\nstrategy = "fmb"\nwrokers = 3', "unknown key in e.toml 'wrokers'; did you mean 'workers'?"),
    ('workload = "digits"\n[[strategy]]\nname = "fmb"\nbtach = 3', "'btach'; did you mean 'batch'?"),
    ('workload = "digits"\nstrategy = "fmb"\n[cluster]\nstragle = "cedar"', "'stragle'; did you mean 'straggle'?"),
    ('workload = "digits"\nstrategy = ["fnb"]', "'fnb'; did you mean 'fmb'?"),
    ('workload = "digits"\nstrategy = [5]', "a strategy is a name or a table, but 5 was given"),
    ('workload = "digits"\nstrategy = [{name = "fmb", label = 3}]', "a label is a word, but 3 was given"),
    ('workload = "digits"', "names no strategy"),
    ('strategy = "fmb"', "names no workload"),
    ('workload = "digits"\nstrategy = "fmb"\nseeds = [-1]', "a seed is 0 or more, but -1 was given"),
    ('workload = "digits"\nstrategy = "fmb"\nseeds = 0', "there is no seed to run"),
    (
        'workload = "digits"\nstrategy = [{name = "fmb", label = "a b"}, {name = "amb", label = "a-b"}]',
        "the labels 'a b' and 'a-b' would share the directory",
    ),
]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def assert_one_sentence(argv: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("offbeat: ")
    assert said.err.count("\n") == 1
    assert sentence in said.err
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("argv", "sentence"), MISTAKES, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_a_mistake_in_a_command_is_answered_by_one_sentence(
    argv: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_one_sentence(argv, sentence, capsys)


@pytest.mark.parametrize(("text", "sentence"), FILES)
def test_a_mistake_in_an_experiment_file_is_answered_by_one_sentence(
    text: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("e.toml").write_text(text)
    assert_one_sentence(["compare", "e.toml"], sentence, capsys)


def test_a_place_that_holds_runs_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["simulate", "quadratic", "fmb", "--until", "1000", "--no-report", "--quiet", "--out", "o"]
    assert main(argv) == 0
    capsys.readouterr()
    assert_one_sentence(argv, "o already holds 1 run; add --overwrite to replace them, or name another place", capsys)


def test_a_place_that_is_a_file_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    Path("o").write_text("")
    assert_one_sentence(["simulate", "quadratic", "fmb", "--out", "o"], "cannot use o for records", capsys)


def test_a_file_of_ones_own_that_is_broken_or_holds_something_else(capsys: pytest.CaptureFixture[str]) -> None:
    Path("broken.py").write_text("import nothing_of_this_name\n")
    Path("empty.py").write_text("class Mine: pass\n")
    assert_one_sentence(
        ["simulate", "broken.py:Mine", "fmb"], "broken.py cannot be loaded: ModuleNotFoundError", capsys
    )
    assert_one_sentence(["simulate", "digits", "empty.py:Mine"], "unknown strategy in empty.py 'Mine'", capsys)
