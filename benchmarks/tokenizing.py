"""Text tokenized beside the feed: documents/s and tokens/s of Map over a Hugging Face dataset, and of the library.

Documents are pieces of the standard library's source text, and the tokenizer is a byte-level BPE of 8,192 tokens trained on
them. A unit is a tokenized document. "meshfeed, threads" and "workers" are a feed of padded documents on one CPU device;
"encode_batch" is the tokenizer alone, with its own threads off, and ``datasets.map`` tokenizes in batches without a cache.
"""

from __future__ import annotations

import argparse
import itertools
import os
import pathlib
import sysconfig
from typing import Any

import numpy as np

from benchmarks._measure import Table, Way, main, rates, take_turns

os.environ["TOKENIZERS_PARALLELISM"] = "false"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--documents", type=int, default=8_000)
    parser.add_argument("--characters", type=int, default=2_000, help="of a document")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each way in each round")


def texts(options: argparse.Namespace) -> list[str]:
    found: list[str] = []
    for path in sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py")):
        content = path.read_text(errors="replace")
        found += [content[i : i + options.characters] for i in range(0, len(content), options.characters)]
    return list(itertools.islice(itertools.cycle(found), options.documents))


def trained(documents: list[str]) -> Any:
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=8192, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(documents[:2000], trainer)
    return tokenizer


class Tokenize:
    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __call__(self, record: dict[str, Any]) -> dict[str, np.ndarray]:
        return {"tokens": np.array(self.tokenizer.encode(record["text"]).ids, np.int32)}


def feed_way(dataset: Any, tokenizer: Any, options: argparse.Namespace, **settings: Any) -> Way:
    import jax

    import meshfeed

    source = meshfeed.sources.Padded(meshfeed.sources.Map(dataset, Tokenize(tokenizer)), options.characters)
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    feed = meshfeed.Feed(
        source, mesh, global_batch_size=options.batch, shuffle=True, num_epochs=None, prefetch=1, **settings
    )

    def run() -> int:
        next(feed)
        return options.batch

    return Way(run, drain=8 * options.batch, close=feed.close)  # what threads and workers have ready


def measure(options: argparse.Namespace) -> list[Table]:
    import datasets

    datasets.disable_progress_bars()
    documents = texts(options)
    tokenizer, dataset = trained(documents), datasets.Dataset.from_dict({"text": documents})
    batches = itertools.cycle(range(0, len(documents) - options.batch, options.batch))
    per_document = np.mean([len(found.ids) for found in tokenizer.encode_batch(documents[:500])])

    def bare() -> int:
        first = next(batches)
        tokenizer.encode_batch(documents[first : first + options.batch])
        return options.batch

    def library() -> int:
        first = next(batches)
        part = dataset.select(range(first, first + options.batch))
        part.map(
            lambda rows: {"tokens": [found.ids for found in tokenizer.encode_batch(rows["text"])]},
            batched=True,
            remove_columns=["text"],
            load_from_cache_file=False,
            keep_in_memory=True,
        )
        return options.batch

    ways = {
        "meshfeed, 1 thread": feed_way(dataset, tokenizer, options),
        "meshfeed, 2 threads": feed_way(dataset, tokenizer, options, num_threads=2),
        "meshfeed, 2 workers": feed_way(dataset, tokenizer, options, num_workers=2),
        "encode_batch": Way(bare),
        "datasets.map": Way(library),
    }
    found = take_turns(ways, rounds=options.rounds, seconds=options.seconds)
    title = f"documents of {options.characters:,} characters, {per_document:.0f} tokens on average"
    table = rates(title, "documents", found, ours="meshfeed, 1 thread")
    for row in table.rows:
        row["tokens/s"] = row["documents/s"] * per_document
    return [table]


if __name__ == "__main__":
    main(__doc__, measure, add_arguments)
