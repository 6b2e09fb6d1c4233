"""Every copy between host memory and a device, and every wait for a device; no other file moves tensors.

Where things are, if a model is on a GPU
- on the GPU: the flat vectors of the module, the values that its node updates, and the gradients and steps it is given;
- in host memory: messages on their way, codes of compressed tensors, checkpoints. Transports know nothing else.

Which copies there are
- `to_host`: when a message is encoded (`transports/wire.py`, `strategies/compressed_node.py`), a checkpoint written, or
  a digest computed. It goes through pinned memory, which torch keeps and lends again, so that nothing is allocated
  after the first messages; the copy is complete when it returns.
- `to_device`: when a message has arrived (`live/inbox.py`) or was decoded. Received memory is not pinned, so the copy
  is complete for the host when it returns.
- `state_to_device`: when a run continues from a checkpoint.
- `on_device`: the batches of a workload, for which the stream of the computation waits by itself.

Which waits there are
- Threads of offbeat use the default stream. A training loop may compute in another one, so each side waits for its own
  before the other goes on: `FlatModule.load` ends with `wait_for_device`, and a round ends with `is_result_finite`,
  whose answer the host waits for.

None of this was run on a GPU: the project's machines have none. The tests run what does not need one, with stand-ins
for pinned memory and for the wait.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

HAS_PINNED_MEMORY = ("cuda", "xpu")
"""Types of devices that copy faster to and from pinned memory."""


def to_host(tensor: Tensor) -> Tensor:
    """The tensor in host memory, with the same strides; itself if it is there already."""
    kind = tensor.device.type
    if kind == "cpu":
        return tensor
    if kind not in HAS_PINNED_MEMORY:
        return tensor.cpu()
    staged = pinned_like(tensor)
    staged.copy_(tensor, non_blocking=True)
    wait_for_device(tensor)
    return staged


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on this device; itself if it is there already."""
    return tensor.to(device)


def state_to_device(state: Any, device: torch.device) -> Any:
    """A state of nested dictionaries, lists and tuples with all of its tensors on this device."""
    if isinstance(state, Tensor):
        return to_device(state, device)
    if isinstance(state, dict):
        return {key: state_to_device(value, device) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(state_to_device(value, device) for value in state)
    return state


def on_device(batch: tuple[Tensor, Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """Inputs and targets on this device."""
    inputs, targets = batch
    if inputs.device == device and targets.device == device:
        return batch
    return inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)


def wait_for_device(tensor: Tensor) -> None:
    """Wait until everything that this thread has enqueued on the device of `tensor` is done."""
    if tensor.device.type not in ("cpu", "meta"):
        torch.accelerator.current_stream(tensor.device).synchronize()


def pinned_like(tensor: Tensor) -> Tensor:
    """Uninitialized pinned memory, from torch's cache, for a tensor of this shape."""
    return torch.empty_like(tensor, device="cpu", pin_memory=True)
