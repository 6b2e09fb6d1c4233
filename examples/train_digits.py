"""A custom training loop, with any strategy:

python examples/train_digits.py                               hub and worker in this process
offbeat launch -n 4 examples/train_digits.py --strategy amb   one hub, three workers
torchrun --nproc-per-node 4 examples/train_digits.py          the same, started by torchrun
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import offbeat as ob

STRATEGIES = {
    "fmb": ob.FixedMinibatch(batch=64, optimizer=ob.Adam(lr=3e-3)),
    "amb": ob.AnytimeMinibatch(batch=64, optimizer=ob.Adam(lr=3e-3)),
    "async-fmb": ob.AsyncFixed(batch=32, optimizer=ob.Adam(lr=3e-3)),
    "async-timed": ob.AsyncTimed(worker_seconds=0.004, hub_seconds=0.004, optimizer=ob.Adam(lr=3e-3)),
    "apam": ob.AsyncAdaptive(batch=32, optimizer=ob.AMSGrad(lr=3e-3)),
    "sync-amsgrad": ob.SyncAdaptive(batch=128, optimizer=ob.AMSGrad(lr=3e-3)),
    "k-of-n": ob.BackupWorkers(batch=64, optimizer=ob.Adam(lr=3e-3)),
}


def data() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Images of handwritten digits, 8 × 8, the last fifth of them for testing."""
    digits = load_digits()
    inputs = torch.tensor(digits.data / 16.0, dtype=torch.float32)
    targets = torch.tensor(digits.target)
    return (inputs[:1437], targets[:1437]), (inputs[1437:], targets[1437:])


def main() -> None:
    arguments = argparse.ArgumentParser(description="Train on digits with a strategy of your choice.")
    arguments.add_argument("--strategy", choices=STRATEGIES, default="async-fmb")
    arguments.add_argument("--samples", type=int, default=60_000, help="samples to train on")
    given = arguments.parse_args()

    torch.set_num_threads(1)  # several processes share this machine
    train, (test_inputs, test_targets) = data()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    @torch.no_grad()
    def evaluate(model: nn.Module) -> tuple[float, float]:
        outputs = model(test_inputs)
        accuracy = (outputs.argmax(1) == test_targets).float().mean()
        return float(F.cross_entropy(outputs, test_targets)), float(accuracy)

    strategy = STRATEGIES[given.strategy]
    with ob.join(model, strategy, until=ob.Samples(given.samples), evaluate=evaluate) as run:
        for x, y in run.batches(train):
            run.backward(F.cross_entropy(model(x), y))

    loss, accuracy = evaluate(model)  # every rank's model holds the result
    print(f"rank {run.rank} of {run.processes}: accuracy {accuracy:.3f}, loss {loss:.3f}")
    if run.is_main:
        print(run.summary)


if __name__ == "__main__":
    main()
