"""Data sets of images: downloaded once, decoded into memory-mapped arrays that processes share, checked at every use.

`catalogue` lists them, `acquisition` downloads and decodes one, and `arrays.load` opens one that is in the cache. It
imports only `offbeat.errors`.
"""
