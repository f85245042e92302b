"""Where a model's files are: a folder, or the cache of what huggingface_hub fetches from the hub.

Config and tokenizer come first and the weights when they are asked for, so that a model that cannot
be served costs no gigabytes. Of weights only safetensors are fetched, or one GGUF file that is
named behind the id: "owner/name:file.gguf", or "owner/name:Q4_K_M" where one file's name ends so.
"""

from __future__ import annotations

import errno
import glob
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from checkpoints.errors import CheckpointError
from checkpoints.gguf import is_gguf
from checkpoints.json_file import read_object
from checkpoints.safetensors_reader import INDEX_FILE, SINGLE_FILE
from jaxserve.config.engine_config import EngineConfig
from jaxserve.errors import HubError, ValidationError
from jaxserve.loading.load_progress import Told, unheard

SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "quantize_config.json",
    "quant_config.json",
    INDEX_FILE,
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "preprocessor_config.json",
    "processor_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
)
BYTES_WRITTEN = "huggingface_hub.snapshot_download"  # the name of one of its bars
OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".safetensors")


@dataclass(frozen=True, slots=True)
class Hub:
    """A hub, as huggingface_hub sees it.

    Attributes:
        token: of an account; None takes HF_TOKEN, or what `hf auth login` has stored.
        cache_dir: where files are kept; None takes HF_HUB_CACHE or HF_HOME, or the user's cache.
        endpoint: address; None takes HF_ENDPOINT, or https://huggingface.co.
    """

    token: str | None = field(default=None, repr=False)
    cache_dir: str | None = None
    endpoint: str | None = None

    def fetch_small_files(self, repo: str, revision: str | None) -> Path:
        """Fetch config and tokenizer; returns the folder of this commit in the cache.

        Raises:
            HubError: they cannot be fetched.
        """
        with self._errors(repo, revision):
            folder = Path(self._download(repo, revision, SMALL_FILES))
        if not folder.is_dir() or not any(folder.glob("*.json")):
            raise HubError(f"{repo!r} on {self._address} has no config.json and no tokenizer.json")
        return folder

    def fetch_weights(self, repo: str, folder: Path, told: Told = unheard) -> None:
        """Fetch the safetensors of the commit in `folder`, several at once.

        `told` hears how many bytes are there, and of how many.

        Raises:
            HubError: they cannot be fetched, there are none, or the disk has no room for them.
        """
        if _has_weights(folder):
            return
        wanted, commit = _weight_files(folder), folder.name
        with self._errors(repo, commit):
            there = self._names(repo, commit)
        missing = [name for name in wanted if name not in there]
        if missing:
            others = [name for name in there if name.endswith(OTHER_WEIGHTS)]
            raise HubError(
                f"{repo!r} on {self._address} has no {', '.join(missing)}, and only safetensors "
                f"are read; its weights are {', '.join(others) or 'missing'}"
            )
        with self._errors(repo, commit):
            needed = self._needed(repo, commit, wanted)
            self._download(repo, commit, wanted, told=lambda done: told(done, needed))

    def fetch_gguf(self, repo: str, revision: str | None, file: str, told: Told = unheard) -> Path:
        """Fetch a GGUF file, which has config, tokenizer and weights.

        Args:
            repo: id of the model.
            revision: branch, tag or commit.
            file: its name, or a type that one file's name ends with.
            told: how many bytes are there, and of how many.

        Raises:
            HubError: it cannot be fetched, none or several are so named, or the disk has no room.
        """
        pattern = file if is_gguf(file) else f"*[-._]{file}.gguf"
        where = f"{repo!r} on {self._address}"
        needed = 0
        with self._errors(repo, revision):
            from huggingface_hub import is_offline_mode

            if not is_offline_mode():
                pattern = _one_gguf(pattern, self._names(repo, revision), where)
                needed = self._needed(repo, revision, [pattern])
            fetched = self._download(
                repo, revision, [pattern], told=lambda done: told(done, needed)
            )
            folder = Path(fetched)
        found = [path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf")]
        return folder / _one_gguf(pattern, found, f"{repo!r} in {self._cache}")

    def _download(
        self,
        repo: str,
        revision: str | None,
        names: Sequence[str],
        *,
        told: Callable[[int], Any] | None = None,
        dry_run: bool = False,
    ) -> Any:
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils import are_progress_bars_disabled, tqdm

        heard = None if are_progress_bars_disabled() else told

        class Bar(tqdm):
            """Shows nothing: the bytes that have been written are told on."""

            def __init__(self, *args: Any, **kwargs: Any):
                super().__init__(*args, **(kwargs | {"disable": True}))
                self._counts = kwargs.get("name") == BYTES_WRITTEN
                self._bytes = 0

            def update(self, n: float | None = 1) -> None:
                self._bytes += int(n or 0)
                if self._counts and heard is not None:
                    heard(self._bytes)

        patterns = [name if "*" in name else glob.escape(name) for name in names]
        return snapshot_download(
            repo,
            revision=revision,
            allow_patterns=patterns,
            cache_dir=self.cache_dir,
            token=self.token,
            endpoint=self.endpoint,
            library_name="jaxserve",
            tqdm_class=Bar,
            dry_run=dry_run,
        )

    def _names(self, repo: str, revision: str | None) -> list[str]:
        from huggingface_hub import HfApi

        api = HfApi(endpoint=self.endpoint, token=self.token, library_name="jaxserve")
        return api.list_repo_files(repo, revision=revision)

    def _needed(self, repo: str, revision: str | None, names: Sequence[str]) -> int:
        """Bytes of files that are not here; raises HubError where there is no room for them."""
        planned = self._download(repo, revision, names, dry_run=True)
        needed: int = sum(f.file_size or 0 for f in planned if not f.is_cached)
        folder = self._cache
        while not folder.exists():
            folder = folder.parent
        free = shutil.disk_usage(folder).free
        if needed > free:
            raise HubError(
                f"{self._cache} has no room for the weights of {repo!r}: they need {needed} bytes "
                f"and {free} are free; set download_dir, or remove models with `hf cache rm`"
            )
        return needed

    @property
    def _cache(self) -> Path:
        from huggingface_hub.constants import HF_HUB_CACHE

        return Path(self.cache_dir or HF_HUB_CACHE).expanduser().absolute()

    @property
    def _address(self) -> str:
        from huggingface_hub.constants import ENDPOINT

        return self.endpoint or ENDPOINT

    @contextmanager
    def _errors(self, repo: str, revision: str | None) -> Iterator[None]:
        """What huggingface_hub raises, as one line."""
        try:
            yield
        except HubError:
            raise
        # transport errors are those of the HTTP library that huggingface_hub has chosen
        except Exception as error:
            raise HubError(self._reason(error, repo, revision)) from error

    def _reason(self, error: Exception, repo: str, revision: str | None) -> str:
        from huggingface_hub import errors, get_token, is_offline_mode

        where = f"{repo!r} on {self._address}"
        token = self.token or get_token()
        if isinstance(error, errors.GatedRepoError):
            how = "the token is of an account without access" if token else "there is no token"
            return (
                f"{where} is gated and {how}: ask for access at {self._address}/{repo}, and give "
                "the account's token as hf_token or HF_TOKEN"
            )
        if isinstance(error, errors.RepositoryNotFoundError):
            seen = "that the token may read" if token else "that is public (there is no token)"
            return f"there is neither a folder {repo!r} here nor a model {where} {seen}"
        if isinstance(error, errors.RevisionNotFoundError):
            return f"{where} has no revision {revision!r}"
        if is_offline_mode():
            return (
                f"there is no folder {repo!r} here, and as a model of the hub its revision "
                f"{revision or 'main'!r} is not whole in {self._cache}: HF_HUB_OFFLINE is set, "
                "fetch it once without"
            )
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return (
                f"{self._cache} is full, {repo!r} is not whole: set download_dir, or remove models "
                "with `hf cache rm`; what is there will not be fetched again"
            )
        response = getattr(error, "response", None)
        if response is not None:
            return f"{where} cannot be fetched: it answers {response.status_code}"
        if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ is not None:
            error = Exception(str(error.__cause__))
        said = (str(error) or type(error).__name__).splitlines()[0]
        said = said.replace(token, "***") if token else said
        return f"{where} cannot be fetched, nor is it whole in {self._cache}: {said}"


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where the files of a configuration are.

    Attributes:
        model: folder with config.json and, once they are fetched, the weights; or a GGUF file.
        tokenizer: folder with tokenizer.json, or a GGUF file.
    """

    model: Path
    tokenizer: Path
    _hub: Hub
    _repo: str | None  # of the model; None: a folder that was given

    @property
    def weights_are_here(self) -> bool:
        """Whether `fetch_weights` has nothing to fetch."""
        return self._repo is None or _has_weights(self.model)

    def fetch_weights(self, told: Told = unheard) -> None:
        """See that the weights are in `model`; a folder that was given is left as it is.

        `told` hears how many bytes are there, and of how many.

        Raises:
            HubError: as `Hub.fetch_weights`.
        """
        if self._repo is not None:
            self._hub.fetch_weights(self._repo, self.model, told)


def locate(config: EngineConfig, hub: Hub | None = None, told: Told = unheard) -> ModelFiles:
    """Find the folders of model and tokenizer, and fetch their small files where they are ids.

    A GGUF file is fetched whole; `told` hears how many of its bytes are there, and of how many.

    Raises:
        ValidationError: a name that is neither a folder nor an id, or a revision of a folder.
        HubError: the hub does not give them.
    """
    hub = hub or Hub(config.hf_token, config.download_dir)
    model = _locate("model", config.model, config.revision, hub, told)
    repo = None if _is_here(config.model) or is_gguf(model) else config.model
    tokenizer, revision = config.tokenizer or config.model, config.tokenizer_revision
    if tokenizer == config.model and revision in (None, config.revision):
        return ModelFiles(model, model, hub, repo)
    return ModelFiles(model, _locate("tokenizer", tokenizer, revision, hub, told), hub, repo)


def _locate(setting: str, name: str, revision: str | None, hub: Hub, told: Told) -> Path:
    if not is_hub_id(setting, name):
        if revision is not None:
            which = "revision" if setting == "model" else f"{setting}_revision"
            raise ValidationError(which, revision, f"none, because {setting} is the folder {name}")
        return Path(name)
    repo, _, file = name.partition(":")
    if file:
        return hub.fetch_gguf(repo, revision, file, told)
    return hub.fetch_small_files(repo, revision)


def names_gguf(name: str) -> bool:
    """Whether the name of a model is that of a GGUF file, here or on the hub."""
    return is_gguf(name) or (not _is_here(name) and ":" in name)


def is_hub_id(setting: str, name: str) -> bool:
    """Whether a model or tokenizer is to be fetched; a folder or GGUF file that exists is taken.

    Raises:
        ValidationError: `name` is neither a folder nor `owner/name`, nor that with `:` and a GGUF
            file; names `setting`.
    """
    if _is_here(name):
        return False
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    allowed = (
        "a folder that is here, a GGUF file, or the id of a model on the hub: owner/name, or "
        "owner/name:file.gguf"
    )
    repo, colon, file = name.partition(":")
    if bool(colon) != bool(file) or (is_gguf(name) and not colon):
        raise ValidationError(setting, name, allowed)
    if "/" not in repo:  # the hub's few old names without an owner; here a folder mistyped
        raise ValidationError(setting, name, allowed)
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ValidationError(setting, name, allowed) from error
    return True


def _one_gguf(pattern: str, names: Sequence[str], where: str) -> str:
    """The one of a repository's files that a pattern names.

    Raises:
        HubError: none, several, or one part of a model in several files.
    """
    files = [name for name in names if is_gguf(name)]
    found = [name for name in files if fnmatchcase(name, pattern)]
    if len(found) != 1:
        how_many = "several files" if found else "no file"
        shown = ", ".join(found or files) or "none"
        raise HubError(f"{where} has {how_many} named {pattern}; its GGUF files are {shown}")
    if re.search(r"-of-\d{5}\.gguf$", found[0]):
        raise HubError(f"{where}: {found[0]} is a part of a model; only single GGUF files are read")
    return found[0]


def _is_here(name: str) -> bool:
    path = Path(name)
    return path.is_dir() or (is_gguf(path) and path.is_file())


def _has_weights(folder: Path) -> bool:
    return all((folder / name).is_file() for name in _weight_files(folder))


def _weight_files(folder: Path) -> list[str]:
    """Names of a checkpoint's files, by its index if it has one."""
    index = folder / INDEX_FILE
    if not index.is_file():
        return [SINGLE_FILE]
    try:
        names = set((read_object(index) or {})["weight_map"].values())
        return sorted(names)
    except CheckpointError as error:
        raise HubError(str(error)) from error
    except (KeyError, TypeError, AttributeError) as error:
        raise HubError(f"{index} is not a safetensors index ({error!r})") from error
