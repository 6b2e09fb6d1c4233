"""A loop with Hugging Face's accelerate. The two lines of offbeat are marked.

python examples/integrations/accelerate_loop.py                        one process
offbeat launch -n 2 examples/integrations/accelerate_loop.py           two, which average every 8 steps
torchrun --nproc-per-node 2 examples/integrations/accelerate_loop.py   the same, started as before
"""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat as ob

EPOCHS = 12


def main() -> None:
    torch.set_num_threads(1)  # several processes share this machine
    torch.manual_seed(0)
    digits = load_digits()
    inputs, targets = torch.tensor(digits.data / 16.0, dtype=torch.float32), torch.tensor(digits.target)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    peer = ob.AsyncDataParallel(  # offbeat
        model, torch.optim.Adam(model.parameters(), lr=2e-3), strategy=ob.LocalSGD(every=8)
    )
    loader = DataLoader(peer.shard(TensorDataset(inputs[:1437], targets[:1437])), batch_size=32, shuffle=True)
    optimizer = peer.optimizer  # offbeat: before Accelerator, which would read the variables of torchrun
    accelerator = Accelerator(cpu=True)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(EPOCHS):
        for x, y in loader:
            with accelerator.accumulate(prepared):
                accelerator.backward(F.cross_entropy(prepared(x), y))
                optimizer.step()
                optimizer.zero_grad()
    peer.close()
    if peer.rank == 0:
        with torch.no_grad():
            accuracy = (model(inputs[1437:]).argmax(1) == targets[1437:]).float().mean()
        print(f"accuracy {float(accuracy):.3f}")


if __name__ == "__main__":
    main()
