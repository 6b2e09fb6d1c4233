"""A script for DistributedDataParallel, changed line by line; `# DDP:` shows the original line.

python examples/from_ddp.py                        one peer
offbeat launch -n 2 examples/from_ddp.py           two peers
torchrun --nproc-per-node 2 examples/from_ddp.py   the same, started as before
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import offbeat as ob  # DDP: import torch.distributed as dist

# DDP: from torch.nn.parallel import DistributedDataParallel

EPOCHS = 20


def data() -> tuple[TensorDataset, TensorDataset]:
    """Images of handwritten digits, 8 × 8, the last fifth of them for testing."""
    digits = load_digits()
    inputs = torch.tensor(digits.data / 16.0, dtype=torch.float32)
    targets = torch.tensor(digits.target)
    return TensorDataset(inputs[:1437], targets[:1437]), TensorDataset(inputs[1437:], targets[1437:])


def main() -> None:
    # DDP: dist.init_process_group("gloo")
    torch.set_num_threads(1)  # several processes share this machine
    train, test = data()
    model = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    peer = ob.AsyncDataParallel(model, optimizer, acid=True)  # DDP: model = DistributedDataParallel(model)
    sampler = DistributedSampler(train, peer.processes, peer.rank)  # DDP: sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=32, sampler=sampler)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            peer.step()  # DDP: optimizer.step()
        scheduler.step()

    peer.close()  # DDP: nothing, every step has waited for all ranks
    if peer.rank == 0:  # DDP: if dist.get_rank() == 0:
        model.eval()
        with torch.no_grad():
            inputs, targets = test.tensors
            outputs = model(inputs)  # DDP: outputs = model.module(inputs)
        accuracy = (outputs.argmax(1) == targets).float().mean()
        print(f"accuracy {accuracy:.3f}")
    # DDP: dist.destroy_process_group()


if __name__ == "__main__":
    main()
