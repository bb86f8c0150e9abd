"""Formats of quantized folders, by name. To add one, write a module with a QuantizedFormat and list it here."""

from collections.abc import Mapping

from meshwright.formats.quantized.bitsandbytes import BitsAndBytes
from meshwright.formats.quantized.compressed_tensors import CompressedTensors
from meshwright.formats.quantized.interface import QuantizedFormat
from meshwright.formats.quantized.native import NativeFormat
from meshwright.formats.quantized.packed_linears import AWQFiles, GPTQFiles

FORMATS: Mapping[str, QuantizedFormat] = {
    format_.name: format_ for format_ in (NativeFormat(), CompressedTensors(), GPTQFiles(), AWQFiles(), BitsAndBytes())
}
"""Format by name, which is also the config's quant_method."""
DEFAULT = NativeFormat.name
FP16_SCALES = (GPTQFiles.name, AWQFiles.name)
"""Formats with fp16 scales. Codes are made for scales rounded to fp16."""
