"""A model and its tokenizer from this machine's disk: a folder as transformers saves it, or a GGUF file."""

from pathlib import Path
from typing import Any, Final

import attrs

from ....core.errors import InputError

# vLLM's names; "auto" is what the weights were saved in, and float32 for a GGUF file, whose weights are unpacked.
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
    """What was found.

    Attributes:
        name: of the folder or file, for clients unless they are told another.
        model: a transformers causal language model, on its device.
        tokenizer: its tokenizer, with its chat template if there is one.
        eos_token_ids: tokens that end an output: the tokenizer's and those of the generation config.
    """

    name: str
    model: Any
    tokenizer: Any
    eos_token_ids: tuple[int, ...]


def load_model(path: str, *, device: str, dtype: str = "auto", chat_template: str | None = None) -> LoadedModel:
    """Load from disk; nothing is downloaded.

    Args:
        path: a folder with a `config.json`, or a `.gguf` file.
        device: where the weights go.
        dtype: one of `DTYPES`.
        chat_template: a file with another template than the tokenizer's.

    Raises:
        InputError: nothing there that can be loaded, or a package is missing; says which.
    """
    if dtype not in DTYPES:
        raise InputError(f"dtype {dtype!r} is unknown; it is one of {', '.join(DTYPES)}")
    folder, gguf_file = _place_of(Path(path))
    options: dict[str, Any] = {"local_files_only": True}
    if gguf_file is not None:
        _need_gguf(path)
        options["gguf_file"] = gguf_file
    model, tokenizer = _loaded(path, folder, options, _dtype(dtype, gguf_file))
    if chat_template is not None:
        tokenizer.chat_template = _text_of(chat_template)
    name = Path(path).resolve()
    return LoadedModel(
        name.stem if gguf_file is not None else name.name, model.to(device), tokenizer, _eos_token_ids(model, tokenizer)
    )


def _place_of(path: Path) -> tuple[Path, str | None]:
    """The folder, and the name of the GGUF file in it if one was named."""
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


def _need_gguf(path: str) -> None:
    try:
        import accelerate  # noqa: F401
        import gguf  # noqa: F401
    except ModuleNotFoundError as error:
        raise InputError(f"{path} needs the package {error.name}: pip install gguf accelerate") from None


def _dtype(name: str, gguf_file: str | None) -> Any:
    import torch

    chosen = DTYPES[name]
    if chosen == "auto":
        return torch.float32 if gguf_file is not None else "auto"
    return getattr(torch, chosen)


def _loaded(path: str, folder: Path, options: dict[str, Any], dtype: Any) -> tuple[Any, Any]:
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ModuleNotFoundError:
        raise InputError("serving a model needs transformers: pip install 'kvledger[serve]'") from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), **options)
        model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype, **options)
    except Exception as error:  # whatever its many parsers meet in a file that is not what it should be
        raise InputError(f"transformers cannot load {path}: {type(error).__name__}: {error}") from error
    return model, tokenizer


def _text_of(chat_template: str) -> str:
    try:
        return Path(chat_template).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the chat template {chat_template}: {error}") from None


def _eos_token_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    config = getattr(model, "generation_config", None)
    of_config = getattr(config, "eos_token_id", None)
    ids = list(of_config) if isinstance(of_config, list | tuple) else [of_config]
    return tuple(sorted({int(each) for each in (*ids, tokenizer.eos_token_id) if each is not None}))
