"""Formats of quantized folders, by name. To add one, write a module with a QuantizedFormat and list it here."""

from collections.abc import Mapping

from meshwright.model.quantized_formats.awq_files import AWQFiles
from meshwright.model.quantized_formats.bitsandbytes import BitsAndBytes
from meshwright.model.quantized_formats.compressed_tensors import CompressedTensors
from meshwright.model.quantized_formats.folder_format import QuantizedFormat
from meshwright.model.quantized_formats.gptq_files import GPTQFiles
from meshwright.model.quantized_formats.native import NativeFormat

FORMATS: Mapping[str, QuantizedFormat] = {
    format_.name: format_ for format_ in (NativeFormat(), CompressedTensors(), GPTQFiles(), AWQFiles(), BitsAndBytes())
}
"""Format by name, which is also the config's quant_method."""
DEFAULT = NativeFormat.name
FP16_SCALES = (GPTQFiles.name, AWQFiles.name)
"""Formats with fp16 scales. Codes are made for scales rounded to fp16."""
