"""If a host of a pod dies or hangs, the others end with an error, and a restart resumes bit for bit."""

import json
import random
import signal
import textwrap
import time

import pytest
from pods import Pod
from test_pod_together import COMMON, said

pytestmark = pytest.mark.slow

TRAIN = COMMON + textwrap.dedent(
    '''
    class Held(Callback):
        """Tells its steps, and stays in one of them on a host that is to be struck."""
        def on_train_batch_end(self, batch, logs=None):
            open(f"steps{me}", "w").write(str(self.model.steps_taken))
            while os.environ.get(f"HOLD{me}") == str(self.model.steps_taken):
                time.sleep(1)

    checkpoint = ModelCheckpoint("run", monitor="loss", save_freq=3)
    model = fit(None, Held(), checkpoint, resume=True, epochs=5)
    json.dump([model.steps_taken, [v.tolist() for v in model.state_dict().values()]], open(f"end{me}.json", "w"))
    '''
)
# A host of a busy machine may be silent for long.
PATIENT = {"TPUFIT_HOST_TIMEOUT": "600"}


def steps_of(folder, host):
    path = folder / f"steps{host}"
    text = path.read_text() if path.exists() else ""
    return int(text or 0)


def wait_until(condition, seconds=600):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the results of an undisturbed training."""
    folder = tmp_path_factory.mktemp("whole")
    ended = Pod(1, 4, folder).run(TRAIN)
    assert ended[0].code == 0, said(ended)
    return json.loads((folder / "end0.json").read_text())


@pytest.mark.parametrize(
    ("host", "name", "others"),
    [
        (1, "SIGKILL", "hang"),
        pytest.param(0, "SIGKILL", "hang", marks=pytest.mark.soak),
        pytest.param(1, "SIGSTOP", "hang", marks=pytest.mark.soak),
        pytest.param(0, "SIGSTOP", "hang", marks=pytest.mark.soak),
        pytest.param(1, "SIGKILL", "fail", marks=pytest.mark.soak),
        pytest.param(0, "SIGKILL", "fail", marks=pytest.mark.soak),
    ],
)
def test_a_dead_host_ends_the_others_and_a_restart_resumes(tmp_path, whole, host, name, others):
    env = {f"HOLD{host}": "7"} | ({"POD_FAILS": "1"} if others == "fail" else {})
    pod = Pod(2, 2, tmp_path, env=env | (PATIENT if name == "SIGKILL" else {"TPUFIT_HOST_TIMEOUT": "20"}))
    with pod.started(TRAIN) as processes:
        wait_until(lambda: steps_of(tmp_path, host) == 7)
        processes[host].send_signal(signal.Signals[name])
        ended = pod.wait_for_results([processes[1 - host]])
    other = ended[0] if host == 1 else None
    err = (tmp_path / f"err{1 - host}").read_text()
    assert processes[1 - host].returncode in (1, 75), err
    assert other is None or other.code in (1, 75)
    assert f"process {host} " in err and "Start all hosts again" in err, err
    ended = Pod(2, 2, tmp_path).run(TRAIN)
    assert [one.code for one in ended] == [0, 0], said(ended)
    assert [json.loads((tmp_path / f"end{one}.json").read_text()) for one in (0, 1)] == [whole, whole]


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("hosts", [2, pytest.param(4, marks=pytest.mark.runtime("torch_tpu"))])
def test_killed_at_four_random_moments(tmp_path, whole, hosts, seed):
    draw = random.Random(seed)
    for moment in sorted(draw.sample(range(1, whole[0]), 4)):
        for host in range(hosts):
            (tmp_path / f"steps{host}").unlink(missing_ok=True)
        host = draw.randrange(hosts)
        pod = Pod(hosts, 4 // hosts, tmp_path, env=PATIENT | {f"HOLD{host}": str(moment + 3)})
        with pod.started(TRAIN) as processes:
            # If the previous kill came too late, the training is complete, and takes no more steps.
            wait_until(lambda at=moment, first=processes[0]: steps_of(tmp_path, 0) >= at or first.poll() == 0)
            time.sleep(draw.random() * 0.1)
            processes[host].kill()
            others = [process for process in processes if process is not processes[host]]
            pod.wait_for_results(others)
        assert all(process.returncode in (0, 1, 75) for process in others)  # 0: it was complete
    ended = Pod(hosts, 4 // hosts, tmp_path).run(TRAIN)
    assert [one.code for one in ended] == [0] * hosts, said(ended)
    assert [json.loads((tmp_path / f"end{one}.json").read_text()) for one in range(hosts)] == [whole] * hosts


@pytest.mark.soak
@pytest.mark.parametrize("hosts", [2, pytest.param(4, marks=pytest.mark.runtime("torch_tpu"))])
def test_a_restart_with_half_of_the_hosts(tmp_path, hosts):
    pod = Pod(hosts, 4 // hosts, tmp_path, env=PATIENT | {"HOLD1": "7"})
    with pod.started(TRAIN) as processes:
        wait_until(lambda: steps_of(tmp_path, 1) == 7 and (tmp_path / "run" / "step-0000000006").exists())
        processes[1].kill()
        pod.wait_for_results([processes[0], *processes[2:]])
    assert "process 1 " in (tmp_path / "err0").read_text()
    ended = Pod(hosts // 2, 4 // hosts, tmp_path).run(TRAIN)
    assert all(one.code == 0 for one in ended), said(ended)
    assert "resuming from step 6 is not bit-exact: cores: 4 -> 2" in ended[0].err


@pytest.mark.soak
def test_a_host_that_hangs_is_named(tmp_path):
    code = """
    fit(None, At(4, lambda model: time.sleep(1000 * me)))
    """
    # It waits 60 s for a host that isn't silent: this number times the seconds of silence.
    env = PATIENT | {"POD_PATIENCE": "0.1"}
    ended = Pod(2, 2, tmp_path, env=env).run(COMMON + textwrap.dedent(code))
    assert [host.code for host in ended] == [1, 75], said(ended)
    assert "don't answer: process 0: train of epoch 1, batch 4, waiting for the others, process" in ended[0].err
    assert "process 1: train of epoch 1, batch 4. Start" in ended[0].err
    assert "tpufit: process 0 has ended with HostError" in ended[1].err
