"""Gradients with a time limit, in one process:

    python examples/anytime_single.py --seconds 0.02

Every update takes the same time, and has as many samples as can be computed in it. When other processes use the CPU,
batches become smaller; updates do not become later.
"""

import argparse
import time

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import offbeat as ob


def main() -> None:
    arguments = argparse.ArgumentParser(description="Train on digits with a time limit per gradient.")
    arguments.add_argument("--seconds", type=float, default=0.02, help="time for each gradient")
    arguments.add_argument("--updates", type=int, default=60, help="updates to make")
    given = arguments.parse_args()

    torch.set_num_threads(1)
    digits = load_digits()
    inputs, targets = torch.tensor(digits.data / 16.0, dtype=torch.float32), torch.tensor(digits.target)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    strategy = ob.AnytimeMinibatch(
        seconds=given.seconds, samples_max=100_000, microbatch=32, optimizer=ob.Adam(lr=3e-3)
    )
    began = time.perf_counter()
    with ob.join(model, strategy, until=ob.Seconds(given.seconds * given.updates)) as run:
        for x, y in run.batches((inputs, targets)):
            run.backward(F.cross_entropy(model(x), y))

    batches = [record.samples for record in run.records.records if isinstance(record, ob.nodes.Update)]
    accuracy = (model(inputs).argmax(1) == targets).float().mean()
    print(f"{len(batches)} updates in {time.perf_counter() - began:.2f} s, accuracy {accuracy:.3f}")
    print(f"samples per update: {min(batches)} to {max(batches)}")


if __name__ == "__main__":
    main()
