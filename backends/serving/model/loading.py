"""Loads a model and its tokenizer from this machine's disk: a folder saved by transformers, or a GGUF file."""

from pathlib import Path
from typing import Any, Final

import attrs

from ....core.errors import InputError

# vLLM's names; "auto" is the dtype of the saved weights, and float32 for a GGUF file, whose weights are unpacked.
DTYPES: Final = {
    "auto": "auto",
    "float32": "float32",
    "float": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "half": "float16",
}


@attrs.frozen(eq=False)
class LoadedModel:
    """A loaded model with its tokenizer."""

    name: str  # name of the folder or file; the default model name for clients
    model: Any  # a transformers causal language model, on its device
    tokenizer: Any  # its tokenizer, with its chat template if there is one
    eos_token_ids: tuple[int, ...]  # tokens that end an output: the tokenizer's and those of the generation config


def load_model(path: str, *, device: str, dtype: str = "auto", chat_template: str | None = None) -> LoadedModel:
    """Load from disk; nothing is downloaded.

    Args:
        path: a folder with a `config.json`, or a `.gguf` file.
        device: device of the weights.
        dtype: one of `DTYPES`.
        chat_template: a file with a template that replaces the tokenizer's.

    Raises:
        InputError: there is nothing to load at `path`, or a package is missing; says which.
    """
    if dtype not in DTYPES:
        raise InputError(f"dtype {dtype!r} is unknown; it is one of {', '.join(DTYPES)}")
    folder, gguf_file = _locate(Path(path))
    options: dict[str, Any] = {"local_files_only": True}
    if gguf_file is not None:
        try:
            import accelerate  # noqa: F401
            import gguf  # noqa: F401
        except ModuleNotFoundError as error:
            raise InputError(f"{path} needs the package {error.name}: pip install gguf accelerate") from None
        options["gguf_file"] = gguf_file
    model, tokenizer = _load(path, folder, options, _dtype(dtype, gguf_file))
    if chat_template is not None:
        try:
            tokenizer.chat_template = Path(chat_template).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"cannot read the chat template {chat_template}: {error}") from None
    name = Path(path).resolve()
    return LoadedModel(
        name.stem if gguf_file is not None else name.name, model.to(device), tokenizer, _eos_token_ids(model, tokenizer)
    )


def _locate(path: Path) -> tuple[Path, str | None]:
    """Return the folder, and the name of the GGUF file in it if `path` is one."""
    if path.is_file() and path.suffix == ".gguf":
        return path.parent, path.name
    if (path / "config.json").is_file():
        return path, None
    if path.is_dir():
        files = sorted(each.name for each in path.glob("*.gguf"))
        hint = f"; name a file in it, such as {files[0]}" if files else ""
        raise InputError(f"the folder {path} has no config.json, so it is no model that transformers saved{hint}")
    if path.is_file():
        raise InputError(f"{path} is a file that does not end in .gguf; give a model's folder or a GGUF file")
    raise InputError(
        f"there is no {path}; give a model's folder or a GGUF file on this machine (nothing is downloaded)"
    )


def _dtype(name: str, gguf_file: str | None) -> Any:
    import torch

    chosen = DTYPES[name]
    if chosen == "auto":
        return torch.float32 if gguf_file is not None else "auto"
    return getattr(torch, chosen)


def _load(path: str, folder: Path, options: dict[str, Any], dtype: Any) -> tuple[Any, Any]:
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ModuleNotFoundError:
        raise InputError("serving a model needs transformers: pip install 'kvledger[serve]'") from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), **options)
        model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype, **options)
    except Exception as error:  # its many parsers raise many kinds of errors for damaged files
        raise InputError(f"transformers cannot load {path}: {type(error).__name__}: {error}") from error
    return model, tokenizer


def _eos_token_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    config = getattr(model, "generation_config", None)
    of_config = getattr(config, "eos_token_id", None)
    ids = list(of_config) if isinstance(of_config, list | tuple) else [of_config]
    return tuple(sorted({int(each) for each in (*ids, tokenizer.eos_token_id) if each is not None}))
