"""`offbeat.AsyncDataParallel`: for scripts written for DDP, which keep their optimizer, scheduler and loop.

    peer = offbeat.AsyncDataParallel(model, optimizer, graph="exponential", acid=True)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        peer.step()
    peer.close()

`step` runs the user's optimizer and passes the change of the parameters to the node, which adds it to its replica as
averaged with other peers meanwhile. When `step` returns, the model holds the newest parameters, and nothing changes
them until the next `step`. Trainers, which call `optimizer.step()` themselves, get `peer.optimizer`.

All processes compute. Where the strategy has a hub, the first process holds it beside its worker.
"""

from __future__ import annotations

import atexit
import dataclasses
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import torch
from torch import Tensor, nn

from offbeat.core.actions import Budget, Samples
from offbeat.core.compiled_modules import plain_module
from offbeat.core.configuration import from_plain
from offbeat.core.events import StepReady
from offbeat.core.strategy import Cadence, EverySeconds, State, Strategy
from offbeat.core.validation import check_instance, require
from offbeat.engine.experiment import Experiment, parse_until
from offbeat.engine.gradient_accumulator import copied_buffers, is_result_finite
from offbeat.errors import ConfigurationError, unknown
from offbeat.launch.rank_info import hide_launcher
from offbeat.live.batch_sources import samples_in
from offbeat.live.evaluation import Evaluation
from offbeat.live.gossip_settings import GossipSettings, gossip_strategy
from offbeat.live.peer_optimizer import PeerOptimizer
from offbeat.live.session_base import SessionBase, loop_options, rank_info_for
from offbeat.live.session_options import RECORDS_MAX_BYTES, LiveOptions
from offbeat.live.shards import shard_of
from offbeat.strategies.local_steps.local_steps_strategies import DelayedExchange
from offbeat.strategies.local_training import Differences

Batch = TypeVar("Batch")

UNLIMITED = Samples(sys.maxsize)
"""No common budget: every peer trains until its own loop ends."""

CANNOT_RESUME = (
    "AsyncDataParallel is not resumed by the launcher, since model and optimizer are yours; save them in the loop, "
    "with peer.state_dict(), start a new run without --resume, and load all three"
)

STATE_KEYS = ("strategy", "rank", "processes", "hub", "extra")
"""The keys of `AsyncDataParallel.state_dict()`."""


class AsyncDataParallel(SessionBase):
    """One of the processes of a run, around a training loop that steps its own optimizer.

    The constructor returns once all processes are connected and the model holds their common initial parameters. Call
    `step` instead of `optimizer.step()`, or give `peer.optimizer` to a trainer. After `close()`, or the `with` block,
    the models of all processes are equal, and `summary` has the metrics of the run. `rank` and `processes` are those
    of the launcher. Raises `ConfigurationError` for values it cannot use.

    model: the model to train, not wrapped in DDP.
    optimizer: steps all trainable parameters of the model, and no others.
    strategy: a strategy whose workers step, or its name: Gossip, LocalSGD, DiLoCo, DecoupledDiLoCo, or
        DelayedExchange(send=parts.Differences()); instead of settings of gossip.
    until: how long all peers together train, such as `Samples(1_000_000)` or `Seconds(90)`; None: every peer trains
        until it calls `close`.
    evaluate, every, seed, out, records_max_bytes: as for `offbeat.join`.
    gossip: settings of gossip, each an argument of its own:
        graph: the name of the communication graph, such as "cycle" (the default), "exponential" or "complete".
        acid: whether to use the A²CiD² momentum; not by default.
        rate: averagings that a peer takes part in per gradient; 1 by default.
        partner: how a peer chooses the next partner: "random" (the default), "first-available" or "matchings".
        clock: when to average: at random times, "poisson" (the default), or at equal intervals, "regular".
    """

    _result_event = StepReady

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        strategy: Strategy | str | None = None,
        until: Budget | int | str | None = None,
        evaluate: Evaluation | None = None,
        every: Cadence | None = EverySeconds(1.0),  # noqa: B008  (frozen)
        seed: int = 0,
        out: str | Path | None = None,
        records_max_bytes: float | None = RECORDS_MAX_BYTES,
        **gossip: Unpack[GossipSettings],
    ) -> None:
        _check_names(gossip)
        check_unwrapped(model)
        check_optimizer(optimizer, model)
        check_instance(every, (Cadence, type(None)), "every", "every=offbeat.EverySeconds(1)")
        require(
            strategy is None or not gossip,
            "both a strategy and settings of another one are given; put the settings into the strategy",
        )
        strategy = gossip_strategy(gossip) if strategy is None else _strategy_of(strategy)
        until = UNLIMITED if until is None else parse_until(until)
        experiment = Experiment(None, strategy, until=until, evaluate=every, seed=seed)
        rank_info = rank_info_for(out)
        require(not rank_info.resume, CANNOT_RESUME)
        live = LiveOptions(checkpoint_seconds=None, records_max_bytes=records_max_bytes)
        options = loop_options(experiment, live, rank_info, hub_beside_worker=True)
        super().__init__(model, options, rank_info, evaluate)
        self.rank, self.processes = self._ranks.workers[self._ranks.rank], len(self._ranks.workers)
        self._optimizer = optimizer
        self._shared_optimizer: PeerOptimizer | None = None
        model.zero_grad()  # the flat gradients are not used here: their memory holds the parameters before a step
        self._parameters_before = self._flat.gradients
        self._sample_counter = _SampleCounter()
        self._forward_hook = model.register_forward_pre_hook(self._sample_counter, with_kwargs=True)
        self._steps = 0
        self._may_step = False
        self._step_hook = optimizer.register_step_pre_hook(self._check_optimizer_step)
        self._closed = False
        self._connect()

    def _connect(self) -> None:
        atexit.register(self._close_at_exit)
        try:
            self._start()
            self._next_round()
        except BaseException as error:
            self._end_session(error)
            raise

    # The loop

    @property
    def done(self) -> bool:
        """Whether training has ended: all peers together have reached `until`."""
        return self._round is None or self._runner.ended

    def step(self, closure: None = None, *, samples: int | None = None, loss: Tensor | float | None = None) -> None:
        """Call `optimizer.step()` and share the change; the model holds the newest parameters afterwards.

        Does nothing once training has ended.

        closure: not supported; accepted to answer with an explanation.
        samples: the number of samples of the gradient; by default those that the model was called with since the last
            step, in training mode.
        loss: the mean loss over these samples, for the records.
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
            self._optimizer.step()
        finally:
            self._may_step = False
        self._flat.check_in_place()
        self._round.samples = count
        self._steps += 1
        after, buffers = self._flat.parameters, copied_buffers(self._flat)
        master = self._flat.layout.master_dtype
        delta = torch.sub(after.to(master), self._parameters_before, out=self._pool.like(after, master))
        self._complete_round(delta, total, buffers, is_result_finite(delta, total, buffers))
        self._next_round()

    def _check_optimizer_step(self, *_: Any) -> None:
        """Refuse `optimizer.step()` from outside `step`: its change of the parameters would be lost silently."""
        require(
            self._may_step,
            "optimizer.step() was called, but peer.step() calls it; leave your own call out, or give peer.optimizer to "
            "the trainer that calls it. With a GradScaler: scaler.unscale_(optimizer); peer.step(); scaler.update()",
        )

    # Trainers

    @property
    def optimizer(self) -> PeerOptimizer:
        """The optimizer for a trainer that calls `optimizer.step()`, as those of Hugging Face and Lightning do.

        The variables of torchrun, mpirun or SLURM are removed from the environment of this process, since a trainer
        would conclude from them that it has to average gradients. Raises `ConfigurationError` if it has done so.
        """
        if self._shared_optimizer is None:
            is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
            require(
                not is_distributed or torch.distributed.get_world_size() == 1,
                "torch.distributed connects these processes already, so a trainer would wrap the model in DDP and each "
                "step would wait for all; create AsyncDataParallel and take peer.optimizer before TrainingArguments, "
                "Trainer or Accelerator",
            )
            hidden = hide_launcher(self._ranks.rank_info)
            if hidden and self.processes > 1 and self.rank == 0:
                print(
                    f"{', '.join(hidden[:3])} and the like are hidden from here on, so that no trainer wraps the model "
                    "in DDP; peer.rank and peer.processes have their values, and peer.shard(dataset) divides the data",
                    file=sys.stderr,
                )
            self._shared_optimizer = PeerOptimizer(self._optimizer, self.step)
        return self._shared_optimizer

    def shard(self, data: Any) -> Any:
        """The share of a dataset that this process trains on: disjoint from those of the others.

        data: a dataset of torch or of Hugging Face, or a tuple of tensors of the same length.
        """
        return shard_of(data, self.rank, self.processes)

    def batches(self, data: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches of a loader, pass after pass until the end of training: faster peers compute more.

        `set_epoch` of the loader's sampler, if there is one, is called before every pass. An iterator is passed once.
        """
        require(
            self._ranks.experiment.until is not UNLIMITED,
            "peer.batches ends when all peers together have reached until, which was not given; type "
            "until=offbeat.Samples(60_000), or loop over the loader itself",
        )
        epoch = 0
        while not self.done:
            if callable(set_epoch := getattr(getattr(data, "sampler", None), "set_epoch", None)):
                set_epoch(epoch)
            steps_before = self._steps
            for batch in data:
                if self.done:
                    return
                yield batch
            if isinstance(data, Iterator):
                return
            require(
                self.done or self._steps > steps_before,
                f"a whole pass through the {type(data).__name__} went by without peer.step(); call it in the loop, and "
                "give the loop at least one batch",
            )
            epoch += 1

    def _next_round(self) -> None:
        """Wait until the node has put the newest parameters into the model."""
        self._round = self._runner.next_round()
        if self._round is None:
            self._runner.check()
        else:
            self._parameters_before.copy_(self._flat.parameters)
            self._sample_counter.reset()

    def _count(self, samples: int | None) -> int:
        """The number of samples of a step."""
        is_count = isinstance(samples, int) and not isinstance(samples, bool) and samples > 0
        require(
            samples is None or is_count,
            f"peer.step takes a whole number of samples, 1 or more, but was given {samples!r}; type samples=len(x)",
        )
        count = self._sample_counter.samples if samples is None else samples
        require(
            count > 0,
            "peer.step does not know how many samples the step is of, since the model was not called in training mode "
            "since the last one; type peer.step(samples=len(x))",
        )
        return count

    # To continue in another run

    def state_dict(self) -> dict[str, Any]:
        """What a new run needs to continue, beside the states of model, optimizer and loader, for `torch.save`.

        Call it in every process, between two steps. With a hub, that of the first process holds the parameters of the
        run, the state of the outer optimizer and the samples counted; with A²CiD², that of every process its momentum.
        """
        extra: list[State] = []
        self._runner.inspect(lambda node: extra.append(node.extra_state()))
        hub: list[State] = []
        if self._ranks.hub_runner is not None:
            self._ranks.hub_runner.inspect(lambda node: hub.append(node.state()))
        identity = self._ranks.identity.strategy, self.rank, self.processes
        return dict(zip(STATE_KEYS, (*identity, hub[0] if hub else None, extra[0]), strict=True))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with a `state_dict()` of a run with the same strategy and as many processes.

        Call it in every process, before the first step; load the states of model and optimizer before
        `AsyncDataParallel` is created.
        """
        self._check_state(state)
        if self._ranks.strategy.computes(0):
            self._runner.inspect(lambda node: node.load_extra_state(state["extra"]))
            return
        if self._ranks.hub_runner is not None:
            self._ranks.restore_hub(state["hub"])
        assert self._round is not None
        patience = float(getattr(self.strategy, "patience_seconds", 60.0))
        require(
            self._round.cancelled.wait(patience),
            f"the hub in rank 0 has not begun again within {patience:g} s; call peer.load_state_dict in every process",
        )
        buffers = copied_buffers(self._flat)
        self._round.samples = 0
        self._complete_round(self._zeros(), 0.0, buffers, True)
        self._next_round()

    def _check_state(self, state: Any) -> None:
        is_state = isinstance(state, Mapping) and set(STATE_KEYS) <= state.keys()
        require(is_state, "this is no state of a peer; give peer.load_state_dict what peer.state_dict() returned")
        ours = self._ranks.identity.strategy
        require(
            state["strategy"] == ours,
            f"the state is of another strategy, {state['strategy']}, and this run has {ours}; create AsyncDataParallel "
            "with the settings it had",
        )
        require(
            (state["rank"], state["processes"]) == (self.rank, self.processes),
            f"the state is of rank {state['rank']} of {state['processes']}, and this is rank {self.rank} of "
            f"{self.processes}; start as many processes, and load the state of the same rank in each",
        )
        require(
            self._steps == 0 and not self.done,
            "peer.load_state_dict comes before the first step; call it right after AsyncDataParallel was created",
        )

    # The end

    def close(self) -> None:
        """Wait until all processes have finished; the model then holds the result, the same in all of them.

        Until then this process computes no more gradients. A peer of gossip keeps averaging with peers that do; a
        worker has sent what it has learned to the hub.
        """
        if not self._closed:
            self._end_session(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if not self._closed:
            self._end_session(error)

    def _end_session(self, error: BaseException | None) -> None:
        self._closed = True
        atexit.unregister(self._close_at_exit)
        self._forward_hook.remove()
        self._step_hook.remove()
        self._shut_down(error)

    def _wait_for_end(self) -> None:
        if not self._runner.ended:
            self._leave(stay=True)
        self._wait_for_other_ranks()

    def _close_at_exit(self) -> None:
        """Leave the run if the script ends without `close`, so that no peer waits for this one."""
        error = getattr(sys, "last_value", None)
        if not isinstance(error, BaseException):
            print(
                f"rank {self.rank} ended without peer.close(), so it has left the run, and its model does not "
                "hold the result; call it after the loop, or use a with block",
                file=sys.stderr,
            )
            error = SystemExit()
        self._end_session(error)


class _SampleCounter:
    """Counts the samples that a model is called with in training mode. May be copied and pickled with the model."""

    def __init__(self) -> None:
        self._samples = 0
        self._compiled = torch.zeros((), dtype=torch.int64)
        """Samples counted in compiled code, which would be compiled again for each new value of a Python integer."""

    @property
    def samples(self) -> int:
        return self._samples + int(self._compiled)

    def reset(self) -> None:
        self._samples = 0
        self._compiled.zero_()

    def __call__(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        if module.training and torch.is_grad_enabled():
            _check_outside_ddp()
            count = samples_in(arguments) or samples_in(named)
            if torch.compiler.is_compiling():
                self._compiled.add_(count)
            else:
                self._samples += count


def _check_names(gossip: GossipSettings) -> None:
    """Raise `ConfigurationError` for an argument that is neither one of the constructor nor a setting of gossip."""
    settings = GossipSettings.__annotations__
    for name in gossip.keys() - settings.keys():
        arguments = [*settings, *inspect.signature(AsyncDataParallel).parameters]
        arguments.remove("gossip")
        raise unknown("argument of AsyncDataParallel", name, arguments)


def _strategy_of(given: Strategy | str) -> Strategy:
    """The strategy for steps of the loop's own optimizer. Raises `ConfigurationError` if there is none."""
    if not isinstance(given, str):
        check_instance(given, (Strategy,), "the strategy", "offbeat.Gossip()")
        return given.for_own_steps()
    named: Strategy = from_plain(Strategy, given, "strategy")
    if isinstance(named, DelayedExchange):
        named = dataclasses.replace(named, send=Differences())
    return named.for_own_steps()


def _check_outside_ddp() -> None:
    """Raise `ConfigurationError` if DDP calls the model: a trainer has wrapped it."""
    require(
        getattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", None) is None,
        "the model is called by DistributedDataParallel, which makes every process wait for all others; create "
        "AsyncDataParallel and take peer.optimizer before the trainer, so that it does not wrap the model",
    )


def check_unwrapped(model: nn.Module) -> None:
    """Raise `ConfigurationError` if the model is wrapped in DDP or is no module."""
    check_instance(model, (nn.Module,), "the model", "offbeat.AsyncDataParallel(model, optimizer)")
    require(
        not isinstance(plain_module(model), nn.parallel.DistributedDataParallel),
        "the model is wrapped in DistributedDataParallel, which would make every peer wait for all others; leave that "
        "wrapper out, or pass model.module",
    )


def check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Raise `ConfigurationError` unless the optimizer holds exactly the model's trainable parameters."""
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
    """The `loss` argument of `step` as a number; raises `ConfigurationError` if it is not a scalar."""
    try:
        return float(loss.detach() if isinstance(loss, Tensor) else loss)
    except (TypeError, ValueError, RuntimeError):
        raise ConfigurationError(
            "peer.step takes the mean loss of its samples as one number, but was given "
            f"{f'shape {tuple(loss.shape)}' if isinstance(loss, Tensor) else repr(loss)}; type loss=loss.mean()"
        ) from None
