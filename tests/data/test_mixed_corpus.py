"""The corpus of a mixture: one tokenizer for all sources, each encoded by itself."""

from pathlib import Path

import numpy as np
import pytest

from meshwright.data import Tokenizer, prepare
from meshwright.data.corpus.corpus import MixedStream
from meshwright.spec import Data
from meshwright.spec.errors import DataError, PlanError
from meshwright.spec.plan.plan import MixtureSource


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Two folders of text that share few words."""
    both = tmp_path / "one", tmp_path / "two"
    for number, folder in enumerate(both):
        folder.mkdir()
        for file in range(30):
            words = " ".join(f"{'left' if number else 'right'}{(file * 7 + word) % 50}" for word in range(90))
            (folder / f"{file}.txt").write_text(words + "\n")
    return both


def mixture(folders: tuple[Path, ...], **settings: object) -> Data:
    sources = tuple(MixtureSource(path=str(folder), weight=1 + number) for number, folder in enumerate(folders))
    return Data(mixture=sources, validation=0.1, **settings)  # type: ignore[arg-type]  # of any kind


def test_its_parts_are_the_corpora_of_its_sources(folders: tuple[Path, Path], tmp_path: Path) -> None:
    data = mixture(folders)
    mixed = prepare(data, cache_root=tmp_path / "cache")
    apart = [prepare(corpus, cache_root=tmp_path / "cache") for corpus in data.sources]
    for side in ("train", "validation"):
        whole, parts = getattr(mixed, side), [getattr(corpus, side) for corpus in apart]
        assert isinstance(whole, MixedStream) and whole.weights == (1, 2)
        assert all(
            np.array_equal(corpus.tokens, other.tokens) for corpus, other in zip(whole.parts, parts, strict=True)
        )
        for count in ("num_tokens", "num_bytes", "num_documents", "size"):
            assert getattr(whole, count) == sum(getattr(part, count) for part in parts)
        expected = sum(weight * part.bytes_per_token for weight, part in zip((1, 2), parts, strict=True)) / 3
        assert whole.bytes_per_token == pytest.approx(expected)
    assert len(list((tmp_path / "cache" / "tokens").iterdir())) >= 2
    assert mixed.fingerprint not in {corpus.fingerprint for corpus in apart}
    assert mixed.fingerprint != prepare(mixture(folders[::-1]), cache_root=tmp_path / "cache").fingerprint


def test_a_mixture_of_one_has_the_fingerprint_of_its_source(folders: tuple[Path, Path], tmp_path: Path) -> None:
    for tokenizer in ("auto", "bytes", "bpe:300"):
        data = mixture(folders[:1], tokenizer=tokenizer)
        both = [prepare(source, cache_root=tmp_path / "cache").fingerprint for source in (data, data.sources[0])]
        assert both[0] == both[1]


def test_a_tokenizer_that_is_trained_knows_every_source_whatever_its_weight(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    data = mixture(folders, tokenizer="bpe:300")
    tokenizer = prepare(data, cache_root=tmp_path / "cache").tokenizer
    assert tokenizer.vocab == 300
    assert all(len(tokenizer.encode(word)) <= 3 for word in ("left1", "right1"))
    heavier = Data(
        mixture=tuple(MixtureSource(path=source.path, weight=9 - source.weight) for source in data.mixture),
        validation=0.1, tokenizer="bpe:300",
    )  # fmt: skip
    assert prepare(heavier, cache_root=tmp_path / "cache").tokenizer.fingerprint == tokenizer.fingerprint


def test_a_tokenizer_beside_one_source_is_that_of_all(folders: tuple[Path, Path], tmp_path: Path) -> None:
    Tokenizer.bytes().save(folders[1])
    tokenizer = prepare(mixture(folders), cache_root=tmp_path / "cache").tokenizer
    assert tokenizer.fingerprint == Tokenizer.bytes().fingerprint
    Tokenizer.bytes().save(folders[0])
    assert prepare(mixture(folders), cache_root=tmp_path / "cache").tokenizer.fingerprint == tokenizer.fingerprint
    Tokenizer.shipped().save(folders[0])
    with pytest.raises(
        DataError, match=r"a mixture has one tokenizer, and its sources have .*one/tokenizer\.json and "
    ):
        prepare(mixture(folders), cache_root=tmp_path / "cache")
    named = mixture(folders, tokenizer="bytes")
    assert prepare(named, cache_root=tmp_path / "cache").tokenizer.fingerprint == tokenizer.fingerprint


def test_a_source_that_is_not_there_is_named(folders: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.path=.*three does not exist"):
        prepare(mixture((folders[0], tmp_path / "three")), cache_root=tmp_path / "cache")


def test_samples_are_read_with_the_tokenizer_of_their_model() -> None:
    with pytest.raises(PlanError, match=r"data\.tokenizer=bpe:300 is trained on text, and samples take"):
        Data(form="samples", tokenizer="bpe:300")
