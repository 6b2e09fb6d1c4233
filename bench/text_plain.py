"""A language model by a plain loop and by live runs of two workers, with the same optimizer and as many samples.

    python bench/text_plain.py [--workload shakespeare] [--strategies fmb async-fmb diloco] [--seed 0]

Prints the bits per byte of held-out text that each one ends with. The plain loop is torch alone: one process,
`torch.optim.Adam` with the warm-up of the workload, batches of as many samples as an update of fmb. All strategies
have batches of 16 windows for each worker.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile

import numpy as np
import torch

import offbeat as ob
from offbeat.core.examples import Order
from offbeat.core.schedules import rate_at

WORKERS, BATCH = 2, 16


def plain(name: str, seed: int) -> float:
    """The bits per byte after as many samples as the workload has by default."""
    workload = getattr(ob.workloads, name)().build()
    model, config, until = workload.initial_model(seed), workload.optimizer, workload.until.count
    optimizer = torch.optim.Adam(model.parameters(), betas=config.betas)
    order = Order(np.arange(len(workload.train)), seed, rank=1)
    model.train()
    for first in range(0, until, WORKERS * BATCH):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(config.lr, first)
        text, following = workload.train.drawn(order, first, min(first + WORKERS * BATCH, until))
        optimizer.zero_grad()
        workload.loss(model(text), following).mean().backward()
        optimizer.step()
    return workload.evaluate(model).loss


def live(workload: str, strategy: str, seed: int) -> float:
    """The same by `offbeat train` with two workers."""
    with tempfile.TemporaryDirectory() as directory:
        words = ["train", workload, strategy, f"{strategy}.batch={BATCH}", "--workers", str(WORKERS)]
        words += ["--seed", str(seed), "--out", f"{directory}/run"]
        command = [sys.executable, "-m", "offbeat", *words, "--json", "--no-report"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout)["runs"][0]["loss"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="shakespeare")
    parser.add_argument("--strategies", nargs="*", default=["fmb", "async-fmb", "diloco"])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"plain loop  {plain(options.workload.capitalize(), options.seed):.3f} bits per byte", flush=True)
    for strategy in options.strategies:
        print(f"{strategy:<10}  {live(options.workload, strategy, options.seed):.3f}", flush=True)


if __name__ == "__main__":
    main()
