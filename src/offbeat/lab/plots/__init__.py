"""Figures of runs, drawn from records.

The only package that imports matplotlib; of ours it may import `records`, `topology`, `strategies` and below.
"""
