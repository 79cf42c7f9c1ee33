"""KV connectors that run on a CPU, for engines that keep blocks beyond their own cache."""

from __future__ import annotations

import shutil

from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector


class OffloadingConnector(ExampleConnector):  # type: ignore[misc]  # untyped here
    """vLLM's example store in a folder, under the name of one that offloads, and as empty."""

    def reset_cache(self) -> bool:
        """Forget all that is kept."""
        shutil.rmtree(self._storage_path, ignore_errors=True)
        return True
