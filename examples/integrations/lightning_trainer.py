"""Lightning with automatic optimization. The two lines of offbeat are marked.

python examples/integrations/lightning_trainer.py                        one process
offbeat launch -n 2 examples/integrations/lightning_trainer.py           two, which average with each other
torchrun --nproc-per-node 2 examples/integrations/lightning_trainer.py   the same, started as before
"""

from typing import Any

import lightning
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat as ob


class Classifier(lightning.LightningModule):
    """Recognises digits; the network is a module of its own, which AsyncDataParallel gets."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        optimizer = torch.optim.Adam(self.network.parameters(), lr=2e-3)
        self.peer = ob.AsyncDataParallel(self.network, optimizer)  # offbeat
        self.optimizer = self.peer.optimizer  # before the trainer, which would read the variables of torchrun

    def training_step(self, batch: Any, index: int) -> Tensor:
        inputs, targets = batch
        return F.cross_entropy(self.network(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer  # offbeat


def main() -> None:
    torch.set_num_threads(1)  # several processes share this machine
    torch.manual_seed(0)
    digits = load_digits()
    inputs, targets = torch.tensor(digits.data / 16.0, dtype=torch.float32), torch.tensor(digits.target)
    module = Classifier()
    train = module.peer.shard(TensorDataset(inputs[:1437], targets[:1437]))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(accelerator="cpu", devices=1, max_epochs=12, enable_model_summary=False, **quiet)
    trainer.fit(module, DataLoader(train, batch_size=32, shuffle=True))
    module.peer.close()
    if module.peer.rank == 0:
        with torch.no_grad():
            accuracy = (module.network(inputs[1437:]).argmax(1) == targets[1437:]).float().mean()
        print(f"accuracy {float(accuracy):.3f}")


if __name__ == "__main__":
    main()
