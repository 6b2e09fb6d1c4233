"""Messages between live processes: the contract, wire format, links, rendezvous, gloo, MPI, shared memory, loopback.

May import `cluster`, `records`, `topology`, `core` and `errors`. The transports (`gloo`, `mpi`, `loopback`) do not
import each other; what they share is in `transport`, `link` and `wire`.
"""
