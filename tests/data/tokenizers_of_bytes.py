"""Tokenizers that split characters into several tokens: byte pairs, and byte fallback."""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast

TEXTS = ["step one.\n\nstep two\n\n", "x = 3.\n\nso x", "a\n\nb\n\nc 1 2 3 + = . step so x"]


def byte_level_tokenizer(vocabulary: int = 300) -> PreTrainedTokenizerFast:
    """Returns a tokenizer of byte pairs."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<pad>", "<|end|>"],
        show_progress=False,
    )
    inner.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<|end|>")


def piece_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer with byte fallback that strips a leading space."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    pieces = ["<pad>", "<unk>", "</s>", "\n", "▁", *"abcdefghijklmnopqrstuvwxyz0123456789.+="]
    pieces += [f"<0x{i:02X}>" for i in range(256)]
    pieces += ["▁s", "▁so", "▁a", "\n\n"]
    merges = [("▁", "s"), ("▁s", "o"), ("▁", "a"), ("\n", "\n")]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    inner = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", unk_token="<unk>", eos_token="</s>"
    )
