"""One host of a simulated pod: `python host.py CODE`, with the environment that `pods.py` sets."""

import os
import sys
from importlib.util import find_spec

from tpufit.hosts import group

if "POD_PATIENCE" in os.environ:  # before the hosts connect
    group._PATIENCE = float(os.environ["POD_PATIENCE"])
if find_spec("torch_xla"):
    os.environ["PJRT_DEVICE"] = "POD"
    from torch_xla.experimental import plugins

    class Pod(plugins.DevicePlugin):
        def library_path(self):
            return os.environ["POD_LIBRARY"]

    plugins.use_dynamic_plugins()
    plugins.register_plugin("POD", Pod())
else:
    import tpufit

    tpufit.init(int(os.environ["POD_HOSTS"]) * int(os.environ["POD_CORES"]))
code = sys.argv[1]
exec(compile(code, "<host>", "exec"), {"__name__": "__main__"})
