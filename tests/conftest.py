"""One thread everywhere: sums, and so bytes, depend on how many share them. Ctrl-C works wherever this is started."""

import signal
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
signal.signal(
    signal.SIGINT, signal.default_int_handler
)  # ignored in the background of a shell, and children inherit that
settings.register_profile("offbeat", deadline=None)  # how long an example takes is the machine's business
settings.load_profile("offbeat")
for folder in ("live", "unit"):
    sys.path.insert(0, str(Path(__file__).parent / folder))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What cannot be tested on this machine is said, in one line."""
    from namespaces import why_not

    reason = why_not()
    if reason is not None:
        terminalreporter.write_line(f"left out: the test with two hosts in network namespaces; {reason}")
