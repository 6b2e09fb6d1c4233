"""`offbeat.AsyncDataParallel`: for scripts that come from DDP and keep their optimizer, scheduler and loop.

    peer = offbeat.AsyncDataParallel(model, optimizer, graph="exponential", acid=True)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        peer.step()
    peer.close()

`step` lets the user's optimizer change the model and hands the change to the node, which adds it to what it has
become by averaging meanwhile. The node's answer is the next round: the newest values are in the model before `step`
returns, and nothing changes them until the next one.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from offbeat.core.actions import Budget, Samples
from offbeat.core.configuration import from_plain
from offbeat.core.events import StepReady
from offbeat.core.strategy import Cadence, EverySeconds, Strategy
from offbeat.core.validation import check_instance, require
from offbeat.errors import ConfigurationError
from offbeat.live.batch_sources import samples_in
from offbeat.live.evaluation import Evaluation
from offbeat.live.local_ranks import SessionOptions
from offbeat.live.session_base import SessionBase, parse_until, rank_info_for
from offbeat.strategies.gossip.gossip_parts import Acid, ExchangeClock, Partner
from offbeat.strategies.gossip.gossip_strategies import Gossip
from offbeat.topology.graphs import Graph

Batch = TypeVar("Batch")

NO_GOAL = Samples(sys.maxsize)
"""Nobody ever gets there: every peer's own loop decides when it is through."""

WORDS = ("cycle", False, 1.0, "random", "poisson")
"""What the words are where nobody says them."""

CANNOT_RESUME = (
    "AsyncDataParallel cannot go on with a run, since the optimizer is yours; save model and optimizer in the loop, "
    "load them before AsyncDataParallel, and start a new run"
)


class AsyncDataParallel(SessionBase):
    """A peer of a gossip run around a training loop that steps an optimizer of its own.

    It is there once all peers are, and the model holds what they start with. `rank` and `processes` say who one is;
    `step` belongs in the place of `optimizer.step()`; after `close()`, or the `with` block, the models of all ranks
    hold the result, and `summary` says how it went.
    """

    _ready = StepReady

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        graph: str = "cycle",
        acid: bool = False,
        rate: float = 1.0,
        partner: str = "random",
        clock: str = "poisson",
        strategy: Strategy | None = None,
        until: Budget | int | str | None = None,
        evaluate: Evaluation | None = None,
        every: Cadence | None = EverySeconds(1.0),  # noqa: B008  (frozen)
        seed: int = 0,
        out: str | Path | None = None,
    ) -> None:
        """The words choose a `Gossip`; a `strategy` that is made already takes their place.

        `until` is how long all peers train together, as `Samples(1_000_000)` or `Seconds(90)`; without it every peer
        trains until its loop calls `close`. `evaluate`, `every`, `seed` and `out` are those of `offbeat.join`.
        """
        check_unwrapped(model)
        check_optimizer(optimizer, model)
        check_instance(every, (Cadence, type(None)), "every", "every=offbeat.EverySeconds(1)")
        words = (graph, acid, rate, partner, clock)
        require(
            strategy is None or words == WORDS,
            "a strategy is given, and words that choose another; put into the strategy what they say",
        )
        strategy = _gossip(*words) if strategy is None else _among_equals(strategy)
        rank_info = rank_info_for(out)
        require(not rank_info.resume, CANNOT_RESUME)
        options = SessionOptions(
            until=NO_GOAL if until is None else parse_until(until),
            seed=seed,
            every=every,
            checkpoint_seconds=None,
            reserved=frozenset(range(rank_info.processes)),
        )
        super().__init__(model, strategy, options, rank_info, evaluate)
        self.optimizer = optimizer
        model.zero_grad()  # gradients are the user's own here, so that memory serves another purpose
        self._before = self._flat.gradients
        self._seen = _Seen()
        self._hook = model.register_forward_pre_hook(self._seen, with_kwargs=True)
        self._steps = 0
        self._may_step = False
        self._guard = optimizer.register_step_pre_hook(self._check_step)
        self._closed = False
        self._start()

    def _start(self) -> None:
        atexit.register(self._left_open)
        try:
            self._begin()
            self._next_round()
        except BaseException as error:
            self._shut(error)
            raise

    # The loop

    @property
    def done(self) -> bool:
        """Whether training is over: all peers together have reached `until`."""
        return self._round is None or self._runner.ended

    def step(self, closure: None = None, *, samples: int | None = None, loss: Tensor | float | None = None) -> None:
        """`optimizer.step()`, and share the change. The newest parameters are in the model afterwards.

        `samples` is how many the gradient is of; left out, it is what the model was called with since the last step.
        A `loss` that is given, the mean over these samples, is recorded. Once training is over this does nothing.
        """
        require(
            closure is None,
            "peer.step takes no closure, since the parameters are averaged between two steps; call loss.backward() in "
            "the loop, and take an optimizer that needs no closure",
        )
        require(not self._closed, "peer.step was called after peer.close(), which belongs after the last step")
        if self.done:
            self._runner.check()
            return
        assert self._round is not None
        count = self._count(samples)
        total = None if loss is None else mean_loss(loss) * count
        self._may_step = True
        try:
            self.optimizer.step()
        finally:
            self._may_step = False
        self._flat.check_in_place()
        self._round.samples = count
        self._steps += 1
        after = self._flat.parameters
        self._hand_in(torch.sub(after, self._before, out=self._pool.like(after)), total)
        self._next_round()

    def _check_step(self, *_: Any) -> None:
        """What an optimizer changes that is stepped by somebody else would be lost, without a word."""
        require(
            self._may_step,
            "optimizer.step() was called, but peer.step() stands in its place, and calls it; leave the other out. With "
            "a GradScaler: scaler.unscale_(optimizer); peer.step(); scaler.update()",
        )

    def batches(self, data: Iterable[Batch]) -> Iterator[Batch]:
        """The batches of a loader, again and again until training is over, so that fast peers simply do more.

        A sampler that has `set_epoch` is told of every new pass. An iterator, which cannot begin again, is passed
        once.
        """
        require(
            self._ranks.options.until is not NO_GOAL,
            "peer.batches goes on until all peers together have trained enough, and until says how much that is; type "
            "until=offbeat.Samples(60_000), or loop over the loader itself",
        )
        epoch = 0
        while not self.done:
            if callable(tell := getattr(getattr(data, "sampler", None), "set_epoch", None)):
                tell(epoch)
            before = self._steps
            for batch in data:
                if self.done:
                    return
                yield batch
            if isinstance(data, Iterator):
                return
            require(
                self.done or self._steps > before,
                f"a whole pass through the {type(data).__name__} went by without peer.step(); call it in the loop, and "
                "give the loop at least one batch",
            )
            epoch += 1

    def _next_round(self) -> None:
        """Wait for the newest parameters; they are in the model then."""
        self._round = self._runner.next_round()
        if self._round is None:
            self._runner.check()
        else:
            self._before.copy_(self._flat.parameters)
            self._seen.samples = 0

    def _count(self, samples: int | None) -> int:
        """Of how many samples the step is."""
        told = isinstance(samples, int) and not isinstance(samples, bool) and samples > 0
        require(
            samples is None or told,
            f"peer.step takes a whole number of samples, 1 or more, but was given {samples!r}; type samples=len(x)",
        )
        count = self._seen.samples if samples is None else samples
        require(
            count > 0,
            "peer.step does not know how many samples the step is of, since the model was not called in training mode "
            "since the last one; type peer.step(samples=len(x))",
        )
        return count

    # The end

    def close(self) -> None:
        """Wait for the other peers to come to their ends; the model holds the average of all then.

        Until then this peer computes no more, but goes on averaging with those that do.
        """
        if not self._closed:
            self._shut(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if not self._closed:
            self._shut(error)

    def _shut(self, error: BaseException | None) -> None:
        self._closed = True
        atexit.unregister(self._left_open)
        self._hook.remove()
        self._guard.remove()
        self._over(error)

    def _end(self) -> None:
        if not self._runner.ended:
            self._leave(stay=True)

    def _left_open(self) -> None:
        """The script has ended, and this peer is still open: it leaves, so that nobody waits for it."""
        error = getattr(sys, "last_value", None)
        if not isinstance(error, BaseException):
            print(
                f"rank {self.rank} ended without peer.close(), so it has left the run, and its model does not "
                "hold the result; call it after the loop, or use a with block",
                file=sys.stderr,
            )
            error = SystemExit()
        self._shut(error)


class _Seen:
    """Counts the samples that a model is called with while it learns. May be copied and saved with the model."""

    def __init__(self) -> None:
        self.samples = 0

    def __call__(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        if module.training and torch.is_grad_enabled():
            self.samples += samples_in(arguments) or samples_in(named)


def _gossip(graph: str, acid: bool, rate: float, partner: str, clock: str) -> Gossip:
    """From words to the strategy; it has no optimizer, since it is given steps and not gradients."""
    for name, word in {"graph": graph, "partner": partner, "clock": clock}.items():
        require(
            isinstance(word, str),
            f"{name} must be a word here, but is {word!r}; type strategy=offbeat.Gossip({name}=...) for an object",
        )
    return Gossip(
        graph=from_plain(Graph, graph, "graph"),
        rate=rate,
        partner=from_plain(Partner, partner, "partner"),
        clock=from_plain(ExchangeClock, clock, "clock"),
        momentum=Acid() if acid else None,
    )


def _among_equals(strategy: Strategy) -> Strategy:
    """A strategy that was made by the user; it must be one that takes steps from everybody."""
    check_instance(strategy, (Strategy,), "the strategy", "offbeat.Gossip()")
    name = type(strategy).__name__
    require(
        strategy.processes(1) == 1,
        f"{name} has a hub, which steps an optimizer of its own; AsyncDataParallel takes strategies among equals, such "
        f"as offbeat.Gossip(), and offbeat.join(model, offbeat.{name}(...)) the others",
    )
    require(
        getattr(strategy, "optimizer", None) is None,
        f"{name} was given an optimizer, but the one that AsyncDataParallel was given is stepped; leave optimizer= out "
        f"of the {name}",
    )
    return strategy


def check_unwrapped(model: nn.Module) -> None:
    """A model of the user's own, and not yet one of DDP's."""
    check_instance(model, (nn.Module,), "the model", "offbeat.AsyncDataParallel(model, optimizer)")
    require(
        not isinstance(model, nn.parallel.DistributedDataParallel),
        "the model is wrapped in DistributedDataParallel, which would make every peer wait for all others; leave that "
        "wrapper out, or pass model.module",
    )


def check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Every trained parameter is stepped, and whatever is stepped is averaged."""
    example = "torch.optim.SGD(model.parameters(), lr=0.1)"
    check_instance(optimizer, (torch.optim.Optimizer,), "the optimizer", example)
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    named = dict(model.named_parameters())
    trained = [name for name, parameter in named.items() if parameter.requires_grad]
    missing = [name for name in trained if id(named[name]) not in stepped]
    require(
        not trained or len(missing) < len(trained),
        f"the optimizer holds none of the model's parameters, perhaps those of a copy; type {example}",
    )
    require(
        not missing,
        f"the optimizer does not hold {len(missing)} of the model's {len(trained)} trainable parameters "
        f"({', '.join(missing)[:80]}); give it all of model.parameters(), or freeze these with requires_grad_(False)",
    )
    require(
        stepped <= {id(parameter) for parameter in named.values()},
        "the optimizer also holds parameters that are not the model's, and these would not be averaged; put all that "
        "is trained into one module, for example nn.ModuleList([model, head])",
    )


def mean_loss(loss: Tensor | float) -> float:
    """The mean loss that a step is told of, as a number."""
    try:
        return float(loss.detach() if isinstance(loss, Tensor) else loss)
    except (TypeError, ValueError, RuntimeError):
        raise ConfigurationError(
            "peer.step takes the mean loss of its samples as one number, but was given "
            f"{f'shape {tuple(loss.shape)}' if isinstance(loss, Tensor) else repr(loss)}; type loss=loss.mean()"
        ) from None
