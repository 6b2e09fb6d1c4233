"""The table for the terminal, the HTML page, labels of runs, and how numbers are written.

May import `plots`, and below `lab` everything.
"""
