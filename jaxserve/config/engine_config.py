"""Engine configuration as it is asked for: every knob in one frozen dataclass."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from functools import partial
from os import PathLike
from typing import Any, ClassVar

from jaxserve.config import deterministic, several_processes, stages
from jaxserve.config.named_object import OBJECT_NAME
from jaxserve.config.settings import (
    Integer,
    Integers,
    Number,
    OneOf,
    PowerOfTwo,
    Switch,
    Text,
    check,
    defaults_of,
    setting,
    settings_of,
)
from jaxserve.errors import ValidationError
from jaxserve.liveness.silence import AUTO

DTYPES = ("auto", "float32", "float16", "bfloat16", "float", "half")
ONLINE_QUANTIZATIONS = ("int8", "int4", "fp8")  # that weights can be rounded to
CHECKPOINT_QUANTIZATIONS = ("awq", "gptq", "compressed-tensors", "fp8", "gguf")
QUANTIZATIONS = tuple(dict.fromkeys((*ONLINE_QUANTIZATIONS, *CHECKPOINT_QUANTIZATIONS)))
PRESETS = ("chat", "bulk", "balanced")
KV_CACHE_DTYPES = ("auto", "int8", "fp8_e4m3", "fp8")
LOAD_FORMATS = ("auto", "safetensors", "orbax", "dummy")
SCHEDULING_POLICIES = ("fcfs", "priority", "length")
MAX_IMAGES = 8  # of a prompt
WITHOUT_PRIORITIES = ("fcfs", "length")
MOST_ENGINES = 256
MOST_PROCESSES = 1024

# settings that are paths, or may be
PATHS = (
    "model",
    "tokenizer",
    "download_dir",
    "kv_cache_scales",
    "kv_offloading_path",
    "generation_config",
    "chat_template",
    "allowed_local_media_path",
    "process_token_file",
)
# no other policy's
_OF_LENGTH = ("length_classes", "output_classes", "length_shares", "max_overtaken_tokens")
_HOST = re.compile(r"[\w.-]+|[0-9a-fA-F:.]+")
_TOKEN = re.compile(r"[!-~]+")  # others would be shown by the error of an HTTP library

# the parts that read settings
MODEL, CACHE, SCHEDULER, PROGRAMS, SERVER = "model", "cache", "scheduler", "programs", "server"
model_setting = partial(setting, reader=MODEL)
cache_setting = partial(setting, reader=CACHE)
scheduler_setting = partial(setting, reader=SCHEDULER)
program_setting = partial(setting, reader=PROGRAMS)
server_setting = partial(setting, reader=SERVER)


class Token:
    """A secret of ASCII characters; errors never show it."""

    metavar = "TOKEN"
    allowed = "a token: ASCII characters without spaces"

    def checked(self, name: str, value: Any) -> str:
        if not isinstance(value, str) or not _TOKEN.fullmatch(value):
            raise ValidationError(name, "***", self.allowed)
        return value


@dataclass(frozen=True, slots=True)
class Overrides:
    """Keys of something, as a JSON file, with their values."""

    metavar: ClassVar[str] = "JSON"
    file: str = "config.json's keys"

    @property
    def allowed(self) -> str:
        return f"a dictionary of {self.file}"

    def checked(self, name: str, value: Any) -> Mapping[str, Any]:
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise ValidationError(name, value, self.allowed)
        return value


class PolicyName:
    """One of `SCHEDULING_POLICIES`, or a class of the operator's own."""

    metavar = "NAME"
    allowed = f"one of {', '.join(SCHEDULING_POLICIES)}, or module:Class"

    def checked(self, name: str, value: Any) -> str:
        is_class = isinstance(value, str) and OBJECT_NAME.fullmatch(value)
        if not is_class and value not in SCHEDULING_POLICIES:
            raise ValidationError(name, value, self.allowed)
        return str(value)


class Classes:
    """Classes of the operator's own, or their names; kept as a tuple."""

    metavar = "MODULE:CLASS"
    allowed = "a list of classes, or of their names as module:Class"

    def checked(self, name: str, value: Any) -> tuple[str | type, ...]:
        given = [value] if isinstance(value, str | type) else value
        if not isinstance(given, list | tuple):
            raise ValidationError(name, value, self.allowed)
        for one in given:
            is_name = isinstance(one, str) and OBJECT_NAME.fullmatch(one)
            if not is_name and not isinstance(one, type):
                raise ValidationError(name, one, self.allowed)
        return tuple(given)


class Callables:
    """Functions or classes of the operator's own, or their names; kept as a tuple."""

    metavar = "MODULE:NAME"
    allowed = "a list of functions or classes, or of their names as module:name"

    def checked(self, name: str, value: Any) -> tuple[Any, ...]:
        given = [value] if isinstance(value, str) or callable(value) else value or ()
        if not isinstance(given, list | tuple):
            raise ValidationError(name, value, self.allowed)
        for one in given:
            is_name = isinstance(one, str) and OBJECT_NAME.fullmatch(one)
            if not is_name and (isinstance(one, str) or not callable(one)):
                raise ValidationError(name, one, self.allowed)
        return tuple(given)


class Names:
    """One name or several, kept as a tuple."""

    metavar = "NAME"
    allowed = "a name, or a list of names"

    def checked(self, name: str, value: Any) -> tuple[str, ...]:
        names = (value,) if isinstance(value, str) else value
        if not isinstance(names, list | tuple) or not all(isinstance(n, str) for n in names):
            raise ValidationError(name, value, self.allowed)
        return tuple(names)


class Domains:
    """Names of hosts, in small letters; kept as a tuple."""

    metavar = "DOMAIN"
    allowed = "names of hosts, without scheme, port or path"

    def checked(self, name: str, value: Any) -> tuple[str, ...]:
        given = (value,) if isinstance(value, str) else value
        if not isinstance(given, list | tuple):
            raise ValidationError(name, value, self.allowed)
        for one in given:
            if not isinstance(one, str) or not _HOST.fullmatch(one):
                raise ValidationError(name, one, self.allowed)
        return tuple(one.lower().rstrip(".") for one in given)


class ImageLimit:
    """vLLM's limits by kind of data, of which there are images alone; kept as their number."""

    metavar = "JSON"
    allowed = 'an integer >= 0, or an object of it such as {"image": 4}'

    def checked(self, name: str, value: Any) -> int:
        found = value
        if isinstance(value, Mapping):
            kinds = {key: Integer(0).checked(name, one) for key, one in value.items()}
            if any(one for key, one in kinds.items() if key != "image"):
                raise ValidationError(name, value, f"{self.allowed}: other data is not read")
            found = kinds.get("image", MAX_IMAGES)
        if isinstance(found, bool) or not isinstance(found, int) or found < 0:
            raise ValidationError(name, value, self.allowed)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What the engine is told by its user; None means: choose from the model and the device.

    What was chosen is a `ResolvedConfig`.

    Raises:
        ValidationError: a value has the wrong type, is out of its range or contradicts another.
    """

    model: str = model_setting(
        MISSING,
        Text(),
        "Folder with a Hugging Face config.json, safetensors and tokenizer files, a GGUF file, or "
        "the id of a model on the hub, with :file.gguf or :Q4_K_M behind it for one of its GGUF "
        "files; a folder that exists is always taken.",
        flag=False,
    )
    revision: str | None = model_setting(
        None, Text("NAME"), "Branch, tag or commit of a model on the hub; none: its main branch."
    )
    tokenizer: str | None = model_setting(
        None, Text("MODEL"), "Folder or id of the tokenizer; none: the model's."
    )
    tokenizer_revision: str | None = model_setting(
        None,
        Text("NAME"),
        "Branch, tag or commit of a tokenizer on the hub; none: revision, where the tokenizer is "
        "the model's.",
    )
    hf_token: str | None = model_setting(
        None,
        Token(),
        "Token of the hub's account that may read the model; none: HF_TOKEN, or what `hf auth "
        "login` has stored. Never logged, and not kept once the engine is loaded. Others on this "
        "machine can see a flag in the list of processes, so rather set HF_TOKEN.",
        secret=True,
    )
    download_dir: str | None = model_setting(
        None, Text("FOLDER"), "Keeps files of the hub; none: the user's Hugging Face cache."
    )
    hf_overrides: Mapping[str, Any] | None = model_setting(
        None,
        Overrides(),
        "Values that take the place of those in the model's config.json, as one JSON object. Its "
        "architectures may be module:NAME of a family of your own ([models.md](models.md)).",
    )
    generation_config: str = model_setting(
        "auto",
        Text("FOLDER"),
        "Where defaults of sampling parameters come from: auto takes the model's "
        "generation_config.json, vllm none, anything else is a folder with such a file. Its "
        "max_new_tokens bounds every request of a server.",
    )
    override_generation_config: Mapping[str, Any] | None = model_setting(
        None,
        Overrides("generation_config.json's keys"),
        "Defaults in place of those of generation_config, as one JSON object.",
    )
    chat_template: str | None = model_setting(
        None,
        Text("FILE"),
        "Jinja template of conversations, a file or the text itself; none: the tokenizer's.",
    )
    skip_tokenizer_init: bool = model_setting(
        False,
        Switch(),
        "Load no tokenizer: prompts must be token ids and outputs have no text.",
        flag=False,  # the commands make text
    )
    dtype: str = model_setting(
        "auto", OneOf(DTYPES), "Type of weights and activations; auto takes the checkpoint's."
    )
    load_format: str = model_setting(
        "auto",
        OneOf(LOAD_FORMATS),
        "auto reads what the folder holds, safetensors or a store of jaxserve convert; safetensors "
        "and orbax read that alone, dummy makes random weights.",
    )
    quantization: str | None = model_setting(
        None,
        OneOf(QUANTIZATIONS),
        "Of the linear layers' weights: int8, int4 and fp8 round them when they are loaded; awq, "
        "gptq, compressed-tensors, fp8 and gguf name what the checkpoint is, which it says itself "
        "where this is none.",
    )
    seed: int = model_setting(
        0, Integer(-(2**63), 2**63 - 1), "Seed of dummy weights and of requests that bring none."
    )
    max_model_len: int | None = model_setting(
        None,
        Integer(1),
        "Longest prompt plus output, in tokens; none: the model's own limit, or what the KV cache "
        "holds.",
    )
    attention_window: int | None = model_setting(
        None,
        Integer(1),
        "Newest tokens that each layer attends to, whatever the model's own windows are where "
        "these are larger; none: the model's own.",
    )
    cpu_offload_gb: float | None = model_setting(
        None,
        Number(0.0, unit="GiB", metavar="GIB"),
        "Of the weights so many GiB need no memory of the device. On a GPU or TPU those of the "
        "last layers lie in the host's memory, and a step brings them one by one. On a CPU they "
        "are mapped from the files of a store (`jaxserve convert`), and read again where memory is "
        "short. None, 0: weights are in the device's memory ([tiers.md](tiers.md#weights)).",
    )
    tensor_parallel_size: int = model_setting(
        1, Integer(1), "Devices that each layer is sharded over."
    )
    pipeline_parallel_size: int = model_setting(
        1,
        Integer(1),
        "Stages that the layers are divided among, each with tensor_parallel_size devices of its "
        "own; as many steps of different requests are in flight "
        "([scaling.md](scaling.md#stages-of-layers)).",
    )
    data_parallel_size: int = model_setting(
        1,
        Integer(1, MOST_ENGINES),
        "Engines of the model behind one server, each in a process of its own with its own share "
        "of the cores and of free memory, or with its own GPUs (docs/isolation.md).",
    )
    num_processes: int = model_setting(
        1,
        Integer(1, MOST_PROCESSES),
        "Processes that have the devices of the one engine, on as many hosts; each has "
        "tensor_parallel_size / num_processes of them. `serve` takes what a launcher says where it "
        "is not given ([scaling.md](scaling.md#launchers)).",
    )
    process_id: int = model_setting(
        0,
        Integer(0, MOST_PROCESSES - 1),
        "Which of num_processes this one is: 0 has scheduler and HTTP, the others its commands.",
    )
    coordinator: str | None = model_setting(
        None,
        Text("HOST:PORT"),
        "Where the others of num_processes find process 0: an address of its host, and a port that "
        "is free there.",
    )
    process_token_file: str | None = model_setting(
        None,
        Text("FILE"),
        "File with the secret that all of num_processes share: a process without it is turned "
        "away. It is needed where coordinator is not the machine itself.",
    )
    block_size: int | None = cache_setting(None, PowerOfTwo(), "Tokens a KV page; none: by device.")
    num_pages: int | None = cache_setting(
        None, Integer(2), "KV pages, trash page included; none: what memory holds."
    )
    gpu_memory_utilization: float = cache_setting(
        0.9,
        Number(above=0.0, most=1.0, metavar="SHARE"),
        "Share of device memory for weights, temporaries and KV pages.",
    )
    memory_reserve: float = cache_setting(
        0.2,
        Number(0.0, 0.99, metavar="SHARE"),
        "Share of the host's memory, or of what its cgroup allows, that is left alone by weights "
        "and KV pages where they are kept there (a CPU).",
    )
    memory_bytes: int | None = cache_setting(
        None,
        Integer(1),
        "Most bytes of the host's memory that the engine of a CPU plans with. A server of several "
        "models sets it.",
        flag=False,
    )
    kv_cache_memory_bytes: int | None = cache_setting(
        None, Integer(1), "Size of the KV cache; takes the place of gpu_memory_utilization."
    )
    kv_cache_dtype: str = cache_setting(
        "auto",
        OneOf(KV_CACHE_DTYPES),
        "How keys and values are stored: auto as dtype, int8 with a scale a token and head, "
        "fp8_e4m3 (fp8 for short) with a scale a layer, see kv_cache_scales.",
    )
    kv_cache_scales: str | None = cache_setting(
        None,
        Text("FILE"),
        "Safetensors file with the scales of an fp8 KV cache, as `jaxserve calibrate-kv` writes "
        "it; none: the checkpoint's.",
    )
    enable_prefix_caching: bool = cache_setting(
        True,
        Switch(),
        "Keep what full KV pages hold after their requests have ended, until the pages are needed, "
        "so that prompts with the same beginning compute the rest alone.",
    )
    kv_offloading_size: float | None = cache_setting(
        None,
        Number(0.0, unit="GiB", metavar="GIB"),
        "Host memory for KV pages that the device has no room for: they come back where that takes "
        "less time than to compute them; swap_space is another name for it. None, 0: no page "
        "leaves ([tiers.md](tiers.md)).",
    )
    kv_offloading_path: str | None = cache_setting(
        None,
        Text("FOLDER"),
        "Folder that keeps copies of the pages of kv_offloading_size as files, for this engine and "
        "for later starts with the same model; none: no page is written to a disk.",
    )
    kv_offloading_path_size: float = cache_setting(
        16.0,
        Number(above=0.0, unit="GiB", metavar="GIB"),
        "Most that these files take; the least recently used are removed first.",
    )
    kv_offloading_preload: bool = cache_setting(
        False,
        Switch(),
        "Fill the host memory of kv_offloading_size with the newest files of kv_offloading_path "
        "before the engine is ready.",
    )
    keep_window_only: bool = cache_setting(
        True,
        Switch(),
        "Give the KV pages of layers with a sliding window back when the window has passed them.",
    )
    max_num_seqs: int | None = scheduler_setting(
        None, Integer(1), "Slots: the most requests that run at once; none: by device and preset."
    )
    max_num_batched_tokens: int | None = scheduler_setting(
        None, Integer(1), "Token budget of one step; none: by device and preset."
    )
    prefill_chunk: int | None = scheduler_setting(
        None, Integer(1), "Most prompt tokens of one step; none: the whole budget."
    )
    preset: str = scheduler_setting(
        "balanced",
        OneOf(PRESETS),
        "What sizes that are left open are chosen for: chat puts latency first, bulk throughput, "
        "balanced neither.",
    )
    overlap: bool = scheduler_setting(
        True,
        Switch(),
        "Prepare the next step while the device runs; the tokens are the same without.",
    )
    scheduling_policy: str = scheduler_setting(
        "fcfs",
        PolicyName(),
        "Whose turn it is: fcfs by arrival, priority by the requests' numbers (smallest first), "
        "length short prompts before long ones, module:Class as a class of yours says, which is "
        "imported.",
    )
    length_classes: tuple[int, ...] = scheduler_setting(
        (128, 512),
        Integers(2, 1),
        "Of the policy length: prompt tokens left to compute from which a request is of the second "
        "and of the third class.",
    )
    output_classes: tuple[int, ...] = scheduler_setting(
        (4096, 32768),
        Integers(2, 1),
        "Of the policy length: n times max_tokens from which a request is at least of the second "
        "and of the third class; a max_tokens that is not said counts as 1.",
    )
    length_shares: tuple[int, ...] = scheduler_setting(
        (6, 3, 1),
        Integers(3, 1),
        "Of the policy length: the classes' shares of the prompt tokens that are computed.",
    )
    max_overtaken_tokens: int = scheduler_setting(
        32768,
        Integer(0),
        "Of the policy length: most tokens that later arrivals may be given before a request is "
        "next.",
    )
    enable_embeddings: bool = program_setting(
        False, Switch(), "Serve embeddings; prompts that are embedded run on the largest program."
    )
    enable_prompt_embeds: bool = program_setting(
        False,
        Switch(),
        "Take prompts as embeddings, which no endpoint does yet, or with some between token ids; "
        "they run on the largest program, and a step sends the device a float32 row of the hidden "
        "size for each.",
    )
    limit_mm_per_prompt: int | None = program_setting(
        None,
        ImageLimit(),
        "Most images of a prompt, as an object with the key image, for a model that reads them; "
        "0: it reads text, and its encoder is not loaded; none: 8, or 0 where only the text of a "
        "Gemma 3 can be served ([images.md](images.md)).",
    )
    max_encoder_patches: int = program_setting(
        2304,
        Integer(1),
        "Patches of images that one launch of the encoder takes at most, or those of one image. "
        "Text waits for one launch at most.",
    )
    mm_processor_kwargs: Mapping[str, Any] | None = program_setting(
        None,
        Overrides("arguments of an image processor"),
        "Arguments of the model's image processor, as one JSON object, in the place of those in "
        "its folder, such as max_pixels ([images.md](images.md)).",
    )
    encoder_cache_bytes: int = cache_setting(
        256 << 20,
        Integer(0),
        "Bytes of the host's memory that keep what the encoder has made of images: one that comes "
        "again is not encoded again.",
    )
    features: tuple[str | type, ...] = program_setting(
        (),
        Classes(),
        "Features of your own beside those that come along, as module:Class (in Python as classes, "
        "too), which are imported; see [research.md](research.md).",
    )
    feature_config: Mapping[str, Any] | None = program_setting(
        None, Overrides("the names of your features"), "Options of your features, by their names."
    )
    logits_processors: tuple[Any, ...] = program_setting(
        (),
        Callables(),
        "What changes the logits of all requests before a token is drawn, as module:name (in "
        "Python as functions and classes, too), which is imported; see "
        "[processors.md](processors.md).",
    )
    max_logprobs: int = program_setting(
        20,
        Integer(-1),
        "Most logprobs a request may ask for; -1 lifts the limit to the vocabulary.",
    )
    decode_backend: str | None = program_setting(
        None,
        Text("NAME"),
        "Attention kernel of decode rows: a name, or module:NAME of a backend of your own, that is "
        "imported ([research.md](research.md)); none: by device.",
    )
    prefill_backend: str | None = program_setting(
        None, Text("NAME"), "Attention kernel of prompt chunks, likewise; none: by device."
    )
    linear_backend: str | None = program_setting(
        None, Text("NAME"), "Kernel of linear layers; none: by device."
    )
    row_invariant: bool = program_setting(
        False,
        Switch(),
        "Sum every row of a linear layer in one order, however many rows a step has, so that a "
        "request's numbers do not depend on the requests beside it; linear_backend native alone.",
    )
    deterministic: bool = program_setting(
        False,
        Switch(),
        "Give each request the same tokens, logprobs and vectors bit for bit whatever is served "
        "beside it, however its prompt is cut, and after a preemption or restart; a request that "
        "brings no seed gets one that follows from the engine's and its prompt. On GPUs and "
        "TPUs, where it has not been run, one program serves every step, see "
        "[determinism.md](determinism.md).",
    )
    graph_collectives: bool = program_setting(
        False,
        Switch(),
        "Record the sums over several GPUs in the CUDA graphs of the steps; nothing where "
        "tensor_parallel_size is 1, or the devices are no GPUs. No machine has run it yet.",
    )
    compile_ahead: int | None = program_setting(
        None,
        Integer(1),
        "Programs that are compiled before the engine is ready; none: by device, all on a GPU, "
        "which drops its recorded CUDA graphs when it compiles.",
    )
    compile_in_background: bool | None = program_setting(
        None,
        Switch(),
        "Compile the remaining programs while larger ones serve; none: unless the device is a GPU.",
    )
    compilation_cache: str = program_setting(
        "auto",
        Text("FOLDER"),
        "Keeps compiled programs for the next start: auto (the user's cache folder), off, or a "
        "folder.",
    )
    served_model_name: tuple[str, ...] = server_setting(
        (),
        Names(),
        "Names that requests may use, the first one is answered with; empty: the model's.",
        flag=False,  # serve alone has one
    )
    allowed_media_domains: tuple[str, ...] = server_setting(
        (),
        Domains(),
        "Hosts that images may be fetched from by their http and https addresses; empty: images "
        "come as data: URLs alone ([images.md](images.md)).",
    )
    allowed_local_media_path: str | None = server_setting(
        None,
        Text("FOLDER"),
        "Folder that file: URLs of images may lie in; none: such URLs are refused.",
    )
    max_num_queued_reqs: int | None = server_setting(
        None,
        Integer(1),
        "Most requests that may wait; more are refused, but for clients that have less than their "
        "share of them. The default of serve is 2048.",
    )
    max_num_queued_tokens: int | None = server_setting(
        None,
        Integer(1),
        "Most prompt tokens that may wait; a request beyond is refused, unless none waits or its "
        "client has less than its share of them. The default of serve is 1M.",
    )
    max_media_bytes: int | None = server_setting(
        None,
        Integer(1),
        "Most bytes of images and embeddings that requests may hold until they end, with what the "
        "engine makes of them; a request beyond is refused, unless none holds any or its client "
        "has less than its share of them. The default of serve is 4 GiB.",
    )
    max_queue_wait: float | None = server_setting(
        None,
        Number(above=0.0, unit="seconds", metavar="SECONDS"),
        "Longest wait for a first step: a request that is predicted to wait longer is refused, and "
        "one that has waited so long without a first step ends with an error.",
    )
    max_beam_width: int | None = server_setting(
        None,
        Integer(1),
        "Most beams of one search; a wider one is refused. None: as many as max_logprobs lets one "
        "have.",
    )
    metrics_prefix: str = server_setting(
        "jaxserve",
        OneOf(("jaxserve", "vllm")),
        "What the names of metrics begin with, before a colon; vllm: dashboards that know vLLM's "
        "find them.",
    )
    enable_mfu_metrics: bool = server_setting(
        False,
        Switch(),
        "Count the operations and bytes of each step from the model's shape, for metrics of the "
        "share of what the device can do.",
    )
    device_flops_per_second: float | None = server_setting(
        None,
        Number(above=0.0, metavar="FLOPS"),
        "What one device can do, as `jaxserve bench latency` measures it: MFU is told as a share "
        "of it; needs enable_mfu_metrics.",
    )
    device_bytes_per_second: float | None = server_setting(
        None,
        Number(above=0.0, metavar="BYTES"),
        "What one device can read, likewise, for the share of its bandwidth; needs "
        "enable_mfu_metrics.",
    )
    stream_interval: int = server_setting(
        1,
        Integer(1),
        "Of streams: tokens that each output brings at least, but for the first and the last; a "
        "request's own value wins.",
    )

    def __post_init__(self) -> None:
        check(self)
        if self.deterministic:
            deterministic.check_settings(self)
        several_processes.check_settings(self)
        stages.check_settings(self)
        for name in _OF_LENGTH if self.scheduling_policy != "length" else ():
            value, default = getattr(self, name), defaults_of(EngineConfig)[name]
            if value != default:
                raise ValidationError(
                    name,
                    value,
                    f"{default} unless scheduling_policy is 'length'; it is "
                    f"{self.scheduling_policy!r}",
                )
        for name in ("length_classes", "output_classes"):
            low, high = getattr(self, name)
            if low >= high:
                raise ValidationError(name, (low, high), "ascending integers")
        for name in ("device_flops_per_second", "device_bytes_per_second"):
            if getattr(self, name) is not None and not self.enable_mfu_metrics:
                raise ValidationError(name, getattr(self, name), "none without enable_mfu_metrics")
        if self.kv_cache_scales is not None and not self.kv_cache_dtype.startswith("fp8"):
            raise ValidationError(
                "kv_cache_scales", self.kv_cache_scales, "none unless kv_cache_dtype is fp8_e4m3"
            )

        if self.kv_offloading_path is not None and not self.kv_offloading_size:
            allowed = "none without kv_offloading_size, whose pages are written there"
            raise ValidationError("kv_offloading_path", self.kv_offloading_path, allowed)
        if self.kv_offloading_preload and self.kv_offloading_path is None:
            allowed = "false without kv_offloading_path"
            raise ValidationError("kv_offloading_preload", True, allowed)

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of the weights that take no memory of the device, which is a CPU's own."""
        return int((self.cpu_offload_gb or 0) * 2**30)

    @property
    def max_images(self) -> int:
        """Most images of a prompt, where the model reads them."""
        return MAX_IMAGES if self.limit_mm_per_prompt is None else self.limit_mm_per_prompt

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names that requests may use; the first one is answered with."""
        return self.served_model_name or (self.model,)

    @classmethod
    def from_settings(cls, **settings: Any) -> EngineConfig:
        """A config from keyword arguments of a user.

        Raises:
            ValidationError: an unknown name, besides what the constructor raises.
        """
        known = settings_of(cls)
        for name, value in settings.items():
            if name not in known:
                raise ValidationError(name, value, f"one of the settings {', '.join(known)}")
        for name in PATHS:
            if isinstance(settings.get(name), PathLike):
                settings[name] = str(settings[name])
        return cls(**settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    """How an engine in a process of its own is watched.

    Attributes:
        step_timeout: seconds without a word from an engine that has work, after which its process
            is killed and started again; "auto": 15, or ten times what its step may take by those
            before it, and at least 60 while it compiles; None: never.
        load_timeout: seconds that the first engine may take to load, after which everything ends;
            None: as long as it takes, be it fetched or compiled.
        spare: while an engine serves, another process waits that has imported what one needs, so
            that the next engine is there sooner; it takes about 200 MB.
        module: what the process runs.
        log_format: of its messages, "text" or "json".
    """

    step_timeout: float | str | None = AUTO
    load_timeout: float | None = None
    spare: bool = False
    module: str = "jaxserve.isolation.child"
    log_format: str = "text"

    def __post_init__(self) -> None:
        check_step_timeout("step_timeout", self.step_timeout)
        if self.load_timeout is not None:
            check_seconds("load_timeout", self.load_timeout)


def check_step_timeout(field: str, value: Any) -> None:
    """Raises ValidationError unless the value is one of `Isolation.step_timeout`."""
    if isinstance(value, str) and value != AUTO:
        raise ValidationError(field, value, f"seconds, {AUTO!r} or none")
    if value is not None and value != AUTO:
        check_seconds(field, value)


def check_seconds(field: str, value: Any) -> None:
    """Raises ValidationError unless the value is a finite number above 0."""
    Number(above=0.0, unit="seconds").checked(field, value)
