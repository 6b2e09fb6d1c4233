"""Text workloads: windows, held-out parts, groups, and the transformer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_texts import DOCUMENTS, make_text

from offbeat.core.examples import Order
from offbeat.core.splits import ByGroup, Shared
from offbeat.errors import ConfigurationError
from offbeat.lab.workloads.text import HELD_OUT, Enwik8, Shakespeare, Sotu, TextExamples, bits_per_byte, windows_of
from offbeat.lab.workloads.transformer import ByteTransformer, generate

SMALL: dict[str, Any] = {"depth": 1, "width": 16, "heads": 2, "context": 32}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    return lambda name, lengths=None: make_text(monkeypatch, tmp_path, name, lengths)


def test_windows_predict_the_next_byte_and_stay_in_their_document(made: Callable[..., Any]) -> None:
    data = made("shakespeare")
    train = windows_of(data, np.arange(6), 32, held_out=False)
    inputs, targets = train.between(0, len(train))
    assert inputs.shape == targets.shape == (len(train), 32)
    # Byte i of a document is its number plus i, so that a window over a border would have a jump.
    assert torch.equal((inputs + 1) % 64, targets)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


@pytest.mark.parametrize("held_out", [False, True])
def test_parts_are_disjoint_and_the_last_twentieth_is_held_out(made: Callable[..., Any], held_out: bool) -> None:
    data = made("shakespeare")
    examples = windows_of(data, np.arange(6), 16, held_out=held_out)
    for begin, end in zip(data.offsets[:-1], data.offsets[1:], strict=True):
        border = end - (end - begin) // HELD_OUT
        inside = (examples.starts >= begin) & (examples.starts < end)
        assert inside.any()
        first, last = (border, end) if held_out else (begin, border)
        assert (examples.starts[inside] >= first).all()
        # A window has one byte more than its context, the last one to predict.
        assert (examples.latest[inside] + 16 + 1 <= last).all()
        assert (examples.starts[inside] <= examples.latest[inside]).all()


def test_a_draw_is_shifted_by_less_than_a_window_and_repeats(made: Callable[..., Any]) -> None:
    train = windows_of(made("shakespeare"), np.arange(6), 32, held_out=False)
    order = Order(Shared().indices(train.targets, 0, 1, 0), 0, 0)
    whole = train.drawn(order, 0, 400)
    parts = [train.drawn(order, first, first + 50) for first in range(0, 400, 50)]
    assert torch.equal(whole[0], torch.cat([part[0] for part in parts]))
    assert torch.equal((whole[0] + 1) % 64, whole[1])
    unshifted = train.take(order.take(0, 400))
    differences = (whole[0][:, 0] - unshifted[0][:, 0]) % 64
    assert differences.max() < 32
    assert len(differences.unique()) > 16


def test_a_subset_keeps_its_windows_and_groups(made: Callable[..., Any]) -> None:
    train = windows_of(made("shakespeare"), np.arange(6), 32, held_out=False)
    chosen = np.array([700, 3, 500])
    part = train.subset(chosen)
    assert isinstance(part, TextExamples)
    assert torch.equal(part.between(0, 3)[0], train.take(torch.from_numpy(chosen))[0])
    assert torch.equal(part.targets, train.targets[torch.from_numpy(chosen)])


def test_groups_are_works_presidents_or_decades(made: Callable[..., Any]) -> None:
    made("shakespeare")
    made("sotu")
    assert len(Shakespeare(**SMALL).build().train.targets.unique()) == len(DOCUMENTS["shakespeare"])
    by_president, by_decade = (Sotu(**SMALL, group=group).build().train.targets for group in ("president", "decade"))
    assert len(by_president.unique()) == 2
    assert by_president.bincount()[0] > by_president.bincount()[1]  # two addresses, and one
    assert torch.equal(by_president, by_decade)
    assert len({Sotu(group="decade").group_of(name) for name in ("1790_a_n", "1799_b_n", "1801_b_n")}) == 2


def test_a_split_by_group_gives_whole_groups_and_all_of_them(made: Callable[..., Any]) -> None:
    made("shakespeare")
    targets = Shakespeare(**SMALL).build().train.targets
    parts = [ByGroup().indices(targets, worker, 4, 7) for worker in range(4)]
    groups = [set(targets[torch.from_numpy(part)].tolist()) for part in parts]
    assert sorted(group for worker in groups for group in worker) == list(range(6))
    assert sorted(map(len, groups)) == [1, 1, 2, 2]
    assert sorted(np.concatenate(parts)) == list(range(len(targets)))
    assert np.array_equal(ByGroup().indices(targets, 5, 4, 7), parts[1])


def test_more_workers_than_groups_are_refused(made: Callable[..., Any]) -> None:
    made("enwik8")
    targets = Enwik8(**SMALL).build().train.targets
    with pytest.raises(
        ConfigurationError, match=r"1 groups cannot be divided among 2 workers; use the split 'sharded'"
    ):
        ByGroup().indices(targets, 0, 2, 0)


def test_a_context_longer_than_every_held_out_part_is_refused(made: Callable[..., Any]) -> None:
    made("sotu")
    with pytest.raises(ConfigurationError, match="no held-out part of sotu has more than 400 bytes"):
        Sotu(context=400).build()


def test_losses_are_bits_per_byte_and_begin_near_eight(made: Callable[..., Any]) -> None:
    made("shakespeare")
    workload = Shakespeare(**SMALL, test_examples=20).build()
    model = workload.initial_model(0)
    assert workload.evaluate(model).loss == pytest.approx(8.0, abs=0.1)
    assert workload.evaluate(model).accuracy is None
    certain = torch.full((2, 3, 256), -100.0)
    text = torch.tensor([[1, 2, 3], [4, 5, 6]])
    certain.scatter_(2, text[..., None], 100.0)
    assert bits_per_byte(certain, text).tolist() == pytest.approx([0.0, 0.0])
    assert bits_per_byte(torch.zeros(2, 3, 256), text).tolist() == pytest.approx([8.0, 8.0])


def test_the_transformer_learns_a_text_that_can_be_predicted(made: Callable[..., Any]) -> None:
    made("shakespeare")
    workload = Shakespeare(**SMALL, test_examples=20).build()
    model = workload.initial_model(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    order = Order(Shared().indices(workload.train.targets, 0, 1, 0), 0, 0)
    for step in range(60):
        optimizer.zero_grad()
        workload.losses(model, workload.train.drawn(order, 16 * step, 16 * step + 16)).mean().backward()
        optimizer.step()
    assert workload.evaluate(model).loss < 1.0
    prompt = bytes(range(10, 30))
    continued = generate(model, prompt, 20, SMALL["context"], 0.0, torch.Generator())
    assert continued == bytes(byte % 64 for byte in range(30, 50))


def test_no_position_sees_what_comes_later() -> None:
    torch.manual_seed(0)
    model = ByteTransformer(depth=2, width=16, heads=2, context=8).build()
    text = torch.randint(256, (1, 8))
    changed = text.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 256
    before, after = model(text), model(changed)
    assert torch.allclose(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_sizes_are_known_without_data() -> None:
    shape = ByteTransformer(depth=3, width=24, heads=4, context=20)
    embedding, positions, norm = 256 * 24, 20 * 24, 2 * 24
    layer = 2 * norm + 24 * 24 * (3 + 1 + 4 + 4)
    assert shape.parameters() == embedding + positions + norm + 3 * layer
    assert sum(parameter.numel() for parameter in shape.build().parameters()) == shape.parameters()
    assert Shakespeare(**dataclasses.asdict(shape)).size().parameters == shape.parameters()
    assert Shakespeare(test_examples=None).size().train > 30_000


def test_generation_is_repeatable_and_cut_to_the_context() -> None:
    torch.manual_seed(0)
    model = ByteTransformer(**SMALL).build()
    texts = [
        generate(model, b"x" * 100, 40, SMALL["context"], 1.0, torch.Generator().manual_seed(seed))
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]
    assert len(texts[0]) == 40


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"width": 10, "heads": 4}, r"width must be a multiple of heads, but is 10 with 4 heads; 8 would do"),
        ({"depth": 0}, "depth"),
        ({"context": -1}, "context"),
        ({"width": 1.5}, "width"),
    ],
)
def test_impossible_transformers_are_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        ByteTransformer(**fields)


def test_bits_per_byte_of_a_uniform_choice_of_few_bytes_is_its_logarithm() -> None:
    logits = torch.full((1, 5, 256), -1e9)
    logits[..., :10] = 0.0
    assert bits_per_byte(logits, torch.tensor([[0, 1, 2, 3, 4]])).item() == pytest.approx(math.log2(10))
