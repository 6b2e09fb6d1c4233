"""Experiments on both engines: workloads, data sets, `simulate`, `train`, calibration, studies, figures and the report.

May import every package except `api`, `cli` and `testing`; no package below imports it.
"""
