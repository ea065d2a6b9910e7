"""Text for language models, which each node tokenises once and caches."""

from collections.abc import Sequence

from torch import Tensor

from runtime.sources.documents import read_texts
from runtime.sources.errors import check_length, find_files
from runtime.sources.packed import PackedTokens
from runtime.sources.tokenised import TokenisedDataset
from runtime.sources.tokenizer import load_tokenizer
from runtime.sources.tokenizing import join_documents, separate_documents


class TextDataset(TokenisedDataset):
    """Documents of JSON lines, Parquet, Arrow or plain text files as samples ``{"input_ids", "labels"}``.

    With packing, the documents are joined, each followed by the end-of-text token, and cut into samples of
    exactly ``length`` tokens; the remainder at the end is not used. Without packing, each document is a
    sample of its own with the tokenizer's special tokens, of at most ``length`` tokens; make batches of
    them with ``pad_collate``.

    The first trainer on a node tokenises all text and caches the tokens. The other trainers, and later jobs
    with the same files and tokenizer, map them into memory. To prepare a large corpus before a job, use
    ``ftd data tokenize`` and ``TokenFile``.
    """

    def __init__(
        self,
        files: str | Sequence[str],
        tokenizer: str,
        *,
        length: int,
        field: str = "text",
        packing: bool = True,
        end_of_text: bool | str = True,
        cache_directory: str | None = None,
    ) -> None:
        """Tokenise the files, or find their tokens in the cache.

        :param files: a path, a pattern or a list of them; a pattern's files are taken in the order of
            names.
        :param tokenizer: a tokenizer.json, or a directory with one as ``save_pretrained`` writes it.
        :param length: tokens of a sample: exactly with packing, at most without.
        :param field: field with the text, in files with records.
        :param end_of_text: whether a token ends each document; or that token, if it is not the tokenizer's
            own.
        :param cache_directory: directory of the cache; None is ``$XDG_CACHE_HOME/ftd`` or ``~/.cache/ftd``.
        :raises DataError: a file, a record or the tokenizer cannot be used.
        """
        check_length(length)
        paths = find_files(files, "text file")
        loaded = load_tokenizer(tokenizer)
        ending = loaded.end_of_text(end_of_text)
        super().__init__(
            loaded,
            paths,
            facts={"field": field, "end_of_text": ending, "length": None if packing else length},
            documents=lambda: read_texts(paths, field),
            encode=join_documents(loaded, ending) if packing else separate_documents(loaded, ending, length),
            cache_directory=cache_directory,
        )
        self._packed = PackedTokens([self._stream], length=length) if packing else None

    def __len__(self) -> int:
        return super().__len__() if self._packed is None else len(self._packed)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return super().__getitem__(index) if self._packed is None else self._packed[index]
