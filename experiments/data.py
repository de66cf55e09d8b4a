"""The one place that knows where data made by others lies; it is never part of the project.

Scripts in the folders beside this file take `DATA` by `runpy`, since Python looks for modules in
their own folder only.
"""

import os
from pathlib import Path

DATA = Path(os.environ.get("EGX_DATA", Path(__file__).parents[2] / "shared" / "data"))
