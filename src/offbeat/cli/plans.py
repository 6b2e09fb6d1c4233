"""From words to a plan: names to classes, NAME.FIELD=VALUE and flags to fields, the rest to defaults.

A value for one strategy beats a flag for all. A flag goes to every strategy that has the field; one that none of
them has is an error, since it was meant for somebody.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from offbeat.errors import ConfigurationError, unknown
from offbeat.lab.experiment import Experiment, Plan, Settings, unique_labels
from offbeat.lab.worker_main import LiveOptions

NO_DEFAULTS: Mapping[str, Any] = {}


def plan_of(
    words: Sequence[str], flag_values: FlagValues, defaults: Mapping[str, Any] = NO_DEFAULTS, *, sized: bool = True
) -> Plan:
    """The plan that a command line of `simulate` or `train` describes; `defaults` are for what it leaves open.

    A cluster that says how many workers it has comes before a default, unless `sized` says that
    the size of the cluster does not count, as under a launcher.
    """
    names = [word for word in words if not _is_setting(word)]
    require(bool(names), f"neither a workload nor a strategy is named; {EXAMPLE}")
    workload_class, workload_label = find_workload(names[0])
    require(len(names) > 1, f"no strategy is named; {EXAMPLE}; 'offbeat strategies' lists them")
    found = [find_strategy(name) for name in names[1:]]
    labels = unique_labels(label for _, label in found)
    own = _own_settings([word for word in words if _is_setting(word)], labels, workload_label)
    workload = _workload(workload_class, workload_label, flag_values[WORKLOAD], own)
    chosen = [_Choice(cls, label, own.get(label, {})) for (cls, _), label in zip(found, labels, strict=True)]
    built = _strategies(chosen, workload, flag_values)
    settings = settings_of(flag_values)
    settings = {**defaults, **_size_of(settings["cluster"], sized), **settings}
    plan = check_plan(Plan(workload=workload, strategies=tuple(built), labels=labels, **settings))
    return _warn_of_unused_workers(plan, "workers" in flag_values[RUN])


def workload_of(words: Sequence[str], flag_values: FlagValues) -> NamedWorkload:
    """The workload that a command line names where no strategy is wanted."""
    names = [word for word in words if not _is_setting(word)]
    require(bool(names), "no workload is named; 'offbeat workloads' lists them")
    require(len(names) == 1, f"{names[-1]!r} is one word too many; name a workload and nothing else")
    cls, label = find_workload(names[0])
    own = _own_settings([word for word in words if _is_setting(word)], [label], label)
    return _workload(cls, label, flag_values[WORKLOAD], own)


def plan_from_file(
    path: str, flag_values: FlagValues, defaults: Mapping[str, Any] = NO_DEFAULTS, *, sized: bool = True
) -> Plan:
    """The plan in an experiment file, with what the command line says otherwise; `defaults` are for what both leave."""
    table = read_toml(path, "experiment")
    load_files(table, path)
    plan = Plan.from_plain({**{key: to_plain(value) for key, value in defaults.items()}, **table}, path)
    settings = settings_of(flag_values, plan.cluster)
    size = _size_of(settings["cluster"], sized and "workers" not in table)
    plan = check_plan(dataclasses.replace(plan, **{**size, **settings}))
    return _warn_of_unused_workers(plan, "workers" in flag_values[RUN] or "workers" in table)


def _size_of(cluster: Cluster, counts: bool) -> dict[str, Any]:
    """The setting that a cluster makes by saying how many workers it has, where that counts."""
    return {"workers": cluster.size} if counts and cluster.size is not None else {}


def settings_of(flag_values: FlagValues, cluster: Cluster = Settings.cluster) -> dict[str, Any]:
    """The settings of a plan that were given, with their types; the cluster is changed where flags say so."""
    kinds = {item.path: item.kind for item in options(Settings)}
    texts = dict(flag_values[RUN])
    values: dict[str, Any] = {"cluster": cluster_of(flag_values[CLUSTER], cluster)}
    require(not {"seed", "seeds"} <= texts.keys(), "--seed and --seeds exclude each other; give one of them")
    if "seed" in texts:
        values["seeds"] = (from_plain(int, texts.pop("seed"), "--seed"),)
    if "seeds" in texts:
        values["seeds"] = _seeds(texts.pop("seeds"))
    for path, text in texts.items():
        with _naming_flags(lambda _, path=path: flag_name(path)):  # type: ignore[misc]
            values[path] = from_plain(kinds[path], text, flag_name(path))
    return values


def live_of(flag_values: FlagValues) -> LiveOptions:
    """What was said about the processes of live runs."""
    kinds = {item.path: item.kind for item in options(LiveOptions)}
    values = {path: from_plain(kinds[path], text, flag_name(path)) for path, text in flag_values[LIVE].items()}
    with _naming_flags(flag_name):
        return LiveOptions(**values)


def _seeds(text: str) -> tuple[int, ...]:
    if "," in text:
        seeds: tuple[int, ...] = from_plain(tuple[int, ...], text, "--seeds")
        return seeds
    count = from_plain(int, text, "--seeds")
    require(
        count >= 1,
        f"--seeds is how many seeds to run, at least 1, but {count} was given; for one seed of your choice type --seed",
    )
    return tuple(range(count))


def cluster_of(flag_values: Mapping[str, Any], base: Cluster) -> Cluster:
    """The cluster that is named, or else the base, with the fields that were given."""
    texts = dict(flag_values)
    if "cluster" in texts:
        base = load_cluster(texts.pop("cluster"))
    kinds = {item.path: item.kind for item in options(Cluster)}
    kinds |= {f"link.{item.path}": item.kind for item in options(Link)}
    values = {path: from_plain(kinds[path], text, flag_name(path)) for path, text in texts.items()}
    link = {path.removeprefix("link."): value for path, value in values.items() if path.startswith("link.")}
    mine = {path: value for path, value in values.items() if "." not in path}
    with _naming_flags(lambda name: flag_name(f"link.{name}" if name in link else name)):
        return dataclasses.replace(base, link=dataclasses.replace(base.link, **link), **mine)


def check_plan(plan: Plan) -> Plan:
    """Refuse what would otherwise come to light only when earlier runs have taken their time."""
    for seed in plan.seeds:
        require(seed >= 0, f"a seed is 0 or more, but {seed} was given")
    twice = [seed for seed, count in Counter(plan.seeds).items() if count > 1]
    require(not twice, f"seed {twice[0] if twice else None} is named more than once, and would give the same run again")
    for strategy in plan.strategies:
        plan.cluster.check(max(strategy.processes(plan.worker_count), plan.worker_count), plan.worker_count)
    return plan


def _warn_of_unused_workers(plan: Plan, asked: bool) -> Plan:
    """The same plan; where workers were asked for and no strategy has a use for them, that is said."""
    if asked and all(strategy.processes(plan.worker_count) < plan.worker_count for strategy in plan.strategies):
        trains = "trains" if len(plan.labels) == 1 else "train"
        print_status(f"{_listed(plan.labels)} {trains} in one process, so the {plan.worker_count} workers are not used")
    return plan


@contextmanager
def _naming_flags(name: Callable[[str], str]) -> Iterator[None]:
    """Refusals of a class speak of its fields; say instead what one types to set them."""
    try:
        yield
    except ConfigurationError as error:
        found = re.match(r"[A-Z]\w*\.(\w+) (?=must be )", str(error))
        if found is None:
            raise
        raise ConfigurationError(f"{name(found[1])} {str(error)[found.end() :]}") from None


# NAME.FIELD=VALUE


def _is_setting(word: str) -> bool:
    return "=" in word and ".py:" not in word


def _own_settings(words: Sequence[str], labels: Sequence[str], workload: str) -> dict[str, dict[str, str]]:
    """Label → path → text."""
    found: dict[str, dict[str, str]] = {}
    for word in words:
        left, _, value = word.partition("=")
        owner = max((name for name in [*labels, workload] if left.startswith(f"{name}.")), key=len, default=None)
        if owner is None:
            raise ConfigurationError(_unassigned_setting(word, labels))
        found.setdefault(owner, {})[left.removeprefix(f"{owner}.").replace("-", "_")] = value
    return found


def _unassigned_setting(word: str, labels: Sequence[str]) -> str:
    left, _, value = word.partition("=")
    name, dot, rest = left.partition(".")
    if not dot:
        return f"{word!r} does not say whose; write {labels[0]}.{word} for one, or {flag_name(left)} {value} for all"
    close = difflib.get_close_matches(name, labels, n=1)
    if close and name not in strategies():
        return f"{word!r} is for {name!r}, which is not named here; did you mean {close[0]}.{rest}={value}?"
    return f"{word!r} is for {name!r}, but this run has only {_listed(labels)}; name {name} too, or leave it out"


def _workload(cls: type[Any], label: str, flags: Mapping[str, Any], own: dict[str, dict[str, str]]) -> NamedWorkload:
    kinds = {item.path: item.kind for item in options(cls)}
    for path in flags:
        if path not in kinds:
            raise _flag_without_field(path, [label], _owners(path, workloads()))
    values = _values(kinds, label, flags, own.get(label, {}))
    with _naming_flags(lambda name: f"{label}.{name}"):
        workload: NamedWorkload = make(cls, values, label)
    return workload


def _values(kinds: Mapping[str, Any], label: str, flags: Mapping[str, Any], own: Mapping[str, str]) -> dict[str, Any]:
    """The fields that were given, with their types: flags where there is such a field, then the settings for one."""
    values = {
        path: from_plain(kinds[path], text, flag_name(path))
        for path, text in flags.items()
        if path in kinds and path not in own
    }
    for path, text in own.items():
        if path not in kinds:
            raise unknown(f"field of {label}", path, kinds)
        values[path] = from_plain(kinds[path], text, f"{label}.{path}")
    return values


def _owners(path: str, known: Mapping[str, type[Any]]) -> list[str]:
    return [name for name, cls in known.items() if any(item.path == path for item in options(cls))]


def _flag_without_field(path: str, named: Sequence[str], owners: Sequence[str]) -> ConfigurationError:
    has = "has" if len(owners) == 1 else "have"
    return ConfigurationError(f"{flag_name(path)} is not a field of {_listed(named, 'or')}; {_listed(owners)} {has} it")


def _listed(names: Sequence[str], last: str = "and") -> str:
    return f" {last} ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


# Strategies and their optimizers


@dataclass
class _Choice:
    """A strategy that was named, and what was set for it alone."""

    cls: type[Any]
    label: str
    own: dict[str, str]
    used: set[str] = field(default_factory=set)
    """Fields of the optimizer that flags set."""
    optimizer: str = "none"

    def build(self, flags: Mapping[str, Any]) -> Strategy:
        kinds = {item.path: item.kind for item in options(self.cls)}
        mine = {path: text for path, text in self.own.items() if path.partition(".")[0] != "optimizer"}
        if "lr" in mine and "lr" not in kinds:
            self.own["optimizer.lr"] = mine.pop("lr")
        if len(mine) < len(self.own) and "optimizer" not in kinds:
            raise unknown(f"field of {self.label}", "optimizer", kinds)
        values = _values(kinds, self.label, flags, mine)
        with _naming_flags(lambda name: f"{self.label}.{name}"):
            strategy: Strategy = make(self.cls, values, self.label)
        return strategy

    def with_optimizer(self, strategy: Strategy, workload: NamedWorkload, flags: Mapping[str, Any]) -> Strategy:
        """The strategy with the optimizer that was asked for; unchanged where nothing was said about it."""
        mine = {path.removeprefix("optimizer."): t for path, t in self.own.items() if path.startswith("optimizer.")}
        fields = {path.removeprefix("optimizer."): t for path, t in flags.items() if path != "optimizer"}
        alone, everyone = self.own.get("optimizer"), flags.get("optimizer")
        if not hasattr(strategy, "optimizer") or not (mine or fields or alone or everyone):
            return strategy
        if alone or everyone:
            where = f"{self.label}.optimizer" if alone else "--optimizer"
            chosen = from_plain(Optimizer | None, alone or everyone, where)
            strategy = dataclasses.replace(strategy, optimizer=chosen)  # type: ignore[call-arg]
        current: Any = Experiment(workload, strategy).resolved()[0].strategy
        current = current.optimizer
        self.optimizer = current.name
        kinds = {item.path: item.kind for item in options(type(current))}
        self.used = fields.keys() & kinds.keys()
        for path, _ in zip(kinds, (alone or "").split(":")[1:], strict=False):
            fields.pop(path, None)
        values = {
            path: from_plain(kinds[path], t, f"--optimizer.{path}") for path, t in fields.items() if path in kinds
        }
        values |= _values(kinds, f"{self.label}.optimizer", {}, mine)
        with _naming_flags(lambda name: f"{self.label}.optimizer.{name}"):
            changed = dataclasses.replace(current, **values)
        return dataclasses.replace(strategy, optimizer=changed)  # type: ignore[call-arg]


def _strategies(chosen: Sequence[_Choice], workload: NamedWorkload, flag_values: FlagValues) -> list[Strategy]:
    labels = [choice.label for choice in chosen]
    for path in flag_values[STRATEGY]:
        if not any(item.path == path for choice in chosen for item in options(choice.cls)):
            raise _flag_without_field(path, labels, _owners(path, strategies()))
    built = [choice.build(flag_values[STRATEGY]) for choice in chosen]
    flags = flag_values[OPTIMIZER]
    built = [c.with_optimizer(strategy, workload, flags) for c, strategy in zip(chosen, built, strict=True)]
    for path in flags:
        name = path.removeprefix("optimizer.")
        if path != "optimizer" and not any(name in choice.used for choice in chosen):
            named = list(dict.fromkeys(choice.optimizer for choice in chosen))
            owners = _owners(name, Optimizer.members)
            raise ConfigurationError(f"{_flag_without_field(path, named, owners)}; add --optimizer {owners[0]}")
    return built
