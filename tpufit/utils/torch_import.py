"""Imports torch without the backends that it loads automatically.

torch_tpu prints and warns when it is loaded, and sleeps if there is no TPU on the bus. The first call that needs it
loads it, see `drivers/torchtpu/start.py`.
"""

import os
import sys

_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"

if "torch" not in sys.modules and _AUTOLOAD not in os.environ:
    os.environ[_AUTOLOAD] = "0"
    try:
        import torch  # noqa: F401
    finally:
        del os.environ[_AUTOLOAD]
