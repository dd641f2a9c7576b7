"""Where do tests get a language model from, without a network and in milliseconds?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["PAD", "STOP_IDS", "write_tiny_classifier", "write_tiny_llama"]

PAD = 0
STOP_IDS = (1, 4, 9)
"""Three of 24, so that about every second short response ends by itself; the first is the tokenizer's ``<eos>``."""
WORDS = ("<pad>", "<eos>", "<unk>", *"0123456789", "ascending", "descending", "=")


def write_tiny_llama(folder: Path, *, seed: int = 0, tied: bool = True, vocabulary: int = 24, **settings: Any) -> Path:
    """Write a random Llama of a few thousand parameters and a word-level tokenizer as a Hugging Face folder.

    ``settings`` override the configuration (``hidden_size=…``). Returns ``folder``; the caller's random state stays.
    """
    from transformers import LlamaForCausalLM

    return _write(folder, LlamaForCausalLM, seed, tie_word_embeddings=tied, vocab_size=vocabulary, **settings)


def write_tiny_classifier(folder: Path, *, seed: int = 0, **settings: Any) -> Path:
    """Write a model as that of ``write_tiny_llama`` that gives each sequence one number, as reward models do."""
    from transformers import LlamaForSequenceClassification

    return _write(folder, LlamaForSequenceClassification, seed, vocab_size=24, num_labels=1, **settings)


def _write(folder: Path, architecture: Any, seed: int, **settings: Any) -> Path:
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    from rpcrl.engines.hf_model import quiet

    shape: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
        # Ten times the usual spread, so that the distributions are far from uniform.
        "initializer_range": 0.2,
    }
    config = LlamaConfig(
        bos_token_id=None,
        eos_token_id=list(STOP_IDS),
        pad_token_id=PAD,
        **{**shape, **settings},
    )
    with torch.random.fork_rng(devices=[]), quiet():
        torch.manual_seed(seed)
        architecture(config).save_pretrained(folder)
    words = {word: index for index, word in enumerate(WORDS)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder)
    return folder
