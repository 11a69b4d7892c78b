"""Imports a model in Hugging Face's format: its tensors are copied into one file per block.

Tensors are copied in pieces, so a model of any size can be imported. A journal lists the complete
blocks, so that a killed import continues.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path

from blocktrain.config import Config, DataConfig, ObjectiveConfig, Vocabulary
from blocktrain.config.settings import TURNS
from blocktrain.errors import RunError
from blocktrain.files import StoredFile, write_bytes
from blocktrain.interop.architecture import (
    EMBEDDING,
    HEAD,
    WeightMap,
    block_weights,
    from_hugging_face,
)
from blocktrain.interop.checkpoint import (
    Checkpoint,
    OnCopied,
    TensorOut,
    TensorRange,
    check_space,
    write_tensors,
)
from blocktrain.storage.run_dir import RunDir

JOURNAL = "import.json"
GENERATION_CONFIG = "generation_config.json"
UNUSED = ".rotary_emb.inv_freq"  # in old checkpoints; follows from the settings
MOST_NAMED = 3


class Import:
    """A checkpoint, and the settings and files of the run to write."""

    def __init__(self, checkpoint: Checkpoint, blocks: int, window: int | None = None) -> None:
        self.checkpoint = checkpoint
        architecture = from_hugging_face(checkpoint.config, blocks, window)
        self.tokenizer = checkpoint.tokenizer(architecture.vocab_size)
        self.config = Config(
            model=architecture.model,
            objective=ObjectiveConfig(kind=TURNS.name),
            data=DataConfig(tokenizer=checkpoint.tokenizer_name),
            vocab=self._vocabulary(),
        )
        self._weights = [block_weights(self.config, index) for index in range(blocks)]
        self._blocks = [[self._tensor(weight) for weight in block] for block in self._weights]
        self._refuse_unknown()

    @property
    def size(self) -> int:
        """The size of all tensors in bytes."""
        return sum(tensor.size for block in self._blocks for tensor in block)

    def write(self, out: Path, on_copied: OnCopied = lambda count: None) -> RunDir:
        """Write the run. Blocks that an earlier call completed are not copied again."""
        if (out / "config.toml").exists() or not out.exists():
            check_space(out, self.size - sum(entry.size for entry in self._journal(out)))
        elif any(out.iterdir()):
            raise RunError(f"{out} is not empty; use another --out")
        with RunDir(out, self.config).lock():
            run = RunDir.create_exported(out, self.config)
            run.store_tokenizer(self.tokenizer.files)
            stored = self._journal(out)
            for entry in stored:
                on_copied(entry.size)
            for index in range(len(stored), len(self._blocks)):
                path = out / f"block-{index}.safetensors"
                stored.append(write_tensors(path, self._blocks[index], on_copied))
                journal = {"of": self._fingerprint, "blocks": [asdict(entry) for entry in stored]}
                write_bytes(out / JOURNAL, json.dumps(journal).encode())
            names = ("source", "revision", "config")
            run.commit_imported(stored, {name: getattr(self.checkpoint, name) for name in names})
            (out / JOURNAL).unlink(missing_ok=True)
            written = {entry.name for entry in stored}
            for path in out.glob("block-*"):
                if path.name not in written:  # left by a killed import into this folder
                    path.unlink()
        return run

    def _vocabulary(self) -> Vocabulary:
        """The tokenizer's vocabulary, with the ids in the model's configuration."""
        vocabulary = self.tokenizer.vocabulary
        generation = self.checkpoint.json(GENERATION_CONFIG)
        ends = [*_ids(generation, "eos_token_id"), *_ids(self.checkpoint.config, "eos_token_id")]
        bos = self.tokenizer.bos
        starts = [*_ids(generation, "bos_token_id"), *_ids(self.checkpoint.config, "bos_token_id")]
        return replace(
            vocabulary,
            bos=bos if bos is not None else next(iter(starts), vocabulary.bos),
            starts_with_bos=self.tokenizer.adds_bos,
            eos=tuple(dict.fromkeys([*ends, *vocabulary.eos])),
        )

    def _tensor(self, weight: WeightMap) -> TensorOut:
        parts = [self._part(part.name) for part in weight.parts]
        for part, tensor in zip(weight.parts, parts, strict=True):
            shape = (part.rows,) if weight.width is None else (part.rows, weight.width)
            if tensor.shape != shape:
                raise RunError(
                    f"{tensor.path}: {part.name} has shape {list(tensor.shape)}, but config.json"
                    f" describes {list(shape)}; copy or download both again"
                )
        if len({part.dtype for part in parts}) > 1:
            names = ", ".join(part.name for part in weight.parts)
            raise RunError(
                f"{parts[0].path}: {names} have different types, but a run stores them as one"
                " tensor; convert them to one type"
            )
        return TensorOut(weight.name, parts[0].dtype, weight.shape, tuple(parts))

    def _part(self, name: str) -> TensorRange:
        try:
            return self.checkpoint.tensors[name]
        except KeyError:
            hint = "set tie_word_embeddings to true if the embedding is the head"
            remedy = hint if name == HEAD else "copy or download the model again"
            raise RunError(f"{self.checkpoint.folder} lacks the tensor {name}; {remedy}") from None

    def _refuse_unknown(self) -> None:
        """Raise RunError if a tensor is unused, since the model would compute something else."""
        tensors = self.checkpoint.tensors
        used = {part.name for block in self._weights for weight in block for part in weight.parts}
        unused = [name for name in tensors if name not in used and not name.endswith(UNUSED)]
        if HEAD in unused and _digest(tensors[HEAD]) == _digest(tensors[EMBEDDING]):
            unused.remove(HEAD)  # a copy of the embedding, which is the head
        if unused:
            more = f" and {len(unused) - MOST_NAMED} more" if len(unused) > MOST_NAMED else ""
            raise RunError(
                f"{self.checkpoint.folder} has tensors that config.json does not describe:"
                f" {', '.join(unused[:MOST_NAMED])}{more}; use another model"
            )

    def _journal(self, out: Path) -> list[StoredFile]:
        """The blocks of this import that a folder already contains."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            journal = json.loads((out / JOURNAL).read_bytes())
            entries = [StoredFile(**entry) for entry in journal["blocks"]]
            sizes = [(out / entry.name).stat().st_size for entry in entries]
            if journal["of"] == self._fingerprint and sizes == [entry.size for entry in entries]:
                return entries
        return []

    @cached_property
    def _fingerprint(self) -> str:
        """A hash of the settings and of the files' names, sizes and times."""
        files = sorted({tensor.path for tensor in self.checkpoint.tensors.values()})
        facts = [f"{f.absolute()} {f.stat().st_size} {f.stat().st_mtime_ns}" for f in files]
        return hashlib.sha256("\n".join([self.config.to_toml(), *facts]).encode()).hexdigest()


def _ids(config: object, key: str) -> Iterator[int]:
    """The ids under a key: one, several or none."""
    value = config.get(key) if isinstance(config, dict) else None
    yield from value if isinstance(value, list) else [] if value is None else [value]


def _digest(tensor: TensorRange) -> str:
    digest = hashlib.sha256()
    for piece in tensor.pieces():
        digest.update(piece)
    return digest.hexdigest()
