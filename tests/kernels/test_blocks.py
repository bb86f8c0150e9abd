"""Blocks of GGUF files: decoded as their layouts say, number by number; encoded as the reference does, or nearer."""

import math
import struct
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.kernels.quantized import gguf_blocks
from meshwright.kernels.quantized.gguf_blocks import UNEVEN, WRITTEN, decode, encode
from meshwright.spec.weights.gguf_schemes import BLOCK_TYPES, FLOATS, SUPER, BlockType

CODED = [name for name in BLOCK_TYPES if name not in FLOATS]
REFERENCE = ("Q4_0", "Q5_0", "Q5_1", "Q8_0")
"""Types whose codes are those of the reference."""


def half(raw: bytes, at: int) -> float:
    return float(struct.unpack_from("<e", raw, at)[0])


def signed(raw: bytes, at: int) -> int:
    return int(struct.unpack_from("<b", raw, at)[0])


def six_bits(packed: bytes, index: int) -> tuple[int, int]:
    """Scale and minimum of a run of 32, as ggml's get_scale_min_k4 takes them."""
    if index < 4:
        return packed[index] & 63, packed[index + 4] & 63
    low = packed[index + 4]
    return (low & 15) | (packed[index - 4] >> 6 << 4), (low >> 4) | (packed[index] >> 6 << 4)


def one_number(kind: str, raw: bytes, index: int) -> float:
    """Number `place` of a block, in double precision."""
    if kind == "Q8_0":
        return half(raw, 0) * signed(raw, 2 + index)
    if kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1"):
        with_minimum, fifth = kind.endswith("1"), kind[1] == "5"
        start = 4 if with_minimum else 2
        upper = (int.from_bytes(raw[start : start + 4], "little") >> index & 1) << 4 if fifth else 0
        byte = raw[start + 4 * fifth + index % 16]
        code = (byte >> 4 if index >= 16 else byte & 15) | upper
        return half(raw, 0) * (code if with_minimum else code - (16 if fifth else 8)) + (
            half(raw, 2) if with_minimum else 0.0
        )
    if kind == "Q2_K":
        part, inside = divmod(index, 128)
        code = raw[16 + part * 32 + inside % 32] >> 2 * (inside // 32) & 3
        return half(raw, 80) * (raw[index // 16] & 15) * code - half(raw, 82) * (raw[index // 16] >> 4)
    if kind == "Q3_K":
        part, inside = divmod(index, 128)
        code = raw[32 + part * 32 + inside % 32] >> 2 * (inside // 32) & 3
        code -= 0 if raw[index % 32] >> index // 32 & 1 else 4
        run = index // 16
        low = raw[96 + run % 8] >> 4 * (run // 8) & 15
        return half(raw, 108) * ((low | (raw[104 + run % 4] >> 2 * (run // 4) & 3) << 4) - 32) * code
    if kind == "IQ4_NL":
        return half(raw, 0) * UNEVEN[raw[2 + index % 16] >> 4 * (index // 16) & 15]
    if kind == "IQ4_XS":
        run, inside = divmod(index, 32)
        low, high = raw[4 + run // 2] >> 4 * (run % 2) & 15, int.from_bytes(raw[2:4], "little") >> 2 * run & 3
        return (
            half(raw, 0) * ((low | high << 4) - 32) * UNEVEN[raw[8 + 16 * run + inside % 16] >> 4 * (inside // 16) & 15]
        )
    if kind in ("Q4_K", "Q5_K"):
        run, inside = divmod(index, 32)
        scale, minimum = six_bits(raw[4:16], run)
        codes = raw[16:] if kind == "Q4_K" else raw[48:]
        byte = codes[run // 2 * 32 + inside]
        code = byte >> 4 if run % 2 else byte & 15
        code |= (raw[16 + inside] >> run & 1) << 4 if kind == "Q5_K" else 0
        return half(raw, 0) * scale * code - half(raw, 2) * minimum
    part, inside = divmod(index, 128)
    quarter, lane = divmod(inside, 32)
    byte = raw[part * 64 + quarter % 2 * 32 + lane]
    code = (byte >> 4 if quarter >= 2 else byte & 15) | (raw[128 + part * 32 + lane] >> 2 * quarter & 3) << 4
    return half(raw, 208) * signed(raw, 192 + index // 16) * (code - 32)


def random_blocks(kind: BlockType, rows: int = 3, blocks: int = 2) -> Tensor:
    """Bytes of which fp16 scales are of the usual size."""
    generator = torch.Generator().manual_seed(kind.number)
    raw = torch.randint(0, 256, (rows, blocks, kind.bytes), generator=generator, dtype=torch.uint8)
    for at in {
        "Q4_1": (0, 2),
        "Q5_1": (0, 2),
        "Q4_K": (0, 2),
        "Q5_K": (0, 2),
        "Q6_K": (208,),
        "Q2_K": (80, 82),
        "Q3_K": (108,),
    }.get(kind.name, (0,)):
        raw[..., at + 1] = (raw[..., at + 1] & 0x83) | 0x20
    return raw.flatten(1)


def weights(rows: int = 24, columns: int = 2 * SUPER) -> Tensor:
    """Of many kinds: usual ones, outliers, zeros, constants, one sign."""
    actual = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)) * 0.02
    actual[:, ::67] *= 9
    actual[0], actual[1], actual[2], actual[3, :SUPER] = 0, 0.25, -0.25, 0
    actual[4], actual[5] = actual[4].abs(), -actual[5].abs()
    return actual


@pytest.mark.parametrize("name", CODED)
def test_blocks_are_decoded_number_by_number(name: str) -> None:
    kind = BLOCK_TYPES[name]
    raw = random_blocks(kind)
    actual = decode(name, raw)
    assert actual.shape == (3, 2 * kind.block) and actual.dtype == torch.float32
    for row in range(3):
        for column in range(2 * kind.block):
            block, index = divmod(column, kind.block)
            block_bytes = bytes(raw[row, block * kind.bytes : (block + 1) * kind.bytes].tolist())
            expected = one_number(name, block_bytes, index)
            assert float(actual[row, column]) == pytest.approx(expected, rel=1e-5, abs=1e-6), (row, column)


@pytest.mark.parametrize("name", list(BLOCK_TYPES))
def test_the_gguf_package_decodes_the_same_bits(name: str) -> None:
    pytest.importorskip("gguf")
    constants: Any = import_module("gguf.constants")
    quants: Any = import_module("gguf.quants")
    kind, number = BLOCK_TYPES[name], constants.GGMLQuantizationType[name]
    assert number == kind.number and constants.GGML_QUANT_SIZES[number] == (kind.block, kind.bytes)
    raw = random_blocks(kind) if name in CODED else encode(name, weights())
    theirs = torch.from_numpy(quants.dequantize(raw.numpy(), number).astype("float32"))
    assert torch.equal(decode(name, raw).float(), theirs)


@pytest.mark.parametrize("name", REFERENCE)
def test_codes_are_those_of_the_gguf_package(name: str) -> None:
    pytest.importorskip("gguf")
    constants: Any = import_module("gguf.constants")
    quants: Any = import_module("gguf.quants")
    theirs = torch.from_numpy(quants.quantize(weights().numpy(), constants.GGMLQuantizationType[name]))
    assert torch.equal(encode(name, weights()), theirs)


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_encoded_is_near_what_it_was(name: str) -> None:
    kind, weight = BLOCK_TYPES[name], weights()
    raw = encode(name, weight)
    assert raw.dtype == torch.uint8 and raw.numel() == kind.num_bytes(weight.shape)
    back = decode(name, raw).float()
    bits = {"F32": 24, "F16": 11, "BF16": 8}.get(name) or int(name[1])
    assert float((back - weight).norm() / weight.norm()) < 1.1 * 2.0**-bits
    assert bool((back[0] == 0).all()) and bool((back[3, :SUPER] == 0).all())
    assert torch.allclose(back[1], weight[1], rtol=2.0 ** -min(bits, 9))


@pytest.mark.parametrize("name", ["Q4_K", "Q5_K", "Q6_K"])
def test_scales_are_searched_further_than_in_the_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = weights()

    def error() -> float:
        return float((decode(name, encode(name, weight)) - weight).norm() / weight.norm())

    ours = error()
    monkeypatch.setattr(gguf_blocks, "NEXT", (0,))  # as the reference, which rounds scales and looks no further
    assert ours < error() * (0.999 if name == "Q6_K" else 0.99)


def test_large_matrices_are_encoded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = {name: encode(name, weights()) for name in CODED if name in WRITTEN}
    monkeypatch.setattr(gguf_blocks, "CHUNK", 3 * SUPER)
    for name, raw in whole.items():
        assert torch.equal(encode(name, weights()), raw), name


def test_sizes_and_bits_per_weight() -> None:
    actual = {name: kind.bits_per_weight for name, kind in BLOCK_TYPES.items()}
    assert math.isclose(actual["Q4_K"], 4.5) and math.isclose(actual["Q6_K"], 6.5625) and actual["Q8_0"] == 8.5
    assert BLOCK_TYPES["Q4_K"].num_bytes((3, 5, 512)) == 3 * 5 * 2 * 144 and not BLOCK_TYPES["Q4_K"].holds(384)
