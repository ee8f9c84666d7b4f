"""Makes a torchvision whose compiled half does not fit this torch importable: image processors need only its Python.

    pip install --no-deps --target FOLDER torchvision==0.28.0; FIDELITY_TORCHVISION=FOLDER make fidelity

The index has no torchvision for the CPU torch (scripts/setup_cpu.py). Its Python half registers shapes for operators of
the compiled one; they are declared here and never called. Without the variable, models that see are not run.
"""

import os
import re
import sys

import torch

_libraries: list[torch.library.Library] = []


def provide() -> None:
    """Import torchvision from the folder that the environment names, if it names one."""
    folder = os.environ.get("FIDELITY_TORCHVISION")
    if not folder:
        return
    sys.path.append(folder)
    library = torch.library.Library("torchvision", "DEF")
    _libraries.append(library)
    while True:
        try:
            import torchvision  # noqa: F401
        except RuntimeError as error:
            lacking = re.search(r"operator torchvision::(\w+) does not exist", str(error))
            if lacking is None:
                raise
            library.define(f"{lacking[1]}(Tensor x) -> Tensor")
            for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
                del sys.modules[name]
        else:
            return
