"""No diff shows a secret of the user's file, and a reference to one is none."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from ruamel.yaml import YAML

from tuner.emit.hiding import hidden, secrets_in
from tuner.emit.merge import merge

PLACES = [
    lambda secret: {"api-key": secret, "seed": 1},
    lambda secret: {"api_key": [secret, "other5ecret"]},
    lambda secret: [{"name": "VLLM_API_KEY", "value": secret}],
    lambda secret: [{"value": secret, "name": "HF_TOKEN"}],
    lambda secret: {"environment": {"HF_TOKEN": secret}},
    lambda secret: ["--api-key", "other5ecret", secret, "--port", "1"],
    lambda secret: [f"--hf-token={secret}", "--port=1"],
    lambda secret: ["sh", "-c", f"vllm serve m --api-key a5ecret '{secret}' --port 1"],
    lambda secret: {"command": f"vllm serve m --api-key \\\n  '{secret}' \\\n  --port 1"},
    lambda secret: ["sh", "-c", f"export HF_TOKEN='{secret}' && exec vllm serve m"],
    lambda secret: ["curl", "-u", f"me:{secret}", "http://h"],
    lambda secret: {"kind": "Secret", "stringData": {"any": secret}},
    lambda secret: {"value": f'--hf-overrides={{"api_key": "{secret}"}}'},
]
SECRETS = st.from_regex(
    re.compile(r"\w[\w+/.=-]{7,20}( [\w#:,!?]{6,10}){0,2}", re.ASCII), fullmatch=True
)


@given(
    SECRETS,
    st.sampled_from(PLACES),
    st.sampled_from([None, "'", '"', "|", ">"]),
    st.sampled_from([None, True, False]),
    st.integers(20, 90),
)
def test_a_secret_is_hidden_wherever_and_however_it_stands(
    secret: str, place: Any, style: str | None, flow: bool | None, width: int
) -> None:
    text = yaml.safe_dump(
        place(secret), default_style=style, default_flow_style=flow, width=width
    )
    secrets = secrets_in(*YAML().load_all(text))
    assert secrets
    shown = hidden(text, secrets)
    assert len(shown) == len(text.splitlines())
    assert [part for part in [*secret.split(), "5ecret"] if part in "".join(shown)] == []


@pytest.mark.parametrize(
    "text",
    [
        "- name: HF_TOKEN\n  # of the search team\n  value: 's3cret'\n",
        "- name: HF_TOKEN\n  value: >-\n\n    s3cret\n",
        "- name: HF_TOKEN\n  value: !!str s3cret\n",
        "a: &a s3cret\nhf-token: *a\n",
        "# - --api-key=s3cret\n",
        "# --hf-token s3cret\n",
        "endpoint: https://me:s3cret@host/\n",
    ],
)
def test_a_secret_is_hidden_in_what_people_write(text: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    merged = merge(path, lambda _: [])
    assert merged.has_secrets
    assert "s3cret" not in "".join(hidden(text, merged.secrets))


REFERENCES = [
    "env: [{name: VLLM_API_KEY, valueFrom: {secretKeyRef: {name: chat, key: api-key}}}]\n",
    "env:\n- name: VLLM_API_KEY\n  value: $(KEY)\n",
    "vllmApiKey: {secretName: chat, secretKey: api-key}\n",
    "volumes: [{name: key, secret: {secretName: chat}}]\n",
    "imagePullSecrets: [{name: registry}]\n",
    "tolerations: [{key: nvidia.com/gpu, operator: Exists}]\n",
    "environment: {VLLM_API_KEY: '${VLLM_API_KEY:?set it}', HF_TOKEN: $HF_TOKEN}\n",
    "environment: [HF_TOKEN]\n",
    "args: ['--api-key=$(KEY)', --hf-token, $HF_TOKEN, --max-num-batched-tokens, '8']\n",
    'command: vllm serve m --api-key "$(cat /run/secrets/key)" --tokenizer t\n',
    '# kubectl create secret generic chat --from-literal=api-key="${VLLM_API_KEY:?}"\n',
    "# left out hf-token, which is a secret: set HF_TOKEN in the environment\n",
]


@pytest.mark.parametrize("text", REFERENCES)
def test_where_to_find_a_secret_is_none(text: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    assert not merge(path, lambda _: []).has_secrets
