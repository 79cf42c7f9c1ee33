"""Files of users, for each format that is merged into, and what may change in them."""

from __future__ import annotations

from tuner.emit.names import Format

VLLM = """\
# production, do not touch
model: Qwen/Qwen2.5-7B-Instruct   # the small one
max_num_seqs: 256

gpu-memory-utilization: 0.90
# long prompts
max-model-len:   16384
max-num-active-seqs: 4
served-model-name: ["a",   'b']
"""

COMPOSE = """\
x-logging: &logging
    driver: json-file   # rotated

services:
    redis: {image: "redis:7"}
    llm:
        image: "vllm/vllm-openai:v0.33.0"
        logging: *logging
        command: ["Qwen/Qwen2.5-7B-Instruct", "--max-num-seqs", "256"]   # tuned by hand
        ports:
            - "8000:8000"
"""

DEPLOYMENT = """\
---
# the Service in front
apiVersion: v1
kind: Service
metadata:
  name: chat
spec:
  ports:
    - port: 80
      targetPort: 8000
---
apiVersion: apps/v1
kind: Deployment
metadata:
  name: chat   # keep
spec:
  template:
    spec:
      containers:
        - name: proxy
          image: envoy
          args: [--config, /etc/envoy.yaml]
        # the engine
        - name: engine
          image: vllm/vllm-openai:v0.33.0
          command: [vllm, serve, Qwen/Qwen2.5-7B-Instruct]
          args:
            - --max_num_seqs
            - "256"   # from the old cluster
            - --enforce-eager
"""

SHELL = """\
apiVersion: apps/v1
kind: StatefulSet
metadata: {name: chat}
spec:
  template:
    spec:
      containers:
      - name: chat
        command: ["/bin/sh", "-c"]
        args:
        - |
          set -e
          exec vllm serve \\
            Qwen/Qwen2.5-7B-Instruct \\
            --max-num-seqs 256 --max-num-active-seqs 4
"""

STACK = """\
servingEngineSpec:
  runtimeClassName: ""
  modelSpec:
  - name: "qwen"
    modelURL: "Qwen/Qwen2.5-7B-Instruct"
    vllmConfig:
      maxNumSeqs: 256   # too many?
      enablePrefixCaching: true
      extraArgs: ["--seed", "1"]
"""

RUNTIME = """\
apiVersion: production-stack.vllm.ai/v1alpha1
kind: VLLMRuntime
metadata:
  name: qwen
spec:
  model:
    modelURL: Qwen/Qwen2.5-7B-Instruct
  vllmConfig:
    enablePrefixCaching: true
    port: 8000
"""

KSERVE = """\
apiVersion: serving.kserve.io/v1beta1
kind: InferenceService
metadata:
  name: qwen
spec:
  predictor:
    model:
      modelFormat: {name: huggingface}
      args:
      - --model_id=Qwen/Qwen2.5-7B-Instruct
      - --max-num-seqs=256
"""

KSERVE_LLM = """\
apiVersion: serving.kserve.io/v1alpha2
kind: LLMInferenceService
metadata:
  name: qwen
spec:
  template:
    containers:
      - name: main
        env:
          - name: VLLM_ADDITIONAL_ARGS
            value: >-
              --enable-auto-tool-choice
              --max-num-seqs=256
              --tool-call-parser=qwen3_coder
"""

LLM_D = """\
decode:
  containers:
  - name: "vllm"
    modelCommand: vllmServe
    args:
      - "--enforce-eager"
    mountModelVolume: true
prefill:
  create: false
"""

FILES = {
    Format.VLLM: VLLM,
    Format.DOCKER_COMPOSE: COMPOSE,
    Format.KUBERNETES: DEPLOYMENT,
    Format.PRODUCTION_STACK: STACK,
    Format.VLLM_RUNTIME: RUNTIME,
    Format.KSERVE: KSERVE,
    Format.KSERVE_LLM: KSERVE_LLM,
    Format.LLM_D: LLM_D,
}
AFTER = {
    Format.VLLM: [
        *("-max_num_seqs: 256", "+max_num_seqs: 48", "+max-num-batched-tokens: 4096"),
        "-max-num-active-seqs: 4",
    ],
    Format.DOCKER_COMPOSE: [
        '-        command: ["Qwen/Qwen2.5-7B-Instruct", "--max-num-seqs", "256"]   '
        "# tuned by hand",
        '+        command: ["Qwen/Qwen2.5-7B-Instruct", "--max-num-seqs", "48", '
        '"--max-num-batched-tokens", "4096"] # tuned by hand',
    ],
    Format.KUBERNETES: [
        '-            - "256"   # from the old cluster',
        '+            - "48"    # from the old cluster',
        "+            - --max-num-batched-tokens",
        "+            - '4096'",
    ],
    Format.PRODUCTION_STACK: [
        *("-      maxNumSeqs: 256   # too many?", "+      maxNumSeqs: 48    # too many?"),
        '-      extraArgs: ["--seed", "1"]',
        '+      extraArgs: ["--seed", "1", "--max-num-batched-tokens", "4096"]',
    ],
    Format.VLLM_RUNTIME: [
        "+    maxNumSeqs: 48",
        *("+    extraArgs:", "+    - --max-num-batched-tokens=4096"),
    ],
    Format.KSERVE: [
        *("-      - --max-num-seqs=256", "+      - --max-num-seqs=48"),
        "+      - --max-num-batched-tokens=4096",
    ],
    Format.KSERVE_LLM: [
        "-              --max-num-seqs=256",
        "-              --tool-call-parser=qwen3_coder",
        "+              --max-num-seqs=48",
        "+              --tool-call-parser=qwen3_coder --max-num-batched-tokens=4096",
    ],
    Format.LLM_D: ['+      - "--max-num-seqs=48"', '+      - "--max-num-batched-tokens=4096"'],
}
