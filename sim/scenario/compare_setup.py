"""What `kvledger compare` measures with: token slots, the longest request, lengths; each with where it came from."""

from array import array
from collections.abc import Iterator

import attrs

from ...core.errors import DoesNotFitError, InputError
from ...core.models.geometry import load_geometry
from ...core.quantities import format_bytes, parse_bytes
from ..report.console import progress
from ..traces import Trace

TOKENS_TO_CHECK = 1 << 20


@attrs.frozen
class TokenBytes:
    """A model of which every token takes the same memory; `max_position_embeddings` None where its config is silent."""

    model: str
    kv_bytes_per_token: int
    max_position_embeddings: int | None


@attrs.frozen
class Sourced:
    """A number and where it came from."""

    value: int
    source: str


class Lengths:
    """(input_length, output_length) of many requests, 16 bytes each; may be iterated again and again."""

    def __init__(self) -> None:
        self._inputs, self._outputs = array("q"), array("q")
        self.longest = 0

    def append(self, input_length: int, output_length: int) -> None:
        """Add a request."""
        self._inputs.append(input_length)
        self._outputs.append(output_length)
        self.longest = max(self.longest, input_length + output_length)

    def __len__(self) -> int:
        return len(self._inputs)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._inputs, self._outputs, strict=True)


def token_bytes(model: str | None, kv_cache_dtype: str | None) -> TokenBytes | None:
    """Bytes of a token's keys and values in all layers of a built-in model or of a config.json; None without a model.

    Raises InputError for a dtype without a model, and for a model with windowed or state layers: its sequences are no
    rows of equal slots, which is what the allocators here place.
    """
    if model is None:
        if kv_cache_dtype is not None:
            raise InputError(f"--kv-cache-dtype {kv_cache_dtype} has no effect without --model: leave it out")
        return None
    geometry = load_geometry(model)
    dtype = kv_cache_dtype or "auto"
    per_token = geometry.sequence_bytes(1, dtype).total
    if geometry.sequence_bytes(TOKENS_TO_CHECK, dtype).total != TOKENS_TO_CHECK * per_token:
        raise InputError(
            f"--model {model}: some layers keep a window or a state, so its memory is not a number of token slots that "
            "these allocators could place. Leave --model out and give --kv-cache-tokens"
        )
    return TokenBytes(geometry.name, per_token, geometry.max_position_embeddings)


def kv_memory(
    model: TokenBytes | None,
    kv_cache_tokens: int | None,
    num_gpu_blocks_override: int | None,
    kv_cache_memory_bytes: str | None,
    block_size: int,
) -> Sourced:
    """Token slots, from the one option that is given.

    Raises InputError for none or several options, and for bytes without a model; DoesNotFitError for bytes below a
    single token.
    """
    options = {
        "--kv-cache-tokens": kv_cache_tokens,
        "--num-gpu-blocks-override": num_gpu_blocks_override,
        "--kv-cache-memory-bytes": kv_cache_memory_bytes,
    }
    given = [name for name, value in options.items() if value is not None]
    if len(given) > 1:
        raise InputError(f"the KV memory is given by {' and '.join(given)}: give one of them")
    if kv_cache_tokens is not None:
        return Sourced(_positive(kv_cache_tokens, "--kv-cache-tokens"), "--kv-cache-tokens")
    if num_gpu_blocks_override is not None:
        num_blocks = _positive(num_gpu_blocks_override, "--num-gpu-blocks-override")
        return Sourced(num_blocks * block_size, f"--num-gpu-blocks-override {num_blocks:,} x {block_size} tokens")
    if kv_cache_memory_bytes is not None:
        return _slots_of_bytes(kv_cache_memory_bytes, model)
    raise InputError(f"the KV memory is not given: give one of {', '.join(options)}")


def _slots_of_bytes(kv_cache_memory_bytes: str, model: TokenBytes | None) -> Sourced:
    option = "--kv-cache-memory-bytes"
    num_bytes = parse_bytes(kv_cache_memory_bytes, option)
    if model is None:
        raise InputError(f"{option} {kv_cache_memory_bytes} needs --model, to know the bytes of a token")
    num_slots = num_bytes // model.kv_bytes_per_token
    if not num_slots:
        raise DoesNotFitError(
            f"{option} {format_bytes(num_bytes)} holds no token of {model.model}: one takes "
            f"{format_bytes(model.kv_bytes_per_token)}"
        )
    return Sourced(num_slots, f"{option} {num_bytes:,} // {model.kv_bytes_per_token:,} bytes a token of {model.model}")


def longest_request(max_model_len: int | None, model: TokenBytes | None, lengths: Lengths) -> Sourced:
    """Tokens of the longest request allowed: as given, else the model's own. Raises InputError where neither is."""
    if max_model_len is not None:
        return Sourced(_positive(max_model_len, "--max-model-len"), "--max-model-len")
    if model is not None and model.max_position_embeddings is not None:
        return Sourced(model.max_position_embeddings, f"max_position_embeddings of {model.model}")
    raise InputError(
        "--max-model-len is missing: static reserves that much for every request, so it decides the answer. Give the "
        f"server's value, or a --model that states one; the longest request here has {lengths.longest:,} tokens"
    )


def read_lengths(trace: Trace) -> Lengths:
    """Every request's lengths. Raises InputError where there is no request."""
    lengths = Lengths()
    bar, task = progress("Reading the trace")
    with bar:
        for number, request in enumerate(trace, start=1):
            lengths.append(request.input_length, request.output_length)
            if number % 1_000 == 0:
                bar.update(task, completed=number)
    if not lengths.longest:
        raise InputError(f"{trace.info.name}: no request with a token to compare allocators with")
    return lengths


def _positive(value: int, option: str) -> int:
    if value < 1:
        raise InputError(f"{option} {value}: it must be at least 1")
    return value
