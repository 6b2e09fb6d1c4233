"""Threads that handle tensors do not outlive the interpreter: PyTorch would abort the process."""

from __future__ import annotations

import subprocess
import sys

import pytest

FREES_TENSORS_UNTIL_TOLD_TO_END = """
import threading
import torch
from offbeat.transports.tensor_threads import TensorThread

begun, end = threading.Event(), threading.Event()

def run():
    begun.set()
    while not end.is_set():
        torch.ones(10)

TensorThread(run, "frees tensors", finish=end.set).start()
begun.wait()
"""

EVALUATES_AT_EXIT = """
import threading
import time
import torch
from offbeat.core.actions import Evaluate
from offbeat.core.workload import Measured
from offbeat.live.evaluation import Evaluator

begun = threading.Event()

def measure(request):
    begun.set()
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        torch.ones(10)
    return Measured(0.0, 0.0)

evaluator = Evaluator(measure, lambda event: print("delivered"), print, time.monotonic)
evaluator.put(Evaluate(version=1, parameters=torch.zeros(1), buffers={}))
begun.wait()
"""

ENDS_BY_ITSELF_LATER = """
import threading
from offbeat.transports.tensor_threads import TensorThread

main = threading.main_thread()
TensorThread(lambda: (main.join(), print("ended")), "outlives the main thread").start()
"""


@pytest.mark.parametrize(
    ("script", "said"),
    [(FREES_TENSORS_UNTIL_TOLD_TO_END, ""), (EVALUATES_AT_EXIT, "delivered\n"), (ENDS_BY_ITSELF_LATER, "ended\n")],
)
def test_an_exit_waits_for_threads_that_handle_tensors(script: str, said: str) -> None:
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=500, check=False)
    assert (process.returncode, process.stdout, process.stderr) == (0, said, "")
