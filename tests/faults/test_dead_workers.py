"""A program on 8 cores whose loader's worker raises, is killed or hangs ends in time, with the reason."""

import pytest

pytestmark = pytest.mark.slow

WORKERS = """
    import os, signal, time
    import numpy as np, torch, tpufit
    from torch import nn
    from torch.utils.data import DataLoader, Dataset

    class Rows(Dataset):
        def __len__(self):
            return 80

        def __getitem__(self, i):
            if i == 70:
                {fault}
            return np.ones(4, "float32"), i % 3

    model = tpufit.Model(nn.Linear(4, 3))
    model.compile("adam", "cross_entropy")
    loader = DataLoader(Rows(), 4, num_workers=2, timeout={timeout})
    try:
        model.fit(loader, epochs=3, verbose=0, cores=8)
    finally:
        model.save_weights("after.safetensors")  # they are there, and the device still answers
"""


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        pytest.param(
            "raise ValueError('sample 70 is broken')",
            "Caught ValueError in DataLoader worker process",
            marks=pytest.mark.soak,
        ),
        pytest.param(
            "os.kill(os.getpid(), signal.SIGKILL)",
            "killed by signal 9",
            marks=pytest.mark.soak,
        ),
        pytest.param("time.sleep(600)", "returned nothing for 5 s (its timeout)", marks=pytest.mark.soak),
    ],
    ids=["raises", "killed", "hangs"],
)
def test_a_program_whose_worker_fails_ends_in_time(run_python, tmp_path, fault, said):
    timeout = 5 if "timeout" in said else 0  # a busy machine delays healthy workers
    ended = run_python(WORKERS.format(fault=fault, timeout=timeout), timeout=240)
    assert ended.returncode == 1 and said in ended.stderr
    assert (tmp_path / "after.safetensors").exists()
    last = ended.stderr.rstrip().splitlines()[-1]
    assert "worker" in last or "sample 70 is broken" in last
