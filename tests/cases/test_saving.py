"""Cases 30-33: what people hit when they save, cast and swap, and the right answer. Case 30 in JSON comes with JSON."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb

import slapo_fn as slapo

from .support import assert_as_recorded, assert_same_numbers, gradients, ids, record, stack

Empty = slapo.Schedule()


# ---- 30: a schedule on its way to another process

PROGRAM = '''
"""What a user's own module holds: a model, a class, and functions for a schedule."""
import torch
from torch import nn
import slapo_fn as slapo


class OwnNorm(nn.Module):
    def __init__(self, old):
        super().__init__()
        self.weight, self.bias, self.eps = old.weight, old.bias, old.eps

    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight + self.bias


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 4), nn.LayerNorm(4))


def fresh(old):
    return nn.Linear(old.in_features, old.out_features)


def double(module, args, output):
    return output * 2


def first(module, path):
    return path == "0"


def schedule():
    sch = slapo.replace(slapo.Schedule(), nn.LayerNorm, OwnNorm)
    sch = slapo.replace(sch, slapo.where("[::3]")[1:], fresh)
    sch = slapo.replace(sch, "2", nn.Tanh())
    sch = slapo.cast(sch, slapo.optional("9") | slapo.where("*"), torch.float64)
    sch = slapo.freeze(sch, slapo.where("*", nn.Linear).where(first), "bias")
    sch = slapo.annotate(sch, "3", "weight", "tag", ("a", 1))
    sch = slapo.hook(sch, "2", forward=double)
    sch = slapo.label(slapo.checkpoint(sch, slapo.exactly(1, "3")), "save memory")
    return slapo.compile(sch, ["0", "3"], backend="eager")


def result(schedule):
    made = model()
    torch.manual_seed(1)
    out = slapo.apply(made, schedule)
    x = torch.linspace(-1, 1, 8, dtype=torch.float64).view(2, 4)
    names = [type(m).__name__ for m in out]
    return names, list(out.state_dict()), out(x).detach(), out[3].weight.tag, out[0].bias.requires_grad
'''


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "users_program.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "users_program", raising=False)
    import users_program

    yield users_program
    sys.modules.pop("users_program", None)


def test_case_30_a_pickled_schedule_gives_the_same_model_in_a_fresh_process(program: Any, tmp_path: Path) -> None:
    sch = program.schedule()
    kinds, keys, out, tag, trains = program.result(sch)
    (tmp_path / "schedule.pickle").write_bytes(pickle.dumps(sch))
    package = str(Path(slapo.__file__).parents[1])
    code = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {package!r}]\n"
        "import pickle, torch\n"
        f"sch = pickle.load(open({str(tmp_path / 'schedule.pickle')!r}, 'rb'))\n"
        "import users_program\n"
        "assert [e.name for e in sch] == [e.name for e in users_program.schedule()]\n"
        "assert sch[-2].label == 'save memory' and sch[0].origin.file.endswith('users_program.py')\n"
        f"torch.save(users_program.result(sch), {str(tmp_path / 'result.pt')!r})\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    kinds2, keys2, out2, tag2, trains2 = torch.load(tmp_path / "result.pt", weights_only=False)
    assert (kinds2, keys2, tag2, trains2) == (kinds, keys, tag, trains)
    assert torch.equal(out2, out)


def test_case_30_a_pickle_round_trip_is_equal_and_keeps_lines_and_labels(program: Any) -> None:
    sch = slapo.drop(program.schedule(), 2)  # an nn.Tanh() is a live module: it compares by identity
    back = pickle.loads(pickle.dumps(sch))
    assert back == sch
    assert hash(back) == hash(sch)
    assert type(back) is slapo.Schedule
    assert [(e.origin, e.label) for e in back] == [(e.origin, e.label) for e in sch]
    assert repr(back) == repr(sch)


@pytest.mark.parametrize(
    "build",
    [
        lambda: slapo.replace(Empty, "0", lambda old: old),
        lambda: slapo.hook(Empty, "0", forward=lambda module, args, output: None),
        lambda: slapo.freeze(Empty, slapo.where("*").where(lambda module, path: True)),
        lambda: slapo.probe(Empty, "0", lambda path, output: None),
    ],
    ids=["factory", "hook", "predicate", "probe"],
)
def test_case_30_a_lambda_does_not_pickle(build: Any) -> None:
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        pickle.dumps(build())


# ---- 31: cast


class Mixed(nn.Module):
    """Every kind of tensor that a model holds."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.fc.weight
        self.fc.bias.requires_grad_(False)
        self.register_buffer("inv_freq", torch.rand(4), persistent=False)
        self.register_buffer("positions", torch.arange(4))
        self.register_buffer("phases", torch.rand(4) + 1j)
        self.register_buffer("mask", torch.ones(4, dtype=torch.bool))
        self.register_buffer("mean", torch.rand(4))
        self.index = nn.Parameter(torch.arange(3), requires_grad=False)


@pytest.mark.parametrize("inplace", [False, True])
def test_case_31_cast_changes_floating_weights_and_nothing_else(inplace: bool) -> None:
    model = Mixed()
    model.fc.weight.own_mark = 5
    kept = {n: getattr(model, n) for n in ("inv_freq", "positions", "phases", "mask", "index")}
    counter, before = model.norm.num_batches_tracked, record(model)
    out = slapo.apply(model, slapo.cast(Empty, "", torch.bfloat16), inplace=inplace)
    for name, tensor in kept.items():
        assert getattr(out, name) is tensor, name
    assert out.norm.num_batches_tracked is counter
    for tensor in (out.fc.weight, out.fc.bias, out.norm.weight, out.norm.running_mean, out.norm.running_var, out.mean):
        assert tensor.dtype == torch.bfloat16
    assert out.tied.weight is out.fc.weight
    assert out.fc.weight.requires_grad
    assert out.fc.weight.own_mark == 5
    assert not out.fc.bias.requires_grad
    assert isinstance(out.fc.weight, nn.Parameter)
    assert out.fc.weight.is_leaf
    assert list(out.state_dict()) == list(Mixed().state_dict())
    assert (out is model) == inplace
    if not inplace:
        assert_as_recorded(model, before)


def test_case_31_a_buffer_that_is_not_saved_is_cast_when_it_is_asked_for() -> None:
    out = slapo.apply(Mixed(), slapo.cast(Empty, "", torch.bfloat16, "inv_freq"))
    assert out.inv_freq.dtype == torch.bfloat16
    assert out.fc.weight.dtype == torch.float32


def test_case_31_the_rotary_table_of_a_llama_stays_in_float32() -> None:
    model = llama().float()
    out = slapo.apply(model, slapo.cast(Empty, "", torch.bfloat16))
    assert out.model.rotary_emb.inv_freq.dtype == torch.float32
    assert {p.dtype for p in out.parameters()} == {torch.bfloat16}
    assert out(ids(1, 5, vocab=32)).logits.dtype == torch.bfloat16
    by_hand = copy.deepcopy(model).bfloat16()
    by_hand.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq
    assert torch.equal(out(ids(1, 5, vocab=32)).logits, by_hand(ids(1, 5, vocab=32)).logits)


def test_case_31_a_narrowing_cast_rounds_for_good_and_the_plan_does_not_strike_it_out() -> None:
    model = nn.Linear(4, 4)
    sch = slapo.cast(slapo.cast(Empty, "", torch.bfloat16), "", torch.float64)
    out = slapo.apply(model, sch)
    assert [step.overridden_by for step in slapo.plan(model, sch).steps] == [None, None]
    assert torch.equal(out.weight, model.weight.bfloat16().double()), "as one applied after the other"


def scripted() -> nn.Sequential:
    return nn.Sequential(torch.jit.script(nn.Linear(4, 4)), nn.ReLU())


def test_case_31_the_tensors_of_a_scripted_module_are_changed_or_it_is_refused() -> None:
    model = scripted()
    for sch, changed in (
        (slapo.cast(Empty, "0", torch.float64), lambda p: p.dtype == torch.float64),
        (slapo.freeze(Empty, "0"), lambda p: not p.requires_grad),
        (slapo.annotate(Empty, "0", "*", "mark", 1), lambda p: hasattr(p, "mark")),
    ):
        try:
            out = slapo.apply(model, sch)
        except slapo.SlapoError:
            continue
        assert all(map(changed, out.parameters())), repr(sch)
        assert not any(map(changed, model.parameters())), repr(sch)


def test_case_31_a_scripted_module_is_checkpointed_or_refused() -> None:
    try:
        out = slapo.apply(scripted(), slapo.checkpoint(Empty, "0"))
    except slapo.SlapoError:
        return
    out(torch.ones(1, 4)).sum().backward()
    assert out[0].weight.grad is not None


# ---- 32: layers that return h, (h,), (h, aux)


class Returns(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.kind = kind

    def forward(self, h: Tensor, scale: int = 1) -> Any:
        y = self.fc(h).tanh() * scale
        return {
            "h": lambda: y,
            "(h,)": lambda: (y,),
            "(h, aux)": lambda: (y, y.detach().sum()),
            "(h, None, int)": lambda: (y, None, 3),
            "[h, h]": lambda: [y, y + 1],
            "dict": lambda: {"h": y, "aux": (y.sum(), "text")},
            "nested": lambda: ((y, [y * 2]), {"x": None}),
        }[self.kind]()


KINDS = ["h", "(h,)", "(h, aux)", "(h, None, int)", "[h, h]", "dict", "nested"]


def flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [type(value), *value, *(one for item in value.values() for one in flat(item))]
    if isinstance(value, (list, tuple)):
        return [type(value), *(one for item in value for one in flat(item))]
    return [value]


@pytest.mark.parametrize("kind", KINDS)
def test_case_32_whatever_a_layer_returns_is_passed_through(kind: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Returns(kind)).double()
    seen: dict[str, Any] = {}
    sch = slapo.checkpoint(slapo.compile(Empty, "0", backend="eager"), "0")
    sch = slapo.probe(slapo.hook(sch, "0", forward=lambda module, args, output: None), "0", seen.__setitem__)
    out = slapo.apply(model, sch)
    results = []
    for one in (model, out):
        x = torch.linspace(-1, 1, 8, dtype=torch.float64).view(2, 4).requires_grad_()
        value = one[0](x, scale=2)
        tensors = [t for t in flat(value) if isinstance(t, Tensor) and t.requires_grad]
        grads = torch.autograd.grad(sum(t.square().sum() for t in tensors), [x, *one.parameters()])
        results.append((flat(value), grads, value))
    for mine, theirs in zip(*[r[0] for r in results], strict=True):
        assert torch.equal(mine, theirs) if isinstance(mine, Tensor) else mine == theirs
    for mine, theirs in zip(*[r[1] for r in results], strict=True):
        assert torch.equal(mine, theirs)
    assert seen["0"] is results[1][2]


def test_case_32_one_schedule_over_layers_of_all_kinds() -> None:
    model = nn.ModuleList([Returns(kind) for kind in KINDS])
    out = slapo.apply(model, slapo.checkpoint(Empty, Returns))
    x = torch.ones(1, 4)
    for mine, theirs in zip(model, out, strict=True):
        assert [type(a) for a in flat(mine(x))] == [type(a) for a in flat(theirs(x))]


# ---- 33: attention swapped on one layer of three


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(config).double()


class OwnAttention(nn.Module):
    """Attention written out, over the old one's projections: ``B`` batch, ``N`` heads, ``T`` tokens, ``D`` a head's width."""

    def __init__(self, old: LlamaAttention) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = old.q_proj, old.k_proj, old.v_proj, old.o_proj
        self.d, self.groups = old.head_dim, old.num_key_value_groups

    def forward(
        self, hidden_states: Tensor, position_embeddings: Any, attention_mask: Tensor | None = None, **_: Any
    ) -> Any:
        batch, tokens, _width = hidden_states.shape
        q, k, v = (
            p(hidden_states).view(batch, tokens, -1, self.d).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        k, v = k.repeat_interleave(self.groups, 1), v.repeat_interleave(self.groups, 1)
        scores_BNTT = q @ k.transpose(-1, -2) / self.d**0.5
        hidden_TT = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        scores_BNTT = scores_BNTT.masked_fill(hidden_TT, -1e300)
        if attention_mask is not None:
            added = (
                attention_mask if attention_mask.dtype != torch.bool else torch.where(attention_mask, 0.0, -1e30).to(q)
            )
            scores_BNTT = scores_BNTT + added
        mixed = (scores_BNTT.softmax(-1) @ v).transpose(1, 2).reshape(batch, tokens, -1)
        return self.o_proj(mixed), None


def test_case_33_only_that_layer_and_the_numbers_hold() -> None:
    model = llama()
    config = copy.deepcopy(model.config.to_dict())
    sch = slapo.replace(Empty, slapo.select(model, "model.layers.1.self_attn", LlamaAttention), OwnAttention)
    out = slapo.apply(model, sch)
    assert [type(layer.self_attn).__name__ for layer in out.model.layers] == [
        "LlamaAttention",
        "OwnAttention",
        "LlamaAttention",
    ]
    assert [type(layer.self_attn) for layer in model.model.layers] == [LlamaAttention] * 3
    assert out.config.to_dict() == model.config.to_dict() == config
    assert out.model.layers[0].self_attn.config is out.model.layers[2].self_attn.config is out.config
    tokens = ids(2, 6, vocab=29) + 3
    torch.testing.assert_close(out(tokens).logits, model(tokens).logits, rtol=1e-12, atol=1e-12)
    padding = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    mine, theirs = (one(tokens, attention_mask=padding).logits[padding.bool()] for one in (out, model))
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_case_33_causality_holds() -> None:
    model = llama()
    out = slapo.apply(model, slapo.replace(Empty, "model.layers.1.self_attn", OwnAttention))
    tokens = ids(1, 6, vocab=32)
    changed = tokens.clone()
    changed[0, 4] = (changed[0, 4] + 1) % 32
    mine, theirs = out(tokens).logits, out(changed).logits
    assert torch.equal(mine[:, :4], theirs[:, :4])
    assert not torch.equal(mine[:, 4:], theirs[:, 4:])


def swap_attention_at(site: slapo.Site[LlamaAttention], name: str) -> nn.Module:
    """A user's own primitive: another attention function, said in a config of the layer's own."""
    site.module.config = copy.copy(site.module.config)
    site.module.config._attn_implementation = name
    return site.module


@pytest.mark.parametrize("inplace", [False, True])
def test_case_33_a_config_of_one_layer_s_own_leaves_the_others_alone(inplace: bool) -> None:
    model = llama()
    plain = copy.deepcopy(model)
    before = model.config._attn_implementation
    sch = slapo.add(Empty, slapo.where("model.layers.1.self_attn", LlamaAttention), swap_attention_at, "eager")
    out = slapo.apply(model, sch, inplace=inplace)
    assert [layer.self_attn.config._attn_implementation for layer in out.model.layers] == [before, "eager", before]
    assert out.config._attn_implementation == before
    if not inplace:
        assert [layer.self_attn.config._attn_implementation for layer in model.model.layers] == [before] * 3
    tokens = ids(2, 6, vocab=29) + 3
    padding = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    mine, theirs = (one(tokens, attention_mask=padding).logits[padding.bool()] for one in (out, plain))
    assert mine.shape == theirs.shape


def test_case_33_gradients_through_the_swapped_layer() -> None:
    model = llama()
    out = slapo.apply(model, slapo.replace(Empty, "model.layers.1.self_attn", OwnAttention))
    tokens = ids(2, 6, vocab=32)
    found = []
    for one in (model, out):
        one.zero_grad(set_to_none=True)
        one(tokens, labels=tokens).loss.backward()
        found.append({n: p.grad.clone() for n, p in one.named_parameters()})
    assert list(found[0]) == list(found[1])
    for name, grad in found[0].items():
        torch.testing.assert_close(found[1][name], grad, rtol=1e-9, atol=1e-12)


def test_saved_weights_of_a_transformed_model_are_the_plain_model_s(tmp_path: Path) -> None:
    model = stack()
    out = slapo.apply(model, slapo.checkpoint(slapo.compile(Empty, "layers.*", backend="eager"), "layers.*"))
    gradients(out, ids())
    torch.save(out.state_dict(), tmp_path / "weights.pt")
    plain = stack()
    with torch.no_grad():
        for p in plain.parameters():
            p.zero_()
    plain.load_state_dict(torch.load(tmp_path / "weights.pt"))
    assert_same_numbers(model, plain, ids())
