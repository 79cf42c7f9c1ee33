"""What comes along is complete: model, tokenizer, and where the samples lie."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.make_demo_tokenizer import VOCAB_SIZE, tokenizer_json, write_tokenizer
from tuner.engine.demo import DEMO_MODEL_DIR, bundled
from tuner.errors import UsageError


def test_the_tokenizer_in_the_package_is_the_one_its_script_writes(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    for made in tmp_path.iterdir():
        assert made.read_bytes() == (DEMO_MODEL_DIR / made.name).read_bytes()


def test_every_token_id_is_below_the_models_vocabulary() -> None:
    config = json.loads((DEMO_MODEL_DIR / "config.json").read_text())
    model = tokenizer_json()["model"]
    assert isinstance(model, dict)
    assert sorted(model["vocab"].values()) == list(range(VOCAB_SIZE))
    assert config["vocab_size"] == VOCAB_SIZE
    assert (config["bos_token_id"], config["eos_token_id"]) == (
        model["vocab"]["<s>"],
        model["vocab"]["</s>"],
    )


@pytest.mark.engine
def test_any_text_survives_the_demo_tokenizer() -> None:
    auto = pytest.importorskip("transformers").AutoTokenizer
    tokenizer = auto.from_pretrained(str(DEMO_MODEL_DIR))
    for text in ("Guten Tag, what's 1234?", "ünïcode 漢字 \t\n 🙂", "A"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert max(ids) < VOCAB_SIZE
    assert len(tokenizer) == VOCAB_SIZE


def test_what_is_bundled_is_found_and_what_is_not_is_refused() -> None:
    assert bundled("traces").is_dir()
    with pytest.raises(UsageError, match="expected profiles or traces"):
        bundled("nothing")
