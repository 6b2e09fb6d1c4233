"""Hugging Face's Trainer: a small GPT-2, from a configuration, learns to add. The two lines of offbeat are marked.

python examples/integrations/hf_trainer.py                        one process
offbeat launch -n 2 examples/integrations/hf_trainer.py           two, which exchange every 10 steps
torchrun --nproc-per-node 2 examples/integrations/hf_trainer.py   the same, started as before
"""

import itertools
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import offbeat as ob

LENGTH = 12


class Sums(Dataset[dict[str, torch.Tensor]]):
    """Texts such as `17+25=42`, byte by byte."""

    def __init__(self) -> None:
        texts = (f"{one}+{other}={one + other}".ljust(LENGTH) for one, other in itertools.product(range(48), repeat=2))
        self.bytes = torch.tensor([list(text.encode()) for text in texts])

    def __len__(self) -> int:
        return len(self.bytes)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.bytes[index], "labels": self.bytes[index]}


def main() -> None:
    torch.set_num_threads(1)  # several processes share this machine
    torch.manual_seed(0)
    size = {"vocab_size": 128, "n_positions": LENGTH, "n_embd": 64, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    peer = ob.AsyncDataParallel(model, optimizer, strategy=ob.DiLoCo(every=10))  # offbeat
    shared = peer.optimizer  # offbeat: before TrainingArguments, which would read the variables of torchrun
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 150)
    with tempfile.TemporaryDirectory() as directory:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=directory,
                max_steps=120,
                per_device_train_batch_size=32,
                use_cpu=True,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
            ),
            train_dataset=peer.shard(Sums()),
            optimizers=(shared, scheduler),
        )
        trainer.train()
    peer.close()
    if peer.rank == 0:
        model.eval()
        every = Sums().bytes
        with torch.no_grad():
            print(f"loss {float(model(input_ids=every, labels=every).loss):.3f}")


if __name__ == "__main__":
    main()
