"""The loops over epochs and batches. `tpufit.step` explains the words capture, replay, hold and expose."""
