"""The live page of the demo: one HTML file, two scripts and the data, on loopback.

Its charts are those of `monolith_report`; Plotly's script comes from the package that is installed.
"""

from __future__ import annotations

from collections.abc import Callable
import pathlib
import threading
import time
from typing import Any

from monolith.agent_service.ports import find_free_port
from monolith.native_training.summary import charts
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
import uvicorn

_HTML = pathlib.Path(__file__).with_name("page.html")
_START_SECS = 30
# The browser asks nobody but this server.
_POLICY = "default-src 'self' 'unsafe-inline'; img-src data: blob:; base-uri 'none'"


class DemoPage:
  """A web server in a thread.

  Args:
    state: returns what the page shows, asked at every request of a browser.
    port: port on loopback; 0: any free.

  Attributes:
    port: where it is.

  Raises:
    ModuleNotFoundError: Plotly is not installed; the message says how to install it.
  """

  def __init__(self, state: Callable[[], dict[str, Any]], port: int = 0):
    self.port = port or find_free_port()
    self._state = state
    scripts = {"plotly.js": charts.plotly_script(), "charts.js": charts.charts_script()}
    routes = [Route("/", self._get_page), Route("/state.json", self._get_state)]
    routes += [Route(f"/{name}", _serve_script(text)) for name, text in scripts.items()]
    app = Starlette(routes=routes)
    config = uvicorn.Config(app, host="127.0.0.1", port=self.port, log_level="warning")
    self._server = uvicorn.Server(config)
    self._thread = threading.Thread(target=self._server.run, name="page", daemon=True)

  def start(self) -> None:
    """Starts to serve.

    Raises:
      TimeoutError: the port is taken.
    """
    self._thread.start()
    deadline = time.monotonic() + _START_SECS
    while not self._server.started:
      if not self._thread.is_alive() or time.monotonic() > deadline:
        raise TimeoutError(f"the page cannot be served on port {self.port}")
      time.sleep(0.05)

  def stop(self) -> None:
    """Ends serving."""
    self._server.should_exit = True
    if self._thread.is_alive():
      self._thread.join()

  def _get_page(self, unused_request: Request) -> Response:
    return HTMLResponse(_HTML.read_text("utf-8"), headers={"Content-Security-Policy": _POLICY})

  def _get_state(self, unused_request: Request) -> Response:
    return JSONResponse(self._state(), headers={"Cache-Control": "no-store"})


def _serve_script(text: str) -> Callable[[Request], Response]:
  """Returns what answers with a script, which a browser may keep."""
  response = Response(text, media_type="text/javascript", headers={"Cache-Control": "max-age=3600"})
  return lambda unused_request: response
