"""Figures of runs, drawn from records; the only place that imports matplotlib."""
