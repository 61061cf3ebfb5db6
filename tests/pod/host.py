"""One host of a played pod: `python host.py CODE`, with the environment that `pods.py` makes."""

import os
import sys

from torch_xla.experimental import plugins


class Pod(plugins.DevicePlugin):
    def library_path(self):
        return os.environ["POD_LIBRARY"]


plugins.use_dynamic_plugins()
plugins.register_plugin("POD", Pod())
code = sys.argv[1]
exec(compile(code, "<host>", "exec"), {"__name__": "__main__"})
