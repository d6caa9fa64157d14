"""B001-B018: selection, paths, children, names. The rest of the range is not among the ancestor's listed behaviours."""

from __future__ import annotations

import pytest
from torch import nn

import slapo_fn as slapo

from .nets import Everywhere, Inner, Lists, Model, Numbered

Empty = slapo.Schedule()


def test_B001_a_selection_lists_paths_and_the_empty_path_is_the_root() -> None:
    model = Model()
    everything = slapo.select(model)
    assert everything[0].path == ""
    assert everything[0].module is model
    assert slapo.select(model, "")[0].module is model
    assert slapo.select(model, "").paths == ("",)
    assert "submod" in repr(everything)


def test_B002_all_seven_paths_each_with_its_module() -> None:
    model = Model()
    listed = dict(slapo.select(model, ["*", "submod.*"]))
    assert list(listed) == ["fc1", "act1", "fc2", "act2", "submod", "submod.linear", "submod.activation"]
    assert all(module is model.get_submodule(path) for path, module in listed.items())


def test_B003_depth_first_in_definition_order_with_the_root_first() -> None:
    for model in (Model(), Lists(), Everywhere()):
        assert slapo.select(model).paths == tuple(path for path, _ in model.named_modules())


def test_B003_below_a_selection_the_prefix_is_kept() -> None:
    inner = slapo.select(slapo.select(Model(), "submod"), "*")
    assert inner.paths == ("submod.linear", "submod.activation")


def test_B004_members_of_a_module_list() -> None:
    model = Lists()
    assert slapo.select(model, "mod.*").paths == ("mod.0", "mod.1", "mod.2")
    assert slapo.select(model, "mod.1").modules == (model.mod[1],)


def test_B005_a_module_list_itself() -> None:
    model = Lists()
    assert slapo.select(model, "mod").modules == (model.mod,)
    out = slapo.apply(model, slapo.freeze(Empty, "mod"))
    assert [n for n, p in out.named_parameters() if not p.requires_grad] == [
        f"mod.{n}.{t}" for n in (0, 2) for t in ("weight", "bias")
    ]


def test_B006_a_sequential_and_its_members_by_one_lookup_or_two() -> None:
    model = Lists()
    assert slapo.select(model, "seq", nn.Sequential).modules == (model.seq,)
    assert (
        slapo.select(model, "seq.0").modules == slapo.select(slapo.select(model, "seq"), "0").modules == (model.seq[0],)
    )
    assert slapo.select(slapo.select(model, "seq"), "0").paths == ("seq.0",)


def test_B008_modules_in_every_container_and_in_library_modules() -> None:
    model = Everywhere()
    for path in (
        "nested.0.0",
        "named.key",
        "bare.linear",
        "encoder.linear1",
        "encoder.self_attn.out_proj",
        "attention.out_proj",
    ):
        assert slapo.select(model, path).modules == (model.get_submodule(path),)
    found = slapo.select(model, type=nn.Linear, subclasses=True).paths
    assert found == tuple(path for path, module in model.named_modules() if isinstance(module, nn.Linear))


@pytest.mark.parametrize("path", ["mod", "mod.0", "seq", "seq.1", "seq.3", "mod.0.weight", "nothing", ""])
def test_B009_present_agrees_with_lookup(path: str) -> None:
    model = Lists()
    there = path in dict(model.named_modules())
    assert bool(slapo.optional(path).resolve(model)) == there
    assert (path in slapo.select(model).paths) == there
    if there:
        assert len(slapo.select(model, path)) == 1
    else:
        with pytest.raises(slapo.NoMatchError):
            slapo.select(model, path)


def test_B010_an_unknown_path_names_the_whole_the_part_and_the_parent() -> None:
    with pytest.raises(LookupError) as refused:
        slapo.select(Model(), "submod.linaer.weight")
    message = str(refused.value)
    assert "'submod.linaer.weight'" in message
    assert "'linaer'" in message
    assert "'submod'" in message
    assert "linear" in message, "what there is"
    assert isinstance(refused.value, slapo.NoMatchError)


def test_B011_a_site_knows_its_path_and_module() -> None:
    model = nn.ModuleDict({"blocks": nn.Sequential(nn.ReLU(), nn.Sequential(nn.ReLU(), nn.Linear(2, 2)))})
    selection = slapo.select(model, "**", nn.Linear)
    (site,) = selection
    path, module = site
    assert path == site.path == "blocks.1.1"
    assert module is site.module is model["blocks"][1][1]
    assert selection.model is model
    parent, _, name = path.rpartition(".")
    assert (parent, name) == ("blocks.1", "1")
    assert slapo.select(model, parent)[0].module._modules[name] is module


def test_B012_the_root_may_be_a_sequential_or_a_leaf() -> None:
    sequential = nn.Sequential(nn.ReLU(), nn.Linear(2, 2))
    assert slapo.select(sequential).paths == ("", "0", "1")
    leaf = nn.Linear(2, 2)
    assert slapo.select(leaf).paths == ("",)
    with pytest.raises(slapo.NoMatchError, match="no modules"):
        slapo.select(leaf, "*")
    assert type(slapo.apply(leaf, slapo.replace(Empty, "", lambda old: nn.Identity()))) is nn.Identity


def test_B013_children_with_numbers_for_names() -> None:
    model = Everywhere()
    assert slapo.select(model, "c.0").modules == (getattr(model.c, "0"),)
    assert slapo.select(model, "c.[0:2]").paths == ("c.0", "c.1")
    assert slapo.select(model, "c").modules == (model.c,)
    out = slapo.apply(Numbered(), slapo.replace(Empty, "0", lambda old: nn.ReLU()))
    assert [type(m) for m in out.children()] == [nn.ReLU, nn.Linear]


def test_B015_unknown_options_are_a_type_error() -> None:
    for call in (
        lambda: slapo.apply(Model(), Empty, no_such_option=1),
        lambda: slapo.select(Model(), no_such_option=1),
        lambda: slapo.checkpoint(Empty, "fc1", no_such_option=1),
        lambda: slapo.Schedule(no_such_option=1),
    ):
        with pytest.raises(TypeError):
            call()


def test_B017_apply_gives_a_new_model_and_leaves_the_argument_alone() -> None:
    model, given = Model(), nn.Linear(2, 2)
    out = slapo.apply(model, slapo.replace(Empty, "act1", lambda old: nn.GELU()))
    assert out is not model
    assert type(out) is Model
    assert type(out.act1) is nn.GELU
    assert type(model.act1) is nn.ReLU
    assert type(slapo.apply(given, slapo.replace(Empty, "", lambda old: nn.ReLU()))) is nn.ReLU
    assert type(given) is nn.Linear


def test_B017_in_place_the_callers_own_object_has_the_new_child() -> None:
    model = Model()
    out = slapo.apply(model, slapo.replace(Empty, "act1", lambda old: nn.GELU()), inplace=True)
    assert out is model
    assert type(model.act1) is nn.GELU
    new_root = slapo.apply(model, slapo.replace(Empty, "", lambda old: nn.Sequential(old)), inplace=True)
    assert new_root is not model
    assert new_root[0] is model


def test_B018_a_selection_kept_across_a_transformation_of_its_parent_works() -> None:
    model = Model()
    child = slapo.select(model, "submod.activation")
    site = child[0]
    sch = slapo.replace(Empty, "submod", lambda old: Inner())
    for target in (child, site):
        out = slapo.apply(model, slapo.replace(sch, target, lambda old: nn.GELU()))
        assert type(out.submod.activation) is nn.GELU, "the rule is looked up on what is there now"
        assert list(dict(out.submod.named_children())) == ["linear", "activation"], "and nothing stray is added"


def test_B018_or_is_refused_where_the_path_is_gone() -> None:
    model = Model()
    child = slapo.select(model, "submod.activation", nn.ReLU)
    sch = slapo.replace(Empty, "submod", lambda old: nn.Identity())
    with pytest.raises(slapo.NoMatchError, match=r"submod\.activation"):
        slapo.apply(model, slapo.replace(sch, child, lambda old: nn.GELU()))
    out = slapo.apply(model, sch)
    with pytest.raises(slapo.NoMatchError, match=r"submod\.activation"):
        slapo.apply(out, slapo.replace(Empty, child[0], lambda old: nn.GELU()))
    assert list(out.submod.children()) == []
