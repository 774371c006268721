"""A proxy in front of a real server that corrupts its answers on demand, as a broken host or server would."""

from aiohttp import ClientSession, ClientTimeout, web

from miles.engine.servers.processes import free_port

HOST = "127.0.0.1"


class FaultyProxy:
    """Pass requests on, except ``/generate`` while there is a ``fault``: ``500`` or ``garbage``."""

    def __init__(self):
        self.fault = None
        self._runner = None

    async def before(self, url):
        """Return the proxy's address for the server at ``url``. A new server has no fault."""
        await self.close()
        self.fault, self._target = None, url
        app = web.Application(client_max_size=0)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        self._session = ClientSession(timeout=ClientTimeout(total=None))
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        port = free_port(HOST)
        await web.TCPSite(self._runner, HOST, port).start()
        return f"http://{HOST}:{port}"

    async def _pass_on(self, request):
        if request.path == "/generate" and self.fault == "500":
            raise web.HTTPInternalServerError(text="out of memory")
        if request.path == "/generate" and self.fault == "garbage":
            return web.Response(text="<html>it works!</html>")
        body = await request.read()
        headers = {"Content-Type": request.content_type}
        if "Authorization" in request.headers:
            headers["Authorization"] = request.headers["Authorization"]
        url = self._target + request.path_qs
        async with self._session.request(request.method, url, data=body, headers=headers) as answer:
            return web.Response(body=await answer.read(), status=answer.status, content_type=answer.content_type)

    async def close(self):
        if self._runner is not None:
            await self._runner.cleanup()
            await self._session.close()
            self._runner = None
