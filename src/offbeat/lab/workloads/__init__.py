"""Named workloads: scikit-learn's digits, data sets of images and texts, and synthetic problems; and models for them.

This is the registry: importing a module enters its workloads in `NamedWorkload.members`, in this order. It imports
`core` and `lab.data`.
"""

from offbeat.lab.workloads import digits as digits
from offbeat.lab.workloads import images as images
from offbeat.lab.workloads import synthetic as synthetic
from offbeat.lab.workloads import text as text
