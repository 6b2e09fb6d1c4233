"""Data sets of images and texts: downloaded once, decoded into memory-mapped arrays that processes share.

`catalogue` lists them, `acquisition` downloads and decodes one, and `arrays` opens one that is in the cache, and checks
it. It imports only `offbeat.errors`.
"""
