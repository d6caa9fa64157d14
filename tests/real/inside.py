"""Schedules that reach inside forwards, for each family: what they fuse, find and replace, and how results are compared."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

import slapo_fn as slapo

from .models import CASES, IDS, VOCAB, Case, both_sides, chain
from .numbers import floats

Empty = slapo.Schedule()
Builder = Callable[[slapo.Schedule], slapo.Schedule]


def t5_gated() -> nn.Module:
    config = hf.T5Config(
        vocab_size=VOCAB, d_model=16, d_kv=8, d_ff=24, num_layers=4, num_decoder_layers=4, num_heads=2,
        feed_forward_proj="gated-gelu", decoder_start_token_id=2, **IDS,
    )  # fmt: skip
    return hf.T5ForConditionalGeneration(config)


GATED = Case(
    "t5 gated", t5_gated, both_sides, "{encoder,decoder}.block.*", 8, "**.{layer_norm,final_layer_norm}", "T5LayerNorm",
    22, CASES["t5"].own_norm, "**.DenseReluDense", chain("wi_0"), CASES["t5"].tied, True,
)  # fmt: skip


def shallow(case: Case) -> Case:
    """The same model with two blocks, or two on each side: twice as fast, and as telling."""

    def build() -> nn.Module:
        model = case.build()
        config = copy.deepcopy(model.config)
        config.num_hidden_layers = 2
        if hasattr(config, "num_decoder_layers"):
            config.num_decoder_layers = 2
        return type(model)(config)

    return replace(case, build=build)


# ---- patterns


def gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def rms(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    x32 = x.to(torch.float32)
    return weight * (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def t5_rms(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    return weight * (x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + eps))


def rms_kernel(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * F.rms_norm(x.float(), weight.shape, None, eps).to(x.dtype)


def dropout_residual_norm(x: Tensor, residual: Tensor) -> Tensor:
    dropped = slapo.call_module("dropout", slapo.call_module("dense", x))
    return slapo.call_module("LayerNorm", dropped + residual)


def dense_gelu(x: Tensor) -> Tensor:
    return F.gelu(slapo.call_module("dense", x))


def swiglu(x: Tensor) -> Tensor:
    return slapo.call_module("down_proj", F.silu(slapo.call_module("gate_proj", x)) * slapo.call_module("up_proj", x))


def gate_or_up(x: Tensor) -> Tensor:
    return slapo.call_module("{gate,up}_proj", x)


def biased_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias)


def biased_norm(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return slapo.call_module("LayerNorm", slapo.call_module("dropout", x + bias) + residual)


class DenseDropoutResidualNorm(nn.Module):
    """The end of a BERT layer as one module, of the old parts."""

    def __init__(self, part: slapo.Subgraph) -> None:
        super().__init__()
        self.dense, self.dropout, self.norm = part.calls

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.norm(residual + self.dropout(self.dense(x)))


class SwiGLU(nn.Module):
    """A gated MLP in one matmul, of the old layers."""

    def __init__(self, part: slapo.Subgraph) -> None:
        super().__init__()
        gate, up, down = part.calls
        self.gate_up = slapo.nn.FusedLinear.from_linears(gate, up, names=part.paths[:2])
        self.down = down

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x)
        return self.down(F.silu(gate) * up)


def linear_activation(part: slapo.Subgraph) -> nn.Module:
    return slapo.nn.LinearActivation.from_linear(part.calls[0], "gelu")


# ---- the table


@dataclass(frozen=True)
class Inside:
    """What is done to one family."""

    case: Case
    layers: tuple[str, ...]
    parts: dict[str, Builder] = field(default_factory=dict)
    attention: str = "**.self_attn"
    mlp: str = "**.mlp"


def within_act(sch: slapo.Schedule) -> slapo.Schedule:
    return slapo.replace(sch, slapo.pattern(gelu_tanh, within="**.act"), nn.GELU("tanh"))


def within_mlp(sch: slapo.Schedule) -> slapo.Schedule:
    gelu = slapo.nn.Function(lambda x: F.gelu(x, approximate="tanh"))
    return slapo.replace(sch, slapo.pattern(gelu_tanh, within="**.mlp", flat=True), gelu)


INSIDE = {
    one.case.name: one
    for one in (
        Inside(shallow(CASES["gpt2"]), (), {
            "gelu module": within_act,
            "gelu function": within_mlp,
            "gelu eager": lambda s: slapo.fuse(s, slapo.pattern(gelu_tanh, "**.act"), backend="eager"),
            "sequential": lambda s: slapo.fuse(s, slapo.pattern(
                lambda x: slapo.call_module("dropout", slapo.call_module("c_proj", x)), "**.mlp"), backend=None),
            "gelu checkpoint": lambda s: slapo.checkpoint(s, slapo.pattern(gelu_tanh, "**.act")),
            "attention": lambda s: slapo.replace(s, "**.attn", slapo.nn.HFAttention.from_gpt2),
            "mlp": lambda s: slapo.replace(s, "**.mlp", slapo.nn.FusedMLP.from_gpt2),
            "flat": lambda s: slapo.trace(s, "**.mlp", flat=True),
            "recursive": lambda s: slapo.trace(s, "**.mlp", recursive=True),
        }, "**.attn"),
        Inside(shallow(CASES["bert"]), ("**.{query,key,value}",), {
            "linear activation": lambda s: slapo.fuse(
                s, slapo.pattern(dense_gelu, "**.intermediate", flat=True), linear_activation),
            "residual norm": lambda s: slapo.fuse(s, slapo.pattern(dropout_residual_norm), DenseDropoutResidualNorm),
            "residual norm aot": lambda s: slapo.fuse(s, slapo.pattern(dropout_residual_norm), backend="aot_eager"),
            "residual checkpoint": lambda s: slapo.checkpoint(s, slapo.pattern(dropout_residual_norm)),
            "decompose": lambda s: slapo.fuse(slapo.decompose(s, "**.intermediate.dense"), slapo.pattern(
                biased_gelu, "**.intermediate", flat=True), backend="eager"),
            "decompose norm": lambda s: slapo.fuse(slapo.decompose(s, "**.output.dense"), slapo.pattern(
                biased_norm, "**.output", flat=True), backend="eager"),
            "attention": lambda s: slapo.replace(s, "**.self", slapo.nn.HFAttention.from_bert),
            "flat": lambda s: slapo.trace(s, "**.{intermediate,output}", flat=True),
            "recursive": lambda s: slapo.trace(s, "**.{intermediate,output}", recursive=True),
        }, "**.self", "**.intermediate"),
        Inside(shallow(CASES["llama"]), ("**.{q,k,v}_proj", "**.{gate,up}_proj"), {
            "rms": lambda s: slapo.replace(s, slapo.pattern(rms), slapo.nn.Function(rms_kernel)),
            "rms eager": lambda s: slapo.fuse(s, slapo.pattern(rms), backend="eager"),
            "rms checkpoint": lambda s: slapo.checkpoint(s, slapo.pattern(rms)),
            "swiglu": lambda s: slapo.fuse(s, slapo.pattern(swiglu, "**.mlp", flat=True), SwiGLU),
            "swiglu template": lambda s: slapo.replace(s, slapo.pattern(swiglu, "**.mlp", flat=True), slapo.nn.GatedMLP(
                16, 24), weights={"gate_up.weight": slapo.cat("gate_proj.weight", "up_proj.weight"),
                                  "down.weight": "down_proj.weight"}),
            "swiglu aot": lambda s: slapo.fuse(s, slapo.pattern(swiglu, "**.mlp", flat=True), backend="aot_eager"),
            "parallel": lambda s: slapo.fuse(s, slapo.parallel(slapo.pattern(gate_or_up, "**.mlp")), lambda part:
                slapo.nn.FusedLinear.from_linears(*part.calls, names=part.paths)),
            "gated mlp": lambda s: slapo.replace(s, "**.mlp", slapo.nn.GatedMLP.from_llama),
            "attention": lambda s: slapo.replace(s, "**.self_attn", slapo.nn.HFAttention.from_llama),
            "flat": lambda s: slapo.trace(s, "**.{mlp,*_layernorm,norm}", flat=True),
            "recursive": lambda s: slapo.trace(s, "**.{mlp,*_layernorm,norm}", recursive=True),
        }),
        Inside(shallow(CASES["t5"]), ("**.SelfAttention.{q,k,v}", "**.EncDecAttention.{k,v}"), {
            "mlp": lambda s: slapo.replace(s, "**.DenseReluDense", slapo.nn.FusedMLP.from_t5),
        }, "**.SelfAttention", "**.DenseReluDense"),
        Inside(shallow(GATED), ("**.SelfAttention.{q,k,v}", "**.{wi_0,wi_1}"), {
            "mlp": lambda s: slapo.replace(s, "**.DenseReluDense", slapo.nn.GatedMLP.from_t5),
        }, "**.SelfAttention", "**.DenseReluDense"),
        Inside(shallow(CASES["opt"]), ("**.{q,k,v}_proj",), {}, "**.self_attn", "**.fc1"),
    )
}  # fmt: skip


def layers(one: Inside) -> slapo.Schedule:
    """The schedule that fuses all layers of one input."""
    sch = Empty
    for path in one.layers:
        sch = slapo.fuse(sch, path)
    return sch


def schedules() -> Iterator[tuple[str, slapo.Schedule, Inside]]:
    """Every schedule of the table, by a name."""
    for name, one in INSIDE.items():
        for path in one.layers:
            yield f"{name}-{path}", slapo.fuse(Empty, path), one
        for part, build in one.parts.items():
            yield f"{name}-{part}", build(Empty), one


# ---- comparing


def original_step(model: nn.Module, inputs: dict[str, Tensor], seed: int = 3) -> dict[str, Tensor]:
    """Outputs and gradients of one step, the gradients in the layout and under the names of the model before."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    outputs = list(floats(model(**inputs)))
    sum(one.double().square().sum() for one in outputs if one.requires_grad).backward()
    found = {f"output {n}": one.detach() for n, one in enumerate(outputs)}
    held: dict[int, Any] = {}
    grads = {
        name: held.setdefault(id(p), torch.zeros_like(p) if p.grad is None else p.grad)
        for name, p in model.named_parameters(remove_duplicate=False)
    }
    found |= {f"gradient of {n}": g for n, g in slapo.to_original(model, grads).items()}
    found["random numbers afterwards"] = torch.rand(1)
    model.zero_grad(set_to_none=True)
    return found


def assert_close(mine: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float) -> None:
    """Two steps gave the same, by the same names, whatever their order."""
    assert set(theirs) == set(mine)
    for name, value in mine.items():
        torch.testing.assert_close(
            theirs[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def assert_same_bits(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Two states have the same names in the same order, and the same bits."""
    assert list(theirs) == list(mine)
    for name, value in mine.items():
        assert value.dtype == theirs[name].dtype, name
        assert torch.equal(value, theirs[name]), name
