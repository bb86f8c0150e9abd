"""Formats of quantized folders, by name. One more is a module with a QuantizedFormat, and a row here."""

from collections.abc import Mapping

from meshwright.compress.formats.bitsandbytes import BitsAndBytes
from meshwright.compress.formats.compressed_tensors import CompressedTensors
from meshwright.compress.formats.folder_format import QuantizedFormat
from meshwright.compress.formats.native import NativeFormat

FORMATS: Mapping[str, QuantizedFormat] = {
    one.name: one for one in (NativeFormat(), CompressedTensors(), BitsAndBytes())
}
"""By the word for each, which is also the config's quant_method."""
DEFAULT = NativeFormat.name
