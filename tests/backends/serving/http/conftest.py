"""A real HTTP server on the loopback, over the honest model of the folder above."""

import asyncio
import json
import socket
import threading
import time

import attrs
import pytest

pytest.importorskip("fastapi", reason="the server needs fastapi")
pytest.importorskip("transformers", reason="the server needs transformers")

from kvledger.backends.serving.http.limits import RequestLimits
from kvledger.backends.serving.http.metrics import ServingMetrics
from kvledger.backends.serving.http.process import (
    ProcessSettings,
    ServingProcess,
    listening_socket,
)
from kvledger.backends.serving.http.prompt_encoder import PromptEncoder
from kvledger.backends.serving.http.server import OpenAIServer, ServerSettings

LETTERS = "abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ.,;:!?-"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role[0] }}:{{ message.content }};{% endfor %}"
    "{% if shouts %}!{% endif %}{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture(scope="session")
def letters():
    """A tokenizer of transformers in which token i is the i-th letter; 60 is special."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocab = {letter: index for index, letter in enumerate(LETTERS)} | {"<end>": 60}
    plain = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="-"))
    plain.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<end>")
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@attrs.define(eq=False)
class Running:
    """A server that runs in a thread of its own."""

    engine: object
    server: OpenAIServer
    process: ServingProcess
    metrics: ServingMetrics
    port: int
    thread: threading.Thread
    clients: list = attrs.field(factory=list)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def openai(self, api_key="nobody asks", **options):
        from openai import OpenAI

        options = {"max_retries": 0, "timeout": 30} | options
        self.clients.append(OpenAI(base_url=f"{self.url}/v1", api_key=api_key, **options))
        return self.clients[-1]

    def post(self, path, body, headers=None, timeout=30):
        """Status, headers (lower case) and body of a request whose body is JSON, or bytes as they are."""
        payload = body if isinstance(body, bytes) else json.dumps(body).encode()
        fields = {"content-type": "application/json", "content-length": len(payload)} | (headers or {})
        lines = [f"POST {path} HTTP/1.1", "host: localhost", "connection: close"]
        lines += [f"{name}: {value}" for name, value in fields.items() if value is not None]
        with self.connection(timeout) as connection:
            connection.sendall("\r\n".join([*lines, "", ""]).encode() + payload)
            return self.answer(connection)

    def get(self, path):
        """Status, headers and body."""
        with self.connection() as connection:
            connection.sendall(f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
            return self.answer(connection)

    def connection(self, timeout=30):
        return socket.create_connection(("127.0.0.1", self.port), timeout)

    @staticmethod
    def answer(connection):
        received = b""
        while chunk := connection.recv(65536):
            received += chunk
        head, _, body = received.partition(b"\r\n\r\n")
        status, *fields = head.decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (field.partition(": ") for field in fields)}
        return int(status.split()[1]), headers, body

    def wait_until_idle(self, timeout_s=10):
        """Until no request is left, here and in the engine, and no block is held."""
        wait_for(lambda: self.server.gate.num_open == 0 and self.engine.stats.num_unended == 0, timeout_s)
        assert self.engine.allocator.pool.num_held_blocks == 0

    def stop(self):
        for client in self.clients:
            client.close()
        self.process.should_exit = True
        self.thread.join(30)
        assert not self.thread.is_alive()


def wait_for(condition, timeout_s=10):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


@pytest.fixture(name="wait_for")
def _wait_for():
    return wait_for


@pytest.fixture
def make_server(make_engine, letters):
    """Servers with small limits; those that still run at the end of a test are stopped."""
    running = []

    def make(
        model_names=("honest",),
        api_keys=(),
        isolates_api_keys=True,
        max_request_bytes=20_000,
        body_timeout_s=5.0,
        max_open_requests=64,
        max_queued_requests=32,
        drain_timeout_s=5.0,
        stall_timeout_s=5.0,
        send_buffer=None,
        keep_alive_interval_s=5.0,
        log_level="error",
        **engine_settings,
    ):
        metrics = ServingMetrics(model_names[0], 64)
        engine = make_engine(
            tokenizer=letters,
            eos_token_ids=[60],
            max_queued_requests=max_queued_requests,
            observers=[metrics.step],
            on_request_ended=metrics.ended,
            **engine_settings,
        )
        metrics.watch(engine)
        settings = ServerSettings(
            model_names=model_names,
            limits=RequestLimits(
                max_request_bytes=max_request_bytes,
                body_timeout_s=body_timeout_s,
                max_open_requests=max_open_requests,
                api_keys=api_keys,
            ),
            max_queued_requests=max_queued_requests,
            isolates_api_keys=isolates_api_keys,
            keep_alive_interval_s=keep_alive_interval_s,
        )
        server = OpenAIServer(engine, PromptEncoder.beside(letters, 61), metrics, settings)
        process = ServingProcess(
            server,
            ProcessSettings(
                drain_timeout_s=drain_timeout_s, stall_timeout_s=stall_timeout_s, log_level=log_level, access_log=False
            ),
        )
        bound = listening_socket("127.0.0.1", 0)
        if send_buffer is not None:  # of the system, for every connection; it would grow to some MiB
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        thread = threading.Thread(target=lambda: asyncio.run(process.serve(sockets=[bound])), daemon=True)
        thread.start()
        wait_for(lambda: process.started)
        running.append(Running(engine, server, process, metrics, bound.getsockname()[1], thread))
        return running[-1]

    yield make
    for each in running:
        each.stop()
