"""Frozen dataclasses to plain data and back, and what mistakes are answered with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import pytest

import offbeat as ob
from offbeat.core.actions import Budget
from offbeat.core.configuration import Family, build, from_plain, option, options, to_plain
from offbeat.core.strategy import Cadence, Strategy
from offbeat.errors import ConfigurationError, FieldError


class Shape(Family):
    """A family for these tests."""


@dataclass(frozen=True)
class Circle(Shape, name="circle"):
    radius: float = option(1.0, "metres")
    tags: tuple[int, ...] = option((), "numbers")


@dataclass(frozen=True)
class Square(Shape, name="square"):
    side: float


@dataclass(frozen=True)
class Drawing:
    shape: Shape = option(Circle(), "what is drawn")
    shapes: tuple[Shape, ...] = option((), "more of it")
    count: int = option(1, "how often")
    scale: float | None = option(None, "how large")
    filled: bool = option(False, "whether it is filled")
    pen: Literal["thin", "thick"] = option("thin", "the pen")


def test_a_configuration_survives_plain_data() -> None:
    drawing = Drawing(Circle(2.0, (1, 2)), (Square(3.0), Circle()), 4, 5.0, True, "thick")
    plain = to_plain(drawing)
    assert plain["shape"] == {"name": "circle", "radius": 2.0, "tags": [1, 2]}
    assert from_plain(Drawing, plain, "drawing") == drawing


def test_members_can_be_written_as_shorthands() -> None:
    table: dict[str, Any] = {"shape": "circle:2.5:1+2", "shapes": ["square:3"], "scale": "none", "filled": "yes"}
    assert build(Drawing, table, "drawing") == Drawing(Circle(2.5, (1, 2)), (Square(3.0),), 1, None, True)


MISTAKES = {
    "unknown key in drawing 'cuont'; did you mean 'count'": {"cuont": 1},
    "drawing.count is a whole number, but 'three' was given": {"count": "three"},
    "drawing.count is a whole number, but 2.5 was given": {"count": 2.5},
    "drawing.count is a whole number, but True was given": {"count": True},
    "drawing.scale is a number, but": {"scale": [1]},
    "drawing.filled is true or false, but 'maybe' was given": {"filled": "maybe"},
    "unknown shape 'circel'; did you mean 'circle'": {"shape": "circel"},
    "unknown shape for drawing.shape 'circel'; did you mean": {"shape": {"name": "circel"}},
    "drawing.shape needs a name; known: circle, square": {"shape": {"radius": 1}},
    "unknown key in drawing.shape 'raduis'; did you mean 'radius'": {"shape": {"name": "circle", "raduis": 1}},
    "drawing.shape needs side": {"shape": {"name": "square"}},
    "square needs side": {"shape": "square"},
    "gives 2 values, but square takes side": {"shape": "square:1:2"},
    "unknown value for drawing.pen 'thik'; did you mean 'thick'": {"pen": "thik"},
    "drawing.shape is a table": {"shape": [1, 2]},
}


@pytest.mark.parametrize("sentence", MISTAKES)
def test_a_mistake_is_answered_with_a_sentence(sentence: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        build(Drawing, MISTAKES[sentence], "drawing")
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_how_long_to_train_is_a_number_of_samples_or_of_seconds() -> None:
    assert from_plain(Budget, "60000", "until") == ob.Samples(60_000)
    assert from_plain(Budget, 6e4, "until") == ob.Samples(60_000)
    assert from_plain(Budget, "90s", "until") == ob.Seconds(90.0)
    with pytest.raises(ConfigurationError, match="neither a number of samples"):
        from_plain(Budget, "soon", "until")


@pytest.mark.parametrize(
    "family",
    [
        Strategy,
        ob.nodes.Optimizer,
        ob.schedules.Schedule,
        ob.stragglers.StragglerModel,
        Cadence,
        ob.workloads.NamedWorkload,
    ],
)
def test_every_field_of_every_member_is_explained(family: Any) -> None:
    for member in family.members.values():
        for item in options(member):
            assert item.text, f"{member.__name__}.{item.path} has no explanation"


@pytest.mark.parametrize("name", sorted(Strategy.members))
def test_every_strategy_survives_plain_data(name: str) -> None:
    strategy = Strategy.members[name]().with_default_optimizer(
        ob.SGD(lr=ob.schedules.Exponential(start=0.1, factor=0.5, samples=1000))
    )
    assert from_plain(Strategy, to_plain(strategy), "strategy") == strategy


@pytest.mark.parametrize("name", sorted(Strategy.members))
def test_every_strategy_has_a_line_and_a_paper(name: str) -> None:
    assert Strategy.members[name].summary
    assert Strategy.members[name].paper


BAD_SETTINGS = [
    lambda: ob.FixedMinibatch(batch=0),
    lambda: ob.FixedMinibatch(microbatch=-1),
    lambda: ob.AnytimeMinibatch(seconds=-1.0),
    lambda: ob.AnytimeMinibatch(samples_max=0),
    lambda: ob.AsyncFixed(messages=0),
    lambda: ob.AsyncFixed(damping=-0.5),
    lambda: ob.AsyncFixed(staleness_max=-1),
    lambda: ob.AsyncTimed(worker_seconds=-1.0),
    lambda: ob.AsyncTimed(hub_seconds=0.0),
    lambda: ob.BackupWorkers(k=0),
    lambda: ob.SyncAdaptive(batch=0),
    lambda: ob.Samples(0),
    lambda: ob.Seconds(-1.0),
    lambda: ob.FixedMinibatch(batch=float("nan")),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("number", range(len(BAD_SETTINGS)))
def test_settings_that_cannot_work_are_refused_where_they_are_written(number: int) -> None:
    with pytest.raises(ConfigurationError, match="must be"):
        BAD_SETTINGS[number]()


def test_an_error_about_a_field_names_the_class_the_field_and_the_problem() -> None:
    with pytest.raises(FieldError) as raised:
        ob.SGD(lr=0.1, momentum=1.5)
    error = raised.value
    assert (error.owner, error.field) == ("SGD", "momentum")
    assert error.problem == "must be at least 0 and below 1, but is 1.5"
    assert str(error) == f"SGD.momentum {error.problem}"
