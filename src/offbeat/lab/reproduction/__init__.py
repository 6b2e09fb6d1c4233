"""Published results, reproduced by one command each: studies from files, their runs, findings and figures.

May import the rest of `lab`, and everything below it.
"""
