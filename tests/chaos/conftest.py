"""The scripts of this folder import one another by name, as ``scripts/chaos`` runs them."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
