"""Modules and parameters outside the module: of the loss, and in attributes of a `Model`."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tpufit
from tpufit.callbacks import ModelCheckpoint
from tpufit.errors import ArgumentError, PlacementError

X, Y = torch.randn(64, 5, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 3
RATE = 0.1


class Centers(nn.Module):
    """A loss with parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.centers = nn.Parameter(torch.ones(3, 4))

    def forward(self, y_pred, y):
        return F.cross_entropy(y_pred @ self.centers.T, y)


class Keeping(tpufit.Model):
    """A student, a teacher in one of the forms in which a model may keep it, and a parameter outside of all modules."""

    def __init__(self, student, teacher):
        super().__init__(student)
        self.teacher = teacher
        self.scale = nn.Parameter(torch.ones(()))

    def teach(self, x):
        kept = self.teacher
        return (kept["one"] if isinstance(kept, dict) else kept[0] if isinstance(kept, list) else kept)(x)

    def train_step(self, batch):
        x, _ = batch
        loss = F.mse_loss(self(x) * self.scale, self.teach(x))
        self.apply_gradients(loss)
        return {"loss": loss}


def parts():
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4))
    return nn.Linear(5, 4), teacher.requires_grad_(False).eval()


def fit(model, cores, epochs=2, **options):
    model.fit(X, Y, 32 // cores, epochs, verbose=0, shuffle=False, cores=cores, **options)
    return model


def distilled(student, teacher, epochs=2):
    """The plain loop, equal to `Keeping`."""
    scale = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([*student.parameters(), scale], RATE)
    for i in [0, 32] * epochs:
        optimizer.zero_grad()
        F.mse_loss(student(X[i : i + 32]) * scale, teacher(X[i : i + 32])).backward()
        optimizer.step()
    return scale


FORMS = {
    "a module": lambda teacher: teacher,
    "in a list": lambda teacher: [teacher],
    "in a dict": lambda teacher: {"one": teacher},
    "a model": tpufit.Model,
}


@pytest.mark.cores(1, 8)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("options", [{}, {"run_eagerly": True}], ids=["replayed", "eagerly"])
def test_a_teacher_is_moved_and_unchanged(cores, form, options):
    student, teacher = parts()
    plain, before = copy.deepcopy(student), copy.deepcopy(teacher.state_dict())
    model = Keeping(student, FORMS[form](teacher))
    both = lambda parameters: torch.optim.SGD([*parameters, model.scale], RATE)  # noqa: E731
    model.compile(both, scale_lr=None, **options)
    fit(model, cores)
    assert not any(model.report().traced.values())
    assert model.to_cpu() is student and {p.device.type for p in teacher.parameters()} == {"cpu"}
    scale = distilled(plain, teacher)
    torch.testing.assert_close(student.state_dict(), plain.state_dict(), rtol=0, atol=1e-6)
    torch.testing.assert_close(model.scale, scale, rtol=0, atol=1e-6)
    assert not any(part.training for part in teacher.modules())
    torch.testing.assert_close(dict(teacher.state_dict()), dict(before), rtol=0, atol=0)


@pytest.mark.cores(1, 8)
def test_a_model_inside_another_can_also_be_used_alone(cores):
    student, teacher = parts()
    kept = tpufit.Model(teacher.requires_grad_(True))
    kept.compile("sgd", "cross_entropy")
    fit(kept, cores)
    teacher.requires_grad_(False)
    expected = kept.predict(X, verbose=0)
    model = Keeping(student, kept)
    kept.student = model  # and it knows the model that keeps it
    model.compile(lambda parameters: torch.optim.SGD([*parameters, model.scale], RATE))
    for _ in range(2):
        fit(model, cores, epochs=1)
        assert (kept.predict(X, verbose=0) == expected).all()
    before = model.state_dict()["weight"]
    teacher.requires_grad_(True)
    fit(kept, cores, epochs=1)
    assert torch.equal(model.state_dict()["weight"], before)


@pytest.mark.cores(1, 8)
@pytest.mark.parametrize("built", [False, True], ids=["function", "instance"])
def test_a_loss_with_parameters_is_trained_if_the_optimizer_has_them(cores, built):
    torch.manual_seed(0)
    net, loss = nn.Linear(5, 4), Centers()
    plain, centers = copy.deepcopy(net), copy.deepcopy(loss)
    optimizer = torch.optim.SGD([*plain.parameters(), *centers.parameters()], RATE)
    for i in [0, 32] * 2:
        optimizer.zero_grad()
        centers(plain(X[i : i + 32]), Y[i : i + 32]).backward()
        optimizer.step()
    both = lambda parameters: torch.optim.SGD([*parameters, *loss.parameters()], RATE)  # noqa: E731
    model = tpufit.Model(net)
    model.compile(both(net.parameters()) if built else both, loss, scale_lr=None)
    fit(model, cores)
    assert not any(model.report().traced.values())
    model.to_cpu()
    torch.testing.assert_close(net.state_dict(), plain.state_dict(), rtol=0, atol=1e-6)
    torch.testing.assert_close(loss.state_dict(), centers.state_dict(), rtol=0, atol=1e-6)


@pytest.mark.cores(1)
def test_an_optimizer_for_only_the_loss(cores):
    net, loss = nn.Linear(5, 4), Centers()
    model = tpufit.Model(net)
    model.compile("sgd", loss)
    with pytest.warns(
        UserWarning, match="no optimizer has centers of the loss, for which the step computes a gradient"
    ):
        fit(model, cores)
    assert (loss.centers.cpu() == 1).all()

    class Two(tpufit.Model):
        def train_step(self, batch):
            x, y = batch
            value = loss(self(x), y)
            self.optimizer.zero_grad()
            self.second.zero_grad()
            value.backward()
            self.optimizer.step()
            self.second.step()
            return {"loss": value}

    model = Two(nn.Linear(5, 4))
    model.second = torch.optim.SGD(loss.parameters(), RATE)  # of a module that isn't an attribute
    model.compile("sgd")
    fit(model, cores)
    assert not any(model.report().traced.values()) and (loss.centers.cpu() != 1).any()


@pytest.mark.cores(1, 8)
def test_kept_modules_are_in_checkpoints(cores, tmp_path):
    def made():
        torch.manual_seed(0)
        net, teacher = parts()
        model = Keeping(net, [teacher])
        model.compile(lambda parameters: torch.optim.Adam([*parameters, model.scale], 0.01))
        return model

    tpufit.set_random_seed(0)
    whole = fit(made(), cores, epochs=2)
    fit(made(), cores, epochs=1, callbacks=[ModelCheckpoint(tmp_path)])
    again = made()
    with torch.no_grad():
        again.teacher[0][0].weight.zero_()  # as in a script that creates it again
    fit(again, cores, epochs=2, callbacks=[ModelCheckpoint(tmp_path)], resume=True)
    assert torch.equal(again.scale.cpu(), whole.scale.cpu()) and again.scale.cpu() != 1
    for name, tensor in whole.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)
    assert torch.equal(again.teacher[0][0].weight.cpu(), whole.teacher[0][0].weight.cpu())
    assert tpufit.load(tmp_path, nn.Linear(5, 4)).predict(X, verbose=0).shape == (64, 4)


@pytest.mark.cores(1, 8)
def test_a_module_in_an_attribute_named_loss_trains_and_is_saved(cores, tmp_path):
    class WithLoss(tpufit.Model):
        def __init__(self):
            torch.manual_seed(0)
            super().__init__(nn.Linear(5, 4))
            self.loss = Centers()

        def train_step(self, batch):
            x, y = batch
            loss = self.loss(self(x), y)
            self.apply_gradients(loss)
            return {"loss": loss}

    def made():
        model = WithLoss()
        model.compile(lambda parameters: torch.optim.SGD([*parameters, model.loss.centers], RATE), scale_lr=None)
        return model

    plain = made()
    optimizer = torch.optim.SGD([*plain.module.parameters(), plain.loss.centers], RATE)
    for rows in torch.arange(64).split(32):
        optimizer.zero_grad()
        plain.loss(plain.module(X[rows]), Y[rows]).backward()
        optimizer.step()
    model = fit(made(), cores, epochs=1, callbacks=[ModelCheckpoint(tmp_path)])
    assert torch.allclose(model.loss.centers.cpu(), plain.loss.centers, atol=1e-6)
    again = fit(made(), cores, epochs=1, callbacks=[ModelCheckpoint(tmp_path)], resume=True)
    assert torch.equal(again.loss.centers.cpu(), model.loss.centers.cpu())


@pytest.mark.cores(1, 8)
def test_a_layer_that_the_teacher_shares_is_trained_once(cores):
    student, teacher = parts()
    shared = nn.Linear(5, 5)
    student, teacher = nn.Sequential(shared, student), nn.Sequential(shared, teacher).eval()
    plain, other = copy.deepcopy((student, teacher))
    model = Keeping(student, teacher)
    both = lambda parameters: torch.optim.SGD([*parameters, model.scale], RATE)  # noqa: E731
    model.compile(both, scale_lr=None)
    fit(model, cores).to_cpu()
    distilled(plain, other)
    assert student[0] is teacher[0] and student[0].weight is teacher[0].weight
    torch.testing.assert_close(student.state_dict(), plain.state_dict(), rtol=0, atol=1e-6)


@pytest.mark.cores(1)
def test_a_teacher_that_starts_to_learn_needs_a_new_graph(cores):
    class Both(Keeping):
        def train_step(self, batch):
            x, _ = batch
            loss = F.mse_loss(self(x), self.teacher(x)) + self.teacher(x).pow(2).mean()
            self.apply_gradients(loss)
            return {"loss": loss}

    student, teacher = parts()
    model = Both(student, teacher)
    model.compile(lambda parameters: torch.optim.SGD([*parameters, *teacher.parameters()], RATE))
    before = teacher[0].weight.clone()
    fit(model, cores)
    assert torch.equal(teacher[0].weight.cpu(), before)
    teacher.requires_grad_(True)
    fit(model, cores)
    assert not torch.equal(teacher[0].weight.cpu(), before)


@pytest.mark.cores(1)
def test_a_module_outside_the_model_is_reported(cores):
    loss = Centers()

    class Apart(tpufit.Model):
        def train_step(self, batch):
            x, y = batch
            value = loss(self(x), y)
            self.apply_gradients(value)
            return {"loss": value}

    model = Apart(nn.Linear(5, 4))
    model.compile("sgd")
    with pytest.raises(PlacementError, match="a tensor that is on the host. Besides the batch, these move"):
        fit(model, cores)
    with pytest.raises(ArgumentError, match="make it the loss or an attribute of the Model"):
        model.compile(lambda parameters: torch.optim.SGD([*parameters, *loss.parameters()], RATE))


@pytest.mark.cores(1)
def test_gradients_of_parameters_in_no_optimizer(cores):
    class Own(tpufit.Model):
        clears_all = False

        def train_step(self, batch):
            x, y = batch
            loss = F.cross_entropy(self.module(x), y)
            (self.module if self.clears_all else self.optimizer).zero_grad()
            loss.backward()
            self.optimizer.step()
            return {"loss": loss}

    for clears_all in (False, True):
        net = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
        model = Own(net)
        model.clears_all = clears_all
        model.compile(lambda parameters: torch.optim.SGD(net[1].parameters(), RATE))  # noqa: B023
        if clears_all:
            fit(model, cores)
            assert not any(model.report().traced.values())
        else:
            said = "self.module.zero_grad\\(\\) also clears those of parameters that no optimizer has"
            with pytest.warns(UserWarning, match=said):
                fit(model, cores)
