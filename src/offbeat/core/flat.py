"""A module's state as contiguous vectors: one for parameters, one for gradients, one per dtype for buffers.

Everything that travels, is averaged or is stepped is one flat tensor. `FlatModule` rebinds a module so that its
own tensors are views into those vectors; nothing is gathered or scattered per step. `Layout` says which piece of a
vector is which tensor, and needs no module: a hub that never computes has only the layout.

Frozen parameters (`requires_grad=False`) stay in the module and do not travel; every rank must start with the same
ones, so their values are part of the fingerprint.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from offbeat.core.messages import Buffers
from offbeat.errors import ConfigurationError, ContractViolation


@dataclass(frozen=True)
class TensorSlice:
    """Where one named tensor lies in a flat vector: elements `start` to `stop`, in this shape and order."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class BufferGroup:
    """The persistent buffers of one dtype."""

    dtype: torch.dtype
    slots: tuple[TensorSlice, ...]

    @property
    def numel(self) -> int:
        return self.slots[-1].stop if self.slots else 0


@dataclass(frozen=True)
class Layout:
    """Which piece of which flat vector is which tensor. Equal on all ranks, or they do not train one model."""

    dtype: torch.dtype
    parameters: tuple[TensorSlice, ...]
    buffers: tuple[BufferGroup, ...] = ()
    frozen: str = ""
    """A digest of the names, shapes and values of the parameters that are not trained."""

    @property
    def numel(self) -> int:
        """How many elements are trained."""
        return self.parameters[-1].stop if self.parameters else 0

    def fingerprint(self) -> str:
        """Equal exactly where two ranks can exchange flat vectors."""
        return hashlib.sha256(repr((self.dtype, self.parameters, self.buffers, self.frozen)).encode()).hexdigest()

    def shaped(self, flat: Tensor) -> list[Tensor]:
        """Views of a flat vector of parameters (or gradients), in the order of the slots."""
        return _views(flat, self.parameters, self.numel)

    def shaped_buffers(self, buffers: Buffers) -> list[Tensor]:
        """Views of flat buffers, group after group."""
        pairs = zip(buffers, self.buffers, strict=True)
        return [view for flat, group in pairs for view in _views(flat, group.slots, group.numel)]


class FlatModule:
    """A module whose trainable parameters, their gradients and its persistent buffers are views of flat tensors.

    The module stays an ordinary one: `backward` accumulates into `gradients`, batch norm writes into `buffers`,
    `load_state_dict` writes into both. Move or convert it *before* it is made flat.
    """

    def __init__(self, module: nn.Module) -> None:
        homes = list(_persistent_buffers(module))
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.module = module
        self.layout = layout = layout_of(module)
        device = trained[0].device
        self.parameters = torch.empty(layout.numel, dtype=layout.dtype, device=device)
        self.gradients = torch.zeros_like(self.parameters)
        self._buffers = tuple(torch.empty(group.numel, dtype=group.dtype, device=device) for group in layout.buffers)
        _rebind(trained, layout.shaped(self.parameters))
        self._trained = list(zip(trained, layout.shaped(self.gradients), layout.shaped(self.parameters), strict=True))
        in_groups = [home for group in layout.buffers for home in homes if home.tensor.dtype == group.dtype]
        _rebind([home.tensor for home in in_groups], layout.shaped_buffers(self._buffers))
        self._homes = in_groups
        self.bind_gradients()

    @property
    def buffers(self) -> Buffers:
        """The flat buffers, one per dtype."""
        # A module may assign a new tensor to a buffer where batch norm writes in place; take it back in.
        for home in self._homes:
            current = home.owner._buffers.get(home.key)
            if current is not None and current is not home.tensor:
                home.tensor.copy_(current)
                home.owner._buffers[home.key] = home.tensor
        return self._buffers

    def check_in_place(self) -> None:
        """Refuse a module whose parameters have become other tensors than the views that they were made."""
        for parameter, _, view in self._trained:
            if parameter.data_ptr() != view.data_ptr():
                raise ConfigurationError(
                    "the module was moved, converted or made flat again after offbeat had taken it over, so its "
                    "parameters are no longer the ones that are trained; call module.to(...) before, not after"
                )

    def bind_gradients(self) -> None:
        """Make every `.grad` a view of `gradients` again, after something such as `module.zero_grad()` dropped it."""
        self.check_in_place()
        for parameter, gradient, _ in self._trained:
            if parameter.grad is not gradient:
                parameter.grad = gradient

    def zero_gradients(self) -> None:
        """Set all gradients to zero, in place."""
        self.gradients.zero_()
        self.bind_gradients()

    def load(self, parameters: Tensor, buffers: Buffers) -> None:
        """Copy values in; the tensors stay the same."""
        _check_flat(parameters, self.layout.numel)
        self.parameters.copy_(parameters)
        for mine, theirs in zip(self.buffers, buffers, strict=True):
            _check_flat(theirs, mine.numel())
            mine.copy_(theirs)


def layout_of(module: nn.Module) -> Layout:
    """The layout of a module, which is left as it is. Refuses what cannot be one flat vector."""
    named = list(module.named_parameters())
    for name, parameter in named:
        if isinstance(parameter, nn.UninitializedParameter):
            raise ConfigurationError(
                f"parameter {name} of {type(module).__name__} has no shape yet, but a fixed one is needed; "
                "run one batch through the module first: module(batch)"
            )
    trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    homes = list(_persistent_buffers(module))
    _check_trainable(module, trained, [home.tensor for home in homes])
    groups: dict[torch.dtype, list[tuple[str, Tensor]]] = {}
    for home in homes:
        groups.setdefault(home.tensor.dtype, []).append((home.name, home.tensor))
    return Layout(
        dtype=trained[0][1].dtype,
        parameters=_slots(trained),
        buffers=tuple(BufferGroup(dtype, _slots(members)) for dtype, members in groups.items()),
        frozen=_digest((name, parameter) for name, parameter in named if not parameter.requires_grad),
    )


def is_averaged(buffer: Tensor) -> bool:
    """Whether several of this buffer become one by their mean; of integers and booleans it is the maximum."""
    return buffer.is_floating_point() or buffer.is_complex()


def is_finite(vector: Tensor) -> bool:
    """Whether every element is finite. A finite sum proves it, at a fraction of the cost of looking at each."""
    return math.isfinite(float(vector.sum())) or bool(torch.isfinite(vector).all())


def merge_buffers(parts: Sequence[tuple[Buffers, int]]) -> Buffers:
    """Buffers of several workers as one: floats averaged by samples, integers and booleans by their maximum.

    A part of no samples has no say, whatever it holds. The result is made of new tensors.
    """
    counted = [(buffers, samples) for buffers, samples in parts if samples > 0]
    if not counted:
        raise ContractViolation("merge_buffers was given no part with samples; merge only what was computed")
    merged = tuple(flat.clone() for flat in counted[0][0])
    total = counted[0][1]
    for buffers, samples in counted[1:]:
        total += samples
        for mean, flat in zip(merged, buffers, strict=True):
            if is_averaged(flat):
                # A running mean, so that equal buffers stay equal to the last bit.
                mean.lerp_(flat, samples / total)
            else:
                torch.maximum(mean, flat, out=mean)
    return merged


def renewed_buffers(before: Buffers, parts: Sequence[tuple[Buffers, int]]) -> Buffers:
    """Those of a hub, after these parts. Counters never fall: what is stale has counted less than it knows already."""
    counted = [(buffers, samples) for buffers, samples in parts if buffers and samples > 0]
    if not counted:
        return before
    pairs = zip(merge_buffers(counted), before, strict=True)
    return tuple(new if is_averaged(new) else torch.maximum(new, old) for new, old in pairs)


@dataclass(frozen=True)
class _Home:
    name: str
    owner: nn.Module
    key: str
    tensor: Tensor


def _persistent_buffers(module: nn.Module) -> Iterator[_Home]:
    seen: set[int] = set()
    for prefix, owner in module.named_modules():
        for key, tensor in owner._buffers.items():
            if tensor is None or key in owner._non_persistent_buffers_set or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            yield _Home(f"{prefix}.{key}" if prefix else key, owner, key, tensor)


def _check_trainable(module: nn.Module, trained: Sequence[tuple[str, Tensor]], buffers: Sequence[Tensor]) -> None:
    kind = type(module).__name__
    if not trained:
        raise ConfigurationError(
            f"{kind} has no trainable parameters, but at least one is needed; "
            "type module.requires_grad_(True), or set it for the layers to train"
        )
    first = {parameter.dtype: name for name, parameter in reversed(trained)}
    if len(first) > 1:
        found = ", ".join(f"{_short(dtype)} ({name})" for dtype, name in reversed(first.items()))
        raise ConfigurationError(
            f"the trainable parameters of {kind} have several dtypes: {found}, but one is expected; "
            f"type module.to({trained[0][1].dtype}), or freeze the others with requires_grad_(False)"
        )
    devices = {str(tensor.device) for tensor in itertools.chain((p for _, p in trained), buffers)}
    if len(devices) > 1:
        raise ConfigurationError(
            f"the trainable parameters and buffers of {kind} are on several devices: {', '.join(sorted(devices))}, "
            f"but one is expected; type module.to({str(trained[0][1].device)!r})"
        )


def _slots(named: Iterable[tuple[str, Tensor]]) -> tuple[TensorSlice, ...]:
    slots: list[TensorSlice] = []
    start = 0
    for name, tensor in named:
        shape, stop = tuple(tensor.shape), start + tensor.numel()
        # Kept as it lies in memory where that has no holes, so that channels_last weights stay channels_last.
        stride = tensor.stride() if _is_dense(tensor) else torch.empty(shape, device="meta").stride()
        slots.append(TensorSlice(name, shape, tuple(stride), start, stop))
        start = stop
    return tuple(slots)


def _is_dense(tensor: Tensor) -> bool:
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _views(flat: Tensor, slots: Sequence[TensorSlice], numel: int) -> list[Tensor]:
    _check_flat(flat, numel)
    offset = flat.storage_offset()
    return [flat.as_strided(slot.shape, slot.stride, offset + slot.start) for slot in slots]


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
        # Through .data the object stays the same, and with it tied weights and every reference others hold.
        tensor.data = view


def _digest(named: Iterable[tuple[str, Tensor]]) -> str:
    digest = hashlib.sha256()
    for name, tensor in named:
        digest.update(repr((name, tuple(tensor.shape), tensor.dtype)).encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
