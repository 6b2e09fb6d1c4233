"""The algorithms: `strategy.py` is the contract, one package or file per family."""
