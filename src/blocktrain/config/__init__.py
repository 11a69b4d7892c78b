"""The settings of a run: what there is to set (settings.py, kinds.py), and how files, overrides and
dictionaries become checked settings (schema.py, loading.py)."""

from blocktrain.config.kinds import KINDS, Kind
from blocktrain.config.loading import (
    from_dict,
    from_toml,
    load_config,
    load_stored_config,
    read_settings,
)
from blocktrain.config.sections import (
    CONFIG_VERSION,
    build,
    closest_match,
    describe,
    setting,
    stored_values,
)
from blocktrain.config.settings import (
    LAYERS,
    Config,
    DataConfig,
    ModelConfig,
    ObjectiveConfig,
    SwarmConfig,
    TrainConfig,
    balanced_depths,
)

__all__ = [
    "CONFIG_VERSION",
    "KINDS",
    "LAYERS",
    "Config",
    "DataConfig",
    "Kind",
    "ModelConfig",
    "ObjectiveConfig",
    "SwarmConfig",
    "TrainConfig",
    "balanced_depths",
    "build",
    "closest_match",
    "describe",
    "from_dict",
    "from_toml",
    "load_config",
    "load_stored_config",
    "read_settings",
    "setting",
    "stored_values",
]
