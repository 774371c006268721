"""A process that answers like an SGLang server, without a model.

Run it as ``python -m fake_server PORT --api-key KEY --admin-api-key KEY``.

It implements the part of the protocol that ``SglangClient`` uses, starts in a fraction of a second, and misbehaves on
demand (``POST /misbehave``). The response to ``input_ids`` is the reversed prompt.
"""

import argparse
import asyncio
import base64

import numpy as np
from aiohttp import web

LATENCY_SECONDS = 0.02


class FakeSglang:
    def __init__(self):
        self.version = "0"
        self.fault = None
        self.served = 0
        self.checked = 0
        self.controls = []
        self.stops = []  # the patterns at which requests end
        self.loaded = None

    def routes(self):
        get, post = web.get, web.post
        return [
            get("/ready", self.ok),
            get("/health", self.ok),  # called by the router
            get("/health_generate", self.health),
            get("/model_info", self.model_info),
            get("/seen", self.seen),
            post("/generate", self.generate),
            post("/misbehave", self.misbehave),
            post("/pause_generation", self.control),
            post("/continue_generation", self.control),
            post("/abort_request", self.control),
            post("/release_memory_occupation", self.control),
            post("/resume_memory_occupation", self.control),
            post("/update_weights_from_disk", self.load),
        ]

    async def ok(self, request):
        return web.json_response({"success": True})

    async def control(self, request):
        self.controls.append(request.path)
        return await self.ok(request)

    async def health(self, request):
        self.checked += 1
        if self.fault == "unhealthy":
            raise web.HTTPServiceUnavailable()
        return web.Response()

    async def model_info(self, request):
        return web.json_response({"weight_version": self.version})

    async def seen(self, request):
        return web.json_response(
            {name: getattr(self, name) for name in ("served", "checked", "controls", "loaded", "stops")}
        )

    async def load(self, request):
        self.controls.append(request.path)
        body = await request.json()
        self.version, self.loaded = body["weight_version"], body["model_path"]
        return web.json_response({"success": True})

    async def misbehave(self, request):
        self.fault = (await request.json())["fault"]
        if self.fault == "loses weights":
            self.version = "0"
        if self.fault == "foreign weights":
            self.version = "default"  # SGLang's name for weights that it has loaded itself
        return web.json_response({})

    async def generate(self, request):
        body = await request.json()
        await asyncio.sleep(LATENCY_SECONDS)
        if self.fault == "500":
            raise web.HTTPInternalServerError()
        if self.fault == "garbage":
            return web.Response(text="<html>it works!</html>")
        if self.fault == "unsound":
            return web.json_response(self.answer([10**9]))
        self.served += 1
        self.stops += body.get("sampling_params", {}).get("stop_regex", [])
        tokens = body["input_ids"][::-1]
        answer = self.answer(tokens)
        if body.get("return_sampling_mask"):
            support = {"mask": [[token, 0] for token in tokens], "logprobs": [-0.5] * len(tokens)}
            answer["meta_info"] |= {f"output_token_sampling_{name}": value for name, value in support.items()}
        if body.get("return_routed_experts"):  # two layers, one expert each
            packed = np.ones((2 * len(tokens) - 1, 2, 1), np.int32).tobytes()
            answer["meta_info"]["routed_experts"] = base64.b64encode(packed).decode()
        return web.json_response(answer)

    def answer(self, tokens):
        meta = {
            "finish_reason": {"type": "length"},
            "weight_version": self.version,
            "output_token_logprobs": [[-1.0, token, None] for token in tokens],
        }
        return {"output_ids": tokens, "meta_info": meta}


OPEN = ("/ready", "/health", "/seen", "/misbehave")
NORMAL = ("/generate", "/model_info")


def check_keys(key, admin_key):
    """Return a middleware that wants a key for generation, and another one for control calls."""

    @web.middleware
    async def check(request, handler):
        wanted = key if request.path in NORMAL else admin_key
        if not request.path.startswith(OPEN) and request.headers.get("Authorization") != f"Bearer {wanted}":
            raise web.HTTPUnauthorized()
        return await handler(request)

    return check


if __name__ == "__main__":
    flags = argparse.ArgumentParser()
    flags.add_argument("port", type=int)
    flags.add_argument("--api-key", required=True)
    flags.add_argument("--admin-api-key", required=True)
    options = flags.parse_args()
    app = web.Application(middlewares=[check_keys(options.api_key, options.admin_api_key)])
    app.add_routes(FakeSglang().routes())
    web.run_app(app, host="127.0.0.1", port=options.port, print=None)
