"""Environment of the engine; set before anything imports torch or vllm, which read it once. Imports neither."""

from __future__ import annotations

import os

from shoal.config.models import RolloutSection, TelemetrySection
from shoal_rollout.engine_plugin import OWNER_VARIABLE


def prepare_environment(rollout: RolloutSection, telemetry: TelemetrySection) -> None:
    """Set what vLLM reads from the environment; values that an operator has set stay, apart from the thread counts."""
    os.environ[OWNER_VARIABLE] = "1"
    os.environ["OMP_NUM_THREADS"] = str(rollout.threads)
    defaults = {
        # Binding to cores would put every server of a machine onto the same ones.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # The engine runs eagerly; the few helpers that vLLM compiles all the same cost 4 s at the first token and need a C++ compiler.
        "TORCHDYNAMO_DISABLE": "1",
        # Only this project's plugin: others may be slow or need what is not installed.
        "VLLM_PLUGINS": "shoal",
        "VLLM_LOGGING_LEVEL": "DEBUG" if telemetry.log_level == "debug" else "ERROR",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
