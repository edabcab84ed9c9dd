"""The corpus is reproducible, holds whole files out, and trusts no cache that is not its own."""

import hashlib
import json
from pathlib import Path

import pytest

from paramstore.demo.corpus import DOMAINS, MANIFEST, SEPARATOR, Domain, open_corpus
from paramstore.errors import ConfigError

PACKAGE = "paramstore_corpus_sample"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An importable package of 200 small files."""
    root = tmp_path / "installed" / PACKAGE
    root.mkdir(parents=True)
    for number in range(200):
        (root / f"module_{number}.py").write_text(f'"""Docstring {number}."""\ndef f_{number}():\n    "Inner {number}."\n')
    (root / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(root.parent))
    return root


def sources(share: float = 1.0) -> Domain:
    return Domain("sources", (PACKAGE,), "*.py", share)


def files_of(text) -> set[bytes]:
    return {file.strip() for file in bytes(text.numpy()).split(SEPARATOR)} - {b""}


def test_same_files_give_the_same_bytes(package, tmp_path):
    one = open_corpus(tmp_path / "one", size_bytes=5000, domains=[sources()])
    other = open_corpus(tmp_path / "other", size_bytes=5000, domains=[sources()])
    assert one.sha256 == other.sha256
    assert one.total_bytes >= 5000


def test_files_come_in_the_order_of_their_names_hashes_not_of_the_directory(package, tmp_path):
    corpus = open_corpus(tmp_path / "corpus", size_bytes=3000, domains=[sources()])
    text = corpus.domains[0]
    taken = files_of(text.train) | files_of(text.valid)
    by_hash = sorted(package.glob("module*.py"), key=lambda file: hashlib.sha256(f"{PACKAGE}/{file.name}".encode()).digest())
    assert taken == {file.read_bytes().strip() for file in by_hash[: len(taken)]}


def test_no_file_is_in_both_training_and_validation(package, tmp_path):
    corpus = open_corpus(tmp_path / "corpus", size_bytes=10_000, domains=[sources()])
    train, valid = files_of(corpus.domains[0].train), files_of(corpus.domains[0].valid)
    assert train
    assert valid
    assert train.isdisjoint(valid)
    assert {file.read_bytes().strip() for file in package.glob("module*.py")} >= train | valid


def test_validation_is_a_small_share_of_a_small_corpus_too(package, tmp_path):
    corpus = open_corpus(tmp_path / "corpus", size_bytes=1500, domains=[sources()])
    assert corpus.domains[0].valid.numel() < corpus.total_bytes / 4


def test_second_opening_reads_the_cache(package, tmp_path):
    first = open_corpus(tmp_path / "corpus", size_bytes=5000, domains=[sources()])
    built: list[str] = []
    second = open_corpus(
        tmp_path / "corpus", size_bytes=5000, domains=[sources()], on_progress=lambda name, _: built.append(name)
    )
    assert second.sha256 == first.sha256
    assert built == []


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "manifest", "garbage"])
def test_damaged_cache_is_built_again(package, tmp_path, damage):
    first = open_corpus(tmp_path / "corpus", size_bytes=5000, domains=[sources()])
    path = tmp_path / "corpus" / "sources.train.bin"
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[100] ^= 1
        path.write_bytes(data)
    elif damage == "truncate":
        path.write_bytes(data[:-1])
    elif damage == "remove":
        path.unlink()
    elif damage == "manifest":
        (path.parent / MANIFEST).unlink()
    else:
        (path.parent / MANIFEST).write_text("{}")
    assert open_corpus(tmp_path / "corpus", size_bytes=5000, domains=[sources()]).sha256 == first.sha256


def test_another_size_is_another_corpus(package, tmp_path):
    open_corpus(tmp_path / "corpus", size_bytes=5000, domains=[sources()])
    assert open_corpus(tmp_path / "corpus", size_bytes=9000, domains=[sources()]).total_bytes >= 9000


def test_equal_files_count_once(package, tmp_path):
    for number in range(50):
        (package / f"copy_{number}.py").write_text((package / "module_0.py").read_text())
    corpus = open_corpus(tmp_path / "corpus", size_bytes=10_000, domains=[sources()])
    text = corpus.domains[0]
    both = bytes(text.train.numpy()) + bytes(text.valid.numpy())
    assert both.count(b"def f_0()") == 1


def test_docstrings_are_taken_alone(package, tmp_path):
    domain = Domain("prose", (PACKAGE,), "*.py", 1.0, is_docstrings=True)
    corpus = open_corpus(tmp_path / "corpus", size_bytes=3000, domains=[domain])
    text = bytes(corpus.domains[0].train.numpy())
    assert b"Docstring" in text
    assert b"Inner" in text
    assert b"def " not in text


def test_odd_files_are_left_out(package, tmp_path):
    (package / "latin.py").write_bytes(b"# caf\xe9 of another encoding\n")
    (package / "huge.py").write_text("x = 1\n" * 100_000)
    (package / "tests").mkdir()
    (package / "tests" / "test_it.py").write_text("assert 'a test'\n")
    corpus = open_corpus(tmp_path / "corpus", size_bytes=10_000, domains=[sources()])
    text = bytes(corpus.domains[0].train.numpy()) + bytes(corpus.domains[0].valid.numpy())
    assert b"caf" not in text
    assert b"x = 1" not in text
    assert b"a test" not in text


def test_too_little_text_is_an_error_that_names_the_sizes(package, tmp_path):
    with pytest.raises(ConfigError, match=r"'sources'.* it needs 1000001"):
        open_corpus(tmp_path / "corpus", size_bytes=1_000_000, domains=[sources()])
    assert not (tmp_path / "corpus" / MANIFEST).exists()


def test_unknown_package_is_an_error_that_names_it(tmp_path):
    with pytest.raises(ConfigError, match="no_such_package"):
        open_corpus(tmp_path / "corpus", size_bytes=10, domains=[Domain("none", ("no_such_package",), "*.py", 1.0)])


def test_frequencies_weigh_domains_equally(package, tmp_path):
    domains = [sources(0.8), Domain("prose", (PACKAGE,), "*.py", 0.2, is_docstrings=True)]
    frequency = open_corpus(tmp_path / "corpus", size_bytes=9000, domains=domains).byte_frequencies()
    assert frequency.shape == (256,)
    assert float(frequency.sum()) == pytest.approx(1.0)
    assert frequency[ord("e")] > frequency[ord("~")]


def test_shares_of_the_domains_make_one():
    assert sum(domain.share for domain in DOMAINS) == pytest.approx(1.0)
    assert len(DOMAINS) == 4


@pytest.mark.slow
def test_installed_packages_give_all_four_domains(tmp_path):
    corpus = open_corpus(tmp_path / "corpus", size_bytes=400_000)
    assert [text.name for text in corpus.domains] == ["python", "cpp", "maths", "prose"]
    assert corpus.total_bytes >= 400_000
    manifest = json.loads((tmp_path / "corpus" / MANIFEST).read_text())
    assert set(manifest["recipe"]["versions"]) == {"python", "torch", "sympy", "numpy", "networkx"}
