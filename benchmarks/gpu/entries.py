"""What is measured, in order of importance; and the same operations at the sizes of a test."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.gpu import attention_cases, narrow_cases, paged_cases, product_cases, quantized_cases, rows_cases
from benchmarks.gpu.case import Case

Build = Callable[..., Case]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An operation at a size."""

    build: Build
    sizes: tuple[int, ...]
    small: tuple[int, ...] = ()
    """Where errors are measured, if fp64 has no room for `sizes`."""
    rank: int
    """Less is more important; whole steps have their own, see whole_steps."""

    @property
    def name(self) -> str:
        """For people, before the case is built."""
        return f"{self.build.__name__.replace('_', ' ')} {' x '.join(f'{size:,}' for size in self.sizes)}"

    def case(self, dtype: torch.dtype, device: torch.device) -> Case:
        """At the size that is timed."""
        return self.build(*self.sizes, dtype=dtype, device=device)

    def judged(self, dtype: torch.dtype, device: torch.device) -> Case:
        """At the size whose errors are measured."""
        return self.build(*(self.small or self.sizes), dtype=dtype, device=device)


def _entry(rank: int, build: Build, *sizes: int, small: tuple[int, ...] = ()) -> Entry:
    return Entry(build=build, sizes=sizes, small=small, rank=rank)


HEAD_SMALL = (1024, 1024, 8192)
ATTENTION_SMALL = (1024, 8, 2, 128)
MIXTRAL, QWEN = (8192, 4096, 8, 2), (8192, 2048, 128, 8)
ENTRIES = [
    _entry(1, product_cases.head_and_loss, 8192, 4096, 128256, small=HEAD_SMALL),
    _entry(1, rows_cases.rms_norm, 8192, 4096),
    _entry(1, attention_cases.causal, 8192, 32, 8, 128, small=ATTENTION_SMALL),
    _entry(3, attention_cases.documents, 8192, 8, 32, 8, 128, small=(1024, 4, 8, 2, 128)),
    _entry(3, rows_cases.gated, 8192, 14336, small=(2048, 14336)),
    _entry(3, rows_cases.rotary, 8192, 32, 8, 128),
    _entry(3, rows_cases.add_rms_norm, 8192, 4096),
    _entry(5, product_cases.loss, 4096, 128256, small=(256, 128256)),
    _entry(5, product_cases.grouped_product, 8192, 4096, 14336, 8, 2, small=(1024, 1024, 1024, 8, 2)),
    _entry(5, product_cases.permute, *MIXTRAL),
    _entry(5, product_cases.combine, *MIXTRAL),
    _entry(5, rows_cases.merge, 8192, 32, 128),
    _entry(5, narrow_cases.fp32_update, 14336 * 8, 4096, 32),
    _entry(5, narrow_cases.gradient_norm, 14336 * 8, 4096, 32),
    _entry(5, narrow_cases.int8_update, 14336, 4096),
    _entry(5, narrow_cases.bf16_update, 14336, 4096),
    _entry(5, narrow_cases.weight_gradient_fp8, 8192, 14336, 4096, small=(2048, 2048, 2048)),
    _entry(5, narrow_cases.grouped_fp8, 8192, 4096, 14336, 8, 2, small=(1024, 1024, 1024, 8, 2)),
    _entry(5, narrow_cases.restored, 14336, 4096),
    _entry(5, paged_cases.paged_rows, 64, 4096, 32, 8, 128, small=(4, 4096, 8, 2, 128)),
    _entry(5, quantized_cases.int4_linear, 1, 14336, 4096),
    _entry(5, quantized_cases.int8_linear, 1, 14336, 4096),
    _entry(5, quantized_cases.int4_linear, 16, 14336, 4096),
    _entry(5, quantized_cases.int8_linear, 4096, 14336, 4096, small=(4096, 1024, 1024)),
    _entry(6, paged_cases.paged_rows, 1, 8192, 32, 8, 128),
    _entry(6, paged_cases.turned_and_kept, 64, 32, 8, 128),
    _entry(6, paged_cases.likeliest_token, 64, 128256),
    _entry(6, quantized_cases.nf4_linear, 1, 14336, 4096),
    _entry(6, quantized_cases.fp8_linear, 16, 14336, 4096),
    _entry(6, quantized_cases.int4_linear, 256, 14336, 4096),
    _entry(6, quantized_cases.int4_linear, 4096, 14336, 4096, small=(4096, 1024, 1024)),
    _entry(6, quantized_cases.fp8_linear, 4096, 14336, 4096, small=(4096, 1024, 1024)),
    _entry(6, rows_cases.rms_norm, 4096, 1024),
    _entry(6, rows_cases.layer_norm, 8192, 4096),
    _entry(6, rows_cases.gelu, 8192, 16384, small=(2048, 16384)),
    _entry(6, product_cases.grouped_product, 8192, 2048, 768, 128, 8, small=(1024, 256, 256, 16, 4)),
    _entry(6, product_cases.permute, *QWEN),
    _entry(6, product_cases.combine, *QWEN),
    # Liger's own shapes, largest and middle
    _entry(7, product_cases.head_and_loss, 4096, 4096, 128256, small=HEAD_SMALL),
    _entry(7, rows_cases.rms_norm, 2048, 32768),
    _entry(7, rows_cases.rms_norm, 2048, 8192),
    _entry(7, rows_cases.gated, 16384, 11008, small=(2048, 11008)),
    _entry(7, rows_cases.rotary, 2048, 32, 8, 256),
    _entry(7, rows_cases.add_rms_norm, 2048, 8192),
    _entry(7, rows_cases.layer_norm, 4096, 8192),
    _entry(7, product_cases.head_and_loss, 32768, 4096, 128256, small=HEAD_SMALL),
]
"""Sizes of Llama-3.1-8B at 8,192 tokens, of Mixtral-8x7B and of Qwen3-30B-A3B."""

TINY = [
    _entry(1, product_cases.head_and_loss, 21, 16, 50),
    _entry(1, rows_cases.rms_norm, 7, 40),
    _entry(1, attention_cases.causal, 37, 4, 2, 16),
    _entry(3, attention_cases.documents, 40, 3, 4, 2, 16),
    _entry(3, rows_cases.gated, 5, 72),
    _entry(3, rows_cases.rotary, 9, 4, 2, 16),
    _entry(3, rows_cases.add_rms_norm, 6, 40),
    _entry(5, product_cases.loss, 9, 70),
    _entry(5, product_cases.grouped_product, 20, 24, 40, 4, 2),
    _entry(5, product_cases.permute, 12, 40, 4, 2),
    _entry(5, product_cases.combine, 12, 40, 4, 2),
    _entry(5, rows_cases.merge, 9, 2, 16),
    _entry(5, narrow_cases.fp32_update, 6, 300, 3),
    _entry(5, narrow_cases.gradient_norm, 6, 300, 3),
    _entry(5, narrow_cases.int8_update, 3, 300),
    _entry(5, narrow_cases.bf16_update, 3, 300),
    _entry(5, narrow_cases.weight_gradient_fp8, 20, 32, 48),
    _entry(5, narrow_cases.grouped_fp8, 20, 32, 48, 4, 2),
    _entry(5, narrow_cases.restored, 5, 192),
    _entry(5, paged_cases.paged_rows, 3, 301, 4, 2, 24),
    _entry(6, paged_cases.turned_and_kept, 3, 4, 2, 16),
    _entry(6, paged_cases.likeliest_token, 3, 70),
    _entry(5, quantized_cases.int4_linear, 3, 40, 96),
    _entry(5, quantized_cases.int8_linear, 3, 40, 96),
    _entry(6, quantized_cases.nf4_linear, 3, 40, 96),
    _entry(6, quantized_cases.fp8_linear, 3, 48, 96),
    _entry(6, rows_cases.layer_norm, 5, 48),
    _entry(6, rows_cases.gelu, 5, 72),
]
"""Every operation, small enough for Triton's interpreter."""

MODEST = [
    _entry(1, product_cases.head_and_loss, 600, 256, 2048),
    _entry(1, rows_cases.rms_norm, 512, 1024),
    _entry(1, attention_cases.causal, 512, 4, 2, 64),
    _entry(3, attention_cases.documents, 512, 3, 4, 2, 64),
    _entry(3, rows_cases.gated, 256, 2048),
    _entry(3, rows_cases.rotary, 256, 8, 2, 64),
    _entry(3, rows_cases.add_rms_norm, 512, 1024),
    _entry(5, product_cases.grouped_product, 256, 256, 512, 4, 2),
    _entry(5, product_cases.permute, 256, 256, 4, 2),
    _entry(5, product_cases.combine, 256, 256, 4, 2),
    _entry(5, rows_cases.merge, 256, 4, 64),
    _entry(5, narrow_cases.fp32_update, 64, 1024, 4),
    _entry(5, narrow_cases.gradient_norm, 64, 1024, 4),
    _entry(5, narrow_cases.int8_update, 64, 1024),
    _entry(5, narrow_cases.bf16_update, 64, 1024),
    _entry(5, narrow_cases.restored, 64, 1024),
    _entry(5, narrow_cases.weight_gradient_fp8, 300, 128, 256),
    _entry(5, narrow_cases.grouped_fp8, 256, 256, 512, 4, 2),
    _entry(5, paged_cases.paged_rows, 8, 500, 4, 2, 64),
    _entry(6, paged_cases.turned_and_kept, 8, 4, 2, 64),
    _entry(6, paged_cases.likeliest_token, 16, 2048),
    _entry(5, quantized_cases.int4_linear, 16, 512, 512),
    _entry(5, quantized_cases.int8_linear, 64, 512, 512),
    _entry(6, quantized_cases.nf4_linear, 16, 512, 512),
    _entry(6, quantized_cases.fp8_linear, 64, 512, 512),
    _entry(6, rows_cases.layer_norm, 512, 1024),
    _entry(6, rows_cases.gelu, 256, 2048),
]
"""For the errors of fast paths on a CPU."""


def entries(tiny: bool) -> list[Entry]:
    """The list, most important first."""
    return sorted(TINY if tiny else ENTRIES, key=lambda entry: entry.rank)
