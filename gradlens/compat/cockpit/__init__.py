"""The modules and names of cockpit-for-pytorch 1.0.2, for programs that were written for it.

A program runs once ``cockpit`` is ``gradlens.compat.cockpit`` in its imports. What differs is in
``docs/migrating.rst``. New programs use ``gradlens`` itself.
"""

from gradlens._version import __version__
from gradlens.compat.cockpit import quantities
from gradlens.compat.cockpit.cockpit import Cockpit
from gradlens.compat.cockpit.modules import add_modules
from gradlens.compat.cockpit.plotter import CockpitPlotter

__all__ = ["Cockpit", "CockpitPlotter", "__version__", "quantities"]

add_modules(__name__)
