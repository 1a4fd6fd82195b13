"""Exported files predict what the surrogate predicts."""

import json
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from inspect import signature
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config as inductor_config

from tests.surrogate.tiny import dataset_of, domain_of, random_inputs, tiny_model, tiny_surrogate
from ups.data.families import Families, Family, condition_features
from ups.data.pdebench import FAMILIES
from ups.errors import ConfigFault, DataFault
from ups.surrogate import export as export_module
from ups.surrogate.export import METADATA, Format, PhysicalModel, export
from ups.surrogate.model import Model
from ups.surrogate.surrogate import Setting, condition_of, rollout

FAST = "darcy_2d"  # has coefficients and a parameter; a program of each other family takes some seconds as well
ALL = [name if name == FAST else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]


@pytest.fixture(scope="module")
def burgers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a model of Burgers as a program of torch."""
    path = tmp_path_factory.mktemp("burgers") / "model.pt2"
    export(tiny_model("burgers_1d"), path, "pt2")
    return path


def expect_parity(model: PhysicalModel, run: Callable[..., Tensor]) -> None:
    """A file's predictions for batches of one, two and five differ from the model's by 1e-5 at most, relatively."""
    for batch_size in (1, 2, 5):
        inputs = random_inputs(model, batch_size)
        expected = model(*inputs.values())
        found = run(*inputs.values())
        assert found.shape == expected.shape
        assert (found - expected).norm() <= 1e-5 * expected.norm()
        change = (expected - inputs["u"]).norm() if "u" in inputs else expected.norm()
        assert (found - expected).norm() <= 1e-4 * change


def run_onnx(path: Path, *inputs: Tensor) -> Tensor:
    """The prediction of an ONNX file by onnxruntime."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path)
    names = [each.name for each in session.get_inputs()]
    (output,) = session.run(None, {name: value.numpy() for name, value in zip(names, inputs, strict=True)})
    assert output.dtype == np.float32
    return torch.from_numpy(output)


@pytest.mark.parametrize("family", ALL)
def test_a_program_of_torch_predicts_the_same(family: str, tmp_path: Path):
    """For batches of any size, and without a trace of the export left in the model."""
    model, path = tiny_model(family), tmp_path / "model.pt2"
    before = model(*random_inputs(model, 2).values())
    export(model, path, "pt2")
    expect_parity(model, torch.export.load(path).module())
    assert torch.equal(model(*random_inputs(model, 2).values()), before)


@pytest.mark.parametrize("family", ALL)
def test_an_onnx_graph_predicts_the_same(family: str, tmp_path: Path):
    """In onnxruntime, for batches of any size; the file says what it is."""
    import onnx

    model, path = tiny_model(family), tmp_path / "model.onnx"
    export(model, path, "onnx")
    expect_parity(model, partial(run_onnx, path))
    graph = onnx.load(path)
    assert [each.name for each in graph.graph.input] == list(model.inputs)
    assert [each.version for each in graph.opset_import if each.domain == ""] == [export_module.OPSET]
    (described,) = (each.value for each in graph.metadata_props if each.key == METADATA)
    assert json.loads(described) == json.loads(json.dumps(model.metadata))


def test_a_parameter_may_have_the_name_of_an_operation(families: Families, tmp_path: Path):
    """Names of values and constants inside an ONNX graph are those of no input."""
    families.define(Family("damped_1d", "u_t = -mean u", ["u"], ["x"], "periodic", ["mean", "features", "val_0"]))
    model, path = tiny_model("damped_1d"), tmp_path / "model.onnx"
    export(model, path, "onnx")
    expect_parity(model, partial(run_onnx, path))


@pytest.mark.parametrize("history", [False, True])
def test_names_of_arguments_and_inputs_are_no_parameters(history: bool):
    """A family whose parameter or coefficient is called like something else that is given by name is not defined."""
    methods = (Model.predict, Model.rollout, Model.adapt, Model.export, Model.describe)
    given = [each for method in methods for each in signature(method).parameters.values()]
    model = tiny_model("incompressible_ns_2d", history=history)
    inputs = set(model.inputs) - set(model.family.parameters)
    for name in {"output", *inputs, *(each.name for each in given if each.kind is not each.VAR_KEYWORD)}:
        for names in ({"parameters": [name]}, {"parameters": [], "coefficients": [name]}):
            with pytest.raises(ConfigFault, match=f"'{name}' .*; choose another name"):
                Family("own_1d", "c_t = 0", ["c"], ["x"], "periodic", **names)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["burgers_1d", "darcy_2d"])
def test_a_compiled_package_predicts_the_same(family: str, tmp_path: Path):
    """Machine code by AOTInductor, with its description."""
    model, path = tiny_model(family), tmp_path / "model.aoti.pt2"
    export(model, path, "aoti")
    package = torch._inductor.aoti_load_package(str(path))
    expect_parity(model, package)
    assert json.loads(package.get_metadata()[METADATA]) == json.loads(json.dumps(model.metadata))


def test_a_program_says_what_it_is(burgers: Path):
    """Family, fields, grid, time step and parameters can be read from the file without this package."""
    found = {METADATA: ""}
    torch.export.load(burgers, extra_files=found)
    described = json.loads(found[METADATA])
    assert described["inputs"] == {"u": ["batch", 1, 12], "nu": ["batch"]}
    expected = {"family": "burgers_1d", "fields": ["u"], "parameters": ["nu"], "grid": [12], "dt": 0.1}
    assert {key: described[key] for key in expected} == expected


def test_gradients_flow_through_a_program(burgers: Path):
    """A file predicts and differentiates like the model it is of."""
    model, gradients = tiny_model("burgers_1d"), []
    program = torch.export.load(burgers).module()
    expect_parity(model, program)
    for predict in (model, program):
        inputs = [value.requires_grad_() for value in random_inputs(model, 3).values()]
        gradients.append(torch.autograd.grad(predict(*inputs).square().sum(), inputs))
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("family", ["compressible_ns_2d", "incompressible_ns_2d"])
def test_repeated_steps_are_the_rollout(family: str):
    """Decoding and encoding between steps changes nothing: ten steps in fields are ten steps in latents."""
    surrogate, model = tiny_surrogate(family), tiny_model(family)
    inputs = random_inputs(model, 3)
    u_0 = inputs["u"]
    z_0 = surrogate.encode(u_0, family)
    given = (
        surrogate.encode(inputs["coefficients"], family, "coefficients") if "coefficients" in inputs else z_0[..., :0]
    )
    dataset = dataset_of(FAMILIES[family])
    features = torch.tensor(condition_features(dataset))
    condition = condition_of(features, {name: inputs[name] for name in model.family.parameters}, 3)
    step = surrogate.plain_step(Setting(family, domain_of(dataset), given, condition))
    expected = surrogate.decode(rollout(step, z_0, 10), family)
    found = rollout(lambda u: model(*(inputs | {"u": u}).values()), u_0, 10)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(found[:, -1], found[:, 0], rtol=0.1)


def test_a_model_with_history_takes_the_snapshot_before(tmp_path: Path):
    """Steps of the file, each from the last two snapshots, are the rollout in latents from a state of the first two."""
    family, path = "shallow_water_2d", tmp_path / "model.pt2"
    surrogate, model = tiny_surrogate(family, history=True), tiny_model(family, history=True)
    assert list(model.inputs) == ["u", "u_before", *model.family.parameters]
    export(model, path, "pt2")
    program = torch.export.load(path).module()
    expect_parity(model, program)
    inputs = random_inputs(model, 3)
    u, u_before, *parameters = inputs.values()
    z, z_before = (surrogate.encode(each, family) for each in (u, u_before))
    features = torch.tensor(condition_features(dataset_of(FAMILIES[family])))
    condition = condition_of(features, dict(zip(model.family.parameters, parameters, strict=True)), 3)
    setting = Setting(family, domain_of(dataset_of(FAMILIES[family])), z[..., :0], condition)
    expected = surrogate.decode(rollout(surrogate.plain_step(setting), torch.cat([z, z_before], -1), 3), family)
    for snapshot in expected.unbind(1):
        u, u_before = program(u, u_before, *parameters), u
        torch.testing.assert_close(u, snapshot, rtol=1e-4, atol=1e-4)


def test_a_file_holds_the_weights_of_one_family():
    """The weights of other families are left out, which changes no prediction."""
    model, whole = tiny_model("burgers_1d"), tiny_surrogate("burgers_1d").operator
    (row,) = {whole.rows["burgers_1d"]}
    kept = {name for name, weight in model.model.named_parameters() if weight.numel()}
    of_others = {name for name, _ in whole.named_parameters() if f"trunks.{1 - row}." in name}
    assert of_others and not kept & of_others
    assert {f"mixer.{part}.weights.{row}" for part in ("stem", "summary", "head")} <= kept
    assert not {f"mixer.{part}.weights.{1 - row}" for part in ("stem", "summary", "head")} & kept
    assert all(map(torch.equal, _sizes(whole), _sizes(tiny_surrogate("burgers_1d").operator)))


def _sizes(model: nn.Module) -> list[Tensor]:
    return [weight.detach() for weight in model.parameters()]


@pytest.mark.parametrize(
    ("form", "hint"), [("onnxx", "pt2, onnx, aoti"), ("onnx", r"'\.\[export\]' \(there is no onnx\)")]
)
def test_what_is_missing_is_said(form: Format, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An unknown format, and packages that are not installed, are one line, and nothing is written."""
    monkeypatch.setattr(export_module, "find_spec", lambda name: None if name == "onnx" else find_spec(name))
    with pytest.raises(ConfigFault, match=hint):
        export(tiny_model("burgers_1d"), tmp_path / "model", form)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_compiler_is_said(tmp_path: Path):
    """Without a C++ compiler there is no compiled package, and one line says so."""
    # monkeypatch would leave torch without this setting, and nothing later in this process could be compiled.
    without_compiler = inductor_config.patch({"cpp.cxx": ("no-such-compiler",)})
    with without_compiler, pytest.raises(ConfigFault, match="install g\\+\\+"):
        export(tiny_model("burgers_1d"), tmp_path / "model.pt2", "aoti")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("family", ["darcy_2d", "shallow_water_2d"])
def test_a_family_without_model_cannot_be_exported(family: str):
    """Neither one whose kind of model was not trained, nor one on which it was not trained."""
    dataset = dataset_of(FAMILIES[family])
    with pytest.raises(DataFault, match=f"no trained model of {family}"):
        PhysicalModel(tiny_surrogate("burgers_1d"), dataset, domain_of(dataset))
