"""A process that answers like a vLLM server, without a model: ``vllm.entrypoints.openai.api_server`` in its place.

It checks the keys by the real guard. The response to ``token_ids`` is the reversed prompt; of a truncated distribution
each token was one of two. An image is three tokens. A prompt that begins with 9 waits until it is aborted or the server
resumes.
"""

import asyncio
import base64
import json
import math
import pickle
import sys

from aiohttp import web

from miles.engine.vllm.guard import Guard

HALF = math.log(0.5)


class FakeVllm:
    def __init__(self):
        self.version = "default"
        self.calls = []
        self.requests = []
        self.freed = asyncio.Event()
        self.reason = "length"

    def routes(self):
        controls = ("pause", "resume", "abort_requests", "collective_rpc", "reset_prefix_cache", "weight_checker")
        controls += ("reset_encoder_cache", "start_weight_update", "finish_weight_update")
        return [
            web.get("/health", self.health),
            web.get("/weight_info", self.weight_info),
            web.get("/seen", self.seen),
            web.post("/inference/v1/generate", self.generate),
            web.post("/update_weight_version", self.set_version),
            web.post("/init_weight_transfer_engine", self.join),
            web.post("/update_weights", self.receive),
            *(web.post(f"/{name}", self.control) for name in controls),
        ]

    async def health(self, request):
        return web.Response()

    async def weight_info(self, request):
        return web.json_response({"weight_version": self.version})

    async def seen(self, request):
        return web.json_response({"calls": self.calls, "requests": self.requests, "arguments": sys.argv[1:]})

    async def control(self, request):
        body = await request.json()
        self.calls.append([request.path_qs, body])
        if request.path in ("/abort_requests", "/resume"):
            self.reason = "abort" if request.path == "/abort_requests" else "length"
            self.freed.set()
        return web.json_response({"checksums": {"w": "1"}} if request.path == "/weight_checker" else {"status": "ok"})

    async def join(self, request):
        import torch  # takes seconds

        from miles.engine.weight_sync.broadcast import TCPStore, join

        info, cpu = (await request.json())["init_info"], torch.device("cpu")
        store = await asyncio.to_thread(TCPStore, info["host"], info["port"], is_master=False)
        self.ranks = await asyncio.to_thread(join, store, info["group"], 1, info["size"], cpu, info["host"])
        return web.json_response({})

    async def receive(self, request):
        import torch

        from miles.engine.weight_sync.broadcast import broadcast

        info = (await request.json())["update_info"]
        if isinstance(info, list):
            tensors = dict(pickle.loads(base64.b64decode(info[0]["shared"])))
        else:
            described = zip(info["names"], info["shapes"], info["dtypes"], strict=True)
            tensors = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, shape, dtype in described}
            await asyncio.to_thread(broadcast, self.ranks, list(tensors.values()))
        self.calls.append(["/update_weights", {name: tensor.tolist() for name, tensor in tensors.items()}])
        return web.json_response({})

    async def set_version(self, request):
        self.version = (await request.json())["new_version"]
        return web.json_response({"success": True})

    async def generate(self, request):
        body = await request.json()
        self.requests.append(body)
        tokens, runs = body["token_ids"][::-1], [{"version": self.version, "start": 0, "end": len(body["token_ids"])}]
        if body["token_ids"][0] == 9:
            self.freed.clear()
            await self.freed.wait()
            if runs[0]["version"] != self.version:
                runs = [{**runs[0], "end": 1}, {"version": self.version, "start": 1, "end": len(tokens)}]
        wanted = body["sampling_params"]["logprobs"]
        content = [{"token_id": t, "logprob": HALF, "top_logprobs": tops(t, wanted)} for t in tokens]
        choice = {"token_ids": tokens, "logprobs": {"content": content}, "weight_versions": runs}
        read = len(body["token_ids"]) + 2 * len(body.get("content_parts", ()))
        return web.json_response(
            {"choices": [choice | {"finish_reason": self.reason}], "usage": {"prompt_tokens": read}}
        )


def tops(token, wanted):
    """The sampled token and 0, and one that top-k dropped. With top-k 7, one that was kept is missing."""
    entries = [{"token_id": t, "logprob": HALF} for t in (token, 0)]
    return [*(entries if wanted != 7 + 64 else entries[:1]), {"token_id": 1, "logprob": -9999.0}]


def guarded(app):
    """Pass requests through the guard first, as vLLM does with ``--middleware``."""

    @web.middleware
    async def check(request, handler):
        answer = []

        async def passed(scope, receive, send):
            answer.append(await handler(request))

        async def send(message):
            if message["type"] == "http.response.start":
                answer.append(web.Response(status=message["status"]))

        headers = [(name.lower().encode(), value.encode()) for name, value in request.headers.items()]
        await Guard(passed)({"type": "http", "path": request.path, "headers": headers}, None, send)
        return answer[0]

    app.middlewares.append(check)
    return app


if __name__ == "__main__":
    print("arguments:", json.dumps(sys.argv[1:]), flush=True)
    app = guarded(web.Application())
    app.add_routes(FakeVllm().routes())
    port = int(sys.argv[sys.argv.index("--port") + 1])
    web.run_app(app, host=sys.argv[sys.argv.index("--host") + 1], port=port, print=None)
