"""`ShownOnce`: a figure that a notebook shows once. Imported with the first picture, as it needs matplotlib."""

from typing import Any

import matplotlib
from matplotlib import pyplot
from matplotlib.figure import Figure


class ShownOnce(Figure):
    """A pyplot figure that a notebook doesn't show twice if it is the value of a cell.

    Jupyter shows the value of a cell's last line, and at the cell's end each figure that pyplot still has.
    """

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        """Close the figure when Jupyter shows it, and leave the picture to Jupyter."""
        if "inline" in matplotlib.get_backend():
            pyplot.close(self)
        return {}
