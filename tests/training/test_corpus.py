"""The corpus: what is dropped, a split that is disjoint and by file, exact round trips, prompts."""

import numpy as np
import pytest

from spec_kernels.training import corpus


def test_drops_what_is_not_text(tmp_path):
    (tmp_path / "good.py").write_text("def good():\n    return None\n")
    (tmp_path / "same.py").write_text("def good():\n    return None\n")
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9\nvalue = 1\n")
    (tmp_path / "table.py").write_text("TABLE = (\n" + "    0x1234, 0x5678,\n" * 50 + ")\n")
    (tmp_path / "empty.py").write_text(" \n")
    (tmp_path / "encodings").mkdir()
    (tmp_path / "encodings" / "code.py").write_text("import codecs\n")
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "other.py").write_text("import this\n")
    topics = tmp_path / "pydoc_data"
    topics.mkdir()
    (topics / "topics.py").write_text('topics = {"if": "The if\\nstatement", "for": "Loops"}\n')
    documents = corpus.load_documents(tmp_path)
    assert [(d.path, d.text) for d in documents] == [
        ("good.py", "def good():\n    return None\n"),
        ("pydoc_data/topics/for.txt", "Loops"),
        ("pydoc_data/topics/if.txt", "The if\nstatement"),
    ]


def test_topics_without_the_dictionary_are_an_error(tmp_path):
    (tmp_path / "pydoc_data").mkdir()
    (tmp_path / "pydoc_data" / "topics.py").write_text("other = {}\n")
    with pytest.raises(ValueError, match="expected an assignment to topics"):
        corpus.load_documents(tmp_path)


def test_split_is_disjoint_by_file_and_stable():
    documents = [corpus.Document(f"a/{i}.py", f"text {i}") for i in range(2000)]
    training, held_out = corpus.split(documents)
    assert {d.path for d in training}.isdisjoint(d.path for d in held_out)
    assert len(training) + len(held_out) == 2000
    assert 0.02 < len(held_out) / 2000 < 0.04
    # A document's side depends on its path alone.
    _, fewer = corpus.split(documents[::2])
    assert [d for d in held_out if d in documents[::2]] == fewer


def test_split_of_the_running_interpreter():
    documents = corpus.load_documents()
    training, held_out = corpus.split(documents)
    assert not {d.text for d in training} & {d.text for d in held_out}
    assert any(not d.is_test for d in held_out)


def test_tokenizer_round_trips_any_bytes(library):
    documents = corpus.load_documents(library)
    tokenizer = corpus.train_tokenizer(documents, 300)
    assert tokenizer.token_to_id(corpus.SEPARATOR) == corpus.SEPARATOR_ID
    for text in (documents[0].text, "\x00\t naïve 𝔘nicode \r\n  ", "    \n\n    x"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_encode_leads_each_document_with_the_separator(library):
    documents = corpus.load_documents(library)
    tokenizer = corpus.train_tokenizer(documents, 300)
    plain, shuffled = corpus.encode(documents, tokenizer), corpus.encode(documents, tokenizer, 1)
    assert (plain == corpus.SEPARATOR_ID).sum() == len(documents)
    assert not np.array_equal(plain, shuffled)
    assert np.array_equal(np.sort(plain), np.sort(shuffled))
    assert np.array_equal(shuffled, corpus.encode(documents, tokenizer, 1))


def test_prompts_are_beginnings_of_held_out_definitions(library):
    documents = corpus.load_documents(library)
    tokenizer = corpus.train_tokenizer(documents, 300)
    by_path = {d.path: d for d in documents}
    held_out = [d for d in documents if d.is_held_out]
    assert held_out
    prompts = corpus.held_out_prompts(documents, tokenizer, 2)
    for prompt in prompts:
        document = by_path[prompt["file"]]
        assert document.is_held_out
        assert len(prompt["token_ids"]) == corpus.PROMPT_TOKENS
        text = document.text[prompt["offset"] :]
        assert text.startswith("def ")
        assert text.startswith(prompt["text"] + prompt["continuation"])
    with pytest.raises(ValueError, match="count: expected at most"):
        corpus.held_out_prompts(documents, tokenizer, 10_000)
