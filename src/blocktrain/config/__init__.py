"""The settings of a run: every setting by section (settings.py), all of them as one value, read
from files and --set (run_config.py), and how sections are declared and checked (sections.py)."""

from blocktrain.config.run_config import (
    Config,
    from_dict,
    from_toml,
    load_config,
    load_stored_config,
    read_settings,
)
from blocktrain.config.sections import build, describe, setting, stored_values
from blocktrain.config.settings import (
    BYTE_VOCABULARY,
    DataConfig,
    ModelConfig,
    ObjectiveConfig,
    SwarmConfig,
    TrainConfig,
    Vocabulary,
)

__all__ = [
    "BYTE_VOCABULARY",
    "Config",
    "DataConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "SwarmConfig",
    "TrainConfig",
    "Vocabulary",
    "build",
    "describe",
    "from_dict",
    "from_toml",
    "load_config",
    "load_stored_config",
    "read_settings",
    "setting",
    "stored_values",
]
