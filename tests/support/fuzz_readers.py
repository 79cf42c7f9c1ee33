"""Byte-level fuzz of every trace reader, guided by coverage.

The first byte of an input chooses how it is read: with the format detected, or with one that is
named. Whatever the rest holds, a reader returns a trace or raises an error of ours.

    python -m support.fuzz_readers [-max_total_time=20] [options of libFuzzer] [CORPUS]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["tuner"]):
    from tuner.errors import TunerError
    from tuner.traffic.formats import read_trace
    from tuner.traffic.formats.columns import ReadOptions
    from tuner.traffic.formats.registry import format_names

NAMES = (None, *format_names())
SKIPPING = ReadOptions(skip_invalid=True, max_invalid_ratio=1.0)
ALL_SKIPPED = len(NAMES) * -(-128 // len(NAMES))
SEEDS = {
    None: b'{"arrived_at_s": 0.5, "input_length": 4, "output_length": 9}',
    "azure": b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n",
    "burstgpt": b"Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    b"5,ChatGPT,472,18,490,Conversation log\n",
    "vidur": b"arrived_at,num_prefill_tokens,num_decode_tokens\n4.3,396,109\n",
    "splitwise": b"request_id,request_type,application_id,arrival_timestamp,batch_size,"
    b"prompt_size,token_size\n0,2,0,1,1,4096,32\n",
    "servegen": b"0,0.01,1,Gamma,0.5,2\n600,0.02,1,Gamma,0.5,2\n",
    "concurrency": b"time_s,in_flight,input_length,output_length\n0,3,9,5\n1,4,7,6\n",
    "weka": b'{"id": "a", "block_size": 64, "hash_id_scope": "local", "requests": '
    b'[{"t": 0, "type": "n", "in": 70, "out": 3, "hash_ids": [1, 2]}]}',
    "otlp": b'{"resourceSpans": [{"scopeSpans": [{"spans": [{"startTimeUnixNano": "5", '
    b'"endTimeUnixNano": "9", "attributes": [{"key": "gen_ai.usage.prompt_tokens", "value": '
    b'{"intValue": "7"}}, {"key": "gen_ai.usage.completion_tokens", "value": '
    b'{"intValue": "3"}}]}]}]}]}',
    "bailian": b'{"chat_id": 1, "parent_chat_id": -1, "timestamp": 0.5, "input_length": 20, '
    b'"output_length": 3, "type": "text", "turn": 1, "hash_ids": [1, 2]}',
    "mooncake": b'{"timestamp": 5, "input_length": 600, "output_length": 3, "hash_ids": [1]}',
    "timed-trace": b'{"timestamp": 0.5, "input_length": 600, "output_length": 3}',
}
LENGTHS = b'{"0": {"input_tokens": "{8: 1.0}", "output_tokens": "{2: 1.0}"}}'
"""What the reader of ServeGen's rates looks for beside them."""


def read(data: bytes, path: Path) -> None:
    """Read the bytes as the first of them says; errors that are not ours end the fuzz."""
    if not data:
        return
    name = NAMES[data[0] % len(NAMES)]
    path.write_bytes(data[1:])
    try:
        trace = read_trace(path, name, SKIPPING if data[0] >= 128 else None)
    except TunerError as error:
        if error.exit_code != 2 or len(error.message) > 2000:
            raise AssertionError(error.message[:200]) from error
    else:
        if not len(trace):
            raise AssertionError("a trace without requests")


def main() -> None:
    """Fuzz until libFuzzer's options say stop."""
    with tempfile.TemporaryDirectory(prefix="tune-fuzz-") as folder:
        corpus, path = Path(folder) / "corpus", Path(folder) / "chunk-0-trace.csv"
        corpus.mkdir()
        path.with_name("chunk-0-dataset.json").write_bytes(LENGTHS)
        for number, (name, seed) in enumerate(SEEDS.items()):
            choice = bytes([NAMES.index(name)])
            (corpus / f"{number}").write_bytes(choice + seed)
            (corpus / f"{number}-detected").write_bytes(b"\0" + seed)
            # A file of which every row is skipped.
            head = seed.split(b"\n", 1)[0]
            (corpus / f"{number}-skipped").write_bytes(
                bytes([ALL_SKIPPED + choice[0]]) + head + b"\n,\n"
            )
        # A line of 10 kB, ten seconds and a gigabyte are the most that one input may take.
        bounds = ["-max_len=10240", "-len_control=0", "-timeout=10", "-rss_limit_mb=2048"]
        atheris.Setup([*sys.argv, *bounds, str(corpus)], lambda data: read(data, path))
        atheris.Fuzz()


if __name__ == "__main__":
    main()
