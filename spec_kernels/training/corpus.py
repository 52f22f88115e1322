"""The corpus: sources and documentation of the running interpreter's standard library.

Everything is a function of the files on disk: order, split, tokenizer and held-out prompts come out
the same on every run with the same Python.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
import re
import sys
import sysconfig
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SEPARATOR = "<|endoftext|>"
SEPARATOR_ID = 0
VOCAB_SIZE = 512
HELD_OUT_PER_MILLE = 30
PROMPT_TOKENS = 96
NUM_PROMPTS = 20

# Not text: code pages, deliberately odd encodings, and inputs of parsers.
_EXCLUDED = (
    "site-packages/",
    "dist-packages/",
    "encodings/",
    "lib2to3/tests/data/",
    "test/encoded_modules/",
    "pydoc_data/",
    "msilib/",
)
# Below this share of letters among the characters that are not white space, a file is a table.
_MIN_LETTER_SHARE = 0.55
_MAX_BYTES = 400_000


@dataclasses.dataclass(frozen=True)
class Document:
    """``path`` is relative to the standard library, with forward slashes; topics get one each."""

    path: str
    text: str

    @property
    def is_held_out(self) -> bool:
        """Decided by the path alone, so a document never changes sides when others come or go."""
        digest = hashlib.sha256(self.path.encode()).digest()
        return int.from_bytes(digest[:8], "big") % 1000 < HELD_OUT_PER_MILLE

    @property
    def is_test(self) -> bool:
        return any(part in ("test", "tests", "idle_test") for part in self.path.split("/"))


def _is_table(text: str) -> bool:
    visible = len("".join(text.split()))
    letters = len(re.sub(r"[\W\d]+", "", text))
    return letters < _MIN_LETTER_SHARE * visible


def _topics(path: Path) -> dict[str, str]:
    """The ``topics`` dictionary of pydoc_data/topics.py, parsed and not executed."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "topics":
            return ast.literal_eval(node.value)
    raise ValueError(f"{path}: expected an assignment to topics, got none")


def standard_library() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def load_documents(root: Path | None = None) -> list[Document]:
    """All documents in path order: UTF-8, not empty, no exact duplicates, no tables."""
    root = standard_library() if root is None else Path(root)
    found: list[Document] = []
    for path in sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).as_posix()):
        name = path.relative_to(root).as_posix()
        if name.startswith(_EXCLUDED) or "/site-packages/" in name:
            continue
        data = path.read_bytes()
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip() and len(data) <= _MAX_BYTES and not _is_table(text):
            found.append(Document(name, text.replace("\r\n", "\n")))
    topics = root / "pydoc_data" / "topics.py"
    if topics.is_file():
        for name, text in sorted(_topics(topics).items()):
            found.append(Document(f"pydoc_data/topics/{name}.txt", text))
    unique: dict[str, Document] = {}
    for document in found:
        unique.setdefault(hashlib.sha256(document.text.encode()).hexdigest(), document)
    return list(unique.values())


def split(documents: list[Document]) -> tuple[list[Document], list[Document]]:
    """(training, held out), by file."""
    held_out = [d for d in documents if d.is_held_out]
    return [d for d in documents if not d.is_held_out], held_out


def train_tokenizer(documents: list[Document], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Byte-level BPE: every byte is a token, so any text encodes and decodes back exactly."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[SEPARATOR],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((d.text for d in documents), trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"train_tokenizer: vocab_size: expected a corpus with {vocab_size} tokens, "
            f"got {tokenizer.get_vocab_size()}"
        )
    return tokenizer


def encode(documents: list[Document], tokenizer: Tokenizer, seed: int | None = None) -> np.ndarray:
    """All documents in one row of uint16 ids, each led by the separator.

    ``seed`` shuffles the documents: neighbours in path order resemble each other.
    """
    order = np.arange(len(documents))
    if seed is not None:
        order = np.random.default_rng(seed).permutation(len(documents))
    encodings = tokenizer.encode_batch([documents[i].text for i in order])
    ids: list[int] = []
    for encoding in encodings:
        ids.append(SEPARATOR_ID)
        ids.extend(encoding.ids)
    return np.asarray(ids, dtype=np.uint16)


def definitions(document: Document) -> list[int]:
    """Character offsets of the top-level ``def`` and ``class`` lines."""
    offsets, position = [], 0
    for line in document.text.splitlines(keepends=True):
        if line.startswith(("def ", "class ", "async def ")):
            offsets.append(position)
        position += len(line)
    return offsets


def held_out_prompts(documents: list[Document], tokenizer: Tokenizer, count: int) -> list[dict]:
    """The first PROMPT_TOKENS tokens of every n-th held-out definition, n chosen to give ``count``.

    A definition counts if the text from it to the end of its file is at least twice that long, so
    that a real continuation exists. Returns dictionaries with file, offset, text, token_ids and
    continuation (the next PROMPT_TOKENS true tokens' text).
    """
    candidates = []
    for document in documents:
        if not document.is_held_out:
            continue
        for offset in definitions(document):
            ids = tokenizer.encode(document.text[offset : offset + 8 * PROMPT_TOKENS]).ids
            if len(ids) >= 2 * PROMPT_TOKENS:
                candidates.append((document.path, offset, ids[: 2 * PROMPT_TOKENS]))
    if len(candidates) < count:
        raise ValueError(
            f"held_out_prompts: count: expected at most {len(candidates)} definitions, got {count}"
        )
    step = len(candidates) // count
    return [
        {
            "file": path,
            "offset": offset,
            "text": tokenizer.decode(ids[:PROMPT_TOKENS]),
            "token_ids": ids[:PROMPT_TOKENS],
            "continuation": tokenizer.decode(ids[PROMPT_TOKENS:]),
        }
        for path, offset, ids in candidates[::step][:count]
    ]


def prepare(
    out: Path,
    seed: int,
    root: Path | None = None,
    vocab_size: int = VOCAB_SIZE,
    num_prompts: int = NUM_PROMPTS,
) -> dict:
    """Writes tokenizer.json, train.npy, held_out.npy, corpus.json, prompts.json into ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    documents = load_documents(root)
    training, held_out = split(documents)
    tokenizer = train_tokenizer(training, vocab_size)
    tokenizer.save(str(out / "tokenizer.json"))
    sizes = {}
    for name, part in (("train", training), ("held_out", held_out)):
        ids = encode(part, tokenizer, seed if name == "train" else None)
        np.save(out / f"{name}.npy", ids)
        num_bytes = sum(len(d.text.encode()) for d in part)
        sizes[name] = {
            "files": len(part),
            "test_files": sum(d.is_test for d in part),
            "bytes": num_bytes,
            "tokens": len(ids),
            # The separators stand for no byte; their loss is counted all the same.
            "bytes_per_token": num_bytes / len(ids),
        }
    digest = hashlib.sha256(b"".join(d.text.encode() for d in documents)).hexdigest()
    summary = {
        "python": sys.version.split()[0],
        "sha256": digest,
        "vocab_size": tokenizer.get_vocab_size(),
        "held_out_per_mille": HELD_OUT_PER_MILLE,
        "held_out_files": [d.path for d in held_out],
        **sizes,
    }
    (out / "corpus.json").write_text(json.dumps(summary, indent=1) + "\n")
    prompts = held_out_prompts(held_out, tokenizer, num_prompts)
    (out / "prompts.json").write_text(json.dumps(prompts, indent=1) + "\n")
    return summary
