"""The runtimes for TPUs that the engine in `runtime/` can drive: torch_xla in `xla`, TorchTPU in `torchtpu`.

No module imports a driver by name: `runtime.driver` loads the driver whose package is installed.
"""
