"""Execute docs/tutorial.ipynb and write it with its outputs, in place or to another file.

    python docs/execute_tutorial.py
    python docs/execute_tutorial.py elsewhere.ipynb

A cell that fails ends the command with its traceback. What describes the installation and not the tutorial is left
out of the file. Needs `pip install 'offbeat[integrations]'`.
"""

import argparse
import os
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

TUTORIAL = Path(__file__).parent / "tutorial.ipynb"
CELL_SECONDS_MAX = 300
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def execute(source: Path, target: Path) -> None:
    """Execute a notebook in an empty directory.

    source: the notebook
    target: where it is written with its outputs
    """
    notebook = nbformat.read(source, as_version=4)
    with tempfile.TemporaryDirectory() as directory:
        client = NotebookClient(
            notebook, timeout=CELL_SECONDS_MAX, kernel_name="python3", resources={"metadata": {"path": directory}}
        )
        client.execute(env={**os.environ, "OMP_NUM_THREADS": "1"})
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({})
        if cell.cell_type == "code":
            for output in cell.outputs:
                output.pop("transient", None)
    nbformat.validate(notebook)
    nbformat.write(notebook, target)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("target", nargs="?", type=Path, default=TUTORIAL, help="the file to write [the tutorial]")
    execute(TUTORIAL, parser.parse_args().target)
