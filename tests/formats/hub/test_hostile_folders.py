"""Directories that claim what is not so: each is refused in one line, before room is made for what it claims."""

import copy
import json
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest

import meshwright as mw
from meshwright.formats.safetensors import read_header
from meshwright.spec.errors import DataError, HubError, MeshwrightError
from meshwright.verbs.import_.answer import import_hf
from tests.formats.hub.test_folder import SHAPE, exported

WEIGHTS = "model.safetensors"
DEEP = 200_000
Change = Callable[[Path], object]
Header = dict[str, Any]


def config(**keys: Any) -> Change:
    """More keys of config.json."""

    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | keys))

    return change


def nested(name: str, start: str = "[", end: str = "") -> Change:
    return lambda folder: (folder / name).write_text('{"a": ' + start * DEEP + end * DEEP)


def header(make: Callable[[Header, int], Header | bytes], more: int = 0) -> Change:
    """Another header of the weights; `make` is given theirs, and how many bytes of data there are. `more`: bytes behind
    the data."""

    def change(folder: Path) -> None:
        raw = (folder / WEIGHTS).read_bytes()
        size = int.from_bytes(raw[:8], "little")
        data = raw[8 + size :] + bytes(more)
        changed = make(json.loads(raw[8 : 8 + size]), len(data))
        text = changed if isinstance(changed, bytes) else json.dumps(changed).encode()
        (folder / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + data)

    return change


def first(key: str, value: Any) -> Change:
    """Change an entry of the first tensor."""

    def make(entries: Header, _: int) -> Header:
        next(entry for name, entry in entries.items() if name != "__metadata__")[key] = value
        return entries

    return header(make)


def overlapping(entries: Header, _: int) -> Header:
    """Two tensors at one place: the file is as long as its header says."""
    first_norm, second_norm = (name for name in entries if name.endswith("layernorm.weight"))
    entries[second_norm]["data_offsets"] = entries[first_norm]["data_offsets"]
    return entries


def tensor(size: list[int], start: int, stop: int) -> Header:
    return {"dtype": "F32", "shape": size, "data_offsets": [start, stop]}


def long(name: str, size: int) -> Change:
    """A file of a size, of which nothing stands on the disk; an index in place of the weights."""

    def change(folder: Path) -> None:
        if name != "config.json":
            (folder / WEIGHTS).unlink()
        with open(folder / name, "wb") as file:
            file.truncate(size)

    return change


CASES: dict[str, tuple[Change, str]] = {
    "a long config": (long("config.json", 2**24 + 1), "has 16,777,217 bytes, and at most 16,777,216 are read"),
    "a long index": (long(WEIGHTS + ".index.json", 2**27), "has 134,217,728 bytes, and at most 67,108,864 are read"),
    "a deep config": (nested("config.json"), r"config\.json is not JSON, or nested too deep"),
    "a deep config that ends": (nested("config.json", '{"a": ', "}"), "nested too deep"),
    "a deep generation config": (nested("generation_config.json"), r"generation_config\.json is not JSON, or nested"),
    "a deep tokenizer config": (nested("tokenizer_config.json"), r"tokenizer_config\.json is not JSON, or nested"),
    "a deep quantization": (
        config(quantization_config={"quant_method": "gptq", "bits": [[[[[4]]]]]}),
        r"quantization_config: bits=\[\[|holds codes, by 'gptq'",
    ),
    "a deep header": (header(lambda entries, _: b'{"a": ' + b"[" * DEEP), "damaged header .maximum recursion"),
    "an infinite dim": (first("shape", [float("inf"), 1]), "must be whole numbers"),
    "a dim that is text": (first("shape", ["2048", "8"]), "must be whole numbers"),
    "half a row": (first("shape", [2048.5, 8]), "must be whole numbers"),
    "dims that overflow": (first("shape", [2**62, 2**62]), "do not fit the shape"),
    "offsets that overflow": (first("data_offsets", [2**63, 2**63 + 65536]), "begins at"),
    "offsets below": (first("data_offsets", [-65536, 0]), "do not fit the shape"),
    "tensors in one place": (header(overlapping), "begins at .* and what is before it ends at"),
    "bytes between tensors": (
        header(lambda entries, size: entries | {"x": tensor([4], size - 16, size)}, more=400),
        "x begins at",
    ),
    "a tensor outside": (
        header(lambda entries, size: entries | {"x": tensor([2**40], size, size + 2**42)}),
        "truncated",
    ),
    "a header of a list": (header(lambda entries, _: b"[1, 2]"), "damaged header"),
    "wide": (config(hidden_size=10**9), "describes .* numbers, and the files hold 33,336"),
    "many words": (config(vocab_size=10**9), "describes 16,000,000,568 numbers"),
    "many heads": (config(num_attention_heads=2**30), "describes .* numbers"),
    "many layers": (config(num_hidden_layers=9999), "describes 5,632,216 numbers"),
    "too many layers": (config(num_hidden_layers=10**9), "must be at most 10000"),
    "a milliard experts": (
        config(
            model_type="mixtral",
            architectures=["MixtralForCausalLM"],
            num_local_experts=10**9,
            num_experts_per_tok=2,
        ),
        "describes 296,000,033,048 numbers",
    ),
    "another width": (config(hidden_size=16, head_dim=8), "is .* where config.json says"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_claimed_is_checked_before_it_is_believed(name: str, tmp_path: Path) -> None:
    change, message = CASES[name]
    folder = tmp_path / "hostile"
    exported(folder)
    change(folder)
    tracemalloc.start()
    begun = perf_counter()
    try:
        for take in (lambda: mw.load(folder), lambda: import_hf(folder, tmp_path / "run")):
            with pytest.raises(HubError, match=message) as caught:
                take()
            assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2**28 and perf_counter() - begun < 60
    assert [path.name for path in tmp_path.iterdir()] == ["hostile"]


def test_a_codes_folder_that_claims_more_is_refused_alike(tmp_path: Path) -> None:
    exported(tmp_path / "hf")
    mw.quantize(tmp_path / "hf", "int4-rtn", tmp_path / "codes", quality=False)
    mw.load(tmp_path / "codes")
    config(intermediate_size=2**31 - 1)(tmp_path / "codes")
    with pytest.raises(HubError, match=r"describes 51,539,\d{3},\d{3} numbers"):
        mw.load(tmp_path / "codes")


def test_files_of_the_library_are_read(tmp_path: Path) -> None:
    """Its tensors lie one behind the other, those without an element too."""
    import torch
    from safetensors.torch import save_file

    save_file({"a": torch.ones(3, 5), "b": torch.zeros(0, 4), "c": torch.ones((), dtype=torch.int8)}, tmp_path / "a")
    assert {name: tensor.size for name, tensor in read_header(tmp_path / "a").items()} == {
        "a": (3, 5),
        "b": (0, 4),
        "c": (),
    }


VALUES = (None, [], {}, -1, 0, 10**30, "x", 1.5, float("inf"), [[]], True, {"a": 1})
WIDE = replace(SHAPE, hidden=128, heads=2, kv_heads=2, head_dim=64, ffn=128)
WAYS = {
    "meshwright": "int4-rtn",
    "gptq": "int4-sym",
    "awq": "int4-rtn",
    "compressed-tensors": "int8",
    "bitsandbytes": "nf4",
}


def places(document: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of entries in a document, in lists the first three."""
    rows = list(
        document.items()
        if isinstance(document, dict)
        else enumerate(document[:3])
        if isinstance(document, list)
        else ()
    )
    for key, value in rows:
        yield (key,)
        yield from ((key, *rest) for rest in places(value))


def damaged(document: Any, path: tuple[Any, ...], value: Any) -> str:
    whole = inner = copy.deepcopy(document)
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return json.dumps(whole)


@pytest.mark.long
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json", *WAYS])
def test_an_entry_of_any_other_kind_is_read_or_refused(name: str, tmp_path: Path) -> None:
    """Every file, and a quantized folder's config in each format, leads to an error of this package or to none."""
    folder, file = tmp_path / "hf", "config.json" if name in WAYS else name
    exported(folder, WIDE)
    if name in WAYS:
        folder = tmp_path / "codes"
        mw.quantize(tmp_path / "hf", WAYS[name], folder, quality=False, format=name)
    document = json.loads((folder / file).read_text())
    for path, value in product(places(document), VALUES):
        (folder / file).write_text(damaged(document, path, value))
        with suppress(MeshwrightError):
            mw.load(folder)


@pytest.mark.parametrize("name", WAYS)
def test_numbers_of_8_bits_without_a_scale_are_refused(name: str, tmp_path: Path) -> None:
    """Without a scale their values are unknown. Every format refuses them where wider numbers belong."""
    import torch
    from safetensors.torch import load_file, save_file

    exported(tmp_path / "hf", WIDE)
    mw.quantize(tmp_path / "hf", WAYS[name], tmp_path / "codes", quality=False, format=name)
    tensors = load_file(tmp_path / "codes" / WEIGHTS)
    norm = next(name for name in tensors if "norm" in name)
    tensors[norm] = tensors[norm].to(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / "codes" / WEIGHTS)
    with pytest.raises(HubError, match=rf"{norm} is \[128\] torch.float8_e4m3fn where"):
        mw.load(tmp_path / "codes")


@pytest.mark.parametrize("damage", ["without scales", "too few scales", "numbers in place of codes"])
def test_a_matrix_of_8_bits_that_lost_its_scales_is_refused_by_name(damage: str, tmp_path: Path) -> None:
    """It was once read as plain numbers, hundreds of times too large."""
    import torch
    from safetensors.torch import load_file, save_file

    exported(tmp_path / "hf", WIDE)
    mw.quantize(tmp_path / "hf", "fp8", tmp_path / "codes", quality=False, format="compressed-tensors")
    tensors, name = load_file(tmp_path / "codes" / WEIGHTS), "model.layers.0.self_attn.q_proj.weight"
    if damage == "without scales":
        del tensors[f"{name}_scale"]
    elif damage == "too few scales":
        tensors[f"{name}_scale"] = tensors[f"{name}_scale"][:-1]
    else:
        tensors[name] = tensors[name].to(torch.bfloat16)
    save_file(tensors, tmp_path / "codes" / WEIGHTS)
    with pytest.raises(HubError, match=rf"{name}(_scale)? is "):
        mw.load(tmp_path / "codes")


@pytest.mark.parametrize(("key", "value"), [("codes", "x"), ("scales", "x"), ("activations", "int3"), ("method", "")])
def test_a_scheme_in_words_that_are_not_known_is_refused(key: str, value: str, tmp_path: Path) -> None:
    exported(tmp_path / "hf")
    mw.quantize(tmp_path / "hf", "int4-rtn", tmp_path / "codes", quality=False)
    document = json.loads((tmp_path / "codes" / "config.json").read_text())
    path = ("quantization_config", "schemes", "int4-rtn", key)
    (tmp_path / "codes" / "config.json").write_text(damaged(document, path, value))
    with pytest.raises(HubError, match=f"damaged quantization_config .*{key}='{value}'"):
        mw.load(tmp_path / "codes")


@pytest.mark.parametrize("mark", [[], 3, {"content": ["a"]}], ids=str)
def test_a_mark_that_is_no_text_is_refused(mark: Any, tmp_path: Path) -> None:
    exported(tmp_path / "hf")
    file = tmp_path / "hf" / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"bos_token": mark}))
    with pytest.raises(DataError, match="is no token"):
        mw.load(tmp_path / "hf")


@pytest.mark.parametrize("name", [None, *WAYS])
def test_a_file_of_weights_that_leads_nowhere_is_one_line(name: str | None, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    exported(folder, WIDE)
    if name is not None:
        folder = tmp_path / "codes"
        mw.quantize(tmp_path / "hf", WAYS[name], folder, quality=False, format=name)
    for file in folder.glob("*.safetensors"):
        file.unlink()
        file.symlink_to(tmp_path / "gone")
    with pytest.raises(HubError) as caught:
        mw.load(folder)
    assert "\n" not in str(caught.value)
