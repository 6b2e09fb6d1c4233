"""Messages between live processes: the contract, wire format, links, rendezvous, TCP, MPI, shared memory, loopback.

May import `cluster`, `records`, `topology`, `core` and `errors`. The transports (`tcp`, `mpi`, `loopback`) do not
import each other; what they share is in `transport`, `link` and `wire`.
"""
