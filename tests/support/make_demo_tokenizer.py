"""Write the demo model's tokenizer: 3 special tokens, 256 bytes, and pairs of characters.

The demo model has random weights, so its words mean nothing; what counts is that any text
becomes token ids below the vocabulary's size and back again, without a download. So nothing
is learnt from a corpus: every pair of the 62 most ordinary characters is one token until the
vocabulary is full. `python tests/support/make_demo_tokenizer.py FOLDER` writes both anew.
"""

from __future__ import annotations

import itertools
import json
import string
import sys
from pathlib import Path

VOCAB_SIZE = 4096
"""Ours: the vocab_size of demo_model/config.json."""

SPECIAL_TOKENS = ("<unk>", "<s>", "</s>")

_PAIRED = string.ascii_lowercase + " .,'" + string.digits + string.ascii_uppercase[:22]


def byte_characters() -> dict[int, str]:
    """Return the printable character that stands for each of the 256 bytes.

    Source: bytes_to_unicode of OpenAI's GPT-2 encoder, which the ByteLevel pre-tokenizer
        follows.

    >>> byte_characters()[ord("a")], byte_characters()[ord(" ")]
    ('a', 'Ġ')
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in printable]
    shown = {byte: chr(byte) for byte in printable}
    shown.update({byte: chr(256 + place) for place, byte in enumerate(hidden)})
    return dict(sorted(shown.items()))


def tokenizer_json() -> dict[str, object]:
    """Return the content of `tokenizer.json`, in the form of the tokenizers library."""
    shown = byte_characters()
    room = VOCAB_SIZE - len(SPECIAL_TOKENS) - len(shown)
    letters = [shown[ord(character)] for character in _PAIRED]
    pairs = list(itertools.islice(itertools.product(letters, repeat=2), room))
    words = [*SPECIAL_TOKENS, *shown.values(), *(first + second for first, second in pairs)]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_special(place, word) for place, word in enumerate(SPECIAL_TOKENS)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {word: place for place, word in enumerate(words)},
            "merges": [f"{first} {second}" for first, second in pairs],
        },
    }


def tokenizer_config_json() -> dict[str, object]:
    """Return the content of `tokenizer_config.json`, with a chat template that only joins."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": SPECIAL_TOKENS[0],
        "bos_token": SPECIAL_TOKENS[1],
        "eos_token": SPECIAL_TOKENS[2],
        "pad_token": SPECIAL_TOKENS[2],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 32768,
        "chat_template": "{% for message in messages %}{{ message['content'] }}\n{% endfor %}",
    }


def write_tokenizer(folder: Path) -> None:
    """Write both files into the folder, byte for byte the same on every run."""
    for name, content in (
        ("tokenizer.json", tokenizer_json()),
        ("tokenizer_config.json", tokenizer_config_json()),
    ):
        text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
        (folder / name).write_text(text + "\n", encoding="utf-8")


def _special(place: int, word: str) -> dict[str, object]:
    """Return one entry of `added_tokens`."""
    return {
        "id": place,
        "content": word,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }


if __name__ == "__main__":
    write_tokenizer(Path(sys.argv[1]))
