"""A user's own weights, frozen parts, adapters, recomputed activations, and weights out that the library loads back."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from baoc.config.schema import LoraConfig, ModelConfig
from baoc.data import build_data
from baoc.errors import BadInputError
from baoc.models import MODELS, build_model
from baoc.models.export import export_model
from baoc.models.switches import set_recomputed
from baoc.profiling.describe import describe
from baoc.tasks import build_task
from baoc.training.prepare import prepare
from baoc.types import ImageDataSpec
from tests.support.tiny import tiny_trainer

IMAGES = torch.linspace(-1, 1, 2 * 64).view(2, 1, 8, 8)


def digits(*, num_classes=10) -> ImageDataSpec:
    return ImageDataSpec(
        dataset="digits", image_size=8, channels=1, num_classes=num_classes, num_train=1438, num_val=359
    )


def vit(*, seed=0, num_classes=10, **options) -> nn.Module:
    return build_model("vit", spec=digits(num_classes=num_classes), seed=seed, **options)


def prepared(model: nn.Module, **asked) -> nn.Module:
    lora = LoraConfig(**{key.removeprefix("lora_"): asked.pop(key) for key in [*asked] if key.startswith("lora_")})
    prepare(model, ModelConfig(name="vit", lora=lora, **asked), seed=0)
    return model


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IMAGES)


# -- in and out -------------------------------------------------------------------------------------------------------


def test_what_is_exported_is_loaded_by_the_library_and_by_model_pretrained(tmp_path):
    from transformers import ViTForImageClassification

    model = vit()
    file = export_model(model, folder=tmp_path / "model")
    assert file.name == "model.safetensors"
    loaded = ViTForImageClassification.from_pretrained(tmp_path / "model")
    assert torch.equal(loaded.eval()(IMAGES).logits, logits(model))
    for path in (tmp_path / "model", file):
        again = prepared(vit(seed=1), pretrained=str(path))
        assert torch.equal(logits(again), logits(model))
        assert again.train().training and all(p.requires_grad for p in again.parameters())


def test_given_weights_take_the_place_of_parameters(tmp_path):
    model = vit().bfloat16()
    name = "net.classifier.weight"
    exact = torch.full_like(model.net.classifier.weight, 1 / 3, dtype=torch.float32)
    held = load_file(export_model(model, folder=tmp_path, weights={name: exact}))
    assert torch.equal(held["classifier.weight"], exact)
    assert held["classifier.bias"].dtype is torch.bfloat16


def test_a_network_without_a_library_is_exported_and_loaded_by_its_file(tmp_path):
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
            self.layers[1].weight = self.layers[0].weight  # tied

    one, other = Own(), Own()
    file = export_model(one, folder=tmp_path)
    assert set(load_file(file)) == {"layers.0.weight", "layers.0.bias", "layers.1.bias"}
    prepared(other, pretrained=str(file))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_a_fresh_head_for_other_classes(tmp_path):
    model = vit(num_classes=7)
    export_model(model, folder=tmp_path)
    with pytest.raises(
        BadInputError, match=r"has a head for 7 classes \(net.classifier.*\), the data has 10: set model.new"
    ):
        prepared(vit(), pretrained=str(tmp_path))
    for path in (tmp_path, tmp_path / "model.safetensors"):
        fresh = vit(seed=1)
        expected = fresh.net.classifier.weight.clone()
        again = prepared(fresh, pretrained=str(path), new_head=True)
        assert torch.equal(again.net.classifier.weight, expected)
        assert torch.equal(again.net.vit.layernorm.weight, model.net.vit.layernorm.weight)
        patches = [dict(m.named_parameters())["net.vit.embeddings.cls_token"] for m in (again, model)]
        assert torch.equal(*patches)


def test_weights_that_do_not_fit_are_named(tmp_path):
    export_model(build_model("vit", spec=digits(), size="mini"), folder=tmp_path / "mini")
    with pytest.raises(
        BadInputError, match=r"does not fit this network; .*not in this network: net.vit.layers.10.*model.size"
    ):
        prepared(vit(), pretrained=str(tmp_path / "mini"))
    held = load_file(export_model(vit(), folder=tmp_path / "tiny"))
    weight = held.pop("vit.layers.2.mlp.fc1.weight")
    save_file(held | {"vit.extra": weight}, tmp_path / "cut.safetensors")
    with pytest.raises(
        BadInputError, match=r"missing: net.vit.layers.2.mlp.fc1.weight; not in this network: vit.extra"
    ):
        prepared(vit(), pretrained=str(tmp_path / "cut.safetensors"))
    save_file(held | {"vit.layers.2.mlp.fc1.weight": weight.T.contiguous()}, tmp_path / "turned.safetensors")
    with pytest.raises(
        BadInputError, match=r"of another shape: net.vit.*fc1.weight \(64, 256\) instead of \(256, 64\)"
    ):
        prepared(vit(), pretrained=str(tmp_path / "turned.safetensors"))


def test_paths_without_weights_are_named(tmp_path):
    with pytest.raises(BadInputError, match=r"nowhere does not exist: give a folder of from_pretrained"):
        prepared(vit(), pretrained=str(tmp_path / "nowhere"))
    with pytest.raises(BadInputError, match=r"must be one safetensors file, or a folder .* files there: none"):
        prepared(vit(), pretrained=str(tmp_path))
    (tmp_path / "broken.safetensors").write_bytes(b"none")
    with pytest.raises(BadInputError, match=r"broken.safetensors cannot be read"):
        prepared(vit(), pretrained=str(tmp_path / "broken.safetensors"))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BadInputError, match=r"cannot be read by ViTForImageClassification"):
        prepared(vit(), pretrained=str(tmp_path))


class TestStoredTensorsOfTiedWeights:
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight

    def loaded(self, folder, **tensors):
        file = folder / "x.safetensors"
        save_file({name.replace("_", "."): tensor for name, tensor in tensors.items()}, file)
        return prepared(self.Tied(), pretrained=str(file)).embed.weight

    def test_two_that_differ_are_refused_by_name(self, tmp_path):
        with pytest.raises(
            BadInputError, match=r"holds (embed|head).weight and (head|embed).weight with different values.*tied"
        ):
            self.loaded(tmp_path, embed_weight=torch.zeros(5, 3), head_weight=torch.ones(5, 3))

    def test_two_that_are_equal_or_either_are_taken(self, tmp_path):
        values = torch.arange(15.0).view(5, 3)
        for names in (("embed_weight", "head_weight"), ("embed_weight",), ("head_weight",)):
            assert torch.equal(self.loaded(tmp_path, **{name: values.clone() for name in names}), values)

    def test_two_names_of_one_parameter_are_two_as_well(self, tmp_path):
        with pytest.raises(BadInputError, match="with different values"):
            file = tmp_path / "x.safetensors"
            save_file({"embed.weight": torch.zeros(5, 3), "model.embed.weight": torch.ones(5, 3)}, file)
            prepared(self.Tied(), pretrained=str(file))


@pytest.mark.parametrize("form", ["folder", "file"])
def test_a_network_with_a_pooler_gets_a_new_head(tmp_path, form):
    from transformers import ViTModel

    donor = ViTModel(vit().net.config, add_pooling_layer=True)
    donor.save_pretrained(tmp_path)
    path = str(tmp_path if form == "folder" else tmp_path / "x.safetensors")
    if form == "file":
        save_file(donor.state_dict(), path)
    model = vit(seed=1)
    (said,) = prepare(model, ModelConfig(pretrained=path, new_head=True), seed=0)
    assert "2 tensors of the head fresh, without its pooler.dense." in said
    stored = donor.state_dict()["embeddings.cls_token"]
    assert torch.equal(model.net.vit.embeddings.cls_token, stored)
    with pytest.raises(BadInputError, match="pooler"):
        prepared(vit(), pretrained=path)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("form", ["folder", "file"])
def test_weights_that_are_no_numbers_are_named(tmp_path, value, form):
    model = vit()
    with torch.no_grad():
        model.net.vit.layernorm.weight[3] = value
    file = export_model(model, folder=tmp_path)
    with pytest.raises(BadInputError, match=r"holds weights that are NaN or infinite \(net.vit.layernorm.weight\)"):
        prepared(vit(), pretrained=str(tmp_path if form == "folder" else file))


# -- parts ------------------------------------------------------------------------------------------------------------


def test_frozen_parts_are_not_described_and_do_not_train():
    model = prepared(vit(), freeze=("*embeddings*", "net.vit.layers.[01].*"))
    names = {info.name for info in describe(model)}
    assert names and not any("embeddings" in name or "layers.0" in name for name in names)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    task = build_task("vision", model=model)
    tiny_trainer(max_steps=2, limit_val_batches=0).fit(task, build_data("digits", task="vision", batch_size=8))
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == names


def test_patterns_that_freeze_nothing_or_everything_are_refused():
    with pytest.raises(
        BadInputError, match=r"'embeddings' matches no parameter. It must match the whole name, such as net"
    ):
        prepared(vit(), freeze=("embeddings",))
    with pytest.raises(BadInputError, match=r"freezes every parameter: leave one to train"):
        prepared(vit(), freeze=("*",))


def test_adapters_train_alone_start_as_nothing_and_are_merged_on_the_way_out(tmp_path):
    from transformers import ViTForImageClassification

    export_model(vit(), folder=tmp_path / "base")
    model = prepared(vit(seed=1), pretrained=str(tmp_path / "base"), lora_rank=2, lora_targets=("q_proj", "fc1"))
    assert torch.equal(logits(model), logits(vit()))
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 4 * 2 * 2 and all(".lora_" in name for name in trained)
    assert {"layers.0.attention", "layers.3.mlp"} <= set(model.parameter_blocks())
    task = build_task("vision", model=model.train())
    tiny_trainer(max_steps=3, limit_val_batches=0).fit(task, build_data("digits", task="vision", batch_size=8))
    assert not torch.equal(logits(model), logits(vit()))
    export_model(model, folder=tmp_path / "out")
    loaded = ViTForImageClassification.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(loaded.eval()(IMAGES).logits, logits(model), rtol=1e-5, atol=1e-5)


def test_adapters_go_everywhere_but_on_the_head_which_trains_if_it_is_fresh():
    model = prepared(vit(), lora_rank=2)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name for name in trained if "lora" not in name} == {"net.classifier.weight", "net.classifier.bias"}
    assert len([name for name in trained if "lora_A" in name]) == 4 * 6
    again = prepared(vit(), lora_rank=2)
    state = torch.get_rng_state()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert torch.equal(state, torch.get_rng_state())


def test_adapters_that_cannot_be_are_refused():
    with pytest.raises(BadInputError, match=r"matches no linear layer; their names end in: classifier, fc1, fc2"):
        prepared(vit(), lora_rank=2, lora_targets=("query",))


# -- switches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in MODELS if MODELS[name].task != "language"])
def test_recomputed_activations_give_the_same_gradients_and_keep_less(name):
    task_name = MODELS[name].task
    data = build_data("digits", task=task_name, batch_size=8)
    batch = next(iter(data.train_dataloader()))
    saved: list[int] = []

    def gradients(*, checkpointing: bool) -> dict[str, torch.Tensor]:
        options = {"dropout": 0.2} if "dropout" in MODELS[name].options else {}
        model = build_model(name, spec=data.spec, seed=0, **options)
        names = list(model.state_dict())
        prepare(model, ModelConfig(name=name, checkpointing=checkpointing))
        assert list(model.state_dict()) == names
        task = build_task(task_name, model=model, spec=data.spec)
        task.log = lambda *_, **__: None
        kept: list[int] = []
        torch.manual_seed(0)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
            loss = task.training_step(batch, 0)
        loss.backward()
        saved.append(sum(kept))
        return {key: p.grad for key, p in model.named_parameters() if p.grad is not None}

    plain, recomputed = gradients(checkpointing=False), gradients(checkpointing=True)
    assert plain.keys() == recomputed.keys()
    for key, gradient in plain.items():
        torch.testing.assert_close(recomputed[key], gradient, rtol=1e-5, atol=1e-7)
    assert saved[1] < 0.7 * saved[0]


def test_a_network_without_units_cannot_recompute():
    with pytest.raises(BadInputError, match=r"model mine names no parts whose .* set model.checkpointing=false"):
        set_recomputed(nn.Linear(2, 2), name="mine")


def test_compiling_keeps_names_and_numbers():
    model = prepared(vit(), compile=True)
    assert list(model.state_dict()) == list(vit().state_dict())
    torch.testing.assert_close(logits(model), logits(vit()))
