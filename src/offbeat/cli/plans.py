"""From a command line to a plan: names to classes, flags and NAME.FIELD=VALUE to fields, and defaults for the rest.

A flag sets the field of every strategy that has it; a flag that no strategy has a field for is an error. A setting
for one strategy, NAME.FIELD=VALUE, takes precedence over a flag.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from offbeat.cli.class_lookup import EXAMPLE, find_strategy, find_workload, load_files, strategies, workloads
from offbeat.cli.flags import FlagValues, flag_name
from offbeat.cli.options import CLUSTER, LIVE, OPTIMIZER, RUN, STRATEGY, WORKLOAD
from offbeat.cli.output import print_status
from offbeat.cluster.cluster import Cluster, Link
from offbeat.cluster.presets import load_cluster
from offbeat.core.configuration import from_plain, make, options, read_toml, to_plain
from offbeat.core.optimizers import Optimizer
from offbeat.core.strategy import Strategy
from offbeat.core.validation import require
from offbeat.core.workload import NamedWorkload
from offbeat.engine.experiment import Experiment, RunSettings
from offbeat.errors import ConfigurationError, FieldError, quoted, unknown
from offbeat.lab.experiment_plan import Plan, first_seeds, unique_labels
from offbeat.lab.live_runs import EVALUATE_LIVE
from offbeat.live.session_options import LiveOptions

NO_DEFAULTS: Mapping[str, Any] = {}


def plan_of(
    words: Sequence[str], flag_values: FlagValues, defaults: Mapping[str, Any] = NO_DEFAULTS, *, sized: bool = True
) -> Plan:
    """The plan that a command line of `simulate` or `train` describes.

    Args:
        words: a workload, strategies, and settings as NAME.FIELD=VALUE.
        flag_values: the flags on the command line.
        defaults: settings of the plan that apply where no flag is given.
        sized: whether the number of workers of the cluster replaces that of `defaults`; not under a launcher.
    """
    names, settings = _split(words)
    require(bool(names), f"neither a workload nor a strategy is named; {EXAMPLE}")
    workload_class, workload_label = find_workload(names[0])
    require(len(names) > 1, f"no strategy is named; {EXAMPLE}; 'offbeat strategies' lists them")
    classes, class_labels = zip(*map(find_strategy, names[1:]), strict=True)
    labels = unique_labels(class_labels)
    by_label = _settings_by_label(settings, labels, workload_label)
    workload = _build_workload(workload_class, workload_label, flag_values[WORKLOAD], by_label)
    choices = [_Choice(cls, label, by_label.get(label, {})) for cls, label in zip(classes, labels, strict=True)]
    built = tuple(_build_strategies(choices, workload, flag_values))
    common = settings_of(flag_values)
    common = {**defaults, **_cluster_defaults(common["cluster"], sized), **common}
    plan = check_plan(Plan(workload=workload, strategies=built, labels=labels, **common))
    return _warn_of_unused_workers(plan, "workers" in flag_values[RUN])


def workload_of(words: Sequence[str], flag_values: FlagValues) -> NamedWorkload:
    """The workload of a command line that takes no strategy."""
    names, settings = _split(words)
    require(bool(names), "no workload is named; 'offbeat workloads' lists them")
    require(len(names) == 1, f"{names[-1]!r} is one word too many; name a workload and nothing else")
    cls, label = find_workload(names[0])
    return _build_workload(cls, label, flag_values[WORKLOAD], _settings_by_label(settings, [label], label))


def plan_from_file(
    path: str, flag_values: FlagValues, defaults: Mapping[str, Any] = NO_DEFAULTS, *, sized: bool = True
) -> Plan:
    """The plan in an experiment file, with the flags that replace its settings; for the arguments see `plan_of`."""
    table = read_toml(path, "experiment")
    load_files(table, path)
    plan = Plan.from_plain({**{key: to_plain(value) for key, value in defaults.items()}, **table}, path)
    settings = settings_of(flag_values, plan.cluster)
    cluster_defaults = _cluster_defaults(settings["cluster"], sized, set(table))
    plan = check_plan(dataclasses.replace(plan, **{**cluster_defaults, **settings}))
    return _warn_of_unused_workers(plan, "workers" in flag_values[RUN] or "workers" in table)


def _cluster_defaults(cluster: Cluster, sized: bool, given: Container[str] = ()) -> dict[str, Any]:
    """The settings that follow from the cluster, unless they are given.

    Where evaluations take time, they are as frequent as in live runs.
    """
    defaults: dict[str, Any] = {}
    if sized and cluster.size is not None:
        defaults["workers"] = cluster.size
    if cluster.seconds_per_evaluation > 0:
        defaults["evaluate"] = EVALUATE_LIVE
    return {name: value for name, value in defaults.items() if name not in given}


def settings_of(flag_values: FlagValues, cluster: Cluster = RunSettings.cluster) -> dict[str, Any]:
    """The settings of a plan that flags give; the cluster is `cluster` with the fields that flags change."""
    texts = dict(flag_values[RUN])
    values: dict[str, Any] = {"cluster": cluster_of(flag_values[CLUSTER], cluster)}
    require(not {"seed", "seeds"} <= texts.keys(), "--seed and --seeds exclude each other; give one of them")
    if "seed" in texts:
        values["seeds"] = (from_plain(int, texts.pop("seed"), "--seed"),)
    if "seeds" in texts:
        values["seeds"] = _seeds(texts.pop("seeds"))
    kinds = _kinds(Plan)
    for path, text in texts.items():
        with _naming_flags(lambda _, path=path: flag_name(path)):  # type: ignore[misc]
            values[path] = from_plain(kinds[path], text, flag_name(path))
    return values


def live_of(flag_values: FlagValues) -> LiveOptions:
    """The options for processes of live runs."""
    with _naming_flags(flag_name):
        return LiveOptions(**_values(_kinds(LiveOptions), flag_values[LIVE]))


def _seeds(text: str) -> tuple[int, ...]:
    if "," in text:
        seeds: tuple[int, ...] = from_plain(tuple[int, ...], text, "--seeds")
        return seeds
    count = from_plain(int, text, "--seeds")
    require(
        count >= 1,
        f"--seeds is how many seeds to run, at least 1, but {quoted(count)} was given; for one seed of your choice "
        "type --seed",
    )
    return first_seeds(count, "--seeds")


def cluster_of(flag_values: Mapping[str, Any], base: Cluster) -> Cluster:
    """The cluster of `--cluster`, or else `base`, with the fields that other flags set."""
    texts = dict(flag_values)
    if "cluster" in texts:
        base = load_cluster(texts.pop("cluster"))
    kinds = _kinds(Cluster) | {f"link.{path}": kind for path, kind in _kinds(Link).items()}
    values = _values(kinds, texts)
    link = {path.removeprefix("link."): values.pop(path) for path in list(values) if path.startswith("link.")}
    with _naming_flags(lambda name: flag_name(f"link.{name}" if name in link else name)):
        return dataclasses.replace(base, link=dataclasses.replace(base.link, **link), **values)


def check_plan(plan: Plan) -> Plan:
    """Return the plan; refuse at once what would otherwise fail only after earlier runs of it."""
    for seed in plan.seeds:
        require(seed >= 0, f"a seed is 0 or more, but {seed} was given")
    (seed, count), *_ = Counter(plan.seeds).most_common(1)
    require(count == 1, f"seed {seed} is named more than once, and would give the same run again")
    for strategy in plan.strategies:
        plan.cluster.check(max(strategy.processes(plan.worker_count), plan.worker_count), plan.worker_count)
    return plan


def _warn_of_unused_workers(plan: Plan, given: bool) -> Plan:
    """Return the plan; print a warning if a number of workers was given and no strategy uses them."""
    if given and all(strategy.processes(plan.worker_count) < plan.worker_count for strategy in plan.strategies):
        trains = "trains" if len(plan.labels) == 1 else "train"
        print_status(f"{_listed(plan.labels)} {trains} in one process, so the {plan.worker_count} workers are not used")
    return plan


@contextmanager
def _naming_flags(name: Callable[[str], str]) -> Iterator[None]:
    """In errors about a field, replace `Class.field` by what sets it on the command line."""
    try:
        yield
    except FieldError as error:
        raise ConfigurationError(f"{name(error.field)} {error.problem}") from None


def _kinds(cls: type[Any]) -> dict[str, Any]:
    """The types of the fields of a configuration class."""
    return {item.path: item.kind for item in options(cls)}


def _values(
    kinds: Mapping[str, Any], texts: Mapping[str, Any], flag: Callable[[str], str] = flag_name
) -> dict[str, Any]:
    """The texts as values of these types; `flag` is how errors name a field."""
    return {path: from_plain(kinds[path], text, flag(path)) for path, text in texts.items()}


# NAME.FIELD=VALUE


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words that are names, and those that are settings."""
    settings = [word for word in words if "=" in word and ".py:" not in word]
    return [word for word in words if word not in settings], settings


def _settings_by_label(words: Sequence[str], labels: Sequence[str], workload: str) -> dict[str, dict[str, str]]:
    """Settings NAME.FIELD=VALUE as label → field → text."""
    settings: dict[str, dict[str, str]] = {}
    for word in words:
        left, _, value = word.partition("=")
        owner = max((name for name in [*labels, workload] if left.startswith(f"{name}.")), key=len, default=None)
        if owner is None:
            raise ConfigurationError(_unassigned_setting(word, labels))
        settings.setdefault(owner, {})[left.removeprefix(f"{owner}.").replace("-", "_")] = value
    return settings


def _unassigned_setting(word: str, labels: Sequence[str]) -> str:
    left, _, value = word.partition("=")
    name, dot, rest = left.partition(".")
    if not dot:
        return f"{word!r} names no owner; write {labels[0]}.{word} for one, or {flag_name(left)} {value} for all"
    close = difflib.get_close_matches(name, labels, n=1)
    if close and name not in strategies():
        return f"{word!r} is for {name!r}, which is not named here; did you mean {close[0]}.{rest}={value}?"
    return f"{word!r} is for {name!r}, but this run has only {_listed(labels)}; name {name} too, or leave it out"


def _own_values(kinds: Mapping[str, Any], label: str, own: Mapping[str, str]) -> dict[str, Any]:
    for path in own:
        if path not in kinds:
            raise unknown(f"field of {label}", path, kinds)
    return _values(kinds, own, lambda path: f"{label}.{path}")


def _field_values(cls: type[Any], label: str, flags: Mapping[str, Any], own: Mapping[str, str]) -> dict[str, Any]:
    """The values of fields: from flags where the class has the field, and from the settings of this label."""
    kinds = _kinds(cls)
    shared = {path: text for path, text in flags.items() if path in kinds and path not in own}
    return {**_values(kinds, shared), **_own_values(kinds, label, own)}


def _build(cls: type[Any], label: str, flags: Mapping[str, Any], own: Mapping[str, str]) -> Any:
    values = _field_values(cls, label, flags, own)
    with _naming_flags(lambda name: f"{label}.{name}"):
        return make(cls, values, label)


def _build_workload(
    cls: type[Any], label: str, flags: Mapping[str, Any], by_label: Mapping[str, Mapping[str, str]]
) -> NamedWorkload:
    for path in flags:
        if path not in _kinds(cls):
            raise _flag_without_field(path, [label], _owners(path, workloads()))
    workload: NamedWorkload = _build(cls, label, flags, by_label.get(label, {}))
    return workload


def _owners(path: str, known: Mapping[str, type[Any]]) -> list[str]:
    return [name for name, cls in known.items() if path in _kinds(cls)]


def _flag_without_field(path: str, labels: Sequence[str], owners: Sequence[str]) -> ConfigurationError:
    have = "has" if len(owners) == 1 else "have"
    return ConfigurationError(
        f"{flag_name(path)} is not a field of {_listed(labels, 'or')}; {_listed(owners)} {have} it"
    )


def _listed(names: Sequence[str], last: str = "and") -> str:
    return f" {last} ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


# Strategies and their optimizers


@dataclass
class _Choice:
    """A strategy on the command line, with the settings for it alone."""

    cls: type[Any]
    label: str
    own: dict[str, str]
    optimizer_flags_used: set[str] = field(default_factory=set)
    """Fields of its optimizer that flags set."""
    optimizer_name: str = "none"

    def build(self, flags: Mapping[str, Any]) -> Strategy:
        kinds = _kinds(self.cls)
        own = {path: text for path, text in self.own.items() if path.partition(".")[0] != "optimizer"}
        if "lr" in own and "lr" not in kinds:
            self.own["optimizer.lr"] = own.pop("lr")
        if len(own) < len(self.own) and "optimizer" not in kinds:
            raise unknown(f"field of {self.label}", "optimizer", kinds)
        strategy: Strategy = _build(self.cls, self.label, flags, own)
        return strategy

    def with_optimizer(self, strategy: Strategy, workload: NamedWorkload, flags: Mapping[str, Any]) -> Strategy:
        """The strategy with the optimizer that flags and settings describe; unchanged where there are none."""
        own = {path.removeprefix("optimizer."): t for path, t in self.own.items() if path.startswith("optimizer.")}
        shared = {path.removeprefix("optimizer."): t for path, t in flags.items() if path != "optimizer"}
        own_choice, shared_choice = self.own.get("optimizer"), flags.get("optimizer")
        if not hasattr(strategy, "optimizer") or not (own or shared or own_choice or shared_choice):
            return strategy
        if own_choice or shared_choice:
            where = f"{self.label}.optimizer" if own_choice else "--optimizer"
            chosen = from_plain(Optimizer | None, own_choice or shared_choice, where)
            strategy = dataclasses.replace(strategy, optimizer=chosen)  # type: ignore[call-arg]
        resolved: Any = Experiment(workload, strategy).resolved()[0].strategy
        self.optimizer_name = resolved.optimizer.name
        kinds = _kinds(type(resolved.optimizer))
        self.optimizer_flags_used = shared.keys() & kinds.keys()
        set_by_shorthand = [path for path, _ in zip(kinds, (own_choice or "").split(":")[1:], strict=False)]
        texts = {path: text for path, text in shared.items() if path in kinds and path not in set_by_shorthand}
        values = _values(kinds, texts, lambda path: f"--optimizer.{path}")
        values |= _own_values(kinds, f"{self.label}.optimizer", own)
        with _naming_flags(lambda name: f"{self.label}.optimizer.{name}"):
            changed = dataclasses.replace(resolved.optimizer, **values)
        return dataclasses.replace(strategy, optimizer=changed)  # type: ignore[call-arg]


def _build_strategies(choices: Sequence[_Choice], workload: NamedWorkload, flag_values: FlagValues) -> list[Strategy]:
    for path in flag_values[STRATEGY]:
        if not any(path in _kinds(choice.cls) for choice in choices):
            raise _flag_without_field(path, [choice.label for choice in choices], _owners(path, strategies()))
    built = [choice.build({**workload.strategy_defaults, **flag_values[STRATEGY]}) for choice in choices]
    flags = flag_values[OPTIMIZER]
    built = [choice.with_optimizer(each, workload, flags) for choice, each in zip(choices, built, strict=True)]
    for path in flags:
        name = path.removeprefix("optimizer.")
        if path != "optimizer" and not any(name in choice.optimizer_flags_used for choice in choices):
            optimizers = list(dict.fromkeys(choice.optimizer_name for choice in choices))
            owners = _owners(name, Optimizer.members)
            raise ConfigurationError(f"{_flag_without_field(path, optimizers, owners)}; add --optimizer {owners[0]}")
    return built
