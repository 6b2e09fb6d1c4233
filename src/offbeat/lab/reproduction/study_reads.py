"""Which records the quantities and plots of a study read."""

from __future__ import annotations

from offbeat.lab.plots.figures import cell_reads
from offbeat.lab.reproduction.quantities import QUANTITIES
from offbeat.lab.reproduction.study import Study
from offbeat.records.thinning import Reads


def reads_of(name: str) -> Reads:
    """What a quantity, or a plot in a panel, reads besides the metrics of a run."""
    return QUANTITIES[name].reads if name in QUANTITIES else cell_reads(name)


def drawn_from_records(study: Study, case: str) -> list[str]:
    """The names of the quantities and plots that read records of the runs of a case, sorted."""
    return sorted(name for name in study.names_read(case) if reads_of(name))
