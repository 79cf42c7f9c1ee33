"""Traces of a line or two, from which both fuzzes of the readers begin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

SEEDS: Final[Mapping[str | None, bytes]] = {
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
"""The smallest trace of each format, by the name it is read under; None for a known one."""

LENGTHS: Final = b'{"0": {"input_tokens": "{8: 1.0}", "output_tokens": "{2: 1.0}"}}'
"""What the reader of ServeGen's rates looks for beside them."""
