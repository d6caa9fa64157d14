"""The models: tiny ones built from configs with random weights, a ResNet, and two real ones with theirs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

VOCAB = 64
IDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}


def ids(*shape: int) -> Tensor:
    """Token ids without special ones, and without touching the global random state."""
    return torch.randint(5, VOCAB, shape, generator=torch.Generator().manual_seed(1))


def gpt2() -> nn.Module:
    config = hf.GPT2Config(n_layer=4, n_embd=16, n_head=2, n_positions=32, vocab_size=VOCAB, **IDS)
    return hf.GPT2LMHeadModel(config)


def bert() -> nn.Module:
    config = hf.BertConfig(
        vocab_size=VOCAB, hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=32, **IDS,
    )  # fmt: skip
    return hf.BertForMaskedLM(config)


def t5() -> nn.Module:
    config = hf.T5Config(
        vocab_size=VOCAB, d_model=16, d_kv=8, d_ff=24, num_layers=4, num_decoder_layers=4, num_heads=2,
        decoder_start_token_id=2, **IDS,
    )  # fmt: skip
    return hf.T5ForConditionalGeneration(config)


def opt() -> nn.Module:
    config = hf.OPTConfig(
        vocab_size=VOCAB, hidden_size=16, num_hidden_layers=4, num_attention_heads=2, ffn_dim=24,
        max_position_embeddings=32, word_embed_proj_dim=16, **IDS,
    )  # fmt: skip
    return hf.OPTForCausalLM(config)


def llama(**more: Any) -> nn.Module:
    config = hf.LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, attention_dropout=0.1, **IDS, **more,
    )  # fmt: skip
    return hf.LlamaForCausalLM(config)


def mixtral() -> nn.Module:
    config = hf.MixtralConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, num_local_experts=4, num_experts_per_tok=2,
        attention_dropout=0.1, **IDS,
    )  # fmt: skip
    config._experts_implementation = "eager"
    return hf.MixtralForCausalLM(config)


def vit() -> nn.Module:
    config = hf.ViTConfig(
        hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=24, image_size=8, patch_size=4,
        num_labels=5, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1,
    )  # fmt: skip
    return hf.ViTForImageClassification(config)


def whisper() -> nn.Module:
    config = hf.WhisperConfig(
        vocab_size=VOCAB, d_model=16, encoder_layers=4, decoder_layers=4, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, num_mel_bins=8, max_source_positions=8,
        max_target_positions=32, decoder_start_token_id=3, dropout=0.1, attention_dropout=0.1, suppress_tokens=None,
        begin_suppress_tokens=None, **IDS,
    )  # fmt: skip
    model = hf.WhisperForConditionalGeneration(config)
    model.generation_config.update(decoder_start_token_id=3, suppress_tokens=None, begin_suppress_tokens=None, **IDS)
    return model


class BasicBlock(nn.Module):
    """Two convolutions and a shortcut, as torchvision names them."""

    def __init__(self, inplanes: int, planes: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample: nn.Module | None = None
        if stride != 1 or inplanes != planes:
            conv = nn.Conv2d(inplanes, planes, 1, stride, bias=False)
            self.downsample = nn.Sequential(conv, nn.BatchNorm2d(planes))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += shortcut
        return self.relu(y)


class ResNet(nn.Module):
    """The residual network of torchvision, small."""

    def __init__(self, depths: tuple[int, ...] = (2, 2), width: int = 4, classes: int = 5) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        inplanes = width
        for number, depth in enumerate(depths):
            planes = width * 2**number
            blocks = [
                BasicBlock(inplanes if n == 0 else planes, planes, 2 if n == 0 and number else 1) for n in range(depth)
            ]
            self.add_module(f"layer{number + 1}", nn.Sequential(*blocks))
            inplanes = planes
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(inplanes, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer2(self.layer1(x))
        return self.fc(torch.flatten(self.avgpool(x), 1))


# ---- replacements over the old weights


class OwnLayerNorm(nn.Module):
    """A LayerNorm over the same tensors, by the same kernel, so that equal means equal."""

    def __init__(self, old: nn.LayerNorm) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = old.weight, old.bias, old.eps

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class OwnRMSNorm(nn.Module):
    """A root-mean-square norm over the same tensor, which computes in float32 as transformers does."""

    def __init__(self, old: Any) -> None:
        super().__init__()
        self.weight, self.eps = old.weight, old.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        return self.weight * (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class OwnT5Norm(OwnRMSNorm):
    """The norm of a T5: only the statistics are float32."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps))


class OwnBatchNorm(nn.Module):
    """A BatchNorm2d over the same tensors and buffers."""

    def __init__(self, old: nn.BatchNorm2d) -> None:
        super().__init__()
        self.weight, self.bias, self.eps, self.momentum = old.weight, old.bias, old.eps, old.momentum
        for name, buffer in old.named_buffers():
            self.register_buffer(name, buffer)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.num_batches_tracked.add_(1)
        given = (self.running_mean, self.running_var, self.weight, self.bias, self.training, self.momentum, self.eps)
        return nn.functional.batch_norm(x, *given)


class OwnLinear(nn.Module):
    """A Linear over the same tensors."""

    def __init__(self, old: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = old.weight, old.bias

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


class OwnMLP(nn.Module):
    """Any MLP that is a chain of the old one's children."""

    def __init__(self, old: nn.Module, *chain: str) -> None:
        super().__init__()
        self.chain = chain
        for name, child in old.named_children():
            self.add_module(name, child)

    def forward(self, x: Tensor) -> Tensor:
        for name in self.chain:
            x = getattr(self, name)(x)
        return x


class OwnGatedMLP(nn.Module):
    """The MLP of a Llama."""

    def __init__(self, old: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = old.gate_proj, old.up_proj, old.down_proj

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class OwnExperts(nn.Module):
    """The experts of a Mixtral, over the same two parameters."""

    def __init__(self, old: Any) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = old.gate_up_proj, old.down_proj

    def forward(self, x_TH: Tensor, chosen_TK: Tensor, weights_TK: Tensor) -> Tensor:
        y_TH = torch.zeros_like(x_TH)
        for expert in range(len(self.gate_up_proj)):
            token, k = torch.where(chosen_TK == expert)
            gate, up = nn.functional.linear(x_TH[token], self.gate_up_proj[expert]).chunk(2, -1)
            made = nn.functional.linear(nn.functional.silu(gate) * up, self.down_proj[expert])
            y_TH = y_TH.index_add(0, token, made * weights_TK[token, k, None])
        return y_TH


# ---- the table


@dataclass(frozen=True)
class Case:
    """One model, where its parts are, and what may stand in their place."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Tensor]]
    blocks: str
    n_blocks: int
    norm: str
    norm_class: str
    n_norms: int
    own_norm: Callable[[Any], nn.Module]
    mlp: str
    own_mlp: Callable[[Any], nn.Module]
    tied: tuple[str, ...] = ()
    generates: bool = False
    hf: bool = True

    def model(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        """The model in train mode, seeded."""
        torch.manual_seed(0)
        return self.build().to(dtype).train()


def text() -> dict[str, Tensor]:
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[0, :2] = 0
    return {"input_ids": ids(2, 7), "attention_mask": mask}


def both_sides() -> dict[str, Tensor]:
    return {**text(), "decoder_input_ids": ids(2, 4)}


def image(size: int) -> Tensor:
    return torch.randn(4, 3, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def sound() -> Tensor:
    return torch.randn(2, 8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def chain(*names: str) -> Callable[[Any], nn.Module]:
    return lambda old: OwnMLP(old, *names)


CASES = {
    one.name: one
    for one in (
        Case("gpt2", gpt2, text, "transformer.h.*", 4, "**.ln_*", "LayerNorm", 9, OwnLayerNorm,
             "**.mlp", chain("c_fc", "act", "c_proj", "dropout"), ("lm_head.weight", "transformer.wte.weight"), True),
        Case("bert", bert, text, "bert.encoder.layer.*", 4, "**.LayerNorm", "LayerNorm", 10, OwnLayerNorm,
             "**.intermediate", chain("dense", "intermediate_act_fn"),
             ("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight")),
        Case("t5", t5, both_sides, "{encoder,decoder}.block.*", 8, "**.{layer_norm,final_layer_norm}", "T5LayerNorm", 22,
             OwnT5Norm, "**.DenseReluDense", chain("wi", "act", "dropout", "wo"),
             ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"), True),
        Case("opt", opt, text, "model.decoder.layers.*", 4, "**.{*_layer_norm,final_layer_norm}", "LayerNorm", 9,
             OwnLayerNorm, "**.fc[1-2]", OwnLinear, ("lm_head.weight", "model.decoder.embed_tokens.weight"), True),
        Case("llama", llama, text, "model.layers.*", 4, "**.{*_layernorm,norm}", "LlamaRMSNorm", 9, OwnRMSNorm,
             "**.mlp", OwnGatedMLP, (), True),
        Case("mixtral", mixtral, text, "model.layers.*", 4, "**.{*_layernorm,norm}", "MixtralRMSNorm", 9, OwnRMSNorm,
             "**.experts", OwnExperts, (), True),
        Case("vit", vit, lambda: {"pixel_values": image(8)}, "vit.layers.*", 4, "**.layernorm*", "LayerNorm", 9,
             OwnLayerNorm, "**.fc[1-2]", OwnLinear),
        Case("whisper", whisper, lambda: {"input_features": sound(), "decoder_input_ids": ids(2, 4)},
             "model.{encoder,decoder}.layers.*", 8, "**.{*_layer_norm,layer_norm}", "LayerNorm", 22, OwnLayerNorm,
             "**.fc[1-2]", OwnLinear, ("proj_out.weight", "model.decoder.embed_tokens.weight"), True),
        Case("resnet", ResNet, lambda: {"x": image(32)}, "layer[1-2].*", 4, "**.{bn*,downsample.1}", "BatchNorm2d", 10, OwnBatchNorm,  # noqa: E501
             "fc", OwnLinear, hf=False),
    )
}  # fmt: skip


@functools.cache
def smollm2() -> tuple[Any, Any]:
    """SmolLM2-135M with its weights, and its tokenizer; read once a session."""
    import real_models

    return real_models.smollm2()


@functools.cache
def minilm() -> tuple[Any, Any]:
    """MiniLM-L6 with its weights, and its tokenizer; read once a session."""
    import real_models

    return real_models.minilm()
