"""The state of a module as contiguous vectors: one for parameters, one for gradients, one per dtype for buffers.

Messages, averages and optimizer steps use these flat vectors. `FlatModule` makes the tensors of a module views of them,
so that nothing is gathered or scattered per step. `Layout` maps slices of a vector to tensors without a module: a hub
that does not compute has only the layout.

Where the parameters are bfloat16 or float16, the values that updates are applied to are float32: small updates would be
rounded away otherwise. These *master values* are those of the nodes; the module gets them rounded (`FlatModule.load`).

Frozen parameters (`requires_grad=False`) are not part of the vectors and are never sent; every rank must start with the
same ones, so their values are part of the fingerprint.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from offbeat.core.buffer_merge import RunningStatistics, batch_norm_layers
from offbeat.core.compiled_modules import plain_module, plain_name
from offbeat.core.device_transfer import to_host, wait_for_device
from offbeat.core.messages import Buffers
from offbeat.errors import ConfigurationError, ContractViolation

LOW_PRECISION = (torch.bfloat16, torch.float16)


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of this dtype are added up and updated."""
    return torch.float32 if dtype in LOW_PRECISION else dtype


@dataclass(frozen=True)
class TensorSlice:
    """A named tensor as elements [start, stop) of a flat vector, with its shape and stride."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class BufferGroup:
    """The persistent buffers of one dtype, which share a flat vector."""

    dtype: torch.dtype
    slices: tuple[TensorSlice, ...]

    @property
    def numel(self) -> int:
        return self.slices[-1].stop if self.slices else 0


@dataclass(frozen=True)
class Layout:
    """Which slice of which flat vector is which tensor. It must be equal on all ranks of a run."""

    dtype: torch.dtype
    """That of the parameters of the module."""
    parameters: tuple[TensorSlice, ...]
    buffers: tuple[BufferGroup, ...] = ()
    frozen: str = ""
    """A digest of the names, shapes and values of the parameters that are not trained."""
    statistics: tuple[RunningStatistics, ...] = ()
    """The buffers that are running statistics of batch norm."""

    @property
    def numel(self) -> int:
        """The number of trainable elements."""
        return self.parameters[-1].stop if self.parameters else 0

    @property
    def master_dtype(self) -> torch.dtype:
        """The dtype of the values that updates are applied to, and of sums of gradients."""
        return master_dtype(self.dtype)

    def fingerprint(self) -> str:
        """A digest that is equal if and only if two ranks can exchange flat vectors."""
        parts = self.dtype, self.parameters, self.buffers, self.frozen, self.statistics
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def shaped(self, flat: Tensor) -> list[Tensor]:
        """Views of a flat vector of parameters or gradients, one per parameter."""
        return _views(flat, self.parameters, self.numel)

    def shaped_buffers(self, buffers: Buffers) -> list[Tensor]:
        """Views of flat buffers, one per buffer, group by group."""
        pairs = zip(buffers, self.buffers, strict=True)
        return [view for flat, group in pairs for view in _views(flat, group.slices, group.numel)]


class FlatModule:
    """A module whose trainable parameters, their gradients and its persistent buffers are views of flat tensors.

    The module remains usable as before: `backward` accumulates into `gradients`, batch norm writes into `buffers`, and
    `load_state_dict` into both. Move or convert it to another device or dtype *before* this.
    """

    def __init__(self, module: nn.Module) -> None:
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.module = module
        self.layout = layout = layout_of(module)
        device = trained[0].device
        self.parameters = torch.empty(layout.numel, dtype=layout.dtype, device=device)
        self.gradients = torch.zeros_like(self.parameters)
        self._buffers = tuple(torch.empty(group.numel, dtype=group.dtype, device=device) for group in layout.buffers)
        _rebind(trained, layout.shaped(self.parameters))
        self._trained = list(zip(trained, layout.shaped(self.gradients), layout.shaped(self.parameters), strict=True))
        refs = list(_persistent_buffers(module))
        self._buffer_refs = [ref for group in layout.buffers for ref in refs if ref.tensor.dtype == group.dtype]
        _rebind([ref.tensor for ref in self._buffer_refs], layout.shaped_buffers(self._buffers))
        self.bind_gradients()

    @property
    def buffers(self) -> Buffers:
        """The flat buffers, one per dtype."""
        # A module may assign a new tensor to a buffer instead of writing in place: copy it, and restore the view.
        for ref in self._buffer_refs:
            current = ref.owner._buffers.get(ref.key)
            if current is not None and current is not ref.tensor:
                ref.tensor.copy_(current)
                ref.owner._buffers[ref.key] = ref.tensor
        return self._buffers

    def initial_values(self) -> tuple[Tensor, Buffers]:
        """Copies of the parameters, as master values, and of the buffers: those that the nodes of a run begin with."""
        parameters = self.parameters.to(self.layout.master_dtype, copy=True)
        return parameters, tuple(buffer.clone() for buffer in self.buffers)

    def check_in_place(self) -> None:
        """Raise ConfigurationError if the parameters of the module are no longer views of the flat vector."""
        for parameter, _, view in self._trained:
            if parameter.data_ptr() != view.data_ptr():
                raise ConfigurationError(
                    "the module was moved, converted or passed to offbeat again after offbeat had started to train it, "
                    "so its parameters are no longer the ones that are trained; call module.to(...) before, not after"
                )

    def bind_gradients(self) -> None:
        """Make every `.grad` a view of `gradients` again, for example after `module.zero_grad()` has set it to None."""
        self.check_in_place()
        for parameter, gradient, _ in self._trained:
            if parameter.grad is not gradient:
                parameter.grad = gradient

    def zero_gradients(self) -> None:
        """Set all gradients to zero, in place."""
        self.gradients.zero_()
        self.bind_gradients()

    def replace_gradients(self, memory: Tensor) -> Tensor:
        """Let gradients accumulate in this memory, whose values are not changed; returns the vector from before."""
        _check_flat(memory, self.layout.numel)
        before, self.gradients = self.gradients, memory
        views = self.layout.shaped(memory)
        self._trained = [(one, view, values) for (one, _, values), view in zip(self._trained, views, strict=True)]
        self.bind_gradients()
        return before

    def load(self, parameters: Tensor, buffers: Buffers) -> None:
        """Copy values into the module, in place; master values are rounded to its dtype."""
        _check_flat(parameters, self.layout.numel)
        self.parameters.copy_(parameters)
        for mine, theirs in zip(self.buffers, buffers, strict=True):
            _check_flat(theirs, mine.numel())
            mine.copy_(theirs)
        # A loop inside `torch.autocast` would compute with copies of the values from before.
        torch.clear_autocast_cache()
        wait_for_device(self.parameters)  # the loop may compute in another stream than this thread


def layout_of(module: nn.Module) -> Layout:
    """The layout of a module, which is not changed.

    Raises ConfigurationError if its parameters cannot be one flat vector.
    """
    module = plain_module(module)
    named = [(plain_name(name), parameter) for name, parameter in module.named_parameters()]
    for name, parameter in named:
        if isinstance(parameter, nn.UninitializedParameter):
            raise ConfigurationError(
                f"parameter {name} of {type(module).__name__} has no shape yet, but a fixed one is needed; "
                "run one batch through the module first: module(batch)"
            )
    trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    refs = list(_persistent_buffers(module))
    _check_trainable(module, trained, [ref.tensor for ref in refs])
    groups: dict[torch.dtype, list[tuple[str, Tensor]]] = {}
    for ref in refs:
        groups.setdefault(ref.tensor.dtype, []).append((ref.name, ref.tensor))
    buffers = tuple(BufferGroup(dtype, _slices(members)) for dtype, members in groups.items())
    return Layout(
        dtype=trained[0][1].dtype,
        parameters=_slices(trained),
        buffers=buffers,
        frozen=_digest((name, parameter) for name, parameter in named if not parameter.requires_grad),
        statistics=_statistics(module, buffers),
    )


def _statistics(module: nn.Module, buffers: tuple[BufferGroup, ...]) -> tuple[RunningStatistics, ...]:
    """The running statistics among these buffers."""
    places = {part.name: (index, part.start, part.stop) for index, group in enumerate(buffers) for part in group.slices}
    found = []
    for name, layer in batch_norm_layers(module).items():
        prefix = f"{plain_name(name)}." if plain_name(name) else ""
        mean, variance = places[f"{prefix}running_mean"], places[f"{prefix}running_var"]
        counter = places[f"{prefix}num_batches_tracked"]
        found.append(RunningStatistics(mean[0], (mean[1:], variance[1:]), *counter[:2], layer.momentum))
    return tuple(found)


def is_finite(vector: Tensor) -> bool:
    """Whether every element is finite. A finite sum implies it, at a fraction of the cost."""
    return math.isfinite(float(vector.sum())) or bool(torch.isfinite(vector).all())


class _BufferRef(NamedTuple):
    """A buffer, and the module that it is registered in."""

    name: str
    owner: nn.Module
    key: str
    tensor: Tensor


def _persistent_buffers(module: nn.Module) -> Iterator[_BufferRef]:
    seen: set[int] = set()
    for prefix, owner in module.named_modules():
        for key, tensor in owner._buffers.items():
            if tensor is None or key in owner._non_persistent_buffers_set or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            yield _BufferRef(plain_name(f"{prefix}.{key}" if prefix else key), owner, key, tensor)


def _check_trainable(module: nn.Module, trained: Sequence[tuple[str, Tensor]], buffers: Sequence[Tensor]) -> None:
    kind = type(module).__name__
    if not trained:
        raise ConfigurationError(
            f"{kind} has no trainable parameters, but at least one is needed; "
            "type module.requires_grad_(True), or set it for the layers to train"
        )
    first = {parameter.dtype: name for name, parameter in reversed(trained)}
    if len(first) > 1:
        listed = ", ".join(f"{str(dtype).removeprefix('torch.')} ({name})" for dtype, name in reversed(first.items()))
        raise ConfigurationError(
            f"the trainable parameters of {kind} have several dtypes: {listed}, but one is expected; "
            f"type module.to({trained[0][1].dtype}), or freeze the others with requires_grad_(False)"
        )
    devices = {str(tensor.device) for tensor in itertools.chain((p for _, p in trained), buffers)}
    if len(devices) > 1:
        raise ConfigurationError(
            f"the trainable parameters and buffers of {kind} are on several devices: {', '.join(sorted(devices))}, "
            f"but one is expected; type module.to({str(trained[0][1].device)!r})"
        )


def _slices(named: Iterable[tuple[str, Tensor]]) -> tuple[TensorSlice, ...]:
    slices: list[TensorSlice] = []
    start = 0
    for name, tensor in named:
        shape, stop = tuple(tensor.shape), start + tensor.numel()
        # Keep the memory format of a dense tensor, so that channels_last weights stay channels_last.
        stride = tensor.stride() if _is_dense(tensor) else torch.empty(shape, device="meta").stride()
        slices.append(TensorSlice(name, shape, tuple(stride), start, stop))
        start = stop
    return tuple(slices)


def _is_dense(tensor: Tensor) -> bool:
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _views(flat: Tensor, slices: Sequence[TensorSlice], numel: int) -> list[Tensor]:
    _check_flat(flat, numel)
    offset = flat.storage_offset()
    return [flat.as_strided(part.shape, part.stride, offset + part.start) for part in slices]


def _check_flat(flat: Tensor, numel: int) -> None:
    if flat.shape != (numel,) or not flat.is_contiguous():
        raise ContractViolation(
            f"a contiguous vector of {numel} elements was expected, "
            f"but a tensor of shape {tuple(flat.shape)} and stride {flat.stride()} was given"
        )


@torch.no_grad()
def _rebind(tensors: Sequence[Tensor], views: Sequence[Tensor]) -> None:
    for tensor, view in zip(tensors, views, strict=True):
        view.copy_(tensor)
        # Assigning .data keeps the tensor object, and with it tied weights and other references to it.
        tensor.data = view


def _digest(named: Iterable[tuple[str, Tensor]]) -> str:
    digest = hashlib.sha256()
    for name, tensor in named:
        digest.update(repr((name, tuple(tensor.shape), tensor.dtype)).encode())
        digest.update(to_host(tensor.detach()).contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
