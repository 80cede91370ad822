"""The files that genrec brings with its code, at the same place in a checkout and in an installed wheel.

In a checkout, ``cluster/launch/ray_config.yaml`` and ``deployments/demo_model`` are links to the one source of each; a wheel has copies.
"""

from importlib.resources import files
from pathlib import Path

LAUNCH = Path(str(files("cluster"))) / "launch"
RAY_CONFIG = LAUNCH / "ray_config.yaml"
DEMO_MODEL = Path(str(files("deployments"))) / "demo_model"
