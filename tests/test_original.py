"""Checkpoints both ways: what a transformed model holds, in the layout of the model before."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slapo_fn as slapo
from slapo_fn._layout.sources import Source, cat, part, resolved, take, transposed, weight_map
from slapo_fn.errors import ArgumentError, WeightsError
from slapo_fn.original import from_original, to_original

transformers = pytest.importorskip("transformers")
stored = pytest.importorskip("safetensors.torch")

S = slapo.Schedule()
IDS_BT = torch.tensor([[1, 5, 2, 7], [3, 3, 0, 9]])


def gpt2(**options: Any) -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=16, n_positions=8, **options)
    ).eval()


def llama(**options: Any) -> nn.Module:
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "vocab_size": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, **options)).eval()


def made_of(new: nn.Module, old: nn.Module, sources: dict[str, Source]) -> None:
    """Hang on a module what some sources give, and say so."""
    given = dict(old.named_parameters())
    shapes = {name: tensor.shape for name, tensor in given.items()}
    for name, source in sources.items():
        path, _, leaf = name.rpartition(".")
        tensor = take(source, given)
        tensor = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor)
        new.get_submodule(path).register_parameter(leaf, tensor)
    vars(new)["weight_map"] = weight_map({name: resolved(source, shapes) for name, source in sources.items()})


class FusedMLP(nn.Module):
    def __init__(self, old: Any) -> None:
        super().__init__()
        self.gate_up, self.down, self.act = nn.Linear(8, 24, bias=False), old.down_proj, old.act_fn
        gate_up = cat("gate_proj.weight", "up_proj.weight")
        made_of(self, old, {"gate_up.weight": gate_up, "down.weight": "down_proj.weight"})

    def forward(self, x_BTD: Tensor) -> Tensor:
        gate, up = self.gate_up(x_BTD).chunk(2, -1)
        return self.down(self.act(gate) * up)


class Turned(nn.Module):
    """A `FusedMLP` that stores its fused weight the other way, under the same name."""

    def __init__(self, old: Any) -> None:
        super().__init__()
        self.gate_up, self.down, self.act = nn.Linear(24, 8, bias=False), old.down, old.act
        made_of(self, old, {"gate_up.weight": transposed("gate_up.weight")})

    def forward(self, x_BTD: Tensor) -> Tensor:
        gate, up = (x_BTD @ self.gate_up.weight).chunk(2, -1)
        return self.down(self.act(gate) * up)


class SplitMLP(nn.Module):
    """A `FusedMLP` that is two layers again."""

    def __init__(self, old: Any) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 12, bias=False), nn.Linear(8, 12, bias=False)
        self.down, self.act = old.down, old.act
        halves = {"one.weight": part("gate_up.weight", 0, 12), "two.weight": part("gate_up.weight", 12, 24)}
        made_of(self, old, dict[str, Source](halves))

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(self.act(self.one(x_BTD)) * self.two(x_BTD))


class GPTMLP(nn.Module):
    """GPT-2's MLP over plain linear layers."""

    def __init__(self, old: Any) -> None:
        super().__init__()
        self.up, self.down, self.act = nn.Linear(8, 32), nn.Linear(32, 8), old.act
        turned = {"up.weight": transposed("c_fc.weight"), "down.weight": transposed("c_proj.weight")}
        made_of(self, old, {**turned, "up.bias": "c_fc.bias", "down.bias": "c_proj.bias"})

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(self.act(self.up(x_BTD)))


class QKV(nn.Module):
    """GPT-2's fused projection over three linear layers."""

    def __init__(self, old: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        sources: dict[str, Source] = {}
        for n in range(3):
            sources[f"layers.{n}.weight"] = part(transposed("weight"), 8 * n, 8 * n + 8)
            sources[f"layers.{n}.bias"] = part("bias", 8 * n, 8 * n + 8)
        made_of(self, old, sources)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return torch.cat([layer(x_BTD) for layer in self.layers], -1)


class Wrap(nn.Module):
    def __init__(self, core: nn.Module) -> None:
        super().__init__()
        self.core = core

    def forward(self, *args: Any, **options: Any) -> Any:
        return self.core(*args, **options)


FUSED = slapo.replace(S, "model.layers.*.mlp", FusedMLP)
GPT = slapo.replace(slapo.replace(S, "**.mlp", GPTMLP), "**.c_attn", QKV)
SCHEDULES = {
    "fused": (llama, FUSED),
    "fused, tied": (lambda: llama(tie_word_embeddings=True), FUSED),
    "fused, turned": (llama, slapo.replace(FUSED, "**.mlp", Turned)),
    "fused, split": (llama, slapo.replace(FUSED, "**.mlp", SplitMLP)),
    "fused, wrapped": (llama, slapo.replace(FUSED, "**.mlp", Wrap)),
    "fused, wrapped, turned": (
        llama,
        slapo.replace(slapo.replace(FUSED, "**.mlp", Wrap), "**.mlp.core", Turned),
    ),
    "fused, its layer wrapped": (llama, slapo.replace(FUSED, "**.gate_up", Wrap)),
    "layers wrapped, fused": (llama, slapo.replace(slapo.replace(S, "**.self_attn", Wrap), "**.mlp", FusedMLP)),
    "gpt2": (gpt2, GPT),
    "gpt2, split": (lambda: gpt2(tie_word_embeddings=False), GPT),
    "gpt2, its head wrapped": (gpt2, slapo.replace(GPT, "lm_head", Wrap)),
    "nothing": (gpt2, S),
}


@pytest.fixture(params=SCHEDULES, name="case")
def _case(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    make, schedule = SCHEDULES[request.param]
    model = make()
    return model, slapo.apply(model, schedule)


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(IDS_BT).logits


def moved(model: nn.Module) -> nn.Module:
    """A copy with other values."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for tensor in other.parameters():
            tensor.add_(torch.randn_like(tensor) * 0.1)
    return other


# ---- to the original layout


def test_the_original_keys_and_values_come_back_bit_for_bit(case: tuple[Any, Any]) -> None:
    model, fast = case
    torch.testing.assert_close(logits(fast), logits(model))
    assert same_bits(to_original(fast), model.state_dict())


def test_what_comes_back_is_contiguous_and_shares_no_memory_but_for_ties(case: tuple[Any, Any], tmp_path: Path) -> None:
    model, fast = case
    back = to_original(fast)
    assert all(tensor.is_contiguous() for tensor in back.values())
    unique = {id(tensor): name for name, tensor in reversed(back.items())}
    assert len({t.untyped_storage().data_ptr() for t in back.values()}) == len(unique)
    stored.save_file({name: back[name] for name in unique.values()}, tmp_path / "x.safetensors")
    tied = dict(model.named_parameters(remove_duplicate=False))
    for name, tensor in tied.items():
        for other in tied:
            assert (back[name] is back[other]) == (tensor is tied[other])


def test_trained_values_come_back(case: tuple[Any, Any]) -> None:
    model, fast = case
    trained = moved(fast)
    plain = copy.deepcopy(model)
    plain.load_state_dict(to_original(trained))
    torch.testing.assert_close(logits(plain), logits(trained))


def test_another_state_of_the_model_is_turned(case: tuple[Any, Any], tmp_path: Path) -> None:
    model, fast = case
    average = {name: tensor.clone() for name, tensor in moved(fast).state_dict().items()}
    for name, tensor in fast.named_parameters(remove_duplicate=False):
        first = next(other for other, one in fast.named_parameters() if one is tensor)
        average[name] = average[first]
    torch.save(average, tmp_path / "x.pt")
    back = to_original(fast, torch.load(tmp_path / "x.pt"))
    assert back.keys() == model.state_dict().keys()
    again = copy.deepcopy(fast)
    from_original(again, back)
    assert same_bits(again.state_dict(), average)


def test_a_state_that_names_a_tied_tensor_once_is_turned() -> None:
    model = gpt2()
    fast = slapo.apply(model, slapo.replace(GPT, "lm_head", Wrap))
    once = {name: tensor for name, tensor in fast.state_dict().items() if name != "lm_head.core.weight"}
    back = to_original(fast, once)
    assert same_bits(back, model.state_dict())
    assert back["lm_head.weight"] is back["transformer.wte.weight"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_comes_back_bit_for_bit(dtype: torch.dtype) -> None:
    model = llama().to(dtype)
    fast = slapo.apply(model, FUSED)
    assert same_bits(to_original(fast), model.state_dict())
    assert from_original(fast, model.state_dict()) == ((), ())


def test_no_value_is_a_parameter_nor_has_a_gradient() -> None:
    assert not any(
        isinstance(t, nn.Parameter) or t.requires_grad for t in to_original(slapo.apply(gpt2(), GPT)).values()
    )


def test_a_shared_module_is_given_back_under_each_of_its_paths() -> None:
    model = llama()
    model.model.layers[1].mlp = model.model.layers[0].mlp
    back = to_original(slapo.apply(model, FUSED))
    assert same_bits(back, model.state_dict())
    assert back["model.layers.0.mlp.up_proj.weight"] is back["model.layers.1.mlp.up_proj.weight"]


def test_new_tensors_keep_their_names() -> None:
    class Low(Wrap):
        def __init__(self, core: nn.Module) -> None:
            super().__init__(core)
            self.low = nn.Parameter(torch.zeros(2))

    model = llama()
    back = to_original(slapo.apply(model, slapo.replace(S, "**.q_proj", Low)))
    new = {f"model.layers.{n}.self_attn.q_proj.low" for n in range(2)}
    assert back.keys() - model.state_dict().keys() == new
    assert same_bits({name: back[name] for name in back.keys() - new}, model.state_dict())


def test_what_was_folded_for_good_is_told() -> None:
    fast = slapo.apply(llama(), FUSED)
    for layer in fast.model.layers:
        vars(layer.mlp)["weight_map"] = None
    for use in (to_original, lambda model: from_original(model, {})):
        with pytest.raises(WeightsError, match=r"of model.layers.\{0,1\}.mlp were folded") as caught:
            use(fast)
        assert caught.value.paths == ("model.layers.0.mlp", "model.layers.1.mlp")


def test_wrong_arguments_are_refused() -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(ArgumentError, match="model is the transformed model, a module, not OrderedDict"):
        to_original(model.state_dict(), model)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="state_dict is a mapping"):
        to_original(model, [1])  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="source is a mapping of names to tensors, or the path"):
        from_original(model, 3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="and weight is int"):
        from_original(model, {"weight": 3})
    with pytest.raises(ArgumentError, match="one of its keys is int"):
        from_original(model, {3: model.weight})  # type: ignore[dict-item]
    with pytest.raises(WeightsError, match=r"the state is none of this model: it has no .*gate_up.weight"):
        to_original(slapo.apply(llama(), FUSED), llama().state_dict())


# ---- from the original layout


@pytest.mark.parametrize("assign", [False, True])
def test_a_checkpoint_of_the_model_before_is_loaded(case: tuple[Any, Any], assign: bool) -> None:
    model, fast = case
    other = moved(model)
    fast = copy.deepcopy(fast)
    held = list(fast.parameters())
    assert from_original(fast, other.state_dict(), assign=assign) == ((), ())
    torch.testing.assert_close(logits(fast), logits(other))
    assert same_bits(to_original(fast), other.state_dict())
    now = list(fast.parameters())
    assert len(now) == len(held)
    assert all((one is was) != assign for one, was in zip(now, held, strict=True))


@pytest.mark.parametrize("size", ["1KB", "1GB"])
def test_what_transformers_saved_is_loaded(case: tuple[Any, Any], size: str, tmp_path: Path) -> None:
    model, fast = case
    other, fast = moved(model), copy.deepcopy(fast)
    other.save_pretrained(tmp_path, max_shard_size=size)
    index = tmp_path / "model.safetensors.index.json"
    assert index.exists() == (size == "1KB")
    for source in (tmp_path, str(tmp_path), index if index.exists() else tmp_path / "model.safetensors"):
        fresh = copy.deepcopy(fast)
        assert from_original(fresh, source) == ((), ())
        torch.testing.assert_close(logits(fresh), logits(other))


def test_transformers_loads_what_comes_back(case: tuple[Any, Any], tmp_path: Path) -> None:
    model, fast = case
    trained = moved(fast)
    model.save_pretrained(tmp_path, state_dict=to_original(trained))
    again = type(model).from_pretrained(tmp_path).eval()
    torch.testing.assert_close(logits(again), logits(trained))
    assert same_bits(again.state_dict(), to_original(trained))


def test_a_model_on_the_meta_device_is_filled_by_assigning() -> None:
    model = gpt2()
    with torch.device("meta"):
        fast = slapo.apply(gpt2(), GPT)
    with pytest.raises(WeightsError, match=r"transformer.wte.weight is on the meta device, .*assign=True"):
        from_original(fast, model.state_dict())
    from_original(fast, model.state_dict(), assign=True)
    assert fast.lm_head.weight is fast.transformer.wte.weight
    torch.testing.assert_close(logits(fast), logits(model))


def test_all_that_does_not_fit_is_told_and_nothing_is_written() -> None:
    model = llama()
    fast = slapo.apply(model, FUSED)
    before = {name: tensor.clone() for name, tensor in fast.state_dict().items()}
    given = moved(model).state_dict()
    given["model.layers.0.mlp.gate_prj.weight"] = given.pop("model.layers.0.mlp.gate_proj.weight")
    given["model.norm.weight"] = torch.ones(9)
    given["lm_head.weight"] = given["lm_head.weight"].half()
    given["model.layers.1.mlp.up_proj.weight"] = torch.ones(13, 8)
    with pytest.raises(WeightsError) as caught:
        from_original(fast, given)
    told = str(caught.value)
    assert "missing: model.layers.0.mlp.gate_proj.weight; did you mean model.layers.0.mlp.gate_prj.weight" in told
    assert "unexpected: model.layers.0.mlp.gate_prj.weight" in told
    assert "model.norm.weight is (9,), and the model's (8,)" in told
    assert "lm_head.weight is torch.float16, and the model's torch.float32" in told
    assert "their shapes are (12, 8), (13, 8)" in told
    assert same_bits(fast.state_dict(), before)


def test_not_strict_leaves_what_has_no_partner() -> None:
    model = llama()
    fast = slapo.apply(model, FUSED)
    given = {name: tensor.half() for name, tensor in moved(model).state_dict().items()}
    lost = given.pop("model.layers.0.mlp.gate_proj.weight")
    given["more"] = lost
    before = fast.model.layers[0].mlp.gate_up.weight.clone()
    assert from_original(fast, given, strict=False) == (("model.layers.0.mlp.gate_proj.weight",), ("more",))
    assert torch.equal(fast.model.layers[0].mlp.gate_up.weight, before)
    assert torch.equal(fast.model.norm.weight, given["model.norm.weight"].float())
    with pytest.raises(WeightsError, match=r"model.norm.weight is \(9,\)"):
        from_original(fast, {"model.norm.weight": torch.ones(9)}, strict=False)


def test_names_with_another_beginning_are_told() -> None:
    model = gpt2()
    fast = slapo.apply(model, GPT)
    given = {name.removeprefix("transformer."): tensor for name, tensor in model.state_dict().items()}
    with pytest.raises(WeightsError, match=r"the checkpoint's names lack 'transformer.'"):
        from_original(fast, given)
    base = slapo.apply(model.transformer, GPT)
    with pytest.raises(WeightsError, match=r"the checkpoint's names begin with 'transformer.'"):
        from_original(base, model.state_dict())


def test_a_tie_with_two_values_is_told() -> None:
    fast = slapo.apply(gpt2(), GPT)
    given = gpt2(tie_word_embeddings=False).state_dict()
    with pytest.raises(WeightsError, match=r"transformer.wte.weight and lm_head.weight differ, and are one tensor"):
        from_original(fast, given)
    given["lm_head.weight"] = given["transformer.wte.weight"].clone()
    assert from_original(fast, given) == ((), ())


# ---- files


@pytest.fixture(name="saved")
def _saved(tmp_path: Path) -> Path:
    llama().save_pretrained(tmp_path, max_shard_size="1KB")
    return tmp_path


def load(path: Path) -> None:
    from_original(slapo.apply(llama(), FUSED), path)


def test_a_path_that_leads_nowhere_is_told(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"there is no .*none.safetensors"):
        load(tmp_path / "none.safetensors")
    with pytest.raises(WeightsError, match=r"has neither model.safetensors nor"):
        load(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(WeightsError, match=r"is no .safetensors file; .* load by torch.load"):
        load(tmp_path / "pytorch_model.bin")


def test_a_missing_shard_is_told(saved: Path) -> None:
    shard = sorted(saved.glob("*-of-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(WeightsError, match=f"files that are not there: {shard.name}"):
        load(saved)


def test_a_corrupt_file_is_told(saved: Path) -> None:
    shard = sorted(saved.glob("*-of-*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-7])
    with pytest.raises(WeightsError, match=f"{shard.name} cannot be read"):
        load(saved)
    shard.write_bytes(b"nonsense")
    with pytest.raises(WeightsError, match=f"{shard.name} cannot be read"):
        load(saved)


@pytest.mark.parametrize(
    "file", ["../x.safetensors", "/etc/x.safetensors", "a/../../x.safetensors", "..\\x.safetensors", ""]
)
def test_an_index_that_leads_out_is_refused(saved: Path, file: str) -> None:
    index = saved / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": file}}))
    with pytest.raises(WeightsError, match="leads out of its directory"):
        load(saved)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_an_index_that_is_none_is_told(saved: Path, text: str) -> None:
    (saved / "model.safetensors.index.json").write_text(text)
    with pytest.raises(WeightsError, match="is no index of safetensors"):
        load(saved)


def test_an_index_that_tells_of_more_than_there_is(saved: Path) -> None:
    index = saved / "model.safetensors.index.json"
    said = json.loads(index.read_text())
    said["weight_map"]["ghost"] = said["weight_map"]["lm_head.weight"]
    index.write_text(json.dumps(said))
    with pytest.raises(WeightsError, match="tensors that its files do not hold: ghost"):
        load(saved)


def test_without_safetensors_it_says_what_to_install(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "safetensors", None)
    with pytest.raises(WeightsError, match="pip install safetensors"):
        load(saved)
