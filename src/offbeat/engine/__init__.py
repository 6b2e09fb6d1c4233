"""What the simulated and the live engine have in common.

Code in this package has no clock, thread or socket, since the simulation imports it.
"""
