"""The network test of `offbeat network`: latency and bandwidth between all ranks, every byte verified on receipt.

`plan` says which blocks are sent when, `protocol` what is sent, `agent` what every rank does, `controller` what rank 0
does in addition, `result` what comes out, and `processes` how ranks are started and connected. It imports `core`,
`launch` and `transports`.
"""
