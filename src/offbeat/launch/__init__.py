"""Which rank a process is, and the local processes of a run: how they are started, watched, restarted and ended.

May import `transports`, `cluster`, `records`, `core` and `errors`.
"""
