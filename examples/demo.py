"""A schedule at work on real weights: SmolLM2-135M made ready for fine-tuning, MiniLM-L6 made ready for serving.

Run it with `make demo`; nothing is downloaded. Shape suffixes: B batch, T tokens, D width.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from real_models import Tokenizer, minilm, smollm2
from torch import Tensor, nn
from transformers import BertModel, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

import slapo_fn as slapo

BACKEND = "inductor" if shutil.which("g++") else "aot_eager"  # inductor wants a C++ compiler
TOKENS = 24
TOLERANCE = 1e-3  # of a MiniLM embedding, whose length is 1
verdicts: list[bool] = []
SENTENCES = ["A man is eating food.", "A man is having a meal.", "A cheetah chases its prey.", "The stock market fell."]


class SwiGLU(nn.Module):
    """An MLP of our own: the old weights under their old names, and nothing in forward that a compiler stumbles on."""

    def __init__(self, old: LlamaMLP) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = old.gate_proj, old.up_proj, old.down_proj

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))


def for_training(model: LlamaForCausalLM) -> slapo.Schedule:
    """What an engineer does to a LLaMA model before fine-tuning it, as data."""
    norms = slapo.select(model, "**", LlamaRMSNorm)
    mlps = slapo.select(model, "model.layers.*.mlp", LlamaMLP)
    blocks = slapo.select(model, "model.layers.*")

    sch = slapo.Schedule()
    sch = slapo.replace(sch, norms, nn.RMSNorm(model.config.hidden_size, model.config.rms_norm_eps))
    sch = slapo.replace(sch, mlps, SwiGLU)
    sch = slapo.freeze(sch, "model.embed_tokens")
    sch = slapo.compile(sch, "model.layers.*.mlp", dynamic=True, backend=BACKEND)  # by path: they are SwiGLU by then
    return slapo.label(slapo.checkpoint(sch, blocks[::2]), "lean")


def for_serving(model: BertModel) -> slapo.Schedule:
    """What an engineer does to a BERT encoder before serving it. One of the two lines is not exact."""
    sch = slapo.Schedule()
    sch = slapo.replace(sch, "**.intermediate_act_fn", nn.GELU(approximate="tanh"))
    return slapo.compile(sch, "encoder.layer.*", dynamic=True, backend=BACKEND)


def main() -> None:
    """Print it all."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))  # so that timings hold still on a busy machine
    began = time.perf_counter()

    title("SmolLM2-135M, ready for fine-tuning")
    llama, words = smollm2()
    sch = for_training(llama)
    show(sch)
    print()
    show(slapo.plan(llama, sch))
    tuned = slapo.apply(llama, sch)
    lighter = slapo.drop(sch, "lean")
    greedy = slapo.apply(llama, lighter)

    title("The same model: names, weights, ties, tokens")
    told_changes(llama, tuned)
    before, after = (generate(model, words) for model in (llama, tuned))
    equal = sum(map(int.__eq__, before, after))
    print(f"  greedy tokens, with the cache   {verdict(before == after)}: {equal} of {len(before)}")
    print(textwrap.indent(textwrap.fill(f"“{words.decode(before)}”", 66), " " * 34))
    error = gradient_error(llama, tuned)
    print(f"  gradients of a training step    {verdict(error < 1e-4)} to {error:.0e} of their norm")

    title('Drop a line: slapo.drop(sch, "lean")')
    rows = [("as it was", llama), ("scheduled", tuned), ("without the checkpoint line", greedy)]
    table(
        ["", "kept for backward", "greedy tokens"],
        [[name, f"{kept(model) / 2**20:.0f} MiB", verdict(generate(model, words) == before)] for name, model in rows],
    )

    title("MiniLM-L6, ready for serving: which line moved the embeddings?")
    bert, pieces = minilm()
    sch = for_serving(bert)
    show(sch)
    print()
    served = slapo.apply(bert, sch)
    want = embed(bert, pieces)
    dropped = {f"without {number}, {entry.name}": slapo.drop(sch, number) for number, entry in enumerate(sch)}
    schedules = {"scheduled": sch, **dropped}
    drift = {name: float((embed(slapo.apply(bert, one), pieces) - want).abs().max()) for name, one in schedules.items()}
    table(
        ["", "moved by at most", f"same to {TOLERANCE:.0e}"],
        [[name, f"{moved:.0e}", verdict(moved < TOLERANCE)] for name, moved in drift.items()],
    )
    like = embed(served, pieces)
    nearest = int((like[0] @ like[1:].T).argmax()) + 1
    print(f"\n  nearest to “{SENTENCES[0]}” after all: “{SENTENCES[nearest]}”")

    title(f"Timing: medians of 5 runs in turn, threads: {torch.get_num_threads()}, backend: {BACKEND}")
    ids = prompt(words, 32)
    rows = [
        ("SmolLM2, forward of 32 tokens", lambda model: forward(model, ids), llama, tuned),
        ("SmolLM2, training step of 32 tokens", lambda model: step(model, ids), llama, tuned),
        ("… without the checkpoint line", lambda model: step(model, ids), llama, greedy),
        ("MiniLM, four sentences", lambda model: embed(model, pieces), bert, served),
    ]
    table(["", "before", "after", "faster by"], [[name, *timing(run, *pair)] for name, run, *pair in rows])
    print(f"\n  all in {time.perf_counter() - began:.0f} s")


# ---------------------------------------------------------------- what is run


def prompt(words: Tokenizer, length: int) -> Tensor:
    """Some English, as token ids."""
    text = "The capital of France is Paris, a city on the river Seine. " * 20
    return words(text, return_tensors="pt").input_ids[:, :length]


def generate(model: LlamaForCausalLM, words: Tokenizer) -> list[int]:
    """Greedy tokens after a question, made with the key-value cache."""
    chat = [{"role": "user", "content": "What is gravity?"}]
    asked = words.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    made = model.generate(**asked, do_sample=False, max_new_tokens=TOKENS)
    return made[0, asked.input_ids.shape[1] :].tolist()


@torch.no_grad()
def forward(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """The logits."""
    return model(ids, use_cache=False).logits


def step(model: LlamaForCausalLM, ids: Tensor) -> None:
    """A training step without its optimizer."""
    model.zero_grad()
    model(ids, labels=ids, use_cache=False).loss.backward()


@torch.no_grad()
def embed(model: BertModel, pieces: Tokenizer) -> Tensor:
    """A unit vector a sentence: the mean over its tokens."""
    given = pieces(SENTENCES, padding=True, return_tensors="pt")
    mask_BT1 = given.attention_mask[..., None]
    mean_BD = (model(**given).last_hidden_state * mask_BT1).sum(1) / mask_BT1.sum(1)
    return F.normalize(mean_BD, dim=-1)


# ---------------------------------------------------------------- what is measured


def told_changes(before: nn.Module, after: nn.Module) -> None:
    """Print what became of names, tensors, ties and frozenness."""
    old, new = dict(before.named_parameters()), dict(after.named_parameters())
    shared = sum(new[name].data_ptr() == old[name].data_ptr() for name in old)
    frozen = [name for name in new if not new[name].requires_grad]
    print(f"  state_dict keys                 {verdict(before.state_dict().keys() == after.state_dict().keys())}")
    print(f"  weights in the same memory      {shared} of {len(old)}")
    print(f"  frozen, with what is tied to it {', '.join(frozen)}; lm_head {'too' if tied(after) else 'NOT'}")
    trains = all(one.requires_grad for one in old.values())
    print(f"  the model that was given        {verdict(trains)}: all of it still trains")


def tied(model: Any) -> bool:
    """Whether the embeddings still are the output layer's weights."""
    return model.lm_head.weight is model.model.embed_tokens.weight


def gradient_error(before: LlamaForCausalLM, after: LlamaForCausalLM) -> float:
    """How far the gradients of what is trained are apart, relative to their norm."""
    ids = torch.arange(100, 132)[None]
    gradients = []
    for model in (before, after):  # the weights are the same objects, and so would their gradients be: copy them
        step(model, ids)
        gradients.append({name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None})
    old, new = gradients
    off = sum(float((old[name] - one).square().sum()) for name, one in new.items())
    return float((off / sum(float(old[name].square().sum()) for name in new)) ** 0.5)


def kept(model: LlamaForCausalLM) -> int:
    """The bytes that a forward keeps for its backward, weights apart."""
    weights = {one.untyped_storage().data_ptr() for one in model.parameters()}
    held: dict[int, Tensor] = {}

    def see(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            held[tensor.untyped_storage().data_ptr()] = tensor  # held, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(see, lambda tensor: tensor):
        model(torch.arange(100, 164)[None], use_cache=False)
    return sum(one.untyped_storage().nbytes() for one in held.values())


def timing(run: Callable[[Any], object], before: nn.Module, after: nn.Module) -> list[str]:
    """Medians of both, run in turn after a warm-up, and their ratio."""
    spent: dict[nn.Module, list[float]] = {before: [], after: []}
    for turn in range(6):
        for model, times in spent.items():
            start = time.perf_counter()
            run(model)
            if turn:
                times.append(time.perf_counter() - start)
    old, new = (statistics.median(times) for times in spent.values())
    return [f"{old * 1e3:.0f} ms", f"{new * 1e3:.0f} ms", f"x{old / new:.2f}"]


# ---------------------------------------------------------------- what is printed


def title(text: str) -> None:
    """Print a heading."""
    print(f"\n── {text} {'─' * max(0, 100 - len(text))}\n")


def show(value: object) -> None:
    """Print what a schedule or a plan shows of itself."""
    print(textwrap.indent(repr(value), "  "), flush=True)


def verdict(good: bool) -> str:
    """Say whether something is as it was; the demo fails in the end if one thing is not."""
    verdicts.append(good)
    return "same" if good else "DIFFERENT"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print columns, the first to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for first, *others in (head, *rows):
        cells = [first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]
        print("  " + "   ".join(cells).rstrip())


if __name__ == "__main__":
    main()
    sys.exit(not all(verdicts))
