"""Hugging Face directories in and out, streaming and without transformers."""

from typing import TYPE_CHECKING

from meshwright.spec.lazy_names import lazy_names

if TYPE_CHECKING:
    from meshwright.formats.hub.config import canonical, config_from_shape, shape_from_config, unwritable
    from meshwright.formats.hub.directory import HubFolder, export_folder, import_folder, load_weights, save_weights

__all__ = [
    "HubFolder",
    "canonical",
    "config_from_shape",
    "export_folder",
    "import_folder",
    "load_weights",
    "save_weights",
    "shape_from_config",
    "unwritable",
]

# Loaded on first use: configs are read without torch.
__getattr__ = lazy_names(__name__, {
    "HubFolder": "directory", "canonical": "config", "config_from_shape": "config", "export_folder": "directory",
    "import_folder": "directory", "load_weights": "directory", "save_weights": "directory",
    "shape_from_config": "config", "unwritable": "config",
})  # fmt: skip
