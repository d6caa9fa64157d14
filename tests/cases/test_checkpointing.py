"""Cases 18-23: what people hit when they checkpoint and compile, and the right answer."""

from __future__ import annotations

import copy
import inspect
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import slapo_fn as slapo

from .support import Block, Calls, assert_as_recorded, assert_same_numbers, gradients, ids, record, stack

Empty = slapo.Schedule()


def build(*names: str, target: Any = "layers.*") -> slapo.Schedule:
    builders = {
        "checkpoint": lambda s: slapo.checkpoint(s, target),
        "compile": lambda s: slapo.compile(s, target, backend="eager"),
        "replace": lambda s: slapo.replace(s, target, Doubled),
    }
    sch = Empty
    for name in names:
        sch = builders[name](sch)
    return sch


class Doubled(Block):
    """The old block's parts, and twice the residual branch."""

    def __init__(self, old: Block) -> None:
        super().__init__()
        self.norm, self.fc, self.act, self.proj, self.proj_drop = old.norm, old.fc, old.act, old.proj, old.proj_drop
        self.scale = 2.0


wraps = pytest.mark.parametrize("names", [("checkpoint",), ("compile",), ("checkpoint", "compile")], ids="+".join)


# ---- 18: as on the plain model


@wraps
@pytest.mark.parametrize("inplace", [False, True])
def test_case_18_names_keys_class_and_signature_are_the_plain_model_s(names: tuple[str, ...], inplace: bool) -> None:
    plain, out = stack(), slapo.apply(stack(), build(*names), inplace=inplace)
    out(ids()).sum().backward()
    for listing in ("named_modules", "named_parameters", "named_buffers", "named_children"):
        assert [n for n, _ in getattr(out, listing)()] == [n for n, _ in getattr(plain, listing)()]
    assert [(n, type(m)) for n, m in out.named_modules()] == [(n, type(m)) for n, m in plain.named_modules()]
    assert list(out.state_dict()) == list(plain.state_dict())
    block = out.layers[0]
    assert isinstance(block, Block)
    assert inspect.signature(block.forward) == inspect.signature(plain.layers[0].forward)
    assert list(dict(block.named_modules())) == list(dict(plain.layers[0].named_modules()))
    assert repr(out) == repr(plain)
    assert "_orig_mod" not in repr(out)
    assert set(dir(block)) == set(dir(plain.layers[0])), "no attribute is added"


@wraps
def test_case_18_a_state_dict_loads_both_ways(names: tuple[str, ...]) -> None:
    plain, out = stack(), slapo.apply(stack(), build(*names))
    with torch.no_grad():
        for p in plain.parameters():
            p.add_(0.1)
    out.load_state_dict(plain.state_dict())
    assert_same_numbers(plain, out, ids())
    with torch.no_grad():
        for p in out.parameters():
            p.mul_(0.5)
    plain.load_state_dict(out.state_dict())
    assert_same_numbers(plain, out, ids())
    out.load_state_dict({k: v + 1 for k, v in plain.state_dict().items()}, assign=True)
    plain.load_state_dict(out.state_dict(), assign=True)
    assert_same_numbers(plain, out, ids())


@wraps
def test_case_18_attribute_writes_take_effect(names: tuple[str, ...]) -> None:
    plain, out = stack(), slapo.apply(stack(), build(*names))
    out(ids())
    for model in (plain, out):
        model.layers[0].scale = 3.0
        model.layers[1].fc = nn.Linear(8, 16).double()
        model.layers[2].fc.bias = nn.Parameter(torch.ones(16, dtype=torch.float64))
        model.layers[2].norm.eps = 0.1
    out.layers[1].fc.load_state_dict(plain.layers[1].fc.state_dict())
    assert_same_numbers(plain, out, ids())
    for model in (plain, out):
        del model.layers[0].act
        model.layers[0].act = nn.ReLU()
    assert_same_numbers(plain, out, ids())


@wraps
def test_case_18_keyword_arguments_pass(names: tuple[str, ...]) -> None:
    plain, out = stack(), slapo.apply(stack(), build(*names))
    x_BTD = torch.ones(2, 3, 8, dtype=torch.float64)
    assert torch.equal(out.layers[0](x_BTD, shift=2.0), plain.layers[0](x_BTD, shift=2.0))
    assert torch.equal(out.layers[0](x_BTD=x_BTD, shift=1.0), plain.layers[0](x_BTD, shift=1.0))
    with pytest.raises(TypeError):
        out.layers[0](x_BTD, no_such=1)


@wraps
def test_case_18_train_and_eval_take_effect(names: tuple[str, ...]) -> None:
    plain, out = stack(p=0.5), slapo.apply(stack(p=0.5), build(*names))
    for mode in (True, False, True):
        plain.train(mode), out.train(mode)
        assert_same_numbers(plain, out, ids())


@wraps
def test_case_18_copies_run_their_own_weights(names: tuple[str, ...], tmp_path: Any) -> None:
    out = slapo.apply(stack(), build(*names))
    value = out(ids())
    torch.save(out, tmp_path / "model.pt")
    for made in (copy.deepcopy(out), torch.load(tmp_path / "model.pt", weights_only=False)):
        assert torch.equal(made(ids()), value)
        assert list(made.state_dict()) == list(out.state_dict())
        with torch.no_grad():
            for p in made.layers.parameters():
                p.zero_()
        assert not torch.equal(made(ids()), value)
        assert torch.equal(out(ids()), value)


def test_case_18_equal_blocks_are_compiled_once_and_really_compiled() -> None:
    graphs: list[Any] = []

    def counting(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    out = slapo.apply(stack(depth=6), slapo.compile(Empty, "layers.*", backend=counting, fullgraph=True))
    out(ids())
    assert len(graphs) == 1


def test_case_18_a_hook_put_on_afterwards_runs_once() -> None:
    out = slapo.apply(stack(), build("checkpoint", "compile"))
    calls = Calls()
    handle = out.layers[0].register_forward_pre_hook(calls)
    out(ids()).sum().backward()
    assert calls.count == 1
    handle.remove()


# ---- 19: a frozen embedding


@pytest.mark.parametrize("frozen_by", ["schedule", "hand"])
@pytest.mark.parametrize("pattern", ["layers.*", "layers.0", "layers.*.fc"])
def test_case_19_gradients_behind_a_frozen_embedding(pattern: str, frozen_by: str) -> None:
    model = stack(tie=False)
    sch = slapo.checkpoint(Empty, pattern)
    if frozen_by == "hand":
        model.embed.requires_grad_(False)
    else:
        sch = slapo.freeze(sch, "embed")
    out = slapo.apply(model, sch)
    plain = stack(tie=False)
    plain.embed.requires_grad_(False)
    assert_same_numbers(plain, out, ids())
    _, grads = gradients(out, ids())
    assert grads["embed.weight"] is None
    assert all(grad is not None and grad.abs().sum() > 0 for name, grad in grads.items() if name.startswith("layers"))


def test_case_19_only_the_input_wants_a_gradient() -> None:
    plain, out = stack().requires_grad_(False), slapo.apply(stack().requires_grad_(False), build("checkpoint"))
    seen = []
    for model in (plain, out):
        x_BTD = torch.ones(2, 3, 8, dtype=torch.float64, requires_grad=True)
        model.layers[0](x_BTD).square().sum().backward()
        seen.append(x_BTD.grad)
    assert torch.equal(*seen)


# ---- 20: a Llama with its cache


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=0, eos_token_id=1, pad_token_id=2,
        attention_dropout=0.25,
    )  # fmt: skip
    return LlamaForCausalLM(config).double()


def loss_and_gradients(model: nn.Module, tokens: Tensor, **kwargs: Any) -> tuple[Tensor, dict[str, Tensor], Any]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(7)
    out = model(tokens, labels=tokens, **kwargs)
    out.loss.backward()
    return out.loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}, out.past_key_values


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("pattern", ["model.layers.*", "model.layers.[::2]", "model.layers.*.self_attn", "model"])
def test_case_20_loss_gradients_and_cache_of_a_checkpointed_llama(pattern: str, mode: str) -> None:
    plain, tokens = llama().train(mode == "train"), ids(2, 7, vocab=32)
    assert plain.config.use_cache
    out = slapo.apply(plain, slapo.checkpoint(Empty, pattern))
    loss, grads, cache = loss_and_gradients(plain, tokens)
    loss2, grads2, cache2 = loss_and_gradients(out, tokens)
    assert torch.equal(loss, loss2)
    for name, grad in grads.items():
        torch.testing.assert_close(grads2[name], grad, rtol=0, atol=0)
    assert (cache is None) == (cache2 is None)
    if cache is not None:
        assert cache.get_seq_length() == cache2.get_seq_length() == 7
        for mine, theirs in zip(cache.layers, cache2.layers, strict=True):
            assert torch.equal(mine.keys, theirs.keys)
            assert torch.equal(mine.values, theirs.values)


def test_case_20_a_cache_that_was_given_with_tokens_in_it_is_written_once() -> None:
    plain, tokens = llama().eval(), ids(2, 7, vocab=32)
    out = slapo.apply(plain, slapo.checkpoint(Empty, "model.layers.*"))
    found = []
    for model in (plain, out):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(tokens[:, :4], past_key_values=cache)
        assert cache.get_seq_length() == 4
        found.append((*loss_and_gradients(model, tokens[:, 4:], past_key_values=cache)[:2], cache))
        assert cache.get_seq_length() == 7
    assert torch.equal(found[0][0], found[1][0])
    for name, grad in found[0][1].items():
        assert torch.equal(found[1][1][name], grad), name
    for mine, theirs in zip(found[0][2].layers, found[1][2].layers, strict=True):
        assert torch.equal(mine.keys, theirs.keys)


@pytest.mark.parametrize("names", [("checkpoint",), ("checkpoint", "compile")], ids="+".join)
def test_case_20_generate_still_uses_the_cache(names: tuple[str, ...]) -> None:
    plain, tokens = llama().eval(), ids(1, 5, vocab=32)
    lengths: list[int] = []
    sch = build(*names, target="model.layers.*")
    sch = slapo.hook(sch, "model.embed_tokens", forward=lambda module, args, output: lengths.append(output.shape[1]))
    out = slapo.apply(plain, sch)
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    with torch.no_grad():
        assert torch.equal(out.generate(tokens, **settings), plain.generate(tokens, **settings))
    assert lengths == [5, 1, 1, 1, 1, 1]


# ---- 21: how often a forward runs


class Counting(nn.Module):
    """A layer whose forward counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.fc(x).tanh()


def test_case_21_every_second_block_runs_twice() -> None:
    model = nn.Sequential(*[Counting() for _ in range(6)])
    out = slapo.apply(model, slapo.checkpoint(Empty, slapo.select(model, "*")[::2]))
    out(torch.ones(2, 4)).sum().backward()
    assert [layer.calls for layer in out] == [2, 1, 2, 1, 2, 1]
    assert [layer.calls for layer in model] == [0] * 6, "a counter is the copy's own"


def test_case_21_the_slice_is_a_rule_that_holds_on_a_deeper_model() -> None:
    small, deep = (nn.Sequential(*[Counting() for _ in range(n)]) for n in (4, 7))
    out = slapo.apply(deep, slapo.checkpoint(Empty, slapo.select(small, "*")[::2]))
    out(torch.ones(2, 4)).sum().backward()
    assert [layer.calls for layer in out] == [2, 1, 2, 1, 2, 1, 2]


def test_case_21_without_gradients_each_runs_once() -> None:
    model = nn.Sequential(*[Counting() for _ in range(3)])
    out = slapo.apply(model, slapo.checkpoint(Empty, "*"))
    with torch.no_grad():
        out(torch.ones(2, 4))
    assert [layer.calls for layer in out] == [1, 1, 1]


def test_case_21_checkpointed_twice_is_checkpointed_once() -> None:
    model = nn.Sequential(*[Counting() for _ in range(2)])
    sch = slapo.checkpoint(slapo.checkpoint(Empty, "*"), "0")
    out = slapo.apply(slapo.apply(model, sch), slapo.checkpoint(Empty, "1"))
    out(torch.ones(2, 4)).sum().backward()
    assert [layer.calls for layer in out] == [2, 2]


def test_case_21_hooks_run_once_though_the_forward_runs_twice() -> None:
    said: list[str] = []
    model = nn.Sequential(Counting())
    model[0].register_forward_pre_hook(lambda module, args: said.append("user's"))
    sch = slapo.hook(slapo.checkpoint(Empty, "0"), "0", forward_pre=lambda module, args: said.append("schedule's"))
    out = slapo.apply(model, sch)
    out(torch.ones(2, 4)).sum().backward()
    assert said == ["user's", "schedule's"]
    assert out[0].calls == 2


# ---- 22: every order


ORDERS = list(itertools.permutations(("checkpoint", "compile", "replace")))


@pytest.mark.parametrize("order", ORDERS, ids="+".join)
def test_case_22_every_order_gives_the_same_model(order: tuple[str, ...]) -> None:
    model = stack(depth=2)
    out = slapo.apply(model, build(*order))
    by_hand = stack(depth=2)
    for number, layer in enumerate(by_hand.layers):
        by_hand.layers[number] = Doubled(layer)
    assert [(n, type(m)) for n, m in out.named_modules()] == [(n, type(m)) for n, m in by_hand.named_modules()]
    assert_same_numbers(by_hand, out, ids())
    plan = slapo.plan(model, build(*order))
    assert [plan.schedule[n].name for n in plan.order] == ["replace", "compile", "checkpoint"]


@pytest.mark.parametrize("order", ORDERS, ids="+".join)
def test_case_22_one_schedule_after_another_in_every_order(order: tuple[str, ...]) -> None:
    out = stack(depth=2)
    for name in order:
        out = slapo.apply(out, build(name))
    by_hand = slapo.apply(stack(depth=2), build("replace"))
    assert_same_numbers(by_hand, out, ids())
    plain_layers = [[type(one).__name__ for one in chain(layer)] for layer in out.layers]
    assert plain_layers == [["Checkpointed", "Compiled"]] * 2


def chain(module: nn.Module) -> list[Any]:
    found, layer = [], vars(module).get("forward")
    while layer is not None and hasattr(layer, "inner"):
        found.append(layer)
        layer = layer.inner
    return found


def compiled_around(model: nn.Module, how: str, sch: slapo.Schedule) -> nn.Module:
    if how == "by hand":
        return torch.compile(slapo.apply(model, sch), backend="aot_eager", fullgraph=True)
    return slapo.apply(model, slapo.compile(sch, "", backend="aot_eager", fullgraph=how == "fullgraph"))


@pytest.mark.parametrize("how", ["schedule", "fullgraph", "by hand"])
def test_case_22_the_whole_model_compiled_around_checkpointed_layers(how: str) -> None:
    plain = stack(depth=2)
    out = compiled_around(stack(depth=2), how, slapo.checkpoint(Empty, "layers.*"))
    tokens = ids()
    value, grads = gradients(plain, tokens)
    value2, grads2 = gradients(out, tokens)
    torch.testing.assert_close(value2, value, rtol=1e-9, atol=1e-12)
    for mine, theirs in zip(grads.values(), grads2.values(), strict=True):
        torch.testing.assert_close(theirs, mine, rtol=1e-9, atol=1e-12)


def keep_matmuls() -> Any:
    """A user's own choice of what is kept, as torch's tutorial has it."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


@pytest.mark.parametrize("how", ["not compiled", "schedule", "fullgraph", "by hand"])
def test_case_22_selective_checkpointing_and_the_whole_model_compiled_around_it(how: str) -> None:
    plain, sch = stack(depth=2), slapo.checkpoint(Empty, "layers.*", context_fn=keep_matmuls)
    out = slapo.apply(stack(depth=2), sch) if how == "not compiled" else compiled_around(stack(depth=2), how, sch)
    value, grads = gradients(plain, ids())
    value2, grads2 = gradients(out, ids())
    torch.testing.assert_close(value2, value, rtol=1e-9, atol=1e-12)
    for mine, theirs in zip(grads.values(), grads2.values(), strict=True):
        torch.testing.assert_close(theirs, mine, rtol=1e-9, atol=1e-12)


# ---- 23: a second schedule over a compiled result


def test_case_23_a_second_schedule_selects_by_the_old_paths_and_takes_effect() -> None:
    model = stack()
    first = slapo.apply(model, build("compile", "checkpoint"))
    first(ids()).sum().backward()
    assert slapo.select(first, "layers.*").paths == slapo.select(model, "layers.*").paths
    assert slapo.select(first, "layers.*", Block).paths == slapo.select(model, "layers.*", Block).paths
    assert slapo.select(first, type=nn.LayerNorm).paths == slapo.select(model, type=nn.LayerNorm).paths
    before = record(first)
    value = first(ids())

    class Nothing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.zeros_like(x)

    second = slapo.apply(first, slapo.replace(Empty, "layers.1.proj_drop", Nothing()))
    by_hand = stack()
    by_hand.layers[1].proj_drop = Nothing()
    assert_same_numbers(by_hand, second, ids())
    first.zero_grad(set_to_none=True)
    assert torch.equal(first(ids()), value), "the first result is as it was"
    assert [one[0] for one in before["modules"]] == [path for path, _ in first.named_modules()]


def test_case_23_in_place_over_a_compiled_block_that_has_run() -> None:
    model = slapo.apply(stack(), build("compile"))
    model(ids())
    slapo.apply(model, slapo.replace(Empty, "layers.0.act", nn.ReLU()), inplace=True)
    by_hand = stack()
    by_hand.layers[0].act = nn.ReLU()
    assert_same_numbers(by_hand, model, ids())


def test_case_23_a_compiled_block_that_is_replaced_stays_compiled() -> None:
    graphs: list[Any] = []

    def counting(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    first = slapo.apply(stack(depth=1), slapo.compile(Empty, "layers.*", backend=counting))
    first(ids())
    seen = len(graphs)
    assert seen == 1
    second = slapo.apply(first, slapo.replace(Empty, "layers.*", Doubled))
    second(ids())
    assert len(graphs) > seen
    assert_same_numbers(slapo.apply(stack(depth=1), build("replace")), second, ids())


def test_case_23_a_model_compiled_by_hand_is_refused_clearly_and_works_in_place() -> None:
    model = stack()
    for layer in model.layers:
        layer.compile(backend="eager")
    model(ids())
    before = record(model)
    sch = slapo.replace(Empty, "layers.0.act", nn.ReLU())
    with pytest.raises(slapo.ForkError, match=r"compile\(\).*inplace=True"):
        slapo.apply(model, sch)
    assert_as_recorded(model, before)
    assert_same_numbers(stack(), model, ids())
    out = slapo.apply(model, sch, inplace=True)
    by_hand = stack()
    by_hand.layers[0].act = nn.ReLU()
    assert_same_numbers(by_hand, out, ids())
