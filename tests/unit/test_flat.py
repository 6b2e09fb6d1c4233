"""A module made flat: its tensors are views, and it stays an ordinary module."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import Tensor, nn

from offbeat.core.flat import FlatModule, Layout, TensorSlice, layout_of
from offbeat.errors import ConfigurationError, ContractViolation


def small_network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 4 * 4, 3))


def batch() -> Tensor:
    return torch.randn(5, 2, 6, 6, generator=torch.Generator().manual_seed(1))


def lies_inside(piece: Tensor, flat: Tensor) -> bool:
    start = flat.data_ptr()
    return start <= piece.data_ptr() < start + flat.nbytes


def test_parameters_gradients_and_buffers_are_views_of_the_flat_tensors() -> None:
    module = small_network()
    before = copy.deepcopy(module.state_dict())
    flat = FlatModule(module)
    assert all(lies_inside(p, flat.parameters) for p in module.parameters())
    assert all(p.grad is not None and lies_inside(p.grad, flat.gradients) for p in module.parameters())
    by_dtype = {buffer.dtype: buffer for buffer in flat.buffers}
    assert set(by_dtype) == {torch.float32, torch.int64}
    assert all(lies_inside(b, by_dtype[b.dtype]) for b in module.buffers())
    assert flat.layout.numel == flat.parameters.numel() == sum(p.numel() for p in module.parameters())
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])


def test_a_flat_module_computes_the_same_gradients_as_an_ordinary_one() -> None:
    module = small_network()
    ordinary = copy.deepcopy(module)
    flat = FlatModule(module)
    for network in (ordinary, module):
        network(batch()).square().sum().backward()
    expected = torch.cat([p.grad.flatten() for p in ordinary.parameters() if p.grad is not None])
    assert torch.equal(flat.gradients, expected)
    assert torch.equal(module[1].running_mean, ordinary[1].running_mean)
    assert [int(b) for b in flat.buffers[1]] == [1]


def test_gradients_accumulate_in_place() -> None:
    flat = FlatModule(small_network())
    addresses = [p.grad.data_ptr() for p in flat.module.parameters() if p.grad is not None]
    flat.module(batch()).sum().backward()
    once = flat.gradients.clone()
    flat.module(batch()).sum().backward()
    assert [p.grad.data_ptr() for p in flat.module.parameters() if p.grad is not None] == addresses
    torch.testing.assert_close(flat.gradients, 2 * once)


def test_gradients_go_on_in_other_memory_and_leave_what_was_accumulated() -> None:
    flat = FlatModule(small_network().eval())
    flat.module(batch()).sum().backward()
    expected = flat.gradients.clone()
    memory = torch.full_like(flat.gradients, float("nan"))
    before = flat.replace_gradients(memory)
    flat.zero_gradients()
    flat.module(batch()).sum().backward()
    assert flat.gradients is memory
    torch.testing.assert_close(memory, expected)
    assert torch.equal(before, expected)
    assert all(p.grad is not None and lies_inside(p.grad, memory) for p in flat.module.parameters())


def test_zero_gradients_binds_gradients_that_were_set_to_none() -> None:
    flat = FlatModule(small_network())
    flat.module(batch()).sum().backward()
    expected = flat.gradients.clone()
    flat.module.zero_grad(set_to_none=True)
    flat.zero_gradients()
    assert not flat.gradients.any()
    flat.module(batch()).sum().backward()
    torch.testing.assert_close(flat.gradients, expected)


def test_binding_gradients_keeps_what_was_accumulated() -> None:
    flat = FlatModule(nn.Linear(2, 2))
    flat.gradients.fill_(7)
    flat.module.zero_grad(set_to_none=True)
    flat.bind_gradients()
    assert all(p.grad is not None and (p.grad == 7).all() for p in flat.module.parameters())


def test_tied_weights_are_held_once_and_stay_tied() -> None:
    module = nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 7, bias=False))
    module[1].weight = module[0].weight
    flat = FlatModule(module)
    assert flat.layout.numel == 21
    flat.parameters.fill_(2)
    assert module[0].weight is module[1].weight
    assert (module[1].weight == 2).all()


def test_frozen_parameters_stay_in_the_module_and_count_in_the_fingerprint() -> None:
    def network(value: float) -> nn.Module:
        module = small_network()
        module[4].requires_grad_(False)
        with torch.no_grad():
            module[4].bias[0] = value
        return module

    flat = FlatModule(network(1.0))
    assert all(not slot.name.startswith("4.") for slot in flat.layout.parameters)
    frozen = flat.module.get_parameter("4.weight")
    assert frozen.grad is None
    assert not lies_inside(frozen, flat.parameters)
    assert flat.layout.fingerprint() == layout_of(network(1.0)).fingerprint()
    assert flat.layout.fingerprint() != layout_of(network(2.0)).fingerprint()


def test_channels_last_weights_stay_channels_last() -> None:
    module = small_network().to(memory_format=torch.channels_last)
    before = module[0].weight.detach().clone()
    flat = FlatModule(module)
    weight = module[0].weight
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert not weight.is_contiguous()
    assert weight.grad is not None
    assert weight.grad.stride() == weight.stride()
    assert torch.equal(weight, before)
    module(batch().to(memory_format=torch.channels_last)).sum().backward()
    assert lies_inside(weight.grad, flat.gradients)
    assert flat.layout.fingerprint() != layout_of(small_network()).fingerprint()


def test_an_expanded_parameter_becomes_contiguous() -> None:
    module = nn.Linear(4, 3)
    module.weight = nn.Parameter(torch.arange(3.0)[:, None].expand(3, 4))
    flat = FlatModule(module)
    assert module.weight.is_contiguous()
    assert flat.parameters[:12].tolist() == [0.0] * 4 + [1.0] * 4 + [2.0] * 4


def test_zero_dimensional_and_boolean_buffers_keep_their_shape() -> None:
    module = nn.Linear(1, 1)
    module.register_buffer("seen", torch.tensor(True))
    module.register_buffer("scratch", torch.ones(3), persistent=False)
    flat = FlatModule(module)
    assert [group.dtype for group in flat.layout.buffers] == [torch.bool]
    assert module.seen.shape == ()
    flat.buffers[0].fill_(False)
    assert not module.seen
    assert [view.shape for view in flat.layout.shaped_buffers(flat.buffers)] == [()]


def test_a_buffer_that_the_module_replaces_is_bound_again() -> None:
    class Counter(nn.Linear):
        def __init__(self) -> None:
            super().__init__(1, 1)
            self.register_buffer("count", torch.tensor(0.0))

        def forward(self, x: Tensor) -> Tensor:
            self.count = self.count + 1
            return super().forward(x)

    flat = FlatModule(Counter())
    flat.module(torch.ones(1, 1))
    flat.module(torch.ones(1, 1))
    assert flat.buffers[0].tolist() == [2.0]
    flat.load(flat.parameters, (torch.tensor([5.0]),))
    assert float(flat.module.get_buffer("count")) == 5.0


def test_a_module_without_buffers_has_none() -> None:
    flat = FlatModule(nn.Linear(2, 2))
    assert flat.buffers == ()
    flat.load(torch.arange(6.0), ())
    assert flat.module.get_parameter("bias").tolist() == [4.0, 5.0]


def test_several_dtypes_among_trained_parameters_are_refused_with_a_remedy() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with pytest.raises(ConfigurationError, match=r"float32 \(0.weight\), float64 \(1.weight\).*one is expected.*type"):
        FlatModule(module)


def test_a_module_with_nothing_to_train_is_refused_with_a_remedy() -> None:
    with pytest.raises(ConfigurationError, match=r"no trainable parameters.*requires_grad_\(True\)"):
        FlatModule(nn.Linear(2, 2).requires_grad_(False))


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_lazy_module_is_refused_with_a_remedy() -> None:
    with pytest.raises(ConfigurationError, match=r"no shape yet.*run one batch"):
        FlatModule(nn.LazyLinear(2))


def test_tensors_on_several_devices_are_refused_with_a_remedy() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(ConfigurationError, match=r"cpu, meta.*type module.to\('cpu'\)"):
        FlatModule(module)


def test_converting_the_module_afterwards_is_noticed() -> None:
    flat = FlatModule(nn.Linear(2, 2))
    flat.module.double()
    with pytest.raises(ConfigurationError, match="moved, converted or passed to offbeat again"):
        flat.zero_gradients()


def test_load_state_dict_writes_into_the_flat_tensors() -> None:
    source = small_network()
    source(batch())
    with torch.no_grad():
        source[4].weight.mul_(3)
    flat = FlatModule(small_network())
    flat.module.load_state_dict(source.state_dict())
    expected = FlatModule(source)
    assert torch.equal(flat.parameters, expected.parameters)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(flat.buffers, expected.buffers, strict=True))
    again = small_network()
    again.load_state_dict(flat.module.state_dict())
    assert torch.equal(FlatModule(again).parameters, flat.parameters)


def test_load_copies_values_and_keeps_the_tensors() -> None:
    flat, other = FlatModule(small_network()), FlatModule(small_network())
    other.module(batch())
    other.parameters.mul_(2)
    address = flat.parameters.data_ptr()
    flat.load(other.parameters, other.buffers)
    assert flat.parameters.data_ptr() == address
    assert torch.equal(flat.parameters, other.parameters)
    assert torch.equal(flat.module.get_buffer("1.running_mean"), other.module.get_buffer("1.running_mean"))


def test_a_vector_of_the_wrong_length_is_refused() -> None:
    flat = FlatModule(nn.Linear(2, 2))
    with pytest.raises(ContractViolation, match="vector of 6 elements"):
        flat.load(torch.zeros(1), ())
    with pytest.raises(ContractViolation, match="vector of 6 elements"):
        flat.layout.shaped(torch.zeros(12)[::2])


def test_views_of_a_slice_begin_where_the_slice_begins() -> None:
    layout = Layout(torch.float32, (TensorSlice("a", (2,), (1,), 0, 2), TensorSlice("b", (1, 3), (3, 1), 2, 5)))
    assert [view.tolist() for view in layout.shaped(torch.arange(10.0)[4:9])] == [[4.0, 5.0], [[6.0, 7.0, 8.0]]]


def test_fingerprints_tell_names_shapes_and_dtypes_apart() -> None:
    layout = layout_of(small_network())
    assert layout == layout_of(small_network())
    renamed = dataclasses.replace(layout.parameters[0], name="other")
    variants = [
        layout,
        layout_of(small_network().double()),
        dataclasses.replace(layout, parameters=(renamed, *layout.parameters[1:])),
        dataclasses.replace(layout, buffers=layout.buffers[:1]),
    ]
    assert len({variant.fingerprint() for variant in variants}) == 4
