"""The command line. `main` turns every outcome into an exit code and every error into one sentence.

0 done · 1 the run failed · 2 the command was wrong · 130 interrupted · 141 nobody reads the output any more

A command is imported when it is called, since deriving its flags takes all strategies, workloads and torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import cyclopts

from offbeat.cli.output import console
from offbeat.errors import ConfigurationError, OffbeatError, unknown
from offbeat.version import __version__

HELP = """Train one model on many machines without making the fast ones wait.

Try:  offbeat simulate digits fmb amb async-timed --straggle niagara"""

COMMANDS = {
    "simulate": (
        """Run strategies on a workload in virtual time, and compare them.

        Gradients are real and time is virtual: nobody waits for a simulated machine, and the same seed always gives
        the same records. 'offbeat strategies' and 'offbeat workloads' list what there is.""",
        "experiment_commands:simulate",
    ),
    "train": (
        """Train on real processes of this machine, and of others that join.

        Takes what 'offbeat simulate' takes, and gives the same records, table and page. Workers on other machines
        join with 'offbeat work'.""",
        "train_command:train",
    ),
    "compare": (
        """Run what an experiment file describes, and compare.

        What is given here takes the place of what the file says. Every 'offbeat simulate' writes such a file,
        experiment.toml, beside its runs.""",
        "experiment_commands:compare",
    ),
    "calibrate": (
        """Measure how fast these machines are at a workload, and write the cluster file that 'simulate' takes.

        Hub and workers run as in 'offbeat train', for a second or two at a time. Workers on other machines join with
        'offbeat work'.""",
        "measurement_commands:calibrate",
    ),
    "launch": (
        """Start a script of your own that uses offbeat.join in several processes, and look after them.

        What comes after the script goes to the script.""",
        "launch_commands:launch",
    ),
    "work": (
        """Join a run on another machine as one more worker, at any time; Ctrl-C leaves it.

        The run says what is trained, unless that is a script: then name it here as well.""",
        "launch_commands:work",
    ),
    "network": (
        """Measure the network between some processes: bandwidth and latency of each pair, ring, all-to-all and star.

        Every block carries markers and a checksum, which are verified on receipt. Under mpirun, torchrun or srun leave
        out -n.""",
        "network_command:network",
    ),
    "topology": (
        """What follows from the shape of a graph that peers gossip on: the constants of acceleration, and a drawing.

        GRAPH is complete, cycle, exponential or star, or a text file with one pair of ranks a line.""",
        "topology_command:topology",
    ),
    "microbatch": (
        """Measure how long micro-batches of several sizes take for a workload on this machine, and recommend one.

        The code is that of live runs, in one thread. The knee is the smallest size whose time per sample is within 5%
        of the best.""",
        "measurement_commands:microbatch",
    ),
    "reproduce": (
        """Run a published result again: its runs, its figure, a table with intervals, and what was published.

        'offbeat reproduce --list' shows what there is. Sizes are those of a small machine, unless --scale full is
        given.""",
        "reproduce_command:reproduce",
    ),
    "report": ("Draw the page about runs: table, curves, who computed and who waited.", "record_commands:report"),
    "replay": (
        """Run a recorded run again and see whether it is the same; or repeat a test from its seed.

        The same bytes are promised on the same machine with the same build of torch.""",
        "record_commands:replay",
    ),
    "strategies": ("What strategies there are, or the fields of one.", "list_commands:strategies"),
    "workloads": ("What workloads there are, or the fields of one.", "list_commands:workloads"),
    "clusters": ("What clusters have a name, or what one of them holds.", "list_commands:clusters"),
    "data": (
        """Get real data sets, see which are here, and where.

        They are fetched and decoded once; all runs share the arrays, and every use checks them.""",
        "data_command:data",
    ),
}


WORDS_BEFORE_SCRIPT = {"launch": 0, "work": 1}
"""For commands that run a script: how many words come before its name. All that follows it is the script's own."""
SWITCHES = ("--help", "-h", "--version", "--overwrite", "--quiet")
"""Options of these commands that take no value."""


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    return exit_code_of(lambda: _call(sys.argv[1:] if argv is None else argv))


def exit_code_of(call: Callable[[], int]) -> int:
    """Call, and turn what goes wrong into one sentence and an exit code."""
    try:
        code = call()
        sys.stdout.flush()
    except cyclopts.CycloptsError as error:
        return _print_error(_sentence(error), 2)
    except ConfigurationError as error:
        return _print_error(error, 2)
    except OffbeatError as error:
        return _print_error(error, 1)
    except KeyboardInterrupt as interrupt:
        return _print_error(f"interrupted{f'; {interrupt}' if interrupt.args else ''}", 130)
    except BrokenPipeError:
        # What is still buffered would be complained about when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return code


def _call(argv: list[str]) -> int:

    result = application()(_separate_script(argv), console=console())
    return result if isinstance(result, int) else 0


def _separate_script(argv: list[str]) -> list[str]:
    """The same with `--` before the script, so that its options are not taken for ours."""
    words = WORDS_BEFORE_SCRIPT.get(argv[0]) if argv else None
    index = 1
    while words is not None and index < len(argv) and argv[index] != "--":
        if argv[index].startswith("-"):
            index += 1 if argv[index] in SWITCHES or "=" in argv[index] else 2
        elif words:
            words, index = words - 1, index + 1
        else:
            return [*argv[:index], "--", *argv[index:]]
    return argv


def application() -> cyclopts.App:
    """The commands, none of them imported yet."""
    app = cyclopts.App(
        name="offbeat",
        help=HELP,
        version=__version__,
        help_format="plaintext",
        print_error=False,
        exit_on_error=False,
        result_action="return_value",
        suppress_keyboard_interrupt=False,
    )
    for order, (name, (text, place)) in enumerate(COMMANDS.items()):
        app.command(
            f"offbeat.cli.{place}",
            name=name,
            help=_unwrap(text),
            sort_key=order,
            usage=f"Usage: {USAGES[name]}",
        )
    return app


def _unwrap(text: str) -> str:
    """Paragraphs without the line breaks of the source, so that they fill the terminal."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


USAGES = {
    "simulate": "offbeat simulate WORKLOAD STRATEGY... [NAME.FIELD=VALUE ...] [OPTIONS]",
    "train": "offbeat train WORKLOAD STRATEGY... [OPTIONS]  |  offbeat train FILE.toml  |  offbeat train --resume RUN",
    "compare": "offbeat compare EXPERIMENT.toml [OPTIONS]",
    "calibrate": "offbeat calibrate WORKLOAD [--workers N] [--seconds S] [--out FILE.toml] [OPTIONS]",
    "launch": "offbeat launch -n N [OPTIONS] SCRIPT.py [ARGUMENTS...]",
    "work": "offbeat work HOST:PORT --token-file FILE [OPTIONS] [SCRIPT.py ARGUMENTS...]",
    "network": "offbeat network -n N [OPTIONS]  |  offbeat network HOST:PORT --token-file FILE",
    "topology": "offbeat topology GRAPH [-n PEERS] [--rate RATE] [--plot FILE.png] [--json]",
    "microbatch": "offbeat microbatch WORKLOAD [--batch N] [--sizes N,N,...] [--seconds S] [--plot FILE] [--json]",
    "reproduce": "offbeat reproduce NAME [OPTIONS]  |  offbeat reproduce --list  |  offbeat reproduce --redraw PLACE",
    "report": "offbeat report RUN... [--out PAGE.html] [--baseline LABEL] [--figures DIR]",
    "replay": "offbeat replay RUN  |  offbeat replay STRATEGY --seed N [--trace] [--no-faults]",
    "strategies": "offbeat strategies [NAME] [--json]",
    "workloads": "offbeat workloads [NAME] [--counts] [--json]",
    "clusters": "offbeat clusters [NAME] [--json]",
    "data": "offbeat data get NAME... [--source WHO] [--from PATH]  |  offbeat data list  |  offbeat data path [NAME]",
}


def _print_error(what: object, code: int) -> int:
    print(f"offbeat: {' '.join(str(what).split())}", file=sys.stderr)
    return code


def _sentence(error: cyclopts.CycloptsError) -> object:
    """What is wrong with the command, in our words."""
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


def _unknown_option(given: str, error: cyclopts.UnknownOptionError, see: str) -> object:
    names = [name for argument in error.argument_collection for name in argument.names if name.startswith("--")]
    # Past ten, a list of all of them is no help; the nearest one is, and the help page.
    answer = str(unknown("option", given, names))
    return answer if "did you mean" in answer or len(names) <= 10 else f"unknown option {given!r}; {see}"
