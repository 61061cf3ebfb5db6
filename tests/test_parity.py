"""The same program on 1 and on 8 cores: the same losses, weights, metrics and predictions, over uneven data."""

import json

import pytest

PROGRAM = """
import json, sys
import numpy as np, torch, tpufit, torchmetrics
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from torch import nn

cores = int(sys.argv[1]) if len(sys.argv) > 1 else {cores}
images, labels = load_digits(return_X_y=True)  # 1,797 rows
images = (images / 16).astype("float32").reshape(-1, 1, 8, 8)
torch.manual_seed(0)
net = nn.Sequential(
    nn.Conv2d(1, 8, 3), {norm}, nn.ReLU(), nn.Dropout({dropout}), nn.Flatten(), nn.Linear(8 * 36, 10)
)
model = tpufit.Model(net)
f1 = torchmetrics.F1Score(task="multiclass", num_classes=10, average="macro")
model.compile("adamw", "cross_entropy", metrics=["accuracy", f1], scale_lr=None)
history = model.fit(images, labels, batch_size=64 // cores, epochs={epochs}, cores=cores, verbose=0,
                    validation_data=(images[:301], labels[:301]))
save_file(model.state_dict(), "weights.safetensors")
np.save("predictions.npy", model.predict(images, batch_size=64 // cores, verbose=0))
print(json.dumps([history.history, model.evaluate(images, labels, verbose=0, return_dict=True)]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("norm", "dropout", "tolerance"),
    [
        pytest.param("nn.Identity()", 0.0, 1e-5, id="plain", marks=pytest.mark.soak),
        pytest.param("nn.Identity()", 0.2, 1e-5, id="dropout"),
        pytest.param("nn.GroupNorm(2, 8)", 0.0, 1e-5, id="group norm", marks=pytest.mark.soak),
    ],
)
def test_one_and_eight_cores_are_equal(run_python, tmp_path, norm, dropout, tolerance):
    import numpy as np
    from safetensors.torch import load_file

    results = []
    for cores in (1, 8):
        code = PROGRAM.format(cores=cores, norm=norm, dropout=dropout, epochs=1)
        process = run_python(code, timeout=300)
        assert process.returncode == 0, process.stderr
        logs = json.loads(process.stdout.splitlines()[-1])
        results.append((logs, load_file(tmp_path / "weights.safetensors"), np.load(tmp_path / "predictions.npy")))
    (one, weights_one, outputs_one), (eight, weights_eight, outputs_eight) = results
    for logs_one, logs_eight in zip(one, eight, strict=True):
        assert logs_one.keys() == logs_eight.keys()
        for name, value in logs_one.items():
            assert logs_eight[name] == pytest.approx(value, abs=tolerance), name
    for name, value in weights_one.items():
        np.testing.assert_allclose(weights_eight[name], value, rtol=0, atol=tolerance)
    np.testing.assert_allclose(outputs_eight, outputs_one, rtol=0, atol=10 * tolerance)
