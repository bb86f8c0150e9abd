"""Formats of quantized folders, by name. One more is a module with a QuantizedFormat, and a row here."""

from collections.abc import Mapping

from meshwright.model.quantized_formats.awq_files import AWQFiles
from meshwright.model.quantized_formats.bitsandbytes import BitsAndBytes
from meshwright.model.quantized_formats.compressed_tensors import CompressedTensors
from meshwright.model.quantized_formats.folder_format import QuantizedFormat
from meshwright.model.quantized_formats.gptq_files import GPTQFiles
from meshwright.model.quantized_formats.native import NativeFormat

FORMATS: Mapping[str, QuantizedFormat] = {
    one.name: one for one in (NativeFormat(), CompressedTensors(), GPTQFiles(), AWQFiles(), BitsAndBytes())
}
"""By the word for each, which is also the config's quant_method."""
DEFAULT = NativeFormat.name
FP16_SCALES = (GPTQFiles.name, AWQFiles.name)
"""Formats whose scales are fp16: codes are made for scales that were rounded so."""
