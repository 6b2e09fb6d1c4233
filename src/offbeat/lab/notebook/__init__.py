"""What notebooks show of results, graphs and clusters: HTML, registered for their classes by `notebook_html`.

May import all of `lab`. matplotlib is used through `lab/plots` alone, where it is installed.
"""
