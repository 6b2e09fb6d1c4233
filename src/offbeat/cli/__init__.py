"""The command line. `main` turns every outcome into an exit code and every error into one sentence.

0 done · 1 the run failed · 2 the command was wrong · 130 interrupted · 141 standard output was closed by its reader

Command functions are in the modules `*_command.py` and `*_commands.py`; each is imported when its command is called,
since deriving flags takes all strategies, workloads and torch. Where an option has no help of its own, cyclopts takes
its text from the docstring of the function. May import everything but `api`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import NamedTuple

import cyclopts

from offbeat.cli.output import console
from offbeat.errors import ConfigurationError, OffbeatError, closest, unknown
from offbeat.version import __version__

HELP = """Train one model on many machines without making the fast ones wait.

Try:  offbeat simulate digits fmb amb async-timed --straggle niagara"""


class Command(NamedTuple):
    """One command: where its function is, as `module:function` below `offbeat.cli`, its usage line and its help."""

    function: str
    usage: str
    help: str


COMMANDS = {
    "simulate": Command(
        "experiment_commands:simulate",
        "offbeat simulate WORKLOAD STRATEGY... [NAME.FIELD=VALUE ...] [OPTIONS]",
        """Run strategies on a workload in virtual time, and compare them.

        Gradients are real and time is virtual: a simulated delay costs no time, and the same seed always gives the
        same records. 'offbeat strategies' and 'offbeat workloads' list the names.""",
    ),
    "train": Command(
        "train_command:train",
        "offbeat train WORKLOAD STRATEGY... [OPTIONS]  |  offbeat train FILE.toml  |  offbeat train --resume RUN",
        """Train on real processes of this machine, and of others that join.

        Takes what 'offbeat simulate' takes, and gives the same records, table and page. Workers on other machines
        join with 'offbeat work'.""",
    ),
    "compare": Command(
        "experiment_commands:compare",
        "offbeat compare EXPERIMENT.toml [OPTIONS]",
        """Run the experiments that a TOML file describes, and compare them.

        Options replace what the file sets. Every 'offbeat simulate' writes such a file, experiment.toml, beside its
        runs.""",
    ),
    "calibrate": Command(
        "measurement_commands:calibrate",
        "offbeat calibrate WORKLOAD [--workers N] [--seconds S] [--out FILE.toml] [OPTIONS]",
        """Measure how fast these machines are at a workload, and write the cluster file that 'simulate' takes.

        Hub and workers run as in 'offbeat train', for a second or two at a time. Workers on other machines join with
        'offbeat work'.""",
    ),
    "launch": Command(
        "launch_commands:launch",
        "offbeat launch -n N [OPTIONS] SCRIPT.py [ARGUMENTS...]",
        """Start a script of your own that uses offbeat.join in several processes, and restart those that die.

        Arguments after the script are passed to the script.""",
    ),
    "work": Command(
        "launch_commands:work",
        "offbeat work HOST:PORT --token-file FILE [OPTIONS] [SCRIPT.py ARGUMENTS...]",
        """Join a run on another machine as one more worker, at any time; Ctrl-C leaves it.

        The worker receives the experiment from the run; if the run trains a script, name that script here too.""",
    ),
    "network": Command(
        "network_command:network",
        "offbeat network -n N [OPTIONS]  |  offbeat network HOST:PORT --token-file FILE",
        """Measure the network between some processes: bandwidth and latency of each pair, ring, all-to-all and star.

        Every block carries markers and a checksum, which are verified on receipt. Under mpirun, torchrun or srun leave
        out -n.""",
    ),
    "topology": Command(
        "topology_command:topology",
        "offbeat topology GRAPH [-n PEERS] [--rate RATE] [--plot FILE.png] [--json]",
        """Print the constants of a gossip graph, which determine how fast peers reach consensus, and draw it.

        GRAPH is complete, cycle, exponential or star, or a text file with one pair of ranks a line.""",
    ),
    "microbatch": Command(
        "measurement_commands:microbatch",
        "offbeat microbatch WORKLOAD [--batch N] [--sizes N,N,...] [--seconds S] [--plot FILE] [--json]",
        """Measure how long micro-batches of several sizes take for a workload on this machine, and recommend one.

        The code is that of live runs, in one thread. The knee is the smallest size whose time per sample is within 5%
        of the best.""",
    ),
    "reproduce": Command(
        "reproduce_command:reproduce",
        "offbeat reproduce NAME [OPTIONS]  |  offbeat reproduce --list  |  offbeat reproduce --redraw PLACE",
        """Run a published study again: its runs, its figures, and a table with intervals beside the published result.

        'offbeat reproduce --list' lists the studies. Sizes are those of a small machine, unless --scale full is
        given.""",
    ),
    "report": Command(
        "record_commands:report",
        "offbeat report RUN... [--out PAGE.html] [--baseline LABEL] [--figures DIR]",
        "Draw the page about runs: table, curves, and timelines of computing and waiting.",
    ),
    "sample": Command(
        "sample_command:sample",
        "offbeat sample RUN [--prompt TEXT] [--bytes N] [--temperature T] [--seed N]",
        """Print text by the model of a run on a text.

        The text begins with the prompt; each further byte is drawn from what the model predicts.""",
    ),
    "replay": Command(
        "record_commands:replay",
        "offbeat replay RUN  |  offbeat replay STRATEGY --seed N [--trace] [--no-faults]",
        """Run a recorded run again and compare the records; or repeat a randomised test from its seed.

        Records are byte for byte the same on the same machine with the same build of torch.""",
    ),
    "strategies": Command(
        "list_commands:strategies",
        "offbeat strategies [NAME] [--json]",
        "List the strategies, or the fields of one.",
    ),
    "workloads": Command(
        "list_commands:workloads",
        "offbeat workloads [NAME] [--counts] [--json]",
        "List the workloads, or the fields of one.",
    ),
    "clusters": Command(
        "list_commands:clusters",
        "offbeat clusters [NAME] [--json]",
        "List the named clusters, or print one as TOML.",
    ),
    "data": Command(
        "data_command:data",
        "offbeat data get NAME... [--source WHO] [--from PATH]  |  offbeat data list  |  offbeat data path [NAME]",
        """Download data sets, list them, or print where they are stored.

        They are fetched and decoded once; all runs share the arrays, and every use checks them.""",
    ),
}

ARGUMENTS_BEFORE_SCRIPT = {"launch": 0, "work": 1}
"""For commands that run a script: how many arguments come before its name. All that follow it belong to the script."""
BOOLEAN_FLAGS = ("--help", "-h", "--version", "--overwrite", "--quiet")
"""Options of these commands that take no value."""


def main(argv: list[str] | None = None) -> int:
    """Run one command, by default that of `sys.argv`, and return its exit code."""
    return exit_code_of(lambda: _run_command(sys.argv[1:] if argv is None else argv))


def exit_code_of(call: Callable[[], int], on_error: Callable[[BaseException], bool] = lambda error: False) -> int:
    """Call, and turn an exception into an exit code and one sentence on standard error.

    `on_error` is called with the exception before; nothing is printed if it returns True.
    """
    try:
        code = call()
        sys.stdout.flush()
    except cyclopts.CycloptsError as error:
        return _print_error(_describe_usage_error(error), 2)
    except OffbeatError as error:
        code = 2 if isinstance(error, ConfigurationError) else 1
        return code if on_error(error) else _print_error(error, code)
    except KeyboardInterrupt as interrupt:
        sentence = f"interrupted{f'; {interrupt}' if interrupt.args else ''}"
        return 130 if on_error(interrupt) else _print_error(sentence, 130)
    except BrokenPipeError:
        # Otherwise the interpreter would print an error when it flushes its buffers on exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return code


def _run_command(argv: list[str]) -> int:
    result = application()(_separate_script(argv), console=console())
    return result if isinstance(result, int) else 0


def _separate_script(argv: list[str]) -> list[str]:
    """Insert `--` before the script, so that its options are not parsed as options of the command."""
    remaining = ARGUMENTS_BEFORE_SCRIPT.get(argv[0]) if argv else None
    index = 1
    while remaining is not None and index < len(argv) and argv[index] != "--":
        if argv[index].startswith("-"):
            index += 1 if argv[index] in BOOLEAN_FLAGS or "=" in argv[index] else 2
        elif remaining:
            remaining, index = remaining - 1, index + 1
        else:
            return [*argv[:index], "--", *argv[index:]]
    return argv


def application() -> cyclopts.App:
    """The application with all commands, none of them imported yet."""
    app = cyclopts.App(
        name="offbeat",
        help=HELP,
        version=__version__,
        help_format="plaintext",
        print_error=False,
        exit_on_error=False,
        result_action="return_value",
        suppress_keyboard_interrupt=False,
        default_parameter=cyclopts.Parameter(show_default=False),
    )
    for order, (name, command) in enumerate(COMMANDS.items()):
        # Paragraphs without the line breaks of the source fill the terminal.
        text = "\n\n".join(" ".join(paragraph.split()) for paragraph in command.help.split("\n\n"))
        usage = f"Usage: {command.usage}"
        app.command(f"offbeat.cli.{command.function}", name=name, help=text, sort_key=order, usage=usage)
    return app


def _print_error(error: object, code: int) -> int:
    print(f"offbeat: {' '.join(str(error).split())}", file=sys.stderr)
    return code


def _describe_usage_error(error: cyclopts.CycloptsError) -> object:
    """What is wrong with the command line, in one sentence; the texts of cyclopts have several lines and a frame."""
    command = " ".join(["offbeat", *(error.command_chain or ())])
    see = f"see '{command} --help'"
    if isinstance(error, cyclopts.UnknownCommandError) and error.unused_tokens:
        return unknown("command", error.unused_tokens[0], COMMANDS)
    if isinstance(error, cyclopts.UnknownOptionError):
        return _unknown_option((error.token.keyword or error.token.value).partition("=")[0], error, see)
    if isinstance(error, cyclopts.MissingArgumentError) and error.argument is not None:
        name = error.keyword or error.argument.name
        return f"{name} needs a value; {see}" if name.startswith("-") else f"{command} needs {name}; {see}"
    if isinstance(error, cyclopts.RepeatArgumentError):
        return f"{error.token.keyword} is given more than once; give it once"
    if isinstance(error, cyclopts.UnusedCliTokensError) and error.unused_tokens:
        return f"{error.unused_tokens[0]!r} is one word too many; {see}"
    error.verbose = False
    return f"{str(error).rstrip('.')}; {see}"


def _unknown_option(name: str, error: cyclopts.UnknownOptionError, see: str) -> object:
    known = [name for argument in error.argument_collection for name in argument.names if name.startswith("--")]
    # Of more than ten options the sentence names the nearest one only, or else refers to the help page.
    is_answered = closest(name, known) is not None or len(known) <= 10
    return unknown("option", name, known) if is_answered else f"unknown option {name!r}; {see}"
