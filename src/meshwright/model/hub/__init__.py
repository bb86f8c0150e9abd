"""Hugging Face directories in and out, streaming and without transformers."""

from meshwright.model.hub.config import canonical, config_from_shape, shape_from_config, unwritable
from meshwright.model.hub.directory import HubFolder, export_folder, import_folder
from meshwright.model.hub.weights import load_weights, save_weights

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
